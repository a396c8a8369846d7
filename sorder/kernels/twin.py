"""The four maps in tiled PyTorch, on any device and floating dtype, with extra memory O(N · tile).

Every map sweeps over tiles of query rows, each against all the keys it sees. Products and row statistics are in
float32, or float64 for float64 inputs. Formulas are in the docstrings of the kernel files of the same names; letters:
``t…`` tangents, ``d…`` cotangents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from sorder.kernels.spec import AttentionSpec, lse_dtype

Optional = torch.Tensor | None

_TILE_ELEMENTS = 2**22
"""Score elements (over all heads) that one tile may hold: 16 MiB in float32."""


def _exact_products(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a map in the precision that its ``spec`` asks for: no autocast, and TF32 on CUDA only if it says so."""

    @functools.wraps(function)
    def wrapped(q: torch.Tensor, *args: Any) -> Any:
        spec = args[-1]
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        changes = q.is_cuda and before != spec.precision
        device = q.device.type
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            if changes:
                matmul.fp32_precision = spec.precision
            try:
                return function(q, *args)
            finally:
                if changes:
                    matmul.fp32_precision = before

    return wrapped


def _upcast(*tensors: Optional) -> list[Any]:
    return [x if x is None or x.dtype == torch.float64 else x.float() for x in tensors]


