"""J: the forward-mode derivative of F in one sweep over key tiles, given O and L (at most 5 products a tile).

    ṡ = c·(Q̇Kᵀ + QK̇ᵀ)     P = exp(c·QKᵀ − L)
    L̇ = μ = rowsum(P∘ṡ)     Ȯ = (P∘ṡ)·V + P·V̇ − μ∘O

Without Q̇ and K̇ there is no ṡ and no μ; without V̇ no P·V̇: the absent products are not issued.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sorder.kernels import launch
from sorder.kernels.spec import AttentionSpec
from sorder.kernels.tiles import (
    SIZES,
    as_operand,
    column_range,
    dot,
    dot_pair,
    head_pointer,
    load_lse,
    load_tile,
    probabilities,
    program_head_and_tile,
    store_tile,
    visible,
)


@triton.jit
def _accumulate(
    q, tq, K, V, TK, TV, row0, col0, k_row, v_row, tk_row, tv_row, n_k, scale, high, low, acc, mu,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = load_tile(K, col0, k_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION)
    tk = load_tile(TK, col0, tk_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION) if TK is not None else None
    tv = load_tile(TV, col0, tv_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION) if TV is not None else None
    s = dot(q, tl.trans(k), None, PRECISION)
    p = probabilities(s, scale, high[:, None], low[:, None], q.dtype == tl.float32)
    if MASKED:
        p = tl.where(visible(row0, col0, n_k, ROWS, COLS, CAUSAL), p, 0.0)
    if tq is not None or tk is not None:
        v = load_tile(V, col0, v_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION)
        pts = p * (dot_pair(tq, k, q, tk, PRECISION) * scale)
        mu += tl.sum(pts, 1)
        acc = dot(as_operand(pts, q.dtype, PRECISION), v, acc, PRECISION)
    if tv is not None:
        acc = dot(as_operand(p, q.dtype, PRECISION), tv, acc, PRECISION)
    return acc, mu


@triton.jit(do_not_specialize=SIZES)
def tangent_kernel(
    Q, K, V, O, L, TQ, TK, TV, TO, TL,
    q_strides, k_strides, v_strides, o_strides, tq_strides, tk_strides, tv_strides, to_strides,
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
    O = head_pointer(O, z, lead1, lead2, o_strides)
    TQ = head_pointer(TQ, z, lead1, lead2, tq_strides) if TQ is not None else None
    TK = head_pointer(TK, z, lead1, lead2, tk_strides) if TK is not None else None
    TV = head_pointer(TV, z, lead1, lead2, tv_strides) if TV is not None else None
    TO = head_pointer(TO, z, lead1, lead2, to_strides)
    q = load_tile(Q, row0, q_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
    tq = load_tile(TQ, row0, tq_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION) if TQ is not None else None
    high, low = load_lse(L + z * n_q, row0, n_q, ROWS, True)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    mu = tl.zeros([ROWS], tl.float32)
    full, end = column_range(row0, n_k, ROWS, COLS, CAUSAL)
    for col0 in range(0, full, COLS):
        acc, mu = _accumulate(
            q, tq, K, V, TK, TV, row0, col0, k_strides[3], v_strides[3], tk_strides[3], tv_strides[3], n_k, scale,
            high, low, acc, mu, D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, False, PRECISION,
        )  # fmt: skip
    for col0 in range(full, end, COLS):
        acc, mu = _accumulate(
            q, tq, K, V, TK, TV, row0, col0, k_strides[3], v_strides[3], tk_strides[3], tv_strides[3], n_k, scale,
            high, low, acc, mu, D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION,
        )  # fmt: skip
    if TQ is not None or TK is not None:
        o = load_tile(O, row0, o_strides[3], n_q, DV, ROWS, BLOCK_DV, True, "ieee")
        acc -= mu[:, None] * o.to(tl.float32)
    store_tile(TO, acc, row0, to_strides[3], n_q, DV, ROWS, BLOCK_DV)
    rows = row0 + tl.arange(0, ROWS)
    tl.store(TL + z * n_q + rows, mu, mask=rows < n_q)


def tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    tq: torch.Tensor | None, tk: torch.Tensor | None, tv: torch.Tensor | None, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tangents Ȯ (like ``o``) and L̇ (like ``lse``); at least one of ``tq``, ``tk``, ``tv`` is given."""
    heads = launch.Heads(q)
    q, k, v, o, tq, tk, tv = heads.fold(q, k, v, o, tq, tk, tv)
    (lse,) = launch.row_vectors(lse)
    to, tl_ = launch.new_matrix(o, o.shape[-1]), torch.empty_like(lse)
    launch.run(
        tangent_kernel, "tangent", heads, spec, (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1]),
        (q, k, v, o, lse, tq, tk, tv, to, tl_, *heads.strides(q, k, v, o, tq, tk, tv, to)),
    )  # fmt: skip
    return heads.unfold(to), tl_
