"""F: output and log-sum-exp of attention in one sweep over key tiles (2 products a tile).

    s = φ(c·QKᵀ) + bias     L = log Σ exp(s)     P = exp(s − L)     O = (Z∘P)·V

Online softmax (Milakov & Gimelshein 2018, as in FlashAttention-2, Dao 2023): running row maximum m and sum l, in base
2 for 16-bit inputs. For float32 inputs L is kept in float64: rounded to float32, an L of a few hundred would scale
whole rows of every later P = exp(s − L) by 1 ± 1e-5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sorder.kernels import launch
from sorder.kernels.ranges import column_range, interval_columns
from sorder.kernels.scores import (
    cap,
    dropout_factor,
    exponents,
    load_bounds,
    score_arguments,
    tile_indices,
    visible,
)
from sorder.kernels.spec import AttentionSpec, lse_dtype
from sorder.kernels.tiles import (
    LN2,
    SIZES,
    as_operand,
    dot,
    head_pointer,
    load_tile,
    program_head_and_tile,
    store_tile,
)

if TYPE_CHECKING:
    from sorder.kernels.mask import Visibility


@triton.jit
def _accumulate(
    q, K, V, score, bounds, at, row0, col0, k_row, v_row, scale, acc, m, l,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    n_k = at[4]
    k = load_tile(K, col0, k_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION)
    v = load_tile(V, col0, v_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION)
    EXACT: tl.constexpr = q.dtype == tl.float32  # natural exponents, see scores.probabilities
    HIDES: tl.constexpr = bounds is not None or score.shown is not None or score.bias is not None
    rows, cols = tile_indices(row0, col0, ROWS, COLS, False)
    s = dot(q, tl.trans(k), None, PRECISION)
    t = cap(s, scale, SOFTCAP, EXACT) if SOFTCAP is not None else None
    s = exponents(s, t, scale, score, at, rows, cols, SOFTCAP, EXACT)
    if MASKED:
        s = tl.where(visible(score, bounds, at, rows, cols, CAUSAL), s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    base = m_new
    if HIDES:  # a row may have seen nothing so far
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp(s - base[:, None]) if EXACT else tl.exp2(s - base[:, None])
    alpha = tl.exp(m - base) if EXACT else tl.exp2(m - base)
    l = l * alpha + tl.sum(p, 1)
    if DROPOUT:  # the sum is of all, the output of the kept
        p *= dropout_factor(score, at, rows, cols, DROPOUT)
    acc = dot(as_operand(p, v.dtype, PRECISION), v, acc * alpha[:, None], PRECISION)
    return acc, m_new, l


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, O, L, q_strides, k_strides, v_strides, o_strides, score, lead1, lead2, tiles, heads, n_q, n_k, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(heads)
    if tile >= tiles:
        return
    row0 = (tiles - 1 - tile) * ROWS  # the heaviest causal rows first
    at = (z, lead1, lead2, n_q, n_k)
    Q = head_pointer(Q, z, lead1, lead2, q_strides)
    K = head_pointer(K, z // GROUP, lead1, lead2 // GROUP, k_strides)
    V = head_pointer(V, z // GROUP, lead1, lead2 // GROUP, v_strides)
    O = head_pointer(O, z, lead1, lead2, o_strides)
    q = load_tile(Q, row0, q_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    rows = row0 + tl.arange(0, ROWS)
    bounds = load_bounds(score, at, rows[:, None]) if score.start is not None else None
    if bounds is not None:
        lo, first, full, end = interval_columns(bounds, n_k, COLS)
        for col0 in range(lo, tl.minimum(first, end), COLS):
            acc, m, l = _accumulate(
                q, K, V, score, bounds, at, row0, col0, k_strides[3], v_strides[3], scale, acc, m, l,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
            )  # fmt: skip
    else:
        first = 0
        full, end = column_range(row0, n_k, ROWS, COLS, CAUSAL)
    for col0 in range(first, full, COLS):
        acc, m, l = _accumulate(
            q, K, V, score, bounds, at, row0, col0, k_strides[3], v_strides[3], scale, acc, m, l,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, score.shown is not None, PRECISION, SOFTCAP, DROPOUT,
        )  # fmt: skip
    for col0 in range(full, end, COLS):
        acc, m, l = _accumulate(
            q, K, V, score, bounds, at, row0, col0, k_strides[3], v_strides[3], scale, acc, m, l,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
        )  # fmt: skip
    if score.start is not None or score.shown is not None or score.bias is not None:
        l = tl.where(l == 0, 1.0, l)  # a row that sees nothing, whose m is −∞
    acc = acc / l[:, None]
    store_tile(O, acc, row0, o_strides[3], n_q, DV, ROWS, BLOCK_DV)
    if q.dtype == tl.float32:
        lse = m.to(tl.float64) + tl.log(l).to(tl.float64)
    else:
        lse = (m + tl.log2(l)) * LN2
    tl.store(L + z * n_q + rows, lse, mask=rows < n_q)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility | None,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output (..., Nq, dv) in the inputs' dtype and log-sum-exp (..., Nq), in float64 for float32 inputs and float32
    for 16-bit ones.

    Rows that see nothing have output 0 and log-sum-exp −∞.
    """
    heads = launch.Heads(q, k)
    q, k, v = heads.fold(q, k, v)
    o = launch.new_matrix(q, v.shape[-1])
    lse = heads.new_row_vector(q, lse_dtype(q))
    tensors = (q, k, v, o)
    lengths = (q.shape[-2], k.shape[-2])
    launch.run(
        forward_kernel, "forward", heads, spec, lengths, (q.shape[-1], v.shape[-1]),
        (*tensors, lse, *heads.strides(*tensors)), score_arguments(heads, vis, bias, None, lengths),
    )  # fmt: skip
    return heads.unfold(o), lse
