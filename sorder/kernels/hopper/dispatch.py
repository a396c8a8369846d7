"""Which problems the Hopper kernels take. (Importing this needs no Gluon.)"""

from __future__ import annotations

import functools

import torch

from sorder.kernels.mask import Visibility
from sorder.kernels.spec import AttentionSpec

_MAX_WIDTH = 128
_MIN_SCORES = 2**28
"""Below this many scores the host's time rules, and the portable kernels are launched in less of it."""


def serves(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility | None,
    spec: AttentionSpec, *needed: torch.Tensor | None,
) -> bool:  # fmt: skip
    """Whether this is a plain or causal problem in 16 bits on a Hopper GPU, with all ``needed`` tensors there."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or any(x is None for x in needed):
        return False
    if bias is not None or spec.softcap is not None or spec.dropout:
        return False
    if vis is not None and any(x is not None for x in vis):
        return False
    d, dv = q.shape[-1], v.shape[-1]
    if d % 8 or dv % 8 or max(d, dv) > _MAX_WIDTH or not _is_hopper(q.device):
        return False
    rows = q.shape[:-1].numel()
    return rows * k.shape[-2] >= _MIN_SCORES and rows < 2**31 - 128 * q.shape[:-2].numel()


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init  # noqa: F401
    except ImportError:  # a Triton before 3.6
        return False
    return True