def _tiles(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """(rows, keys they see, mask of those) for every tile of query rows; no mask where all is visible."""
    n_q, n_k = q.shape[-2], k.shape[-2]
    size = max(1, min(n_q, _TILE_ELEMENTS // max(1, math.prod(q.shape[:-2]) * n_k)))
    for start in range(0, n_q, size):
        stop = min(start + size, n_q)
        if spec.causal:
            seen = min(stop, n_k)
            rows = torch.arange(start, stop, device=q.device)
            yield slice(start, stop), slice(seen), rows[:, None] >= torch.arange(seen, device=q.device)
        else:
            yield slice(start, stop), slice(n_k), None


def _probabilities(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, mask: Optional, scale: float) -> torch.Tensor:
    high = lse.to(q.dtype)
    low = (lse - high).to(q.dtype)  # not zero where a float32 problem keeps its log-sum-exp in float64
    p = torch.exp(scale * (q @ k.mT) - high[..., None] - low[..., None])
    return p if mask is None else p.masked_fill(~mask, 0.0)


def _sum(*terms: Optional) -> Any:
    """Sum of the terms that exist, ``None`` if there are none."""
    present = [t for t in terms if t is not None]
    return functools.reduce(torch.add, present) if present else None


def _matmul(a: Optional, b: Optional) -> Any:
    return None if a is None or b is None else a @ b


def _at(x: Optional, *index: Any) -> Any:
    position = (..., *index)
    return None if x is None else x[position]


def _cast(dtype: torch.dtype, *tensors: Optional) -> Any:
    return tuple(None if x is None else x.to(dtype) for x in tensors)


def _row_dot(a: Optional, b: Optional) -> Any:
    return None if a is None or b is None else (a * b).sum(-1)


@_exact_products
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """F: output (..., Nq, dv) and log-sum-exp (..., Nq)."""
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=lse_dtype(q))
    q, k, v = _upcast(q, k, v)
    for r, c, mask in _tiles(q, k, spec):
        s = spec.scale * (q[..., r, :] @ k[..., c, :].mT)
        if mask is not None:
            s = s.masked_fill(~mask, -math.inf)
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - m)
        l = p.sum(-1, keepdim=True)
        lse[..., r] = (m.to(lse.dtype) + l.log().to(lse.dtype))[..., 0]
        o[..., r, :] = (p / l) @ v[..., c, :]
    return o, lse


@_exact_products
def tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    tq: Optional, tk: Optional, tv: Optional, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """J: tangents Ȯ and L̇; at least one of ``tq``, ``tk``, ``tv`` is given."""
    to, tl = torch.zeros_like(o), torch.zeros_like(lse)
    q, k, v, o, tq, tk, tv = _upcast(q, k, v, o, tq, tk, tv)
    for r, c, mask in _tiles(q, k, spec):
        p = _probabilities(q[..., r, :], k[..., c, :], lse[..., r], mask, spec.scale)
        ts = _sum(
            _matmul(_at(tq, r, slice(None)), k[..., c, :].mT),
            _matmul(q[..., r, :], _transposed(_at(tk, c, slice(None)))),
        )
        out = _matmul(p, _at(tv, c, slice(None)))
        if ts is not None:
            pts = p * ts * spec.scale
            mu = pts.sum(-1)
            tl[..., r] = mu
            out = _sum(out, pts @ v[..., c, :] - mu[..., None] * o[..., r, :])
        to[..., r, :] = out
    return to, tl


def _transposed(x: Optional) -> Any:
    return None if x is None else x.mT


@_exact_products
def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: Optional, dl: Optional, wanted: str, spec: AttentionSpec,
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    """B: cotangents (dQ, dK, dV) of the letters in ``wanted``; ``None`` for the others and for a dV that is zero."""
    dtype = q.dtype
    q, k, v, o, do = _upcast(q, k, v, o, do)
    (dl,) = _cast(q.dtype, dl)
    dq, dk = (torch.zeros_like(x) if name in wanted else None for name, x in (("q", q), ("k", k)))
    dv = torch.zeros_like(v) if "v" in wanted and do is not None else None
    delta = _sum(_row_dot(do, o), None if dl is None else -dl)
    for r, c, mask in _tiles(q, k, spec):
        p = _probabilities(q[..., r, :], k[..., c, :], lse[..., r], mask, spec.scale)
        dp = _matmul(_at(do, r, slice(None)), v[..., c, :].mT)
        ds = spec.scale * p * _sum(dp, -delta[..., r, None])
        if dq is not None:
            dq[..., r, :] = ds @ k[..., c, :]
        if dk is not None:
            dk[..., c, :] += ds.mT @ q[..., r, :]
        if dv is not None:
            dv[..., c, :] += p.mT @ do[..., r, :]
    return _cast(dtype, dq, dk, dv)


@_exact_products
def backward_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: Optional, dl: Optional, tq: Optional, tk: Optional, tv: Optional,
    to: Optional, tl: Optional, tdo: Optional, tdl: Optional, wanted: str, spec: AttentionSpec,
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    """T: tangents (dQ̇, dK̇, dV̇) of the letters in ``wanted``; ``None`` for the others and for a dV̇ that is zero."""
    dtype = q.dtype
    q, k, v, o, do, tq, tk, tv, to, tdo = _upcast(q, k, v, o, do, tq, tk, tv, to, tdo)
    dl, tl, tdl = _cast(q.dtype, dl, tl, tdl)
    moves_p = tq is not None or tk is not None
    dq, dk = (torch.zeros_like(x) if name in wanted else None for name, x in (("q", q), ("k", k)))
    wants_v = "v" in wanted and (tdo is not None or (moves_p and do is not None))
    dv = torch.zeros_like(v) if wants_v else None
    delta = _sum(_row_dot(do, o), None if dl is None else -dl)
    tdelta = _sum(_row_dot(tdo, o), _row_dot(do, to), None if tdl is None else -tdl)
    for r, c, mask in _tiles(q, k, spec):
        row, col = (r, slice(None)), (c, slice(None))
        p = _probabilities(_at(q, *row), _at(k, *col), lse[..., r], mask, spec.scale)
        centred = _sum(_matmul(_at(do, *row), _at(v, *col).mT), -delta[..., r, None])
        ds = p * centred
        tds = _sum(
            _matmul(_at(do, *row), _transposed(_at(tv, *col))),
            _matmul(_at(tdo, *row), _at(v, *col).mT),
            None if tdelta is None else -tdelta[..., r, None],
        )
        tp = None
        if moves_p:
            ts = spec.scale * _sum(
                _matmul(_at(tq, *row), _at(k, *col).mT), _matmul(_at(q, *row), _transposed(_at(tk, *col)))
            )
            tp = p * (ts - tl[..., r, None])
            tds = _sum(tds, (ts - tl[..., r, None]) * centred)
        if tds is not None:
            tds = p * tds
        if dq is not None:
            dq[..., r, :] = spec.scale * _sum(_matmul(tds, _at(k, *col)), _matmul(ds, _at(tk, *col)))
        if dk is not None:
            dk[..., c, :] += spec.scale * _sum(_matmul(tds.mT, _at(q, *row)), _matmul(ds.mT, _at(tq, *row)))
        if dv is not None:
            pt = None if tp is None else tp.mT
            dv[..., c, :] += _sum(_matmul(pt, _at(do, *row)), _matmul(p.mT, _at(tdo, *row)))
    return _cast(dtype, dq, dk, dv)
