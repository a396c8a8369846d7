"""The four maps in tiled PyTorch, on any device and floating dtype, with extra memory O(N · tile).

Every map sweeps over tiles of query rows, each against all the keys it sees. Products and row statistics are in
float32, or float64 for float64 inputs. Formulas are in the docstrings of the kernel files of the same names; letters:
``t…`` tangents, ``d…`` cotangents. With G query heads to a key head, products take the G heads' rows as one matrix, so
that keys and values are never repeated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from sorder.kernels.mask import HIDING_BIAS, NOTHING, Visibility
from sorder.kernels.philox import dropped
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


def _sum(*terms: Optional) -> Any:
    """Sum of the terms that exist, ``None`` if there are none."""
    present = [t for t in terms if t is not None]
    return functools.reduce(torch.add, present) if present else None


def _times(*factors: Optional) -> Any:
    """Product of the factors that exist."""
    return functools.reduce(torch.mul, (f for f in factors if f is not None))


def _matmul(a: Optional, b: Optional) -> Any:
    """a·b for every query head, b (..., Hk, x, y) shared by the query heads (..., Hq, rows, x) of a group."""
    if a is None or b is None:
        return None
    if a.shape[:-2] == b.shape[:-2]:
        return a @ b
    return (_rows_of_groups(a, b.shape[-3]) @ b).reshape(*a.shape[:-1], b.shape[-1])


def _matmul_summed(a: Optional, b: Optional, like: torch.Tensor) -> Any:
    """aᵀ·b summed over the query heads that share a head of ``like``."""
    if a is None or b is None:
        return None
    if a.shape[:-2] != like.shape[:-2]:
        a, b = (_rows_of_groups(x, like.shape[-3]) for x in (a, b))
    return a.mT @ b


def _rows_of_groups(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(..., Hq, rows, width) as (..., Hk, G·rows, width)."""
    return x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads * x.shape[-2], x.shape[-1])


def _rows(x: Optional, r: slice) -> Any:
    return None if x is None else x[..., r, :]


def _transposed(x: Optional) -> Any:
    return None if x is None else x.mT


def _cast(dtype: torch.dtype, *tensors: Optional) -> Any:
    return tuple(None if x is None else x.to(dtype) for x in tensors)


def _row_dot(a: Optional, b: Optional) -> Any:
    return None if a is None or b is None else (a * b).sum(-1)


def _unexpanded(x: Optional) -> Any:
    """Without the repetitions along dimensions of stride 0."""
    if x is None:
        return None
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def _window(x: torch.Tensor, r: slice, c: slice) -> torch.Tensor:
    """Rows r and columns c of a matrix that may broadcast along either."""
    return x[..., r if x.shape[-2] != 1 else slice(None), c if x.shape[-1] != 1 else slice(None)]


class _Scores:
    """Everything between Q·Kᵀ and P: score map, bias, visibility, dropout, tile by tile."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, bias: Optional, vis: Visibility | None, spec: AttentionSpec
    ) -> None:
        vis = vis or NOTHING
        self.q, self.k, self.bias, self.spec = q, k, bias, spec
        self.start, self.stop, self.shown, self.slopes = (_unexpanded(x) for x in vis[:4])
        self.seed = vis.seed if spec.dropout else None
        self.masked = bias is not None or self.start is not None or self.stop is not None or self.shown is not None
        """Whether a row may see nothing."""

    def tiles(self) -> Iterator[_Tile]:
        n_q, n_k = self.q.shape[-2], self.k.shape[-2]
        size = max(1, min(n_q, _TILE_ELEMENTS // max(1, math.prod(self.q.shape[:-2]) * n_k)))
        for first in range(0, n_q, size):
            r = slice(first, min(first + size, n_q))
            yield _Tile(self, r, self._keys(r))

    def _keys(self, r: slice) -> slice:
        """Keys that some row of r may see."""
        low, high = 0, self.k.shape[-2]
        if self.spec.causal:
            high = min(r.stop, high)
        if self.q.device.type == "cpu":  # elsewhere a look at the ranges would wait for the device
            if self.start is not None and self.start.numel():
                low = min(max(low, int(self.start[..., self._of(self.start, r)].min())), high)
            if self.stop is not None and self.stop.numel():
                high = max(min(high, int(self.stop[..., self._of(self.stop, r)].max())), low)
        return slice(low, high)

    @staticmethod
    def _of(vector: torch.Tensor, r: slice) -> slice:
        return r if vector.shape[-1] != 1 else slice(None)

    def lse_parts(self, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(high, low) of the log-sum-exp; +∞ where a row sees nothing, so that its P is 0."""
        high = lse.to(self.q.dtype)
        low = (lse - high).to(self.q.dtype)  # not zero where a float32 problem keeps its log-sum-exp in float64
        if self.masked:
            empty = lse == -math.inf
            high, low = high.masked_fill(empty, math.inf), low.masked_fill(empty, 0.0)
        return high, low


