"""F and B on PyTorch's own fused kernels (cuDNN, flash), so that first order stays as fast as SDPA.

They hand over their log-sum-exp, and are called below autograd: what they return carries no graph of theirs.
"""

from __future__ import annotations

import math

import torch
from torch.nn.attention import SDPBackend

from sorder.kernels.mask import Visibility
from sorder.kernels.spec import AttentionSpec

_MAX_GRID = 65_535  # these kernels put batch and heads on grid axes y and z


def backend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility, spec: AttentionSpec
) -> SDPBackend | None:
    """The fused backend that takes this input forward and backward: cuDNN from Hopper on, else flash, else none.

    Dense and top-left causal attention, grouped heads too; the rest runs on our own kernels.
    """
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or q.dim() < 4 or q.numel() == 0:
        return None
    if bias is not None or spec.softcap is not None or q.shape[:-3] != k.shape[:-3]:
        return None
    if spec.scale < 0:  # their row maximum is that of the unscaled scores
        return None
    if any(x is not None for x in vis):
        return None
    n_q, n_k, d = q.shape[-2], k.shape[-2], q.shape[-1]
    if d != v.shape[-1] or d % 8 or (spec.causal and n_q != n_k):
        return None
    if max(q.shape[-3], math.prod(q.shape[:-3])) > _MAX_GRID:
        return None
    q4, k4, v4 = _four_dimensional(q, k, v)
    params = torch.backends.cuda.SDPAParams(q4, k4, v4, None, 0.0, spec.causal, q.shape[-3] != k.shape[-3])
    hopper = torch.cuda.get_device_capability(q.device) >= (9, 0)
    if hopper and d <= 128 and torch.backends.cuda.can_use_cudnn_attention(params):
        return SDPBackend.CUDNN_ATTENTION
    if torch.backends.cuda.can_use_flash_attention(params):
        return SDPBackend.FLASH_ATTENTION
    return None


def _four_dimensional(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x if x.dim() == 4 else x.flatten(0, -4) for x in tensors)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, kind: SDPBackend
) -> tuple[torch.Tensor, torch.Tensor]:
    """F on ``kind``: output like ``q`` and log-sum-exp (..., Nq) in float32."""
    lead = q.shape[:-2]
    q, k, v = _four_dimensional(q, k, v)
    if kind is SDPBackend.CUDNN_ATTENTION:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, spec.causal, False, scale=spec.scale
        )
    else:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, spec.causal, False, scale=spec.scale
        )
    return o.reshape(*lead, *o.shape[-2:]), lse.reshape(*lead, o.shape[-2])


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    spec: AttentionSpec, kind: SDPBackend,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """B on ``kind``: (dQ, dK, dV) for a cotangent of the output alone."""
    shapes = [x.shape for x in (q, k, v)]
    n_q, n_k = q.shape[-2], k.shape[-2]
    do, q, k, v, o = _four_dimensional(do, q, k, v, o)
    if do.stride(-1) != 1 or 0 in do.stride():  # such as the expanded cotangent of a sum
        do = do.contiguous()
    lse = lse.reshape(*q.shape[:-1]).contiguous()
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # no dropout: never read
    if kind is SDPBackend.CUDNN_ATTENTION:
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do,
            q,
            k,
            v,
            o,
            lse.unsqueeze(-1),
            seed,
            seed,
            None,
            None,
            None,
            n_q,
            n_k,
            0.0,
            spec.causal,
            scale=spec.scale,
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, None, None, n_q, n_k, 0.0, spec.causal, seed, seed, scale=spec.scale
        )
    return tuple(g.reshape(shape) for g, shape in zip(grads, shapes, strict=True))
