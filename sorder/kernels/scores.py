"""What happens to a tile of scores between the products: the score map, visibility and dropout, for every sweep.

    s = φ(x) + bias     φ = identity or κ·tanh(x/κ)     bias = additive tensor, ALiBi's slope·(j − i), or both
    P = exp(s − L), 0 where hidden                      Z = keep/(1 − p)

Everything is elementwise in the query index i and the key index j, which come as ``rows`` and ``cols``: (ROWS, 1) and
(1, COLS) in sweeps over keys, (1, ROWS) and (COLS, 1) in sweeps over queries, whose score tiles are transposed. All
that is optional travels in one :class:`Score`; what is absent there is ``None`` and folds away at compile time.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from sorder.kernels.mask import HIDING_BIAS, NOTHING, Visibility
from sorder.kernels.tiles import LOG2E, head_pointer

if TYPE_CHECKING:
    from sorder.kernels.launch import Heads

HIDING = tl.constexpr(HIDING_BIAS)


class Score(NamedTuple):
    """Optional tensors that act on scores, each expanded to three leading dimensions as all matrices are.

    ``bias``, its tangent ``tbias`` and ``shown`` (uint8, 0 = hidden) are (heads, Nq, Nk), ``start`` and ``stop``
    (int32: row i sees keys start ≤ j < stop) are (heads, Nq), ``slopes`` (heads). ``sweep`` (int32) has the query rows
    that each key tile meets, see :func:`sorder.kernels.ranges.row_intervals`. ``seed`` is two int64.
    """

    bias: torch.Tensor | None = None
    tbias: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    start: torch.Tensor | None = None
    stop: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    sweep: torch.Tensor | None = None
    seed: torch.Tensor | None = None

    def argument(self) -> tuple[Any, ...]:
        """The kernels' argument ``score``: these tensors and, in fields such as ``bias_row``, strides of the present.

        One flat tuple, since Triton 3.6 loses constants of tuples in tuples; without what is absent, to launch fast.
        """
        strided = [(name, x) for name, x in zip(self._fields, self, strict=True) if x is not None and name != "seed"]
        names = tuple(name for name, _ in strided)
        return _argument_type(names)(*self, *(s for name, x in strided for s in x.stride()[: len(_STRIDES[name])]))


_HEADS = ("0", "1", "2")
_STRIDES = {
    **dict.fromkeys(("bias", "tbias", "shown"), (*_HEADS, "row", "col")),
    **dict.fromkeys(("start", "stop"), (*_HEADS, "row")),
    **dict.fromkeys(("slopes", "sweep"), _HEADS),
}


@functools.cache
def _argument_type(strided: tuple[str, ...]) -> Any:
    fields = (f"{name}_{stride}" for name in strided for stride in _STRIDES[name])
    return namedtuple("Argument", (*Score._fields, *fields))


PLAIN = Score()
"""Nothing but scale and causality."""


@triton.jit
def tile_indices(row0, col0, ROWS: tl.constexpr, COLS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Query and key indices of a score tile, which is transposed if KEYS_FIRST."""
    rows = row0 + tl.arange(0, ROWS)
    cols = col0 + tl.arange(0, COLS)
    if KEYS_FIRST:
        return rows[None, :], cols[:, None]
    else:
        return rows[:, None], cols[None, :]


@triton.jit
def load_matrix(base, strides, at, rows, cols):
    """Tile of an (Nq, Nk) matrix, 0 beyond its ends."""
    z, lead1, lead2, n_q, n_k = at
    head = head_pointer(base, z, lead1, lead2, strides)
    pointers = head + rows.to(tl.int64) * strides[3] + cols.to(tl.int64) * strides[4]
    return tl.load(pointers, mask=(rows < n_q) & (cols < n_k), other=0)


