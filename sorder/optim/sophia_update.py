"""Sophia's update of many tensors: on a GPU in one fused kernel, elsewhere by torch's foreach operations.

Both compute in float32 at least, and round parameters and m once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from sorder.linalg.pytree import wide_dtype

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from sorder.kernels.sophia_step import Batch, NonFinite, sophia_step
    from sorder.kernels.sophia_step import batches as _batches


def batches(
    params: Sequence[Tensor], gradients: Sequence[Tensor], m: Sequence[Tensor], h: Sequence[Tensor]
) -> list[Batch] | None:
    """The tensors as launches of the fused kernel, or None where it does not take all of them.

    It takes contiguous float32, float16 and bfloat16 tensors on one GPU; of subclasses of Tensor, Parameter alone.
    """
    if not HAS_TRITON or not params or not _on_gpu(params[0]):
        return None
    return _batches(params, gradients, m, h)


def fused_update(launches: Sequence[tuple[Batch, dict[str, float]]], maximize: bool) -> bool:
    """:func:`update` of each batch with its options; False, and nothing has happened, if a gradient is not finite."""
    # The steps are queued behind the search, and obey its finding, before the host knows it.
    search = NonFinite([batch for batch, _ in launches])
    for batch, options in launches:
        sophia_step(batch, **options, maximize=maximize, unless=search)
    return not search.found()


def update(
    params: Sequence[Tensor], gradients: Sequence[Tensor], m: Sequence[Tensor], h: Sequence[Tensor],
    *, lr: float, beta1: float, gamma: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """m ← β₁m + (1 − β₁)g; p ← (1 − lr·decay)·p − lr·clip(m / max(γh, ε), 1), in place."""
    launches = batches(params, gradients, m, h)
    if launches is None:
        foreach_update(params, gradients, m, h, lr=lr, beta1=beta1, gamma=gamma, eps=eps, weight_decay=weight_decay)
    for batch in launches or ():
        sophia_step(batch, lr=lr, beta1=beta1, gamma=gamma, eps=eps, weight_decay=weight_decay)


def foreach_update(
    params: Sequence[Tensor], gradients: Sequence[Tensor], m: Sequence[Tensor], h: Sequence[Tensor],
    *, lr: float, beta1: float, gamma: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """:func:`update`, anywhere."""
    wide_m = [_wide(t, p) for t, p in zip(m, params, strict=True)]
    wide_p = [_wide(p, t) for p, t in zip(params, m, strict=True)]
    torch._foreach_lerp_(wide_m, [g.to(t.dtype) for g, t in zip(gradients, wide_m, strict=True)], 1.0 - beta1)
    u = quotients(wide_m, h, gamma, eps)
    torch._foreach_clamp_min_(u, -1.0)
    torch._foreach_clamp_max_(u, 1.0)
    if lr * weight_decay:
        torch._foreach_mul_(wide_p, 1.0 - lr * weight_decay)
    torch._foreach_add_(wide_p, u, alpha=-lr)
    for stored, computed in ((m, wide_m), (params, wide_p)):
        if any(a is not b for a, b in zip(stored, computed, strict=True)):
            torch._foreach_copy_(list(stored), computed)


def quotients(m: Sequence[Tensor], h: Sequence[Tensor], gamma: float, eps: float) -> list[Tensor]:
    """m / max(γ h, ε), in the dtype of ``m``, which holds ε or its smallest normal number."""
    below = list(torch._foreach_mul([b.to(a.dtype) for a, b in zip(m, h, strict=True)], gamma))
    torch._foreach_clamp_min_(below, max(eps, *(torch.finfo(t.dtype).tiny for t in below)))
    return list(torch._foreach_div(list(m), below))


def _wide(t: Tensor, beside: Tensor) -> Tensor:
    return t.to(wide_dtype(torch.promote_types(t.dtype, beside.dtype)))


def _on_gpu(p: Tensor) -> bool:
    return p.is_cuda
