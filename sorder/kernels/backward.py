"""B: the reverse-mode derivative of F (5 products a tile, recomputing P; 7 in two sweeps without atomics).

    x  = c·QKᵀ          s  = φ(x) + bias     P  = exp(s − L)         D  = rowsum(dO∘O) − dL
    dP = Z∘(dO·Vᵀ)      ds = P∘(dP − D)      dx = φ'(x)∘ds
    dQ = c·dx·K         dK = c·dxᵀ·Q         dV = (Z∘P)ᵀ·dO          dbias = ds, summed where the bias broadcasts

One sweep per key tile, with transposed score tiles, gives dK and dV; one per query tile gives dQ. A sweep whose
outputs nobody wants is not launched. PyTorch's fused kernels serve B where they accept the input; this one serves the
rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sorder.kernels import launch
from sorder.kernels.bias_gradient import bias_gradient
from sorder.kernels.ranges import column_range, interval_columns, load_row_interval, row_range
from sorder.kernels.row_scalars import row_scalars
from sorder.kernels.scores import (
    cap,
    dropout_factor,
    exponents,
    load_bounds,
    probabilities,
    rows_that_see,
    score_arguments,
    tile_indices,
    visible,
)
from sorder.kernels.spec import AttentionSpec
from sorder.kernels.tiles import (
    SIZES,
    as_operand,
    dot,
    head_pointer,
    load_lse,
    load_row_vector,
    load_tile,
    program_head_and_tile,
    store_tile,
)

if TYPE_CHECKING:
    from sorder.kernels.mask import Visibility


@triton.jit
def _keys_step(
    Q, DO, L, DELTA, k, v, score, at, row0, col0, q_row, do_row, scale, dk, dv,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    n_q = at[3]
    q = load_tile(Q, row0, q_row, n_q, D, ROWS, BLOCK_D, RAGGED, PRECISION)
    high, low = load_lse(L, row0, n_q, ROWS, RAGGED)
    BLIND: tl.constexpr = score.shown is not None or score.bias is not None or (MASKED and score.start is not None)
    sees = rows_that_see(high) if BLIND else None  # what other rows hold counts as 0
    do = load_tile(DO, row0, do_row, n_q, DV, ROWS, BLOCK_DV, RAGGED, PRECISION, sees) if DO is not None else None
    delta = load_row_vector(DELTA, row0, n_q, ROWS, RAGGED, sees)
    EXACT: tl.constexpr = q.dtype == tl.float32
    rows, cols = tile_indices(row0, col0, ROWS, COLS, True)
    s = dot(k, tl.trans(q), None, PRECISION)
    t = cap(s, scale, SOFTCAP, EXACT) if SOFTCAP is not None else None
    x = exponents(s, t, scale, score, at, rows, cols, SOFTCAP, EXACT)
    p = probabilities(x, high[None, :], low[None, :], EXACT)
    if MASKED:
        bounds = load_bounds(score, at, rows) if score.start is not None else None
        p = tl.where(visible(score, bounds, at, rows, cols, CAUSAL), p, 0.0)
    keep = dropout_factor(score, at, rows, cols, DROPOUT) if DROPOUT else None
    if WANT_V:
        kept = p
        if keep is not None:
            kept = p * keep
        dv = dot(as_operand(kept, q.dtype, PRECISION), do, dv, PRECISION)
    if WANT_K:
        ds = p * -delta[None, :]
        if do is not None:
            dp = dot(v, tl.trans(do), None, PRECISION)
            if keep is not None:
                dp *= keep
            ds += p * dp
        if t is not None:
            ds *= 1.0 - t * t
        dk = dot(as_operand(ds, q.dtype, PRECISION), q, dk, PRECISION)
    return dk, dv


@triton.jit
def _sweep_rows(
    Q, DO, L, DELTA, k, v, score, at, tile, q_strides, do_strides, scale, dk, dv,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """What the rows of query head ``at[0]`` add to dK and dV of a key tile."""
    z, lead1, lead2, n_q, _ = at
    col0 = tile * COLS
    Q = head_pointer(Q, z, lead1, lead2, q_strides)
    DO = head_pointer(DO, z, lead1, lead2, do_strides) if DO is not None else None
    L += z * n_q
    DELTA += z * n_q
    if score.start is not None:
        lo, first, full, end = load_row_interval(score, z, lead1, lead2, tile)
    else:
        lo, first = row_range(col0, n_q, ROWS, COLS, CAUSAL)
        first, full, end = tl.maximum(lo, first), n_q, n_q
    if CAUSAL or score.start is not None:
        for row0 in range(lo, first, ROWS):
            dk, dv = _keys_step(
                Q, DO, L, DELTA, k, v, score, at, row0, col0, q_strides[3], do_strides[3], scale, dk, dv,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
                WANT_K, WANT_V, RAGGED,
            )  # fmt: skip
    for row0 in range(first, full, ROWS):
        dk, dv = _keys_step(
            Q, DO, L, DELTA, k, v, score, at, row0, col0, q_strides[3], do_strides[3], scale, dk, dv,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, score.shown is not None, PRECISION, SOFTCAP, DROPOUT,
            WANT_K, WANT_V, RAGGED,
        )  # fmt: skip
    if score.start is not None:
        for row0 in range(full, end, ROWS):
            dk, dv = _keys_step(
                Q, DO, L, DELTA, k, v, score, at, row0, col0, q_strides[3], do_strides[3], scale, dk, dv,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
                WANT_K, WANT_V, RAGGED,
            )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def backward_keys_kernel(
    Q, K, V, L, DO, DELTA, DK, DV_, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    score, lead1, lead2, tiles, heads, n_q, n_k, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(heads)  # one of SPLITS parts of a head of keys
    if tile >= tiles:
        return
    col0 = tile * COLS
    key_lead2 = lead2 // GROUP
    key_z = z // SPLITS
    K = head_pointer(K, key_z, lead1, key_lead2, k_strides)
    V = head_pointer(V, key_z, lead1, key_lead2, v_strides)
    DK = head_pointer(DK, z, lead1, key_lead2 * SPLITS, dk_strides) if DK is not None else None
    DV_ = head_pointer(DV_, z, lead1, key_lead2 * SPLITS, dv_strides) if DV_ is not None else None
    k = load_tile(K, col0, k_strides[3], n_k, D, COLS, BLOCK_D, True, PRECISION)
    v = load_tile(V, col0, v_strides[3], n_k, DV, COLS, BLOCK_DV, True, PRECISION)
    dk = tl.zeros([COLS, BLOCK_D], tl.float32)
    dv = tl.zeros([COLS, BLOCK_DV], tl.float32)
    SHARE: tl.constexpr = GROUP // SPLITS
    if SHARE == 1:
        dk, dv = _sweep_rows(
            Q, DO, L, DELTA, k, v, score, (z, lead1, lead2, n_q, n_k), tile, q_strides, do_strides, scale, dk, dv,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, PRECISION, SOFTCAP, DROPOUT,
            DK is not None, DV_ is not None, RAGGED,
        )  # fmt: skip
    else:
        for query_z in range(z * SHARE, z * SHARE + SHARE):
            dk, dv = _sweep_rows(
                Q, DO, L, DELTA, k, v, score, (query_z, lead1, lead2, n_q, n_k), tile, q_strides, do_strides, scale,
                dk, dv, D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, PRECISION, SOFTCAP, DROPOUT,
                DK is not None, DV_ is not None, RAGGED,
            )  # fmt: skip
    if DK is not None:
        store_tile(DK, dk * scale, col0, dk_strides[3], n_k, D, COLS, BLOCK_D)
    if DV_ is not None:
        store_tile(DV_, dv, col0, dv_strides[3], n_k, DV, COLS, BLOCK_DV)


@triton.jit
def _queries_step(
    K, V, q, do, high, low, delta, score, bounds, at, row0, col0, k_row, v_row, scale, dq,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    n_k = at[4]
    k = load_tile(K, col0, k_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION)
    EXACT: tl.constexpr = q.dtype == tl.float32
    rows, cols = tile_indices(row0, col0, ROWS, COLS, False)
    s = dot(q, tl.trans(k), None, PRECISION)
    t = cap(s, scale, SOFTCAP, EXACT) if SOFTCAP is not None else None
    x = exponents(s, t, scale, score, at, rows, cols, SOFTCAP, EXACT)
    p = probabilities(x, high[:, None], low[:, None], EXACT)
    if MASKED:
        p = tl.where(visible(score, bounds, at, rows, cols, CAUSAL), p, 0.0)
    ds = p * -delta[:, None]
    if do is not None:
        v = load_tile(V, col0, v_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION)
        dp = dot(do, tl.trans(v), None, PRECISION)
        if DROPOUT:
            dp *= dropout_factor(score, at, rows, cols, DROPOUT)
        ds += p * dp
    if t is not None:
        ds *= 1.0 - t * t
    return dot(as_operand(ds, q.dtype, PRECISION), k, dq, PRECISION)


@triton.jit(do_not_specialize=SIZES)
def backward_queries_kernel(
    Q, K, V, L, DO, DELTA, DQ, q_strides, k_strides, v_strides, do_strides, dq_strides,
    score, lead1, lead2, tiles, heads, n_q, n_k, scale,
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
    DO = head_pointer(DO, z, lead1, lead2, do_strides) if DO is not None else None
    DQ = head_pointer(DQ, z, lead1, lead2, dq_strides)
    q = load_tile(Q, row0, q_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
    high, low = load_lse(L + z * n_q, row0, n_q, ROWS, True)
    HIDES: tl.constexpr = score.start is not None or score.shown is not None or score.bias is not None
    sees = rows_that_see(high) if HIDES else None  # what other rows hold counts as 0
    do = load_tile(DO, row0, do_strides[3], n_q, DV, ROWS, BLOCK_DV, True, PRECISION, sees) if DO is not None else None
    delta = load_row_vector(DELTA + z * n_q, row0, n_q, ROWS, True, sees)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    rows = row0 + tl.arange(0, ROWS)
    bounds = load_bounds(score, at, rows[:, None]) if score.start is not None else None
    if bounds is not None:
        lo, first, full, end = interval_columns(bounds, n_k, COLS)
        for col0 in range(lo, tl.minimum(first, end), COLS):
            dq = _queries_step(
                K, V, q, do, high, low, delta, score, bounds, at, row0, col0, k_strides[3], v_strides[3], scale, dq,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
            )  # fmt: skip
    else:
        first = 0
        full, end = column_range(row0, n_k, ROWS, COLS, CAUSAL)
    for col0 in range(first, full, COLS):
        dq = _queries_step(
            K, V, q, do, high, low, delta, score, bounds, at, row0, col0, k_strides[3], v_strides[3], scale, dq,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, score.shown is not None, PRECISION, SOFTCAP, DROPOUT,
        )  # fmt: skip
    for col0 in range(full, end, COLS):
        dq = _queries_step(
            K, V, q, do, high, low, delta, score, bounds, at, row0, col0, k_strides[3], v_strides[3], scale, dq,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
        )  # fmt: skip
    store_tile(DQ, dq * scale, row0, dq_strides[3], n_q, D, ROWS, BLOCK_D)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor | None, dl: torch.Tensor | None,
    wanted: str, spec: AttentionSpec,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Cotangents (dQ, dK, dV, dbias) of the letters in ``wanted`` ("qkvb").

    ``None`` for the others and for a dV that is zero.
    """
    heads = launch.Heads(q, k)
    q, k, v, o, do = heads.fold(q, k, v, o, do)
    lse, dl = launch.row_vectors(lse, dl)
    splits = heads.splits(q, k.shape[-2])
    dk = heads.new_key_matrix(k, splits) if "k" in wanted else None
    dv = heads.new_key_matrix(v, splits) if "v" in wanted and do is not None else None
    delta, _ = row_scalars(heads, o, do, dl)
    lengths, widths = (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1])
    score = score_arguments(heads, vis, bias, None, lengths)
    if dk is not None or dv is not None:
        launch.run(
            backward_keys_kernel, "backward_keys", heads, spec, lengths, widths,
            (q, k, v, lse, do, delta, dk, dv, *heads.strides(q, k, v, do, dk, dv)), score, SPLITS=splits,
        )  # fmt: skip
    dk, dv = heads.merged(dk, k.dtype, splits), heads.merged(dv, v.dtype, splits)
    dq = launch.new_matrix(q, q.shape[-1]) if "q" in wanted else None
    if dq is not None:
        launch.run(
            backward_queries_kernel, "backward_queries", heads, spec, lengths, widths,
            (q, k, v, lse, do, delta, dq, *heads.strides(q, k, v, do, dq)), score,
        )  # fmt: skip
    dbias = None
    if bias is not None and "b" in wanted:
        rows = (lse, None, delta, None)
        dbias = bias_gradient(heads, spec, bias, score, (q, k, v, do, None, None, None, None), rows)
    return None if dq is None else heads.unfold(dq), dk, dv, dbias
