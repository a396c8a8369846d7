"""Vector-space operations on lists of tensors, the leaves of a pytree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from sorder.linalg.past_modes import sees_no_modes

Leaves = Sequence[Tensor]


def scalar_dtype(device: torch.device) -> torch.dtype:
    """dtype in which inner products are summed over leaves: float64, or float32 where a device lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or float32 where ``dtype`` has 16 bits or fewer."""
    return torch.promote_types(dtype, torch.float32)


def flatten_vector(tree: Any, name: str) -> tuple[list[Tensor], TreeSpec]:
    """Detached leaves of ``tree`` and its structure; TypeError unless all are dense floating-point tensors."""
    leaves, spec = tree_flatten(tree)
    if not leaves:
        raise ValueError(f"{name} has no tensors")
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"{name} must be a pytree of floating-point tensors, but leaf {index} is {got}")
        if leaf.layout != torch.strided or leaf.is_meta:
            what = "on the meta device" if leaf.is_meta else leaf.layout
            raise TypeError(f"{name} must be a pytree of dense tensors that hold numbers, but leaf {index} is {what}")
    return [leaf.detach() for leaf in leaves], spec


def flatten_like(tree: Any, name: str, leaves: Leaves, spec: TreeSpec) -> list[Tensor]:
    """Detached leaves of ``tree``, matched by place; ValueError unless places and shapes are those of ``leaves``."""
    out, out_spec = flatten_vector(tree, name)
    if out_spec != spec:
        given = {keystr(path): leaf for (path, _), leaf in zip(tree_flatten_with_path(tree)[0], out, strict=True)}
        places = [keystr(path) for path, _ in tree_flatten_with_path(tree_unflatten(leaves, spec))[0]]
        if given.keys() != set(places):
            raise ValueError(f"{name} must have the structure {spec}, got {out_spec}")
        out = [given[place] for place in places]
    for index, (a, b) in enumerate(zip(out, leaves, strict=True)):
        if a.shape != b.shape:
            raise ValueError(f"{name}: leaf {index} must have shape {tuple(b.shape)}, got {tuple(a.shape)}")
    return out


@sees_no_modes
def dot(a: Leaves, b: Leaves) -> Tensor:
    """Σ aᵢbᵢ over all leaves, a 0-dimensional tensor on the device of the first leaf.

    Within a leaf the sum is taken in the wider of the two dtypes, float32 at least; over leaves in float64. A squared
    norm, of one and the same list, is taken in float64 within a leaf, too, so that no square leaves float32's range.
    """
    device = a[0].device
    if a is b:
        norms = torch._foreach_norm(list(a), 2, dtype=scalar_dtype(device))
        return torch.stack([norm.to(device) for norm in norms]).square().sum()
    parts = []
    for x, y in zip(a, b, strict=True):
        dtype = wide_dtype(torch.promote_types(x.dtype, y.dtype))
        parts.append(torch.dot(x.reshape(-1).to(dtype), y.reshape(-1).to(dtype)))
    if any(part.dtype != parts[0].dtype or part.device != device for part in parts):
        parts = [part.to(device=device, dtype=scalar_dtype(device)) for part in parts]
    return torch.stack(parts).to(scalar_dtype(device)).sum()


def axpy_(y: Leaves, alpha: Tensor | float, x: Leaves) -> None:
    """y ← y + alpha·x in place, in the dtype of each leaf of ``y``; a tensor ``alpha`` stays on its device."""
    for target, leaf in zip(y, x, strict=True):
        if isinstance(alpha, Tensor):
            target.addcmul_(leaf.to(target.dtype), alpha.to(device=target.device, dtype=target.dtype))
        else:
            target.add_(leaf, alpha=alpha)


def axpby_(y: Leaves, alpha: float, x: Leaves, beta: float) -> None:
    """y ← alpha·x + beta·y in place; 16-bit leaves are rounded once, after the sum."""
    for target, leaf in zip(y, x, strict=True):
        wide = wide_dtype(target.dtype)
        if target.dtype == wide:
            target.mul_(beta).add_(leaf, alpha=alpha)
        else:
            target.copy_(target.to(wide).mul_(beta).add_(leaf, alpha=alpha))


def ldexp_(y: Leaves, exponent: int) -> None:
    """y ← 2^exponent·y in place, in two factors where one would leave float32's range."""
    parts = (exponent,) if abs(exponent) < 120 else (exponent // 2, exponent - exponent // 2)
    for target in y:
        for part in parts:
            target.mul_(2.0**part)


def norm(v: Leaves, dot: Callable[[Leaves, Leaves], Tensor]) -> tuple[float, int]:
    """‖v‖ = m·2^e as the pair (m, e), ½ ≤ m < 1 or m = 0; m is not finite if ``v`` is not. The host waits for it."""
    found = dot(v, v)
    if not isinstance(found, Tensor) or found.dim():
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"dot must return a 0-dimensional tensor, got {got}")
    squared, shift = found.item(), 0
    if not 1e-280 < squared < 1e300 and any(leaf.dtype == torch.float64 for leaf in v):
        # Squares outside float64's range. The decision rests on ``dot``, so that shards decide alike.
        shift = 600 if squared < 1.0 else -600
        shifted = [leaf.double() * 2.0**shift for leaf in v]
        squared = dot(shifted, shifted).item()
    m, e = math.frexp(math.sqrt(squared))
    return m, e - shift


def largest(v: Leaves) -> list[Tensor]:
    """max |vᵢ| of each leaf, 0-dimensional tensors on the device of the first; NaN stays."""
    device, dtype = v[0].device, scalar_dtype(v[0].device)
    return [
        (torch.linalg.vector_norm(leaf, math.inf) if leaf.numel() else leaf.new_zeros(())).to(device, dtype)
        for leaf in v
    ]
