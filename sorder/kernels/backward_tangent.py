"""T: the tangent of B, all of second order. At most 15 products in two sweeps, 3 more with dȮ.

    x  = c·QKᵀ                  s  = φ(x) + bias              P  = exp(s − L)
    ẋ  = c·(Q̇Kᵀ + QK̇ᵀ)          ṡ  = φ'(x)∘ẋ + ḃ              Ṗ  = P∘(ṡ − μ)
    dP = Z∘(dO·Vᵀ)              dṖ = Z∘(dO·V̇ᵀ + dȮ·Vᵀ)        ds = P∘(dP − D)      dx = φ'(x)∘ds
    dṡ = Ṗ∘(dP − D) + P∘(dṖ − Ḋ)                              dẋ = φ'(x)∘dṡ + φ''(x)∘ẋ∘ds
    dQ̇ = c·(dẋ·K + dx·K̇)       dK̇ = c·(dẋᵀ·Q + dxᵀ·Q̇)       dV̇ = (Z∘Ṗ)ᵀ·dO + (Z∘P)ᵀ·dȮ

and dṡ, summed where the bias broadcasts, for the bias.

μ = L̇ comes from J (or from the forward-mode transform), D and Ḋ from row products. With dȮ = dL̇ = 0 this is also the
vector-Jacobian product of B for cotangents (Q̇, K̇, V̇, ḃ), since B is a gradient and its derivative symmetric.

One sweep per key tile, with transposed score tiles, gives dK̇ and dV̇; one per query tile gives dQ̇. No atomics: results
are bitwise reproducible (on Hopper under deterministic algorithms: ``sorder.kernels.hopper.backward_tangent``). A sweep
whose outputs nobody wants is not launched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sorder.kernels import launch
from sorder.kernels.bias_gradient import bias_gradient
from sorder.kernels.hopper import dispatch
from sorder.kernels.ranges import column_range, interval_columns, load_row_interval, row_range
from sorder.kernels.row_scalars import row_scalars
from sorder.kernels.scores import (
    cap,
    dropout_factor,
    exponents,
    first_order,
    load_bounds,
    probabilities,
    rows_that_see,
    score_arguments,
    score_tangent,
    second_order,
    through_cap,
    tile_indices,
    visible,
)
from sorder.kernels.spec import AttentionSpec
from sorder.kernels.tiles import (
    SIZES,
    as_operand,
    dot,
    dot_pair,
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
    Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, score, at, row0, col0,
    q_row, tq_row, do_row, tdo_row, scale, dk, dv,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    n_q = at[3]
    q = load_tile(Q, row0, q_row, n_q, D, ROWS, BLOCK_D, RAGGED, PRECISION)
    tq = load_tile(TQ, row0, tq_row, n_q, D, ROWS, BLOCK_D, RAGGED, PRECISION) if TQ is not None else None
    high, low = load_lse(L, row0, n_q, ROWS, RAGGED)
    BLIND: tl.constexpr = score.shown is not None or score.bias is not None or (MASKED and score.start is not None)
    sees = rows_that_see(high) if BLIND else None  # what other rows hold counts as 0
    do = load_tile(DO, row0, do_row, n_q, DV, ROWS, BLOCK_DV, RAGGED, PRECISION, sees) if DO is not None else None
    tdo = load_tile(TDO, row0, tdo_row, n_q, DV, ROWS, BLOCK_DV, RAGGED, PRECISION, sees) if TDO is not None else None
    mu = load_row_vector(MU, row0, n_q, ROWS, RAGGED, sees)[None, :]
    delta = load_row_vector(DELTA, row0, n_q, ROWS, RAGGED, sees)[None, :]
    tdelta = load_row_vector(TDELTA, row0, n_q, ROWS, RAGGED, sees)[None, :]
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
    tx = dot_pair(k, tq, tk, q, PRECISION) * scale if tq is not None or tk is not None else None
    moves: tl.constexpr = tx is not None or score.tbias is not None
    ts = score_tangent(tx, t, score, at, rows, cols) if moves else None
    if WANT_V:
        kept = p
        if keep is not None:
            kept = p * keep
        if ts is not None and do is not None:
            dv = dot(as_operand(kept * (ts - mu), q.dtype, PRECISION), do, dv, PRECISION)
        if tdo is not None:
            dv = dot(as_operand(kept, q.dtype, PRECISION), tdo, dv, PRECISION)
    if WANT_K:
        dp = dot(v, tl.trans(do), None, PRECISION) if do is not None else None
        has_tdp: tl.constexpr = tdo is not None or (tv is not None and do is not None)
        tdp = dot_pair(tv, do, v, tdo, PRECISION) if has_tdp else None
        if keep is not None:
            dp = dp * keep if dp is not None else None
            tdp = tdp * keep if tdp is not None else None
        tds = second_order(p, ts, dp, tdp, mu, delta, tdelta)
        ds = first_order(p, dp, delta)
        if t is not None:
            tds = through_cap(tds, ds, tx, t, SOFTCAP)
            ds *= 1.0 - t * t
        tds = as_operand(tds, q.dtype, PRECISION)
        ds = as_operand(ds, q.dtype, PRECISION)
        dk = dot(tds, q, dk, PRECISION)
        if tq is not None:
            dk = dot(ds, tq, dk, PRECISION)
    return dk, dv


@triton.jit
def _sweep_rows(
    Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, score, at, tile,
    q_strides, tq_strides, do_strides, tdo_strides, scale, dk, dv,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """What the rows of query head ``at[0]`` add to dK̇ and dV̇ of a key tile."""
    z, lead1, lead2, n_q, _ = at
    col0 = tile * COLS
    Q = head_pointer(Q, z, lead1, lead2, q_strides)
    TQ = head_pointer(TQ, z, lead1, lead2, tq_strides) if TQ is not None else None
    DO = head_pointer(DO, z, lead1, lead2, do_strides) if DO is not None else None
    TDO = head_pointer(TDO, z, lead1, lead2, tdo_strides) if TDO is not None else None
    L += z * n_q
    MU += z * n_q
    DELTA += z * n_q
    TDELTA += z * n_q
    if score.start is not None:
        lo, first, full, end = load_row_interval(score, z, lead1, lead2, tile)
    else:
        lo, first = row_range(col0, n_q, ROWS, COLS, CAUSAL)
        first, full, end = tl.maximum(lo, first), n_q, n_q
    if CAUSAL or score.start is not None:
        for row0 in range(lo, first, ROWS):
            dk, dv = _keys_step(
                Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, score, at, row0, col0,
                q_strides[3], tq_strides[3], do_strides[3], tdo_strides[3], scale, dk, dv,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
                WANT_K, WANT_V, RAGGED,
            )  # fmt: skip
    for row0 in range(first, full, ROWS):
        dk, dv = _keys_step(
            Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, score, at, row0, col0,
            q_strides[3], tq_strides[3], do_strides[3], tdo_strides[3], scale, dk, dv,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, score.shown is not None, PRECISION, SOFTCAP, DROPOUT,
            WANT_K, WANT_V, RAGGED,
        )  # fmt: skip
    if score.start is not None:
        for row0 in range(full, end, ROWS):
            dk, dv = _keys_step(
                Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, score, at, row0, col0,
                q_strides[3], tq_strides[3], do_strides[3], tdo_strides[3], scale, dk, dv,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
                WANT_K, WANT_V, RAGGED,
            )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def backward_tangent_keys_kernel(
    Q, K, V, L, DO, TQ, TK, TV, TDO, MU, DELTA, TDELTA, DK, DV_,
    q_strides, k_strides, v_strides, do_strides, tq_strides, tk_strides, tv_strides, tdo_strides, dk_strides,
    dv_strides, score, lead1, lead2, tiles, heads, n_q, n_k, scale,
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
    TK = head_pointer(TK, key_z, lead1, key_lead2, tk_strides) if TK is not None else None
    TV = head_pointer(TV, key_z, lead1, key_lead2, tv_strides) if TV is not None else None
    DK = head_pointer(DK, z, lead1, key_lead2 * SPLITS, dk_strides) if DK is not None else None
    DV_ = head_pointer(DV_, z, lead1, key_lead2 * SPLITS, dv_strides) if DV_ is not None else None
    k = load_tile(K, col0, k_strides[3], n_k, D, COLS, BLOCK_D, True, PRECISION)
    tk = load_tile(TK, col0, tk_strides[3], n_k, D, COLS, BLOCK_D, True, PRECISION) if TK is not None else None
    v = load_tile(V, col0, v_strides[3], n_k, DV, COLS, BLOCK_DV, True, PRECISION)
    tv = load_tile(TV, col0, tv_strides[3], n_k, DV, COLS, BLOCK_DV, True, PRECISION) if TV is not None else None
    dk = tl.zeros([COLS, BLOCK_D], tl.float32)
    dv = tl.zeros([COLS, BLOCK_DV], tl.float32)
    SHARE: tl.constexpr = GROUP // SPLITS
    if SHARE == 1:
        dk, dv = _sweep_rows(
            Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, score, (z, lead1, lead2, n_q, n_k), tile,
            q_strides, tq_strides, do_strides, tdo_strides, scale, dk, dv,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, PRECISION, SOFTCAP, DROPOUT,
            DK is not None, DV_ is not None, RAGGED,
        )  # fmt: skip
    else:
        for query_z in range(z * SHARE, z * SHARE + SHARE):
            dk, dv = _sweep_rows(
                Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, score, (query_z, lead1, lead2, n_q, n_k), tile,
                q_strides, tq_strides, do_strides, tdo_strides, scale, dk, dv,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, PRECISION, SOFTCAP, DROPOUT,
                DK is not None, DV_ is not None, RAGGED,
            )  # fmt: skip
    if DK is not None:
        store_tile(DK, dk * scale, col0, dk_strides[3], n_k, D, COLS, BLOCK_D)
    if DV_ is not None:
        store_tile(DV_, dv, col0, dv_strides[3], n_k, DV, COLS, BLOCK_DV)


@triton.jit
def _queries_step(
    K, TK, V, TV, q, tq, do, tdo, high, low, mu, delta, tdelta, score, bounds, at, row0, col0,
    k_row, tk_row, v_row, tv_row, scale, dq,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    n_k = at[4]
    k = load_tile(K, col0, k_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION)
    tk = load_tile(TK, col0, tk_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION) if TK is not None else None
    v = load_tile(V, col0, v_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION)
    tv = load_tile(TV, col0, tv_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION) if TV is not None else None
    EXACT: tl.constexpr = q.dtype == tl.float32
    rows, cols = tile_indices(row0, col0, ROWS, COLS, False)
    s = dot(q, tl.trans(k), None, PRECISION)
    t = cap(s, scale, SOFTCAP, EXACT) if SOFTCAP is not None else None
    x = exponents(s, t, scale, score, at, rows, cols, SOFTCAP, EXACT)
    p = probabilities(x, high[:, None], low[:, None], EXACT)
    if MASKED:
        p = tl.where(visible(score, bounds, at, rows, cols, CAUSAL), p, 0.0)
    tx = dot_pair(tq, k, q, tk, PRECISION) * scale if tq is not None or tk is not None else None
    moves: tl.constexpr = tx is not None or score.tbias is not None
    ts = score_tangent(tx, t, score, at, rows, cols) if moves else None
    dp = dot(do, tl.trans(v), None, PRECISION) if do is not None else None
    has_tdp: tl.constexpr = tdo is not None or (tv is not None and do is not None)
    tdp = dot_pair(do, tv, tdo, v, PRECISION) if has_tdp else None
    if DROPOUT:
        keep = dropout_factor(score, at, rows, cols, DROPOUT)
        dp = dp * keep if dp is not None else None
        tdp = tdp * keep if tdp is not None else None
    tds = second_order(p, ts, dp, tdp, mu, delta, tdelta)
    if t is not None:
        tds = through_cap(tds, first_order(p, dp, delta), tx, t, SOFTCAP)
    dq = dot(as_operand(tds, q.dtype, PRECISION), k, dq, PRECISION)
    if tk is not None:
        ds = first_order(p, dp, delta)
        if t is not None:
            ds *= 1.0 - t * t
        dq = dot(as_operand(ds, q.dtype, PRECISION), tk, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def backward_tangent_queries_kernel(
    Q, K, V, L, DO, TQ, TK, TV, TDO, MU, DELTA, TDELTA, DQ,
    q_strides, k_strides, v_strides, do_strides, tq_strides, tk_strides, tv_strides, tdo_strides, dq_strides,
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
    key_z, key_lead2 = z // GROUP, lead2 // GROUP
    Q = head_pointer(Q, z, lead1, lead2, q_strides)
    K = head_pointer(K, key_z, lead1, key_lead2, k_strides)
    V = head_pointer(V, key_z, lead1, key_lead2, v_strides)
    DO = head_pointer(DO, z, lead1, lead2, do_strides) if DO is not None else None
    TQ = head_pointer(TQ, z, lead1, lead2, tq_strides) if TQ is not None else None
    TK = head_pointer(TK, key_z, lead1, key_lead2, tk_strides) if TK is not None else None
    TV = head_pointer(TV, key_z, lead1, key_lead2, tv_strides) if TV is not None else None
    TDO = head_pointer(TDO, z, lead1, lead2, tdo_strides) if TDO is not None else None
    DQ = head_pointer(DQ, z, lead1, lead2, dq_strides)
    q = load_tile(Q, row0, q_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
    tq = load_tile(TQ, row0, tq_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION) if TQ is not None else None
    high, low = load_lse(L + z * n_q, row0, n_q, ROWS, True)
    HIDES: tl.constexpr = score.start is not None or score.shown is not None or score.bias is not None
    sees = rows_that_see(high) if HIDES else None  # what other rows hold counts as 0
    do = load_tile(DO, row0, do_strides[3], n_q, DV, ROWS, BLOCK_DV, True, PRECISION, sees) if DO is not None else None
    tdo = None
    if TDO is not None:
        tdo = load_tile(TDO, row0, tdo_strides[3], n_q, DV, ROWS, BLOCK_DV, True, PRECISION, sees)
    mu = load_row_vector(MU + z * n_q, row0, n_q, ROWS, True, sees)[:, None]
    delta = load_row_vector(DELTA + z * n_q, row0, n_q, ROWS, True, sees)[:, None]
    tdelta = load_row_vector(TDELTA + z * n_q, row0, n_q, ROWS, True, sees)[:, None]
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    rows = row0 + tl.arange(0, ROWS)
    bounds = load_bounds(score, at, rows[:, None]) if score.start is not None else None
    if bounds is not None:
        lo, first, full, end = interval_columns(bounds, n_k, COLS)
        for col0 in range(lo, tl.minimum(first, end), COLS):
            dq = _queries_step(
                K, TK, V, TV, q, tq, do, tdo, high, low, mu, delta, tdelta, score, bounds, at, row0, col0,
                k_strides[3], tk_strides[3], v_strides[3], tv_strides[3], scale, dq,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
            )  # fmt: skip
    else:
        first = 0
        full, end = column_range(row0, n_k, ROWS, COLS, CAUSAL)
    for col0 in range(first, full, COLS):
        dq = _queries_step(
            K, TK, V, TV, q, tq, do, tdo, high, low, mu, delta, tdelta, score, bounds, at, row0, col0,
            k_strides[3], tk_strides[3], v_strides[3], tv_strides[3], scale, dq,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, score.shown is not None, PRECISION, SOFTCAP, DROPOUT,
        )  # fmt: skip
    for col0 in range(full, end, COLS):
        dq = _queries_step(
            K, TK, V, TV, q, tq, do, tdo, high, low, mu, delta, tdelta, score, bounds, at, row0, col0,
            k_strides[3], tk_strides[3], v_strides[3], tv_strides[3], scale, dq,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
        )  # fmt: skip
    store_tile(DQ, dq * scale, row0, dq_strides[3], n_q, D, ROWS, BLOCK_D)


def backward_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor | None, dl: torch.Tensor | None,
    tq: torch.Tensor | None, tk: torch.Tensor | None, tv: torch.Tensor | None, tbias: torch.Tensor | None,
    to: torch.Tensor | None, tl_: torch.Tensor | None, to_low: torch.Tensor | None,
    tdo: torch.Tensor | None, tdl: torch.Tensor | None, wanted: str, spec: AttentionSpec,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Tangents (dQ̇, dK̇, dV̇, dbias') of the letters in ``wanted`` ("qkvb"); ``None`` for the others and for a dV̇ that
    is zero.

    ``to``, ``tl_`` and ``to_low`` are J's outputs for (``tq``, ``tk``, ``tv``, ``tbias``), of which one at least is
    given.
    """
    if dispatch.serves(q, k, v, bias, vis, spec, do, tq, tk, tv, to, tl_):
        from sorder.kernels.hopper.backward_tangent import backward_tangent as hopper_backward_tangent

        return hopper_backward_tangent(
            q, k, v, o, lse, do, dl, tq, tk, tv, to, tl_, to_low, tdo, tdl, wanted, spec,  # type: ignore[arg-type]
        )  # fmt: skip
    heads = launch.Heads(q, k)
    q, k, v, o, do, tq, tk, tv, to, to_low, tdo = heads.fold(q, k, v, o, do, tq, tk, tv, to, to_low, tdo)
    lse, dl, tl_, tdl = launch.row_vectors(lse, dl, tl_, tdl)
    delta, tdelta = row_scalars(heads, o, do, dl, to=to, to_low=to_low, tdo=tdo, tdl=tdl, second_order=True)
    moves_p = tq is not None or tk is not None or tbias is not None
    splits = heads.splits(q, k.shape[-2])
    dk = heads.new_key_matrix(k, splits) if "k" in wanted else None
    wants_v = "v" in wanted and (tdo is not None or (moves_p and do is not None))
    dv = heads.new_key_matrix(v, splits) if wants_v else None
    lengths, widths = (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1])
    score = score_arguments(heads, vis, bias, tbias, lengths)
    name = "backward_tangent" if tdo is None else "backward_tangent_dual"
    if dk is not None or dv is not None:
        launch.run(
            backward_tangent_keys_kernel, f"{name}_keys", heads, spec, lengths, widths,
            (
                q, k, v, lse, do, tq, tk, tv, tdo, tl_, delta, tdelta, dk, dv,
                *heads.strides(q, k, v, do, tq, tk, tv, tdo, dk, dv),
            ), score, SPLITS=splits,
        )  # fmt: skip
    dk, dv = heads.merged(dk, k.dtype, splits), heads.merged(dv, v.dtype, splits)
    dq = launch.new_matrix(q, q.shape[-1]) if "q" in wanted else None
    if dq is not None:
        launch.run(
            backward_tangent_queries_kernel, f"{name}_queries", heads, spec, lengths, widths,
            (
                q, k, v, lse, do, tq, tk, tv, tdo, tl_, delta, tdelta, dq,
                *heads.strides(q, k, v, do, tq, tk, tv, tdo, dq),
            ), score,
        )  # fmt: skip
    dbias = None
    if bias is not None and "b" in wanted:
        rows = (lse, tl_, delta, tdelta)
        dbias = bias_gradient(heads, spec, bias, score, (q, k, v, do, tq, tk, tv, tdo), rows)
    return None if dq is None else heads.unfold(dq), dk, dv, dbias
