"""J: the forward-mode derivative of F in one sweep over key tiles, given O and L (at most 5 products a tile).

    x = c·QKᵀ     s = φ(x) + bias     P = exp(s − L)     ṡ = φ'(x)∘c·(Q̇Kᵀ + QK̇ᵀ) + ḃ
    L̇ = μ = rowsum(P∘ṡ)     Ȯ = (Z∘P∘ṡ)·V + (Z∘P)·V̇ − μ∘O

Without Q̇, K̇ and ḃ there is no ṡ and no μ; without V̇ no P·V̇: the absent products are not issued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sorder.kernels import launch
from sorder.kernels.hopper import dispatch
from sorder.kernels.ranges import column_range, interval_columns
from sorder.kernels.scores import (
    cap,
    dropout_factor,
    exponents,
    load_bounds,
    probabilities,
    score_arguments,
    score_tangent,
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
    load_tile,
    program_head_and_tile,
    store_tile,
)

if TYPE_CHECKING:
    from sorder.kernels.mask import Visibility


@triton.jit
def add_row_sums(weights, acc, COLS: tl.constexpr):
    """``acc`` plus the row sums of 16-bit weights, in each of its 16 columns: by a product with ones.

    The product is next to free, whereas a weight's way back to float32 takes as long as its exponential.
    """
    return tl.dot(weights, tl.full([COLS, 16], 1.0, weights.dtype), acc)


@triton.jit
def _accumulate(
    q, tq, K, V, TK, TV, score, bounds, at, row0, col0, k_row, v_row, tk_row, tv_row, scale, high, low,
    acc, mu, drift, weight,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    n_k = at[4]
    k = load_tile(K, col0, k_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION)
    tk = load_tile(TK, col0, tk_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION) if TK is not None else None
    tv = load_tile(TV, col0, tv_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION) if TV is not None else None
    EXACT: tl.constexpr = q.dtype == tl.float32
    rows, cols = tile_indices(row0, col0, ROWS, COLS, False)
    s = dot(q, tl.trans(k), None, PRECISION)
    t = cap(s, scale, SOFTCAP, EXACT) if SOFTCAP is not None else None
    x = exponents(s, t, scale, score, at, rows, cols, SOFTCAP, EXACT)
    p = probabilities(x, high[:, None], low[:, None], EXACT)
    if MASKED:
        p = tl.where(visible(score, bounds, at, rows, cols, CAUSAL), p, 0.0)
    keep = dropout_factor(score, at, rows, cols, DROPOUT) if DROPOUT else None
    WEIGHTED: tl.constexpr = not EXACT and not DROPOUT  # see tangent_kernel
    if tq is not None or tk is not None or score.tbias is not None:
        v = load_tile(V, col0, v_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION)
        tx = dot_pair(tq, k, q, tk, PRECISION) * scale if tq is not None or tk is not None else None
        pts = p * score_tangent(tx, t, score, at, rows, cols)
        mu += tl.sum(pts, 1)
        if keep is not None:
            pts *= keep
        pts = as_operand(pts, q.dtype, PRECISION)
        if WEIGHTED:
            drift = add_row_sums(pts, drift, COLS)
        acc = dot(pts, v, acc, PRECISION)
    if tv is not None:
        if keep is not None:
            p *= keep
        p = as_operand(p, q.dtype, PRECISION)
        if WEIGHTED:
            weight = add_row_sums(p, weight, COLS)
        acc = dot(p, tv, acc, PRECISION)
    return acc, mu, drift, weight


@triton.jit(do_not_specialize=SIZES)
def tangent_kernel(
    Q, K, V, O, L, TQ, TK, TV, TO, LOW, TL,
    q_strides, k_strides, v_strides, o_strides, tq_strides, tk_strides, tv_strides, to_strides, low_strides,
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
    O = head_pointer(O, z, lead1, lead2, o_strides)
    TQ = head_pointer(TQ, z, lead1, lead2, tq_strides) if TQ is not None else None
    TK = head_pointer(TK, key_z, lead1, key_lead2, tk_strides) if TK is not None else None
    TV = head_pointer(TV, key_z, lead1, key_lead2, tv_strides) if TV is not None else None
    TO = head_pointer(TO, z, lead1, lead2, to_strides)
    LOW = head_pointer(LOW, z, lead1, lead2, low_strides) if LOW is not None else None
    q = load_tile(Q, row0, q_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
    tq = load_tile(TQ, row0, tq_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION) if TQ is not None else None
    high, low = load_lse(L + z * n_q, row0, n_q, ROWS, True)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    mu = tl.zeros([ROWS], tl.float32)
    drift = tl.zeros([ROWS, 16], tl.float32)
    weight = tl.zeros([ROWS, 16], tl.float32)
    rows = row0 + tl.arange(0, ROWS)
    bounds = load_bounds(score, at, rows[:, None]) if score.start is not None else None
    if bounds is not None:
        lo, first, full, end = interval_columns(bounds, n_k, COLS)
        for col0 in range(lo, tl.minimum(first, end), COLS):
            acc, mu, drift, weight = _accumulate(
                q, tq, K, V, TK, TV, score, bounds, at, row0, col0, k_strides[3], v_strides[3], tk_strides[3],
                tv_strides[3], scale, high, low, acc, mu, drift, weight,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
            )  # fmt: skip
    else:
        first = 0
        full, end = column_range(row0, n_k, ROWS, COLS, CAUSAL)
    for col0 in range(first, full, COLS):
        acc, mu, drift, weight = _accumulate(
            q, tq, K, V, TK, TV, score, bounds, at, row0, col0, k_strides[3], v_strides[3], tk_strides[3],
            tv_strides[3], scale, high, low, acc, mu, drift, weight,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, score.shown is not None, PRECISION, SOFTCAP, DROPOUT,
        )  # fmt: skip
    for col0 in range(full, end, COLS):
        acc, mu, drift, weight = _accumulate(
            q, tq, K, V, TK, TV, score, bounds, at, row0, col0, k_strides[3], v_strides[3], tk_strides[3],
            tv_strides[3], scale, high, low, acc, mu, drift, weight,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION, SOFTCAP, DROPOUT,
        )  # fmt: skip
    # In 16 bits the weights of V and V̇ sum to 0 and 1 only up to their rounding, which would leak V's and V̇'s means
    # into Ȯ: the sums of the rounded weights take the places of μ and 1.
    WEIGHTED: tl.constexpr = q.dtype != tl.float32 and not DROPOUT
    if TQ is not None or TK is not None or score.tbias is not None:
        o = load_tile(O, row0, o_strides[3], n_q, DV, ROWS, BLOCK_DV, True, "ieee")
        acc -= (tl.sum(drift, 1) * (1 / 16) if WEIGHTED else mu)[:, None] * o.to(tl.float32)
    if WEIGHTED and TV is not None:
        sums = tl.sum(weight, 1) * (1 / 16)
        acc = acc / tl.where(sums == 0, 1.0, sums)[:, None]
    if LOW is not None:
        low = acc - acc.to(LOW.dtype.element_ty).to(tl.float32)
        store_tile(LOW, low, row0, low_strides[3], n_q, DV, ROWS, BLOCK_DV)
    store_tile(TO, acc, row0, to_strides[3], n_q, DV, ROWS, BLOCK_DV)
    tl.store(TL + z * n_q + rows, mu, mask=rows < n_q)


def tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, vis: Visibility | None,
    o: torch.Tensor, lse: torch.Tensor, tq: torch.Tensor | None, tk: torch.Tensor | None, tv: torch.Tensor | None,
    tbias: torch.Tensor | None, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Tangents Ȯ (like ``o``) and L̇ (like ``lse``), and for 16-bit inputs the part of Ȯ lost by its rounding.

    At least one of ``tq``, ``tk``, ``tv``, ``tbias`` is given.
    """
    if dispatch.serves(q, k, v, bias, vis, spec, tq, tk, tv):
        from sorder.kernels.hopper.tangent import tangent as hopper_tangent

        return hopper_tangent(q, k, v, o, lse, tq, tk, tv, spec)  # type: ignore[arg-type]
    heads = launch.Heads(q, k)
    q, k, v, o, tq, tk, tv = heads.fold(q, k, v, o, tq, tk, tv)
    (lse,) = launch.row_vectors(lse)
    to, tl_ = launch.new_matrix(o, o.shape[-1]), torch.empty_like(lse)
    to_low = None if o.dtype == torch.float32 else torch.empty_like(to)
    lengths = (q.shape[-2], k.shape[-2])
    launch.run(
        tangent_kernel, "tangent", heads, spec, lengths, (q.shape[-1], v.shape[-1]),
        (q, k, v, o, lse, tq, tk, tv, to, to_low, tl_, *heads.strides(q, k, v, o, tq, tk, tv, to, to_low)),
        score_arguments(heads, vis, bias, tbias, lengths),
    )  # fmt: skip
    return heads.unfold(to), tl_, None if to_low is None else heads.unfold(to_low)