class _Tile:
    """The scores of query rows ``r`` and keys ``c``."""

    def __init__(self, scores: _Scores, r: slice, c: slice) -> None:
        self.of, self.r, self.c = scores, r, c
        self.q, self.k = scores.q[..., r, :], scores.k[..., c, :]
        spec = scores.spec
        x = spec.scale * _matmul(self.q, self.k.mT)
        self.slope: Optional = None  # φ'(x)
        self.bend: Optional = None  # φ''(x)
        if spec.softcap is not None:
            capped = torch.tanh(x / spec.softcap)
            self.slope = 1 - capped.square()
            self.bend = capped * self.slope * (-2 / spec.softcap)
            x = spec.softcap * capped
        s, hidden = self._biased(x)
        for mask in self._hidden():
            hidden = mask if hidden is None else hidden | mask
        self.s = s if hidden is None else s.masked_fill(hidden, -math.inf)

    def _biased(self, s: torch.Tensor) -> tuple[torch.Tensor, Optional]:
        hidden: Optional = None
        if self.of.slopes is not None:
            rows, cols = self._positions()
            s = s + self.of.slopes[..., None, None].to(s.dtype) * (cols - rows[:, None]).to(s.dtype)
        if self.of.bias is not None:
            bias = _window(self.of.bias, self.r, self.c)
            s, hidden = s + bias.to(s.dtype), bias <= HIDING_BIAS
        return s, hidden

    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.q.device
        rows = torch.arange(self.r.start, self.r.stop, device=device)
        return rows, torch.arange(self.c.start, self.c.stop, device=device)

    def _hidden(self) -> Iterator[torch.Tensor]:
        scores = self.of
        rows, cols = self._positions()
        if scores.spec.causal:
            yield rows[:, None] < cols
        if scores.start is not None:
            yield cols < scores.start[..., scores._of(scores.start, self.r)][..., None]
        if scores.stop is not None:
            yield cols >= scores.stop[..., scores._of(scores.stop, self.r)][..., None]
        if scores.shown is not None:
            yield ~_window(scores.shown, self.r, self.c)

    def probabilities(self, lse_parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        high, low = lse_parts
        return torch.exp(self.s - high[..., self.r, None] - low[..., self.r, None])

    def kept(self) -> Optional:
        """Z: 1/(1 − p) where dropout keeps an entry, else 0."""
        if self.of.seed is None:
            return None
        p = self.of.spec.dropout
        q, n_q, n_k = self.of.q, self.of.q.shape[-2], self.of.k.shape[-2]
        rows, cols = self._positions()
        heads = torch.arange(math.prod(q.shape[:-2]), device=q.device).reshape(*q.shape[:-2], 1, 1)
        z = dropped(self.of.seed, (heads * n_q + rows[:, None]) * n_k + cols, p)
        return (~z).to(self.s.dtype) / (1 - p)


def _without_empty_rows(lse: torch.Tensor, scores: _Scores, *vectors: Optional) -> list[Any]:
    """Row vectors or matrices with zeros in the rows that see nothing, whatever their cotangents are."""
    if not scores.masked:
        return list(vectors)
    empty = lse == -math.inf
    return [
        None if x is None else x.masked_fill(empty if x.dim() == lse.dim() else empty[..., None], 0.0) for x in vectors
    ]


def _accumulate_bias(total: torch.Tensor, ds: torch.Tensor, r: slice, c: slice) -> None:
    """Adds a tile's gradient of the biased scores, summed over what the bias broadcasts."""
    part = _window(total, r, c)
    part += ds.sum_to_size(part.shape)


@_exact_products
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """F: output (..., Nq, dv) and log-sum-exp (..., Nq)."""
    same_width = q.shape[-1] == v.shape[-1]
    o = torch.empty_like(q) if same_width else q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=lse_dtype(q))
    q, k, v = _upcast(q, k, v)
    scores = _Scores(q, k, bias, vis, spec)
    for tile in scores.tiles():
        r, c, s = tile.r, tile.c, tile.s
        if not s.shape[-1]:
            o[..., r, :], lse[..., r] = 0.0, -math.inf
            continue
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - (m.masked_fill(m == -math.inf, 0.0) if scores.masked else m))
        l = p.sum(-1, keepdim=True)
        lse[..., r] = (m.to(lse.dtype) + l.log().to(lse.dtype))[..., 0]
        p = p / (l.masked_fill(l == 0, 1.0) if scores.masked else l)
        o[..., r, :] = _matmul(_times(p, tile.kept()), v[..., c, :])
    return o, lse


