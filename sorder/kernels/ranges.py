"""Which tiles a sweep visits, and which of them need no mask.

A sweep over key tiles visits, for its query rows, the keys of [lo, end), without masks inside [first, full); a sweep
over query tiles likewise visits the rows that see something of its keys. Both come from causality by arithmetic or
from the rows' intervals start ≤ j < stop: the cost of a sliding window is its width, that of packed documents the sum
of their squares.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from sorder.kernels.scores import Score, load_bounds
from sorder.kernels.tiles import SIZES, head_pointer, program_head_and_tile

if TYPE_CHECKING:
    from sorder.kernels.launch import Heads

_SCANNED = 512
"""Row tiles that one step of a key tile's search looks at."""


@triton.jit
def column_range(row0, n_k, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr):
    """(full, end) of a sweep of rows row0 …: key tiles below ``full`` need no mask, from there to ``end`` they do."""
    if CAUSAL:
        full = tl.minimum(row0 + 1, n_k) // COLS * COLS
        end = tl.minimum(row0 + ROWS, n_k)
    else:
        full = n_k // COLS * COLS
        end = n_k
    return full, end


@triton.jit
def row_range(col0, n_q, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr):
    """(start, full) of a sweep of keys col0 …: tiles from ``start`` to ``full`` cross the diagonal, no later ones."""
    if CAUSAL:
        start = col0 // ROWS * ROWS
        full = tl.minimum((col0 + COLS + ROWS - 2) // ROWS * ROWS, (n_q + ROWS - 1) // ROWS * ROWS)
    else:
        start = 0
        full = 0
    return start, full


@triton.jit
def extremes(start, stop, n_k, AXIS: tl.constexpr):
    """Least start, greatest start, least stop and greatest stop of rows; a row that sees nothing narrows all four."""
    seen = start < stop
    start = tl.where(seen, start, n_k)
    stop = tl.where(seen, stop, 0)
    return tl.min(start, AXIS), tl.max(start, AXIS), tl.min(stop, AXIS), tl.max(stop, AXIS)


@triton.jit
def interval_columns(bounds, n_k, COLS: tl.constexpr):
    """(lo, first, full, end) of a sweep of rows with these intervals; all but ``end`` are multiples of COLS."""
    lo, first, full, end = extremes(tl.ravel(bounds[0]), tl.ravel(bounds[1]), n_k, 0)
    first = (first + COLS - 1) // COLS * COLS
    return lo // COLS * COLS, first, tl.maximum(first, full // COLS * COLS), end


@triton.jit
def load_row_interval(score, z, lead1, lead2, tile):
    """(lo, first, full, end) of a sweep of key tile ``tile``, as :func:`row_intervals` found them."""
    sweep_heads = (score.sweep_0, score.sweep_1, score.sweep_2)
    base = head_pointer(score.sweep, z, lead1, lead2, sweep_heads) + tile * 4
    return tl.load(base), tl.load(base + 1), tl.load(base + 2), tl.load(base + 3)


@triton.jit(do_not_specialize=SIZES)
def _summary_kernel(score, SUMMARY, lead1, lead2, tiles, heads, n_q, n_k, ROWS: tl.constexpr):
    """The four extremes of every tile of rows."""
    z, tile = program_head_and_tile(heads)
    if tile >= tiles:
        return
    start, stop = load_bounds(score, (z, lead1, lead2, n_q, n_k), tile * ROWS + tl.arange(0, ROWS))
    least_start, greatest_start, least_stop, greatest_stop = extremes(start, stop, n_k, 0)
    base = SUMMARY + z * 4 * tiles + tile
    tl.store(base, least_start)
    tl.store(base + tiles, greatest_start)
    tl.store(base + 2 * tiles, least_stop)
    tl.store(base + 3 * tiles, greatest_stop)


@triton.jit(do_not_specialize=(*SIZES, "row_tiles"))
def _interval_kernel(
    SUMMARY, INTERVALS, tiles, heads, row_tiles, n_q, n_k, ROWS: tl.constexpr, COLS: tl.constexpr, SCANNED: tl.constexpr
):
    """The rows that a tile of keys meets, as (lo, first, full, end): see :func:`row_intervals`."""
    z, tile = program_head_and_tile(heads)
    if tile >= tiles:
        return
    begin = tile * COLS
    end = tl.minimum(begin + COLS, n_k)
    SUMMARY += z * 4 * row_tiles
    lo = row_tiles
    hi = 0
    first = row_tiles
    for base in range(0, row_tiles, SCANNED):
        r = base + tl.arange(0, SCANNED)
        inside = r < row_tiles
        meets = inside & (tl.load(SUMMARY + r, mask=inside, other=0) < end)
        meets = meets & (tl.load(SUMMARY + 3 * row_tiles + r, mask=inside, other=0) > begin)
        whole = inside & (tl.load(SUMMARY + row_tiles + r, mask=inside, other=0) <= begin)
        whole = whole & (tl.load(SUMMARY + 2 * row_tiles + r, mask=inside, other=0) >= end)
        lo = tl.minimum(lo, tl.min(tl.where(meets, r, row_tiles), 0))
        hi = tl.maximum(hi, tl.max(tl.where(meets, r + 1, 0), 0))
        first = tl.minimum(first, tl.min(tl.where(whole, r, row_tiles), 0))
    full = row_tiles
    for base in range(first // SCANNED * SCANNED, row_tiles, SCANNED):
        r = base + tl.arange(0, SCANNED)
        inside = (r < row_tiles) & (r > first)
        whole = inside & (tl.load(SUMMARY + row_tiles + r, mask=inside, other=0) <= begin)
        whole = whole & (tl.load(SUMMARY + 2 * row_tiles + r, mask=inside, other=0) >= end)
        full = tl.minimum(full, tl.min(tl.where(inside & (whole == 0), r, row_tiles), 0))
    base = INTERVALS + (z * tiles + tile) * 4
    tl.store(base, lo * ROWS)
    tl.store(base + 1, tl.minimum(first, hi) * ROWS)
    tl.store(base + 2, tl.minimum(full, hi) * ROWS)
    tl.store(base + 3, tl.minimum(hi * ROWS, n_q))


def row_intervals(heads: Heads, score: Score, lengths: tuple[int, int], rows: int, cols: int) -> Score:
    """``score`` with the rows that a sweep visits for each of its key tiles, int32 (lo, first, full, end).

    Rows of [lo, end) meet the key tile; the first run of row tiles that see all of it is [first, full). Where intervals
    do not grow with the row, there may be rows in between that meet nothing; masks hide them.
    """
    n_q, n_k = lengths
    start, stop = score.start, score.stop
    assert start is not None and stop is not None
    # Heads that share their intervals share the search.
    shared = [0 == a == b for a, b in zip(start.stride()[:3], stop.stride()[:3], strict=True)]
    folded = [1 if s else size for s, size in zip(shared, heads.folded, strict=True)]
    count = math.prod(folded)
    row_tiles, tiles = triton.cdiv(n_q, rows), triton.cdiv(n_k, cols)
    summary = start.new_empty((count, 4, row_tiles))
    sweep = start.new_empty((*folded, tiles, 4))
    bounds = Score(start=start, stop=stop).argument()
    _summary_kernel[heads.grid(row_tiles, count)](
        bounds, summary, *folded[1:], row_tiles, count, n_q, n_k, ROWS=rows
    )  # fmt: skip
    _interval_kernel[heads.grid(tiles, count)](
        summary, sweep, tiles, count, row_tiles, n_q, n_k, ROWS=rows, COLS=cols, SCANNED=_SCANNED
    )  # fmt: skip
    return score._replace(sweep=sweep.expand(*heads.folded, tiles, 4))
