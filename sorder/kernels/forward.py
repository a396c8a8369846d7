"""F: output and log-sum-exp of attention in one sweep over key tiles (2 products a tile).

    s = c·QKᵀ     L = log Σ exp(s)     O = exp(s − L)·V

Online softmax (Milakov & Gimelshein 2018, as in FlashAttention-2, Dao 2023): running row maximum m and sum l, in base
2 for 16-bit inputs. For float32 inputs L is kept in float64: rounded to float32, an L of a few hundred would scale
whole rows of every later P = exp(s − L) by 1 ± 1e-5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sorder.kernels import launch
from sorder.kernels.spec import AttentionSpec, lse_dtype
from sorder.kernels.tiles import (
    LN2,
    LOG2E,
    SIZES,
    as_operand,
    column_range,
    dot,
    head_pointer,
    load_tile,
    program_head_and_tile,
    store_tile,
    visible,
)


@triton.jit
def _accumulate(
    q, K, V, row0, col0, k_row, v_row, n_k, scale, acc, m, l,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = load_tile(K, col0, k_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION)
    v = load_tile(V, col0, v_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION)
    EXACT: tl.constexpr = q.dtype == tl.float32  # natural exponents, see tiles.probabilities
    s = dot(q, tl.trans(k), None, PRECISION) * (scale if EXACT else scale * LOG2E)
    if MASKED:
        s = tl.where(visible(row0, col0, n_k, ROWS, COLS, CAUSAL), s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp(s - m_new[:, None]) if EXACT else tl.exp2(s - m_new[:, None])
    alpha = tl.exp(m - m_new) if EXACT else tl.exp2(m - m_new)
    acc = dot(as_operand(p, v.dtype, PRECISION), v, acc * alpha[:, None], PRECISION)
    return acc, m_new, l * alpha + tl.sum(p, 1)


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, O, L, q_strides, k_strides, v_strides, o_strides, lead1, lead2, tiles, heads, n_q, n_k, scale,
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
    q = load_tile(Q, row0, q_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    full, end = column_range(row0, n_k, ROWS, COLS, CAUSAL)
    for col0 in range(0, full, COLS):
        acc, m, l = _accumulate(
            q, K, V, row0, col0, k_strides[3], v_strides[3], n_k, scale, acc, m, l,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, False, PRECISION,
        )  # fmt: skip
    for col0 in range(full, end, COLS):
        acc, m, l = _accumulate(
            q, K, V, row0, col0, k_strides[3], v_strides[3], n_k, scale, acc, m, l,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION,
        )  # fmt: skip
    acc = acc / l[:, None]  # l > 0: every row sees the first key
    store_tile(O, acc, row0, o_strides[3], n_q, DV, ROWS, BLOCK_DV)
    rows = row0 + tl.arange(0, ROWS)
    if q.dtype == tl.float32:
        lse = m.to(tl.float64) + tl.log(l).to(tl.float64)
    else:
        lse = (m + tl.log2(l)) * LN2
    tl.store(L + z * n_q + rows, lse, mask=rows < n_q)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (..., Nq, dv) in the inputs' dtype and log-sum-exp (..., Nq), in float64 for float32 inputs and float32
    for 16-bit ones.
    """
    heads = launch.Heads(q)
    q, k, v = heads.fold(q, k, v)
    o = launch.new_matrix(q, v.shape[-1])
    lse = heads.new_row_vector(q, lse_dtype(q))
    tensors = (q, k, v, o)
    launch.run(
        forward_kernel, "forward", heads, spec, (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1]),
        (*tensors, lse, *heads.strides(*tensors)),
    )  # fmt: skip
    return heads.unfold(o), lse
