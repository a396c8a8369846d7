"""Vector-space operations on lists of tensors, the leaves of a pytree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

Leaves = Sequence[Tensor]


def scalar_dtype(device: torch.device) -> torch.dtype:
    """dtype in which inner products are summed over leaves: float64, or float32 where a device lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or float32 where ``dtype`` has 16 bits or fewer."""
    return torch.promote_types(dtype, torch.float32)


def flatten_vector(tree: Any, name: str) -> tuple[list[Tensor], TreeSpec]:
    """Detached leaves of ``tree`` and its structure; TypeError unless all are floating-point tensors."""
    leaves, spec = tree_flatten(tree)
    if not leaves:
        raise ValueError(f"{name} has no tensors")
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"{name} must be a pytree of floating-point tensors, but leaf {index} is {got}")
    return [leaf.detach() for leaf in leaves], spec


def flatten_like(tree: Any, name: str, leaves: Leaves, spec: TreeSpec) -> list[Tensor]:
    """Detached leaves of ``tree``; ValueError unless structure and shapes are those of ``leaves``."""
    out, out_spec = flatten_vector(tree, name)
    if out_spec != spec:
        raise ValueError(f"{name} must have the structure {spec}, got {out_spec}")
    for index, (a, b) in enumerate(zip(out, leaves, strict=True)):
        if a.shape != b.shape:
            raise ValueError(f"{name}: leaf {index} must have shape {tuple(b.shape)}, got {tuple(a.shape)}")
    return out


def dot(a: Leaves, b: Leaves) -> Tensor:
    """Σ aᵢbᵢ over all leaves, a 0-dimensional tensor on the device of the first leaf.

    Within a leaf the sum is taken in the wider of the two dtypes, float32 at least; over leaves in float64.
    """
    device = a[0].device
    parts = []
    for x, y in zip(a, b, strict=True):
        dtype = wide_dtype(torch.promote_types(x.dtype, y.dtype))
        part = torch.dot(x.reshape(-1).to(dtype), y.reshape(-1).to(dtype))
        parts.append(part.to(device=device, dtype=scalar_dtype(device)))
    return torch.stack(parts).sum()


def axpy_(y: Leaves, alpha: Tensor | float, x: Leaves) -> None:
    """y ← y + alpha·x in place, in the dtype of each leaf of ``y``; a tensor ``alpha`` stays on its device."""
    for target, leaf in zip(y, x, strict=True):
        if isinstance(alpha, Tensor):
            target.addcmul_(leaf.to(target.dtype), alpha.to(device=target.device, dtype=target.dtype))
        else:
            target.add_(leaf, alpha=alpha)


def xpby_(y: Leaves, x: Leaves, beta: float) -> None:
    """y ← x + beta·y in place; 16-bit leaves are rounded once, after the sum."""
    for target, leaf in zip(y, x, strict=True):
        wide = wide_dtype(target.dtype)
        if target.dtype == wide:
            target.mul_(beta).add_(leaf)
        else:
            target.copy_(target.to(wide).mul_(beta).add_(leaf))
