"""T: the tangent of B, all of second order. At most 15 products in two sweeps, 3 more with dȮ.

    P  = exp(c·QKᵀ − L)         ṡ  = c·(Q̇Kᵀ + QK̇ᵀ)          Ṗ = P∘(ṡ − μ)
    dP = dO·Vᵀ                  dṖ = dO·V̇ᵀ + dȮ·Vᵀ           ds = P∘(dP − D)
    dṡ = Ṗ∘(dP − D) + P∘(dṖ − Ḋ)
    dQ̇ = c·(dṡ·K + ds·K̇)       dK̇ = c·(dṡᵀ·Q + dsᵀ·Q̇)       dV̇ = Ṗᵀ·dO + Pᵀ·dȮ

μ = L̇ comes from J (or from the forward-mode transform), D and Ḋ from row products. With dȮ = dL̇ = 0 this is also the
vector-Jacobian product of B for cotangents (Q̇, K̇, V̇), since B is a gradient and its derivative symmetric.

One sweep per key tile, with transposed score tiles, gives dK̇ and dV̇; one per query tile gives dQ̇. No atomics: results
are bitwise reproducible. A sweep whose outputs nobody wants is not launched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sorder.kernels import launch
from sorder.kernels.row_scalars import row_scalars
from sorder.kernels.spec import AttentionSpec
from sorder.kernels.tiles import (
    SIZES,
    as_operand,
    column_range,
    dot,
    dot_pair,
    head_pointer,
    load_lse,
    load_row_vector,
    load_tile,
    probabilities,
    program_head_and_tile,
    row_range,
    store_tile,
    visible,
)


@triton.jit
def _first_order(p, dp, delta):
    """ds = P∘(dP − D)."""
    x = -delta
    if dp is not None:
        x = dp + x
    return p * x


@triton.jit
def _second_order(p, ts, dp, tdp, mu, delta, tdelta):
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
def _keys_step(
    Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, row0, col0,
    q_row, tq_row, do_row, tdo_row, n_q, n_k, scale, dk, dv,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    q = load_tile(Q, row0, q_row, n_q, D, ROWS, BLOCK_D, RAGGED, PRECISION)
    tq = load_tile(TQ, row0, tq_row, n_q, D, ROWS, BLOCK_D, RAGGED, PRECISION) if TQ is not None else None
    do = load_tile(DO, row0, do_row, n_q, DV, ROWS, BLOCK_DV, RAGGED, PRECISION) if DO is not None else None
    tdo = load_tile(TDO, row0, tdo_row, n_q, DV, ROWS, BLOCK_DV, RAGGED, PRECISION) if TDO is not None else None
    high, low = load_lse(L, row0, n_q, ROWS, RAGGED)
    mu = load_row_vector(MU, row0, n_q, ROWS, RAGGED)[None, :]
    delta = load_row_vector(DELTA, row0, n_q, ROWS, RAGGED)[None, :]
    tdelta = load_row_vector(TDELTA, row0, n_q, ROWS, RAGGED)[None, :]
    s = dot(k, tl.trans(q), None, PRECISION)
    p = probabilities(s, scale, high[None, :], low[None, :], q.dtype == tl.float32)
    if DIAGONAL:
        p = tl.where(tl.trans(visible(row0, col0, n_k, ROWS, COLS, True)), p, 0.0)
    ts = dot_pair(k, tq, tk, q, PRECISION) * scale if tq is not None or tk is not None else None
    if WANT_V:
        if ts is not None and do is not None:
            dv = dot(as_operand(p * (ts - mu), q.dtype, PRECISION), do, dv, PRECISION)
        if tdo is not None:
            dv = dot(as_operand(p, q.dtype, PRECISION), tdo, dv, PRECISION)
    if WANT_K:
        dp = dot(v, tl.trans(do), None, PRECISION) if do is not None else None
        has_tdp: tl.constexpr = tdo is not None or (tv is not None and do is not None)
        tdp = dot_pair(tv, do, v, tdo, PRECISION) if has_tdp else None
        tds = as_operand(_second_order(p, ts, dp, tdp, mu, delta, tdelta), q.dtype, PRECISION)
        ds = as_operand(_first_order(p, dp, delta), q.dtype, PRECISION)
        dk = dot(tds, q, dk, PRECISION)
        if tq is not None:
            dk = dot(ds, tq, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def backward_tangent_keys_kernel(
    Q, K, V, L, DO, TQ, TK, TV, TDO, MU, DELTA, TDELTA, DK, DV_,
    q_strides, k_strides, v_strides, do_strides, tq_strides, tk_strides, tv_strides, tdo_strides, dk_strides,
    dv_strides, lead1, lead2, tiles, heads, n_q, n_k, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(tiles)
    if z >= heads:
        return
    col0 = tile * COLS
    Q = head_pointer(Q, z, lead1, lead2, q_strides)
    K = head_pointer(K, z, lead1, lead2, k_strides)
    V = head_pointer(V, z, lead1, lead2, v_strides)
    DO = head_pointer(DO, z, lead1, lead2, do_strides) if DO is not None else None
    TQ = head_pointer(TQ, z, lead1, lead2, tq_strides) if TQ is not None else None
    TK = head_pointer(TK, z, lead1, lead2, tk_strides) if TK is not None else None
    TV = head_pointer(TV, z, lead1, lead2, tv_strides) if TV is not None else None
    TDO = head_pointer(TDO, z, lead1, lead2, tdo_strides) if TDO is not None else None
    DK = head_pointer(DK, z, lead1, lead2, dk_strides) if DK is not None else None
    DV_ = head_pointer(DV_, z, lead1, lead2, dv_strides) if DV_ is not None else None
    L += z * n_q
    MU += z * n_q
    DELTA += z * n_q
    TDELTA += z * n_q
    k = load_tile(K, col0, k_strides[3], n_k, D, COLS, BLOCK_D, True, PRECISION)
    tk = load_tile(TK, col0, tk_strides[3], n_k, D, COLS, BLOCK_D, True, PRECISION) if TK is not None else None
    v = load_tile(V, col0, v_strides[3], n_k, DV, COLS, BLOCK_DV, True, PRECISION)
    tv = load_tile(TV, col0, tv_strides[3], n_k, DV, COLS, BLOCK_DV, True, PRECISION) if TV is not None else None
    dk = tl.zeros([COLS, BLOCK_D], tl.float32)
    dv = tl.zeros([COLS, BLOCK_DV], tl.float32)
    start, full = row_range(col0, n_q, ROWS, COLS, CAUSAL)
    if CAUSAL:
        for row0 in range(start, full, ROWS):
            dk, dv = _keys_step(
                Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, row0, col0,
                q_strides[3], tq_strides[3], do_strides[3], tdo_strides[3], n_q, n_k, scale, dk, dv,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, True, PRECISION, DK is not None, DV_ is not None, RAGGED,
            )  # fmt: skip
    for row0 in range(tl.maximum(start, full), n_q, ROWS):
        dk, dv = _keys_step(
            Q, TQ, DO, TDO, L, MU, DELTA, TDELTA, k, tk, v, tv, row0, col0,
            q_strides[3], tq_strides[3], do_strides[3], tdo_strides[3], n_q, n_k, scale, dk, dv,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, False, PRECISION, DK is not None, DV_ is not None, RAGGED,
        )  # fmt: skip
    if DK is not None:
        store_tile(DK, dk * scale, col0, dk_strides[3], n_k, D, COLS, BLOCK_D)
    if DV_ is not None:
        store_tile(DV_, dv, col0, dv_strides[3], n_k, DV, COLS, BLOCK_DV)


@triton.jit
def _queries_step(
    K, TK, V, TV, q, tq, do, tdo, high, low, mu, delta, tdelta, row0, col0, k_row, tk_row, v_row, tv_row, n_k, scale,
    dq, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = load_tile(K, col0, k_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION)
    tk = load_tile(TK, col0, tk_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION) if TK is not None else None
    v = load_tile(V, col0, v_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION)
    tv = load_tile(TV, col0, tv_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION) if TV is not None else None
    s = dot(q, tl.trans(k), None, PRECISION)
    p = probabilities(s, scale, high[:, None], low[:, None], q.dtype == tl.float32)
    if MASKED:
        p = tl.where(visible(row0, col0, n_k, ROWS, COLS, CAUSAL), p, 0.0)
    ts = dot_pair(tq, k, q, tk, PRECISION) * scale if tq is not None or tk is not None else None
    dp = dot(do, tl.trans(v), None, PRECISION) if do is not None else None
    has_tdp: tl.constexpr = tdo is not None or (tv is not None and do is not None)
    tdp = dot_pair(do, tv, tdo, v, PRECISION) if has_tdp else None
    tds = _second_order(p, ts, dp, tdp, mu, delta, tdelta)
    dq = dot(as_operand(tds, q.dtype, PRECISION), k, dq, PRECISION)
    if tk is not None:
        dq = dot(as_operand(_first_order(p, dp, delta), q.dtype, PRECISION), tk, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def backward_tangent_queries_kernel(
    Q, K, V, L, DO, TQ, TK, TV, TDO, MU, DELTA, TDELTA, DQ,
    q_strides, k_strides, v_strides, do_strides, tq_strides, tk_strides, tv_strides, tdo_strides, dq_strides,
    lead1, lead2, tiles, heads, n_q, n_k, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(tiles)
    if z >= heads:
        return
    row0 = (tiles - 1 - tile) * ROWS  # the heaviest causal rows first
    Q = head_pointer(Q, z, lead1, lead2, q_strides)
    K = head_pointer(K, z, lead1, lead2, k_strides)
    V = head_pointer(V, z, lead1, lead2, v_strides)
    DO = head_pointer(DO, z, lead1, lead2, do_strides) if DO is not None else None
    TQ = head_pointer(TQ, z, lead1, lead2, tq_strides) if TQ is not None else None
    TK = head_pointer(TK, z, lead1, lead2, tk_strides) if TK is not None else None
    TV = head_pointer(TV, z, lead1, lead2, tv_strides) if TV is not None else None
    TDO = head_pointer(TDO, z, lead1, lead2, tdo_strides) if TDO is not None else None
    DQ = head_pointer(DQ, z, lead1, lead2, dq_strides)
    q = load_tile(Q, row0, q_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
    tq = load_tile(TQ, row0, tq_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION) if TQ is not None else None
    do = load_tile(DO, row0, do_strides[3], n_q, DV, ROWS, BLOCK_DV, True, PRECISION) if DO is not None else None
    tdo = load_tile(TDO, row0, tdo_strides[3], n_q, DV, ROWS, BLOCK_DV, True, PRECISION) if TDO is not None else None
    high, low = load_lse(L + z * n_q, row0, n_q, ROWS, True)
    mu = load_row_vector(MU + z * n_q, row0, n_q, ROWS, True)[:, None]
    delta = load_row_vector(DELTA + z * n_q, row0, n_q, ROWS, True)[:, None]
    tdelta = load_row_vector(TDELTA + z * n_q, row0, n_q, ROWS, True)[:, None]
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    full, end = column_range(row0, n_k, ROWS, COLS, CAUSAL)
    for col0 in range(0, full, COLS):
        dq = _queries_step(
            K, TK, V, TV, q, tq, do, tdo, high, low, mu, delta, tdelta, row0, col0,
            k_strides[3], tk_strides[3], v_strides[3], tv_strides[3], n_k, scale, dq,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, False, PRECISION,
        )  # fmt: skip
    for col0 in range(full, end, COLS):
        dq = _queries_step(
            K, TK, V, TV, q, tq, do, tdo, high, low, mu, delta, tdelta, row0, col0,
            k_strides[3], tk_strides[3], v_strides[3], tv_strides[3], n_k, scale, dq,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION,
        )  # fmt: skip
    store_tile(DQ, dq * scale, row0, dq_strides[3], n_q, D, ROWS, BLOCK_D)


def backward_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: torch.Tensor | None, dl: torch.Tensor | None,
    tq: torch.Tensor | None, tk: torch.Tensor | None, tv: torch.Tensor | None,
    to: torch.Tensor | None, tl_: torch.Tensor | None, tdo: torch.Tensor | None, tdl: torch.Tensor | None,
    wanted: str, spec: AttentionSpec,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Tangents (dQ̇, dK̇, dV̇) of the letters in ``wanted`` ("qkv"); ``None`` for the others and for a dV̇ that is zero.

    ``to`` and ``tl_`` are J's outputs for (``tq``, ``tk``, ``tv``), of which at least one is given.
    """
    heads = launch.Heads(q)
    q, k, v, o, do, tq, tk, tv, to, tdo = heads.fold(q, k, v, o, do, tq, tk, tv, to, tdo)
    lse, dl, tl_, tdl = launch.row_vectors(lse, dl, tl_, tdl)
    delta, tdelta = row_scalars(heads, o, do, dl, to=to, tdo=tdo, tdl=tdl, second_order=True)
    moves_p = tq is not None or tk is not None
    dk = launch.new_matrix(k, k.shape[-1]) if "k" in wanted else None
    wants_v = "v" in wanted and (tdo is not None or (moves_p and do is not None))
    dv = launch.new_matrix(v, v.shape[-1]) if wants_v else None
    dq = launch.new_matrix(q, q.shape[-1]) if "q" in wanted else None
    lengths, widths = (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1])
    name = "backward_tangent" if tdo is None else "backward_tangent_dual"
    if dk is not None or dv is not None:
        launch.run(
            backward_tangent_keys_kernel, f"{name}_keys", heads, spec, lengths, widths,
            (
                q, k, v, lse, do, tq, tk, tv, tdo, tl_, delta, tdelta, dk, dv,
                *heads.strides(q, k, v, do, tq, tk, tv, tdo, dk, dv),
            ),
        )  # fmt: skip
    if dq is not None:
        launch.run(
            backward_tangent_queries_kernel, f"{name}_queries", heads, spec, lengths, widths,
            (
                q, k, v, lse, do, tq, tk, tv, tdo, tl_, delta, tdelta, dq,
                *heads.strides(q, k, v, do, tq, tk, tv, tdo, dq),
            ),
        )  # fmt: skip
    return tuple(None if x is None else heads.unfold(x) for x in (dq, dk, dv))  # type: ignore[return-value]
