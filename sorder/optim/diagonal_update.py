"""The rules of the optimizers that divide by a diagonal, on many tensors by torch's foreach operations.

    m ← m + take·(g − m)        p ← keep·p − lr·u(m, h)

They compute in float32 at least, and round parameters and m once; :mod:`sorder.kernels.diagonal_step` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sorder.linalg.pytree import scalar_dtype, wide_dtype


class Rule(NamedTuple):
    """Numbers of one step. ``power`` tells which u it has.

    - None (Sophia): clip(m / max(scale·h, ε), 1);
    - a number (AdaHessian): m / ((scale·√h)^power + ε).
    """

    lr: float
    keep: float
    take: float
    scale: float
    eps: float
    power: float | None = None


def update(
    params: Sequence[Tensor], gradients: Sequence[Tensor], m: Sequence[Tensor], h: Sequence[Tensor], rule: Rule
) -> None:
    """Take the step in place."""
    wide_m = [_wide(t, p) for t, p in zip(m, params, strict=True)]
    wide_p = [_wide(p, t) for t, p in zip(m, params, strict=True)]
    torch._foreach_lerp_(wide_m, [g.to(t.dtype) for g, t in zip(gradients, wide_m, strict=True)], rule.take)
    u = directions(wide_m, h, rule)
    if rule.keep != 1.0:
        torch._foreach_mul_(wide_p, rule.keep)
    torch._foreach_add_(wide_p, u, alpha=-rule.lr)
    for stored, computed in ((m, wide_m), (params, wide_p)):
        if any(a is not b for a, b in zip(stored, computed, strict=True)):
            torch._foreach_copy_(list(stored), computed)


def directions(m: Sequence[Tensor], h: Sequence[Tensor], rule: Rule) -> list[Tensor]:
    """u(m, h), in the dtype of ``m``."""
    if rule.power is None:
        u = quotients(m, h, rule)
        torch._foreach_clamp_min_(u, -1.0)
        torch._foreach_clamp_max_(u, 1.0)
        return u
    below = list(torch._foreach_sqrt([b.to(a.dtype) for a, b in zip(m, h, strict=True)]))
    torch._foreach_mul_(below, rule.scale)
    if rule.power != 1.0:
        below = list(torch._foreach_pow(below, rule.power))
    torch._foreach_add_(below, rule.eps)
    return list(torch._foreach_div(list(m), below))


def quotients(m: Sequence[Tensor], h: Sequence[Tensor], rule: Rule) -> list[Tensor]:
    """Sophia's m / max(scale·h, ε) before the clip; ε is at least the smallest normal number of ``m``."""
    below = list(torch._foreach_mul([b.to(a.dtype) for a, b in zip(m, h, strict=True)], rule.scale))
    torch._foreach_clamp_min_(below, max(rule.eps, *(torch.finfo(t.dtype).tiny for t in below)))
    return list(torch._foreach_div(list(m), below))


def square_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares, on the tensors' device."""
    norms = torch._foreach_norm([t.to(wide_dtype(t.dtype)) for t in tensors])
    return torch.stack(list(norms)).to(scalar_dtype(norms[0].device)).square().sum()


def _wide(t: Tensor, beside: Tensor) -> Tensor:
    return t.to(wide_dtype(torch.promote_types(t.dtype, beside.dtype)))
