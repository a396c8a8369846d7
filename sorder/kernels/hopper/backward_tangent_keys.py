"""T's sweep for dK̇ and dV̇ on Hopper: see ``sorder.kernels.backward_tangent`` (8 products a tile, 10 with dȮ).

Score tiles are transposed, so that Ṗᵀ, dsᵀ and dṡᵀ are operands as they are. A row of the problem is then a column of
the tile, of which every thread has many: the row vectors come with the stage, or two of them from global memory where
shared memory is short (SHARED of the four come with the stage).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sorder.kernels import launch
from sorder.kernels.hopper import host
from sorder.kernels.hopper.tiles import (
    LOG2E,
    add_product,
    async_load,
    barriers_ready,
    copy_tiles,
    head_index,
    load_row_vector,
    new_barriers,
    product,
    program_head_and_tile,
    store_matrix,
    thread_barrier,
)
from sorder.kernels.spec import AttentionSpec

# By padded head width; at 128, all four would leave no room for a second program beside the first.
_SHARED = {64: 4, 128: 2}


@gluon.jit
def _copy_rows(
    descs, buffers, vector_descs, vectors, bars, step, steps, key_head, key_z, first,
    ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the ``step``-th tile of rows: the tiles from ``first`` on, head after head of the group."""
    BYTES: gl.constexpr = len(descs) * ROWS * D * 2 + len(vectors) * ROWS * 4
    stage = step % STAGES
    member = step // steps if GROUP > 1 else 0
    row0 = (first + step - member * steps) * ROWS
    pred = step < GROUP * steps
    head = (key_head[0], key_head[1], key_head[2] * GROUP + member)
    copy_tiles(descs, buffers, bars, stage, head, row0, pred, BYTES)
    for j in gl.static_range(len(vectors)):
        async_load(
            vector_descs[j], [key_z * GROUP + member, row0], bars.index(stage), vectors[j].index(stage), pred=pred
        )


@gluon.jit
def _row_vector(shared, stage, ROWS: gl.constexpr, layout: gl.constexpr):
    return shared.index(stage).reshape([ROWS]).load(layout)[None, :]


