"""B: the reverse-mode derivative of F (5 products a tile, recomputing P; 7 in two sweeps without atomics).

    P  = exp(c·QKᵀ − L)     ds = P∘(dO·Vᵀ − D)     D = rowsum(dO∘O) − dL
    dQ = c·ds·K             dK = c·dsᵀ·Q           dV = Pᵀ·dO

One sweep per key tile, with transposed score tiles, gives dK and dV; one per query tile gives dQ. A sweep whose
outputs nobody wants is not launched. PyTorch's fused kernels serve B where they accept the input; this one serves the
rest.
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
def _keys_step(
    Q, DO, L, DELTA, k, v, row0, col0, q_row, do_row, n_q, n_k, scale, dk, dv,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    q = load_tile(Q, row0, q_row, n_q, D, ROWS, BLOCK_D, RAGGED, PRECISION)
    do = load_tile(DO, row0, do_row, n_q, DV, ROWS, BLOCK_DV, RAGGED, PRECISION) if DO is not None else None
    high, low = load_lse(L, row0, n_q, ROWS, RAGGED)
    delta = load_row_vector(DELTA, row0, n_q, ROWS, RAGGED)
    s = dot(k, tl.trans(q), None, PRECISION)
    p = probabilities(s, scale, high[None, :], low[None, :], q.dtype == tl.float32)
    if DIAGONAL:
        p = tl.where(tl.trans(visible(row0, col0, n_k, ROWS, COLS, True)), p, 0.0)
    if WANT_V:
        dv = dot(as_operand(p, q.dtype, PRECISION), do, dv, PRECISION)
    if WANT_K:
        ds = p * -delta[None, :]
        if do is not None:
            ds += p * dot(v, tl.trans(do), None, PRECISION)
        dk = dot(as_operand(ds, q.dtype, PRECISION), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def backward_keys_kernel(
    Q, K, V, L, DO, DELTA, DK, DV_, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    lead1, lead2, tiles, heads, n_q, n_k, scale,
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
    DK = head_pointer(DK, z, lead1, lead2, dk_strides) if DK is not None else None
    DV_ = head_pointer(DV_, z, lead1, lead2, dv_strides) if DV_ is not None else None
    L += z * n_q
    DELTA += z * n_q
    k = load_tile(K, col0, k_strides[3], n_k, D, COLS, BLOCK_D, True, PRECISION)
    v = load_tile(V, col0, v_strides[3], n_k, DV, COLS, BLOCK_DV, True, PRECISION)
    dk = tl.zeros([COLS, BLOCK_D], tl.float32)
    dv = tl.zeros([COLS, BLOCK_DV], tl.float32)
    start, full = row_range(col0, n_q, ROWS, COLS, CAUSAL)
    if CAUSAL:
        for row0 in range(start, full, ROWS):
            dk, dv = _keys_step(
                Q, DO, L, DELTA, k, v, row0, col0, q_strides[3], do_strides[3], n_q, n_k, scale, dk, dv,
                D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, True, PRECISION, DK is not None, DV_ is not None, RAGGED,
            )  # fmt: skip
    for row0 in range(tl.maximum(start, full), n_q, ROWS):
        dk, dv = _keys_step(
            Q, DO, L, DELTA, k, v, row0, col0, q_strides[3], do_strides[3], n_q, n_k, scale, dk, dv,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, False, PRECISION, DK is not None, DV_ is not None, RAGGED,
        )  # fmt: skip
    if DK is not None:
        store_tile(DK, dk * scale, col0, dk_strides[3], n_k, D, COLS, BLOCK_D)
    if DV_ is not None:
        store_tile(DV_, dv, col0, dv_strides[3], n_k, DV, COLS, BLOCK_DV)


@triton.jit
def _queries_step(
    K, V, q, do, high, low, delta, row0, col0, k_row, v_row, n_k, scale, dq,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = load_tile(K, col0, k_row, n_k, D, COLS, BLOCK_D, MASKED, PRECISION)
    s = dot(q, tl.trans(k), None, PRECISION)
    p = probabilities(s, scale, high[:, None], low[:, None], q.dtype == tl.float32)
    if MASKED:
        p = tl.where(visible(row0, col0, n_k, ROWS, COLS, CAUSAL), p, 0.0)
    ds = p * -delta[:, None]
    if do is not None:
        v = load_tile(V, col0, v_row, n_k, DV, COLS, BLOCK_DV, MASKED, PRECISION)
        ds += p * dot(do, tl.trans(v), None, PRECISION)
    return dot(as_operand(ds, q.dtype, PRECISION), k, dq, PRECISION)


@triton.jit(do_not_specialize=SIZES)
def backward_queries_kernel(
    Q, K, V, L, DO, DELTA, DQ, q_strides, k_strides, v_strides, do_strides, dq_strides,
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
    DQ = head_pointer(DQ, z, lead1, lead2, dq_strides)
    q = load_tile(Q, row0, q_strides[3], n_q, D, ROWS, BLOCK_D, True, PRECISION)
    do = load_tile(DO, row0, do_strides[3], n_q, DV, ROWS, BLOCK_DV, True, PRECISION) if DO is not None else None
    high, low = load_lse(L + z * n_q, row0, n_q, ROWS, True)
    delta = load_row_vector(DELTA + z * n_q, row0, n_q, ROWS, True)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    full, end = column_range(row0, n_k, ROWS, COLS, CAUSAL)
    for col0 in range(0, full, COLS):
        dq = _queries_step(
            K, V, q, do, high, low, delta, row0, col0, k_strides[3], v_strides[3], n_k, scale, dq,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, False, PRECISION,
        )  # fmt: skip
    for col0 in range(full, end, COLS):
        dq = _queries_step(
            K, V, q, do, high, low, delta, row0, col0, k_strides[3], v_strides[3], n_k, scale, dq,
            D, DV, BLOCK_D, BLOCK_DV, ROWS, COLS, CAUSAL, True, PRECISION,
        )  # fmt: skip
    store_tile(DQ, dq * scale, row0, dq_strides[3], n_q, D, ROWS, BLOCK_D)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    do: torch.Tensor | None, dl: torch.Tensor | None, wanted: str, spec: AttentionSpec,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Cotangents (dQ, dK, dV) of the letters in ``wanted`` ("qkv").

    ``None`` for the others and for a dV that is zero.
    """
    heads = launch.Heads(q)
    q, k, v, o, do = heads.fold(q, k, v, o, do)
    lse, dl = launch.row_vectors(lse, dl)
    dq = launch.new_matrix(q, q.shape[-1]) if "q" in wanted else None
    dk = launch.new_matrix(k, k.shape[-1]) if "k" in wanted else None
    dv = launch.new_matrix(v, v.shape[-1]) if "v" in wanted and do is not None else None
    delta, _ = row_scalars(heads, o, do, dl)
    lengths, widths = (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1])
    if dk is not None or dv is not None:
        launch.run(
            backward_keys_kernel, "backward_keys", heads, spec, lengths, widths,
            (q, k, v, lse, do, delta, dk, dv, *heads.strides(q, k, v, do, dk, dv)),
        )  # fmt: skip
    if dq is not None:
        launch.run(
            backward_queries_kernel, "backward_queries", heads, spec, lengths, widths,
            (q, k, v, lse, do, delta, dq, *heads.strides(q, k, v, do, dq)),
        )  # fmt: skip
    return tuple(None if x is None else heads.unfold(x) for x in (dq, dk, dv))  # type: ignore[return-value]
