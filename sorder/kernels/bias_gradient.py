"""The cotangent of an additive bias, first order (ds of B) and second (dṡ of T), summed where the bias broadcasts.

    ds = P∘(dP − D)          dṡ = P∘((ṡ − μ)∘(dP − D) + dṖ − Ḋ)

One program per tile of the bias's own shape; it loops over the heads, rows and keys to which its tile broadcasts, in a
fixed order and without atomics. The letters are those of :mod:`sorder.kernels.backward_tangent`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sorder.kernels import launch
from sorder.kernels.ranges import column_range, interval_columns
from sorder.kernels.scores import (
    Score,
    cap,
    dropout_factor,
    exponents,
    first_order,
    load_bounds,
    probabilities,
    rows_that_see,
    score_tangent,
    second_order,
    tile_indices,
    visible,
)
from sorder.kernels.tiles import (
    SIZES,
    dot,
    dot_pair,
    head_pointer,
    load_lse,
    load_row_vector,
    load_tile,
    program_head_and_tile,
)

if TYPE_CHECKING:
    from sorder.kernels.spec import AttentionSpec


@triton.jit
def _step(
    K, V, TK, TV, q, do, tq, tdo, high, low, mu, delta, tdelta, score, bounds, at, row0, col0,
    k_row, v_row, tk_row, tv_row, scale, acc,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    n_k = at[4]
    k = load_tile(K, col0, k_row, n_k, D, COLS, BLOCK_D, True, PRECISION)
    v = load_tile(V, col0, v_row, n_k, DV, COLS, BLOCK_DV, True, PRECISION)
    EXACT: tl.constexpr = q.dtype == tl.float32
    rows, cols = tile_indices(row0, col0, ROWS, COLS, False)
    s = dot(q, tl.trans(k), None, PRECISION)
    t = cap(s, scale, SOFTCAP, EXACT) if SOFTCAP is not None else None
    x = exponents(s, t, scale, score, at, rows, cols, SOFTCAP, EXACT)
    p = probabilities(x, high[:, None], low[:, None], EXACT)
    p = tl.where(visible(score, bounds, at, rows, cols, CAUSAL), p, 0.0)
    keep = dropout_factor(score, at, rows, cols, DROPOUT) if DROPOUT else None
    dp = dot(do, tl.trans(v), None, PRECISION) if do is not None else None
    if keep is not None:
        dp = dp * keep if dp is not None else None
    if SECOND:
        tk = load_tile(TK, col0, tk_row, n_k, D, COLS, BLOCK_D, True, PRECISION) if TK is not None else None
        tv = load_tile(TV, col0, tv_row, n_k, DV, COLS, BLOCK_DV, True, PRECISION) if TV is not None else None
        tx = dot_pair(tq, k, q, tk, PRECISION) * scale if tq is not None or tk is not None else None
        moves: tl.constexpr = tx is not None or score.tbias is not None
        ts = score_tangent(tx, t, score, at, rows, cols) if moves else None
        has_tdp: tl.constexpr = tdo is not None or (tv is not None and do is not None)
        tdp = dot_pair(do, tv, tdo, v, PRECISION) if has_tdp else None
        if keep is not None:
            tdp = tdp * keep if tdp is not None else None
        return acc + second_order(p, ts, dp, tdp, mu[:, None], delta[:, None], tdelta[:, None])
    else:
        return acc + first_order(p, dp, delta[:, None])


@triton.jit(do_not_specialize=[*SIZES, "bias1", "bias2", "repeats0", "repeats1", "repeats2"])
def bias_gradient_kernel(
    Q, K, V, DO, TQ, TK, TV, TDO, L, MU, DELTA, TDELTA, DBIAS,
    q_strides, k_strides, v_strides, do_strides, tq_strides, tk_strides, tv_strides, tdo_strides, dbias_strides,
    bias1, bias2, repeats0, repeats1, repeats2, score, lead1, lead2, tiles, heads, n_q, n_k, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    EACH_ROW: tl.constexpr, EACH_COL: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    w, tile = program_head_and_tile(heads)  # a head of the bias
    if tile >= tiles:
        return
    # The part of the scores that this tile of the bias acts on: one tile of them, or all along a broadcast dimension.
    col_tiles = (n_k + COLS - 1) // COLS if EACH_COL else 1
    row_begin = tile // col_tiles * ROWS if EACH_ROW else 0
    row_end = tl.minimum(row_begin + ROWS, n_q) if EACH_ROW else n_q
    col_begin = tile % col_tiles * COLS if EACH_COL else 0
    col_end = tl.minimum(col_begin + COLS, n_k) if EACH_COL else n_k
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for repeat in range(repeats0 * repeats1 * repeats2):
        outer = repeat // repeats2
        z2 = w % bias2 + repeat % repeats2
        z1 = w // bias2 % bias1 + outer % repeats1
        z0 = w // bias2 // bias1 + outer // repeats1
        z = (z0 * lead1 + z1) * lead2 + z2
        at = (z, lead1, lead2, n_q, n_k)
        key_z, key_lead2 = z // GROUP, lead2 // GROUP
        k_head = head_pointer(K, key_z, lead1, key_lead2, k_strides)
        v_head = head_pointer(V, key_z, lead1, key_lead2, v_strides)
        tk_head = head_pointer(TK, key_z, lead1, key_lead2, tk_strides) if TK is not None else None
        tv_head = head_pointer(TV, key_z, lead1, key_lead2, tv_strides) if TV is not None else None
        q_head = head_pointer(Q, z, lead1, lead2, q_strides)
        do_head = head_pointer(DO, z, lead1, lead2, do_strides) if DO is not None else None
        tq_head = head_pointer(TQ, z, lead1, lead2, tq_strides) if TQ is not None else None
        tdo_head = head_pointer(TDO, z, lead1, lead2, tdo_strides) if TDO is not None else None
        for row0 in range(row_begin, row_end, ROWS):
            q = load_tile(q_head, row0, q_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
            high, low = load_lse(L + z * n_q, row0, n_q, ROWS, True)
            sees = rows_that_see(high)
            do = None
            tq = None
            tdo = None
            if DO is not None:
                do = load_tile(do_head, row0, do_strides[3], n_q, DV, ROWS, BLOCK_DV, True, PRECISION, sees)
            if TQ is not None:
                tq = load_tile(tq_head, row0, tq_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
            if TDO is not None:
                tdo = load_tile(tdo_head, row0, tdo_strides[3], n_q, DV, ROWS, BLOCK_DV, True, PRECISION, sees)
            delta = load_row_vector(DELTA + z * n_q, row0, n_q, ROWS, True, sees)
            mu = None
            tdelta = None
            if SECOND:
                mu = load_row_vector(MU + z * n_q, row0, n_q, ROWS, True, sees)
                tdelta = load_row_vector(TDELTA + z * n_q, row0, n_q, ROWS, True, sees)
            rows = row0 + tl.arange(0, ROWS)
            bounds = load_bounds(score, at, rows[:, None]) if score.start is not None else None
            if bounds is not None:
                lo, _, _, end = interval_columns(bounds, n_k, COLS)
            else:
                lo = 0
                _, end = column_range(row0, n_k, ROWS, COLS, CAUSAL)
            for col0 in range(tl.maximum(col_begin, lo), tl.minimum(col_end, end), COLS):
                acc = _step(
                    k_head, v_head, tk_head, tv_head, q, do, tq, tdo, high, low, mu, delta, tdelta, score, bounds, at,
                    row0, col0, k_strides[3], v_strides[3], tk_strides[3], tv_strides[3], scale, acc,
                    D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, PRECISION, SOFTCAP, DROPOUT, SECOND,
                )  # fmt: skip
    base = DBIAS + (w // bias2 // bias1) * dbias_strides[0]
    base += (w // bias2 % bias1) * dbias_strides[1] + (w % bias2) * dbias_strides[2]
    row = (row_begin + tl.arange(0, ROWS)).to(tl.int64)
    col = col_begin + tl.arange(0, COLS)
    DTYPE: tl.constexpr = DBIAS.dtype.element_ty
    if EACH_ROW and EACH_COL:
        pointers = base + row[:, None] * dbias_strides[3] + col[None, :]
        tl.store(pointers, acc.to(DTYPE), mask=(row < n_q)[:, None] & (col < n_k)[None, :])
    elif EACH_ROW:
        tl.store(base + row * dbias_strides[3], tl.sum(acc, 1).to(DTYPE), mask=row < n_q)
    elif EACH_COL:
        tl.store(base + col, tl.sum(acc, 0).to(DTYPE), mask=col < n_k)
    else:
        tl.store(base, tl.sum(tl.sum(acc, 1), 0).to(DTYPE))


def bias_gradient(
    heads: launch.Heads, spec: AttentionSpec, bias: torch.Tensor, score: Score,
    matrices: tuple[torch.Tensor | None, ...], row_vectors: tuple[torch.Tensor | None, ...],
) -> torch.Tensor:  # fmt: skip
    """dbias in the shape and dtype of ``bias``, from folded matrices and contiguous row vectors.

    Args:
        bias: (..., 1 or Hq, 1 or Nq, 1 or Nk), with as many dimensions as the query; only its shape and dtype matter.
        score: as the sweeps of B or T had it.
        matrices: Q, K, V, dO and their tangents Q̇, K̇, V̇, dȮ.
        row_vectors: L, μ, D, Ḋ. Without Ḋ it is the first order.
    """
    q, k, v = matrices[:3]
    assert q is not None and k is not None and v is not None
    lengths = (q.shape[-2], k.shape[-2])
    own = heads.fold_shape(bias.shape, 2)
    # A bias that repeats itself in part of the leading dimensions folded into one: summed over that part at the end.
    repeats_itself = own.numel() != bias.numel()
    gradient = bias.new_empty(own, dtype=torch.float32 if repeats_itself else bias.dtype)
    each_row, each_col = own[3] > 1, own[4] > 1

    def grid(config: launch.Config) -> tuple[int, int]:
        row_tiles = launch.cdiv(lengths[0], config.rows) if each_row else 1
        col_tiles = launch.cdiv(lengths[1], config.cols) if each_col else 1
        return row_tiles * col_tiles, own[0] * own[1] * own[2]

    launch.run(
        bias_gradient_kernel, "bias_gradient", heads, spec, lengths, (q.shape[-1], v.shape[-1]),
        (
            *matrices, *row_vectors, gradient, *heads.strides(*matrices), gradient.stride()[:4], *own[1:3],
            *(size // size_own for size, size_own in zip(heads.folded, own[:3], strict=True)),
        ),
        score, grid, EACH_ROW=each_row, EACH_COL=each_col, SECOND=row_vectors[3] is not None,
    )  # fmt: skip
    if repeats_itself:
        return gradient.view(*heads.lead[:-2], *own[1:]).sum_to_size(bias.shape).to(bias.dtype)
    return gradient.view(bias.shape)