@_exact_products
def tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, tq: Optional, tk: Optional, tv: Optional, tbias: Optional, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, Optional]:  # fmt: skip
    """J: tangents Ȯ and L̇, and for 16-bit inputs what rounding Ȯ lost; at least one of the tangents is given."""
    to, tl = torch.zeros_like(o), torch.zeros_like(lse)
    to_low = torch.zeros_like(o) if o.dtype.itemsize == 2 else None
    q, k, v, o, tq, tk, tv = _upcast(q, k, v, o, tq, tk, tv)
    scores = _Scores(q, k, bias, vis, spec)
    parts = scores.lse_parts(lse)
    for tile in scores.tiles():
        r, c = tile.r, tile.c
        p, kept = tile.probabilities(parts), tile.kept()
        _, ts = _score_tangent(tile, tq, tk, tbias)
        out = _matmul(_times(p, kept), _rows(tv, c))
        if ts is not None:
            pts = p * ts
            mu = pts.sum(-1)
            tl[..., r] = mu
            out = _sum(out, _matmul(_times(pts, kept), v[..., c, :]) - mu[..., None] * o[..., r, :])
        to[..., r, :] = out
        if to_low is not None:
            to_low[..., r, :] = out - to[..., r, :]
    return to, tl, to_low


def _score_tangent(tile: _Tile, tq: Optional, tk: Optional, tbias: Optional) -> tuple[Optional, Optional]:
    """(ẋ, ṡ): tangents of the scaled products and of the scores."""
    tx = _sum(_matmul(_rows(tq, tile.r), tile.k.mT), _matmul(tile.q, _transposed(_rows(tk, tile.c))))
    ts = None
    if tx is not None:
        tx = tx * tile.of.spec.scale
        ts = _times(tx, tile.slope)
    if tbias is not None:
        tb = _window(tbias, tile.r, tile.c).to(tile.s.dtype)
        ts = tb.expand(tile.s.shape) if ts is None else ts + tb
    return tx, ts


@_exact_products
def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, do: Optional, dl: Optional, wanted: str, spec: AttentionSpec,
) -> tuple[Optional, Optional, Optional, Optional]:  # fmt: skip
    """B: cotangents (dQ, dK, dV, dbias) of the letters in ``wanted`` ("qkvb").

    ``None`` for the others and for a dV that is zero.
    """
    dtype = q.dtype
    q, k, v, o, do = _upcast(q, k, v, o, do)
    (dl,) = _cast(q.dtype, dl)
    dq, dk, dv, dbias = _outputs(q, k, v, bias, wanted if do is not None else wanted.replace("v", ""))
    scores = _Scores(q, k, bias, vis, spec)
    parts = scores.lse_parts(lse)
    delta = _sum(_row_dot(do, o), None if dl is None else -dl)
    do, delta = _without_empty_rows(lse, scores, do, delta)
    for tile in scores.tiles():
        r, c = tile.r, tile.c
        p, kept = tile.probabilities(parts), tile.kept()
        dp = _matmul(_rows(do, r), v[..., c, :].mT)
        ds = p * _sum(None if dp is None else _times(dp, kept), -delta[..., r, None])
        dx = spec.scale * _times(ds, tile.slope)
        if dq is not None:
            dq[..., r, :] = _matmul(dx, tile.k)
        if dk is not None:
            dk[..., c, :] += _matmul_summed(dx, tile.q, k)
        if dv is not None:
            dv[..., c, :] += _matmul_summed(_times(p, kept), _rows(do, r), v)
        if dbias is not None:
            _accumulate_bias(dbias, ds, r, c)
    return *_cast(dtype, dq, dk, dv), None if dbias is None or bias is None else dbias.to(bias.dtype)