@triton.jit
def load_bias(score, at, rows, cols):
    """Tile of the bias, −∞ where it is so low that it hides (see :data:`sorder.kernels.mask.HIDING_BIAS`)."""
    bias_strides = (score.bias_0, score.bias_1, score.bias_2, score.bias_row, score.bias_col)
    bias = load_matrix(score.bias, bias_strides, at, rows, cols).to(tl.float32)
    return tl.where(bias <= HIDING, float("-inf"), bias)


@triton.jit
def rows_that_see(lse_high):
    """Which rows see something, from :func:`sorder.kernels.tiles.load_lse`; those beyond the end do not."""
    return lse_high < float("inf")


@triton.jit
def load_bounds(score, at, rows):
    """(start, stop) of the given rows; rows beyond the end repeat the last one."""
    z, lead1, lead2, n_q, n_k = at
    row = tl.minimum(rows, n_q - 1).to(tl.int64)
    start_heads = (score.start_0, score.start_1, score.start_2)
    stop_heads = (score.stop_0, score.stop_1, score.stop_2)
    start = tl.load(head_pointer(score.start, z, lead1, lead2, start_heads) + row * score.start_row)
    stop = tl.load(head_pointer(score.stop, z, lead1, lead2, stop_heads) + row * score.stop_row)
    return start, tl.minimum(stop, n_k)


@triton.jit
def visible(score, bounds, at, rows, cols, CAUSAL: tl.constexpr):
    """Mask of a score tile: inside the keys, in its row's interval or, if causal, not above the diagonal, and shown."""
    if bounds is not None:
        mask = (cols >= bounds[0]) & (cols < bounds[1])
    else:
        mask = cols < at[4]
    if CAUSAL:
        mask = mask & (rows >= cols)
    if score.shown is not None:
        shown_strides = (score.shown_0, score.shown_1, score.shown_2, score.shown_row, score.shown_col)
        mask = mask & (load_matrix(score.shown, shown_strides, at, rows, cols) != 0)
    return mask


