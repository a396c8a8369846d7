"""Dense float64 attention and its four maps by nested torch.func transforms: what every implementation is compared
with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import jvp, vjp

Optional = torch.Tensor | None


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Materialised attention (output, log-sum-exp), top-left causal, differentiable to any order."""
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def maps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cotangents: tuple[Optional, Optional],
    tangents: tuple[Optional, ...], cotangent_tangents: tuple[Optional, Optional], causal: bool, scale: float | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """All outputs of F, J, B and T in float64. ``None`` stands for a zero tangent or cotangent."""

    def f(*qkv: torch.Tensor) -> Any:
        return dense(*qkv, causal, scale)

    def b(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cotangents: torch.Tensor) -> Any:
        return vjp(f, q, k, v)[1](cotangents)

    def defined(xs: tuple[Optional, ...], like: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros_like(y) if x is None else x.double().contiguous() for x, y in zip(xs, like, strict=True)
        )

    qkv = (q.double().contiguous(), k.double().contiguous(), v.double().contiguous())
    out = f(*qkv)
    t = defined(tangents, qkv)
    c, tc = defined(cotangents, out), defined(cotangent_tangents, out)
    values = (*out, *jvp(f, qkv, t)[1], *b(*qkv, *c), *jvp(b, (*qkv, *c), (*t, *tc))[1])
    return dict(zip(("o", "lse", "to", "tlse", "dq", "dk", "dv", "tdq", "tdk", "tdv"), values, strict=True))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64; the absolute norm where ``want`` is zero.

    NaN compares false with every bound.
    """
    difference, norm = (got.double() - want.double()).norm(), want.double().norm()
    return (difference / norm if norm > 0 else difference).item()