def _outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, wanted: str) -> list[Optional]:
    """Zeroed accumulators of the letters in ``wanted``."""
    like = zip("qkvb", (q, k, v, bias), strict=True)
    return [
        torch.zeros(x.shape, dtype=q.dtype, device=q.device) if name in wanted and x is not None else None
        for name, x in like
    ]


@_exact_products
def backward_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Optional, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, do: Optional, dl: Optional,
    tq: Optional, tk: Optional, tv: Optional, tbias: Optional,
    to: Optional, tl: Optional, to_low: Optional, tdo: Optional, tdl: Optional, wanted: str, spec: AttentionSpec,
) -> tuple[Optional, Optional, Optional, Optional]:  # fmt: skip
    """T: tangents (dQ̇, dK̇, dV̇, dbiaṡ) of the letters in ``wanted`` ("qkvb").

    ``None`` for the others and for a dV̇ that is zero.
    """
    dtype = q.dtype
    q, k, v, o, do, tq, tk, tv, to, to_low, tdo = _upcast(q, k, v, o, do, tq, tk, tv, to, to_low, tdo)
    to = _sum(to, to_low)
    dl, tl, tdl = _cast(q.dtype, dl, tl, tdl)
    moves_p = tq is not None or tk is not None or tbias is not None
    wants_v = tdo is not None or (moves_p and do is not None)
    dq, dk, dv, dbias = _outputs(q, k, v, bias, wanted if wants_v else wanted.replace("v", ""))
    scores = _Scores(q, k, bias, vis, spec)
    parts = scores.lse_parts(lse)
    delta = _sum(_row_dot(do, o), None if dl is None else -dl)
    tdelta = _sum(_row_dot(tdo, o), _row_dot(do, to), None if tdl is None else -tdl)
    do, tdo, delta, tdelta, tl = _without_empty_rows(lse, scores, do, tdo, delta, tdelta, tl)
    for tile in scores.tiles():
        r, c = tile.r, tile.c
        p, kept = tile.probabilities(parts), tile.kept()
        dp = _matmul(_rows(do, r), _rows(v, c).mT)
        centred = _sum(None if dp is None else _times(dp, kept), -delta[..., r, None])
        ds = p * centred
        tdp = _sum(_matmul(_rows(do, r), _transposed(_rows(tv, c))), _matmul(_rows(tdo, r), _rows(v, c).mT))
        tds = _sum(None if tdp is None else _times(tdp, kept), None if tdelta is None else -tdelta[..., r, None])
        tx, ts = _score_tangent(tile, tq, tk, tbias)
        tp = None
        if ts is not None:
            relative = ts - tl[..., r, None]
            tp = p * relative
            tds = _sum(tds, relative * centred)
        if tds is not None:
            tds = p * tds
        dx = _times(ds, tile.slope)
        tdx = None if tds is None else _times(tds, tile.slope)
        if tile.bend is not None and tx is not None:
            tdx = _sum(tdx, tile.bend * tx * ds)
        if dq is not None:
            dq[..., r, :] = spec.scale * _sum(_matmul(tdx, tile.k), _matmul(dx, _rows(tk, c)))
        if dk is not None:
            dk[..., c, :] += spec.scale * _sum(_matmul_summed(tdx, tile.q, k), _matmul_summed(dx, _rows(tq, r), k))
        if dv is not None:
            dv[..., c, :] += _sum(
                _matmul_summed(None if tp is None else _times(tp, kept), _rows(do, r), v),
                _matmul_summed(_times(p, kept), _rows(tdo, r), v),
            )
        if dbias is not None and tds is not None:
            _accumulate_bias(dbias, tds, r, c)
    return *_cast(dtype, dq, dk, dv), None if dbias is None or bias is None else dbias.to(bias.dtype)