@gluon.jit
def _sweep(
    resident, zero, descs, buffers, vector_descs, vectors, DELTA, TDELTA, bars, key_head, key_z, first, member, start,
    stop, steps, col0, n_q, scale, dk, dv,
    ROWS: gl.constexpr, COLS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    MASKED: gl.constexpr, DUAL: gl.constexpr, scores: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = resident[0].dtype
    row: gl.constexpr = gl.SliceLayout(0, scores)
    empty = gl.zeros([COLS, ROWS], gl.float32, scores)
    vector = (key_z * GROUP + member).to(gl.int64) * n_q
    for i in range(start, stop):
        step = member * steps + i
        stage = step % STAGES
        mbarrier.wait(bars.index(stage), (step // STAGES) & 1)
        row0 = (first + i) * ROWS
        k = resident[0].index(i * zero).reshape([COLS, D])
        tk = resident[1].index(i * zero).reshape([COLS, D])
        v = resident[2].index(i * zero).reshape([COLS, D])
        tv = resident[3].index(i * zero).reshape([COLS, D])
        q = buffers[0].index(stage).reshape([ROWS, D])
        tq = buffers[1].index(stage).reshape([ROWS, D])
        do = buffers[2].index(stage).reshape([ROWS, D])
        s = product(k, q.permute((1, 0)), empty)
        ts = product(k, tq.permute((1, 0)), empty)
        ts = add_product(tk, q.permute((1, 0)), ts)
        dp = product(v, do.permute((1, 0)), empty)
        s = warpgroup_mma_wait(3, deps=(s,))
        thread_barrier()  # the tile before is done with
        _copy_rows(
            descs, buffers, vector_descs, vectors, bars, step + STAGES - 1, steps, key_head, key_z, first,
            ROWS, D, STAGES, GROUP,
        )  # fmt: skip
        rows = row0 + gl.arange(0, ROWS, layout=row)
        p = gl.exp2(s * (scale * LOG2E) - _row_vector(vectors[0], stage, ROWS, row) * LOG2E)
        if MASKED:
            cols = col0 + gl.arange(0, COLS, layout=gl.SliceLayout(1, scores))
            p = gl.where(rows[None, :] >= cols[:, None], p, 0.0)
        ts = warpgroup_mma_wait(1, deps=(ts,))
        tp = p * (ts * scale - _row_vector(vectors[1], stage, ROWS, row))
        dv = add_product(gl.convert_layout(tp.to(dtype), operand), do, dv)
        tdp = product(tv, do.permute((1, 0)), empty)
        if DUAL:
            tdo = buffers[3].index(stage).reshape([ROWS, D])
            dv = add_product(gl.convert_layout(p.to(dtype), operand), tdo, dv)
            tdp = add_product(v, tdo.permute((1, 0)), tdp)
        if len(vectors) == 4:
            delta = _row_vector(vectors[2], stage, ROWS, row)
            tdelta = _row_vector(vectors[3], stage, ROWS, row)
        else:
            delta = load_row_vector(DELTA + vector, rows, n_q)[None, :]
            tdelta = load_row_vector(TDELTA + vector, rows, n_q)[None, :]
        dp = warpgroup_mma_wait(4 if DUAL else 2, deps=(dp,))
        centred = dp - delta
        ds = (p * centred).to(dtype)
        tp = tp * centred
        dk = add_product(gl.convert_layout(ds, operand), tq, dk)
        tdp = warpgroup_mma_wait(1, deps=(tdp,))
        tds = (tp + p * (tdp - tdelta)).to(dtype)
        dk = add_product(gl.convert_layout(tds, operand), q, dk)
    return dk, dv


@gluon.jit(do_not_specialize=host.SIZES)
def hopper_backward_tangent_keys_kernel(
    q_desc, tq_desc, do_desc, tdo_desc, k_desc, tk_desc, v_desc, tv_desc, lse_desc, mu_desc, delta_desc,
    tdelta_desc, DELTA, TDELTA, DK, DV, dk_strides, dv_strides, row_tiles, lead1, lead2, heads, tiles, n_q, n_k, zero,
    scale, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr, DUAL: gl.constexpr,
    SHARED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    key_z, tile = program_head_and_tile(heads)
    col0 = tile * COLS  # the heaviest causal keys first
    MEMBERS: gl.constexpr = GROUP // SPLITS  # query heads of a program; a split counts as a key head of its own
    head = head_index(key_z, lead1, lead2)
    key_head = (head[0], head[1], head[2] // SPLITS)
    dtype: gl.constexpr = k_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    k = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    tk = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    tv = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, ROWS, D], q_desc.layout)
    tq = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, ROWS, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, ROWS, D], q_desc.layout)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], lse_desc.layout)
    mu = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], lse_desc.layout)
    if SHARED == 4:
        vector_descs = (lse_desc, mu_desc, delta_desc, tdelta_desc)
        delta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], lse_desc.layout)
        tdelta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], lse_desc.layout)
        vectors = (lse, mu, delta, tdelta)
    else:
        vector_descs = (lse_desc, mu_desc)
        vectors = (lse, mu)
    bars = new_barriers(STAGES)
    resident_bar = new_barriers(1)
    barriers_ready()
    resident = (k, tk, v, tv)
    copy_tiles((k_desc, tk_desc, v_desc, tv_desc), resident, resident_bar, 0, key_head, col0, True, COLS * D * 8)
    if DUAL:
        tdo = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, ROWS, D], q_desc.layout)
        descs = (q_desc, tq_desc, do_desc, tdo_desc)
        buffers = (q, tq, do, tdo)
    else:
        descs = (q_desc, tq_desc, do_desc)
        buffers = (q, tq, do)
    first = col0 // ROWS if CAUSAL else 0
    steps = gl.maximum(row_tiles - first, 0)
    masked = gl.minimum(steps, (col0 + COLS - 2) // ROWS + 1 - first) if CAUSAL else 0
    for i in gl.static_range(STAGES - 1):
        _copy_rows(descs, buffers, vector_descs, vectors, bars, i, steps, head, key_z, first, ROWS, D, STAGES, MEMBERS)
    dk = warpgroup_mma_init(gl.zeros([COLS, D], gl.float32, output))
    dv = warpgroup_mma_init(gl.zeros([COLS, D], gl.float32, output))
    mbarrier.wait(resident_bar.index(0), 0)
    for member in range(MEMBERS):
        if CAUSAL:
            dk, dv = _sweep(
                resident, zero, descs, buffers, vector_descs, vectors, DELTA, TDELTA, bars, head, key_z, first, member,
                0, masked, steps, col0, n_q, scale, dk, dv,
                ROWS, COLS, D, STAGES, MEMBERS, True, DUAL, scores, operand,
            )  # fmt: skip
        dk, dv = _sweep(
            resident, zero, descs, buffers, vector_descs, vectors, DELTA, TDELTA, bars, head, key_z, first, member,
            masked, steps, steps, col0, n_q, scale, dk, dv,
            ROWS, COLS, D, STAGES, MEMBERS, False, DUAL, scores, operand,
        )  # fmt: skip
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    store_matrix(dk * scale, DK, head, dk_strides, col0, n_k, WIDTH, COLS, D, output)
    store_matrix(dv, DV, head, dv_strides, col0, n_k, WIDTH_V, COLS, D, output)


def key_gradients(
    heads: launch.Heads, of: host.Descriptors, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    lse: torch.Tensor, do: torch.Tensor, tq: torch.Tensor, tk: torch.Tensor, tv: torch.Tensor,
    mu: torch.Tensor, tdo: torch.Tensor | None,
    delta: torch.Tensor, tdelta: torch.Tensor, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dK̇ and dV̇ of folded matrices and contiguous row vectors."""
    name = "backward_tangent_keys" if tdo is None else "backward_tangent_dual_keys"
    width, config = host.block(q, v), host.settings(name, q, v)
    splits = heads.splits(q, k.shape[-2], config.cols, occupancy=4)
    dk, dv = heads.new_key_matrix(k, splits), heads.new_key_matrix(v, splits)
    row_tiles = launch.cdiv(q.shape[-2], config.rows)
    host.run(
        hopper_backward_tangent_keys_kernel, heads, config, q, k, spec,
        (
            *of.matrices(config.rows, q, tq, do, tdo), *of.matrices(config.cols, k, tk, v, tv),
            *of.vectors(config.rows, lse, mu, delta, tdelta),
            delta, tdelta, dk, dv, *heads.strides(dk, dv), row_tiles,
        ),
        WIDTH=k.shape[-1], WIDTH_V=v.shape[-1], width=width, DUAL=tdo is not None, SHARED=_SHARED[width],
        over_keys=True, splits=splits,
    )  # fmt: skip
    return heads.merged(dk, k.dtype, splits), heads.merged(dv, v.dtype, splits)  # type: ignore[return-value]
