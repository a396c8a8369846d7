"""Dense float64 attention and its four maps by nested torch.func transforms: what every implementation is compared
with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp

Optional = Tensor | None
HIDING_BIAS = -1e6


def dense(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *,
    bias: Optional = None, visible: Optional = None, softcap: float | None = None, kept: Optional = None,
    sinks: Optional = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Materialised attention (output, log-sum-exp), top-left causal, differentiable to any order.

    ``bias`` is added to the (soft-capped) scores, what ``visible`` hides is left out, ``kept`` multiplies the softmax.
    Rows that see nothing are constants.
    """
    if k.shape[:-2] != q.shape[:-2]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
    if causal:
        seen = seen.tril()
    if visible is not None:
        seen = seen & visible
    if bias is not None:
        seen = seen & (bias > HIDING_BIAS)
        s = s + torch.where(bias > HIDING_BIAS, bias, 0.0)
    empty = ~seen.any(-1, keepdim=True)
    s = s.masked_fill(~(seen | empty), -torch.inf)
    if sinks is not None:
        columns = sinks[:, None, None].expand(*s.shape[:-1], 1)
        s, empty = torch.cat([s.masked_fill(empty, -torch.inf), columns], -1), torch.zeros_like(empty)
        v = torch.cat([v, torch.zeros_like(v[..., :1, :])], -2)
    p = s.softmax(-1).masked_fill(empty, 0.0)
    return (p if kept is None else p * kept) @ v, s.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)


def maps(
    attend: Callable[..., Any], inputs: tuple[Tensor, ...], tangents: tuple[Optional, ...],
    cotangents: tuple[Optional, Optional], cotangent_tangents: tuple[Optional, Optional],
) -> dict[str, Tensor]:  # fmt: skip
    """All outputs of F, J, B and T of ``attend(q, k, v[, bias]) -> (o, lse)`` in float64.

    ``None`` stands for a zero tangent or cotangent.
    """
    n = len(inputs)

    def b(*args: Tensor) -> Any:
        return vjp(attend, *args[:n])[1](args[n:])

    def defined(xs: tuple[Optional, ...], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros_like(y) if x is None else x.double().contiguous() for x, y in zip(xs, like, strict=True)
        )

    inputs = tuple(x.double().contiguous() for x in inputs)
    out = attend(*inputs)
    t = defined(tangents, inputs)
    c, tc = defined(cotangents, out), defined(cotangent_tangents, out)
    names = ("q", "k", "v", "bias")[:n]
    values = (*out, *jvp(attend, inputs, t)[1], *b(*inputs, *c), *jvp(b, (*inputs, *c), (*t, *tc))[1])
    names_of_values = ("o", "lse", "to", "tlse", *(f"d{x}" for x in names), *(f"td{x}" for x in names))
    return dict(zip(names_of_values, values, strict=True))


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64; the absolute norm where ``want`` is zero.

    NaN compares false with every bound; infinities count as equal where both have them.
    """
    got, want = got.double(), want.double()
    infinite = want.isinf() & (got == want)
    got, want = got.masked_fill(infinite, 0.0), want.masked_fill(infinite, 0.0)
    difference, norm = (got - want).norm(), want.norm()
    return (difference / norm if norm > 0 else difference).item()