@triton.jit
def cap(s, scale, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """tanh(scale·s/κ), of which everything about the soft cap follows: φ = κ·t, φ' = 1 − t², φ'' = −2t(1 − t²)/κ.

    Triton's own tanh is not in all its backends. EXACT (float32 inputs) is accurate relative to small t too, and so is
    what a wide cap needs: rounding t to 2⁻²⁴ moves φ by κ·2⁻²⁴.
    """
    u = s * (scale / SOFTCAP)
    magnitude = tl.abs(u)
    t = 1.0 - 2.0 / (tl.exp2(magnitude * (2.0 * LOG2E)) + 1.0)
    t = tl.where(u < 0, -t, t)
    if EXACT or SOFTCAP > 1024.0:
        # (tanh(u)/u − 1)/u², least squares over u² ≤ 0.36: 8e-8 relative to tanh.
        z = u * u
        series = ((0.020795166 - 0.0058945245 * z) * z - 0.053783476) * z + 0.13331918
        series = (series * z - 0.333333) * z
        t = tl.where(magnitude < 0.6, u + u * series, t)
    return t


@triton.jit
def exponents(s, t, scale, score, at, rows, cols, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """φ(scale·s) + bias of a tile of products s, in the exponent's base: natural if EXACT, else 2. ``t`` is cap(s)."""
    if t is not None:
        x = t * (SOFTCAP if EXACT else SOFTCAP * LOG2E)
    else:
        x = s * (scale if EXACT else scale * LOG2E)
    if score.bias is not None:
        bias = load_bias(score, at, rows, cols)
        x += bias if EXACT else bias * LOG2E
    if score.slopes is not None:
        slopes_heads = (score.slopes_0, score.slopes_1, score.slopes_2)
        slope = tl.load(head_pointer(score.slopes, at[0], at[1], at[2], slopes_heads))
        x += (slope if EXACT else slope * LOG2E) * (cols - rows).to(tl.float32)
    return x


@triton.jit
def probabilities(x, lse_high, lse_low, EXACT: tl.constexpr):
    """P = exp(s − L) from :func:`exponents`.

    EXACT (float32 inputs) keeps the exponent's rounding relative to the exponent, not to the score.
    """
    if EXACT:
        return tl.exp((x - lse_high) - lse_low)
    else:
        return tl.exp2(x - lse_high)


@triton.jit
def load_bias_tangent(score, at, rows, cols):
    tbias_strides = (score.tbias_0, score.tbias_1, score.tbias_2, score.tbias_row, score.tbias_col)
    return load_matrix(score.tbias, tbias_strides, at, rows, cols).to(tl.float32)


@triton.jit
def score_tangent(tx, t, score, at, rows, cols):
    """ṡ = φ'(x)∘ẋ + ḃ; ``tx`` or the bias's tangent is present."""
    if tx is not None:
        ts = tx
        if t is not None:
            ts = ts * (1.0 - t * t)
        if score.tbias is not None:
            ts += load_bias_tangent(score, at, rows, cols)
        return ts
    else:
        return load_bias_tangent(score, at, rows, cols)


@triton.jit
def first_order(p, dp, delta):
    """ds = P∘(dP − D)."""
    x = -delta
    if dp is not None:
        x = dp + x
    return p * x


@triton.jit
def second_order(p, ts, dp, tdp, mu, delta, tdelta):
    """dṡ = P∘((ṡ − μ)∘(dP − D) + dṖ − Ḋ)."""
    x = -tdelta
    if tdp is not None:
        x = tdp + x
    if ts is not None:
        centred = -delta
        if dp is not None:
            centred = dp + centred
        x = x + (ts - mu) * centred
    return p * x


@triton.jit
def through_cap(tds, ds, tx, t, SOFTCAP: tl.constexpr):
    """dẋ = φ'(x)∘dṡ + φ''(x)∘ẋ∘ds."""
    slope = 1.0 - t * t
    if tx is not None:
        return slope * (tds - (2.0 / SOFTCAP) * t * tx * ds)
    else:
        return slope * tds


@triton.jit
def dropout_factor(score, at, rows, cols, DROPOUT: tl.constexpr):
    """Z of a tile: one word of Philox (7 rounds) for each score, counted over heads, rows and keys.

    A score is dropped where its word is below DROPOUT = p·2³². The counter's two words and the two of ``seed[1]`` make
    Philox's counter, ``seed[0]`` is its key (Salmon et al. 2011).
    """
    z, _, _, n_q, n_k = at
    counter = (z * n_q + rows) * n_k + cols
    low = counter.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    key = tl.load(score.seed)
    offset = tl.load(score.seed + 1)
    zero = low * 0
    word, _, _, _ = tl.philox(key, low, high, zero + offset.to(tl.uint32), zero + (offset >> 32).to(tl.uint32), 7)
    return tl.where(word >= DROPOUT, 1.0 / (1.0 - DROPOUT / 4294967296.0), 0.0)


def dropout_threshold(p: float) -> int:
    """The constant DROPOUT of a probability, 0 for none."""
    return int(p * 2**32)


def score_arguments(
    heads: Heads, vis: Visibility | None, bias: torch.Tensor | None, tbias: torch.Tensor | None,
    lengths: tuple[int, int],
) -> Score:  # fmt: skip
    """The optional arguments of a sweep; ``bias`` and ``tbias`` broadcast to (..., Nq, Nk)."""
    start, stop, shown, slopes, seed = NOTHING if vis is None else vis
    if all(x is None for x in (bias, tbias, start, stop, shown, slopes, seed)):
        return PLAIN
    fold = heads.fold_broadcast
    return Score(
        bias=None if bias is None else fold(bias, lengths),
        tbias=None if tbias is None else fold(tbias, lengths),
        shown=None if shown is None else fold(shown.view(torch.uint8), lengths),
        start=None if start is None else fold(start, lengths[:1]),
        stop=None if stop is None else fold(stop, lengths[:1]),
        slopes=None if slopes is None else fold(slopes, ()),
        seed=seed,
    )
