"""T's sweep for dQ̇ on Hopper: see ``sorder.kernels.backward_tangent`` for the maths (7 products a tile, 8 with dȮ).

At width 64 there are registers left for Q and dO, which then need not be read from shared memory for every product.
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
    barriers_ready,
    copy_tiles,
    grouped,
    head_index,
    key_tiles,
    load_lse,
    load_row_vector,
    new_barriers,
    product,
    program_head_and_tile,
    store_matrix,
    thread_barrier,
    visible,
)
from sorder.kernels.spec import AttentionSpec


@gluon.jit
def _sweep(
    resident, held, zero, descs, buffers, bars, key_head, lse, mu, delta, tdelta, row0, start, stop, count, n_k, scale,
    dq,
    ROWS: gl.constexpr, COLS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, DUAL: gl.constexpr, scores: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = buffers[0].dtype
    empty = gl.zeros([ROWS, COLS], gl.float32, scores)
    for i in range(start, stop):
        stage = i % STAGES
        mbarrier.wait(bars.index(stage), (i // STAGES) & 1)
        if D == 64:
            q = held[0]
            do = held[1]
        else:
            q = resident[0].index(i * zero).reshape([ROWS, D])
            do = resident[2].index(i * zero).reshape([ROWS, D])
        tq = resident[1].index(i * zero).reshape([ROWS, D])
        k = buffers[0].index(stage).reshape([COLS, D])
        tk = buffers[1].index(stage).reshape([COLS, D])
        v = buffers[2].index(stage).reshape([COLS, D])
        tv = buffers[3].index(stage).reshape([COLS, D])
        s = product(q, k.permute((1, 0)), empty)
        ts = product(tq, k.permute((1, 0)), empty)
        ts = add_product(q, tk.permute((1, 0)), ts)
        dp = product(do, v.permute((1, 0)), empty)
        tdp = product(do, tv.permute((1, 0)), empty)
        if DUAL:
            tdo = resident[3].index(i * zero).reshape([ROWS, D])
            tdp = add_product(tdo, v.permute((1, 0)), tdp)
        s = warpgroup_mma_wait(4 + DUAL, deps=(s,))
        thread_barrier()  # the tile before is done with
        ahead = i + STAGES - 1
        copy_tiles(descs, buffers, bars, ahead % STAGES, key_head, ahead * COLS, ahead < count, COLS * D * 8)
        p = gl.exp2(s * (scale * LOG2E) - lse[:, None])
        if MASKED:
            p = gl.where(visible(row0, i * COLS, n_k, ROWS, COLS, CAUSAL, scores), p, 0.0)
        dp = warpgroup_mma_wait(1 + DUAL, deps=(dp,))
        centred = dp - delta[:, None]
        dq = add_product(gl.convert_layout((p * centred).to(dtype), operand), tk, dq)
        ts, tdp = warpgroup_mma_wait(1, deps=(ts, tdp))
        tds = p * ((ts * scale - mu[:, None]) * centred + (tdp - tdelta[:, None]))
        dq = add_product(gl.convert_layout(tds.to(dtype), operand), k, dq)
    return dq


@gluon.jit(do_not_specialize=host.SIZES)
def hopper_backward_tangent_queries_kernel(
    q_desc, tq_desc, do_desc, tdo_desc, k_desc, tk_desc, v_desc, tv_desc, L, MU, DELTA, TDELTA, DQ, dq_strides,
    lead1, lead2, heads, tiles, n_q, n_k, zero, scale,
    WIDTH: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, DUAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(heads)
    row0 = (tiles - 1 - tile) * ROWS  # the heaviest causal rows first
    head = head_index(z, lead1, lead2)
    key_head = grouped(head, GROUP)
    dtype: gl.constexpr = k_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, COLS, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    q = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, ROWS, D], q_desc.layout)
    tq = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, ROWS, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    tk = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    tv = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    bars = new_barriers(STAGES)
    resident_bar = new_barriers(1)
    barriers_ready()
    if DUAL:
        tdo = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, ROWS, D], q_desc.layout)
        resident = (q, tq, do, tdo)
        copy_tiles((q_desc, tq_desc, do_desc, tdo_desc), resident, resident_bar, 0, head, row0, True, ROWS * D * 8)
    else:
        resident = (q, tq, do)
        copy_tiles((q_desc, tq_desc, do_desc), resident, resident_bar, 0, head, row0, True, ROWS * D * 6)
    descs = (k_desc, tk_desc, v_desc, tv_desc)
    buffers = (k, tk, v, tv)
    count, full = key_tiles(row0, n_k, ROWS, COLS, CAUSAL)
    for i in gl.static_range(STAGES - 1):
        copy_tiles(descs, buffers, bars, i, key_head, i * COLS, i < count, COLS * D * 8)
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    first = z.to(gl.int64) * n_q
    lse = load_lse(L + first, rows, n_q)
    mu = load_row_vector(MU + first, rows, n_q)
    delta = load_row_vector(DELTA + first, rows, n_q)
    tdelta = load_row_vector(TDELTA + first, rows, n_q)
    dq = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, output))
    mbarrier.wait(resident_bar.index(0), 0)
    if D == 64:
        left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
        held = (q.index(0).reshape([ROWS, D]).load(left), do.index(0).reshape([ROWS, D]).load(left))
    else:
        held = resident
    dq = _sweep(
        resident, held, zero, descs, buffers, bars, key_head, lse, mu, delta, tdelta, row0, 0, full, count, n_k, scale,
        dq,
        ROWS, COLS, D, STAGES, CAUSAL, False, DUAL, scores, operand,
    )  # fmt: skip
    dq = _sweep(
        resident, held, zero, descs, buffers, bars, key_head, lse, mu, delta, tdelta, row0, full, count, count, n_k,
        scale, dq,
        ROWS, COLS, D, STAGES, CAUSAL, True, DUAL, scores, operand,
    )  # fmt: skip
    dq = warpgroup_mma_wait(0, deps=(dq,))
    store_matrix(dq * scale, DQ, head, dq_strides, row0, n_q, WIDTH, ROWS, D, output)


def query_gradient(
    heads: launch.Heads, of: host.Descriptors, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    lse: torch.Tensor, do: torch.Tensor, tq: torch.Tensor, tk: torch.Tensor, tv: torch.Tensor,
    mu: torch.Tensor, tdo: torch.Tensor | None,
    delta: torch.Tensor, tdelta: torch.Tensor, spec: AttentionSpec,
) -> torch.Tensor:  # fmt: skip
    """dQ̇, folded, of folded matrices and contiguous row vectors."""
    dq = launch.new_matrix(q, q.shape[-1])
    name = "backward_tangent_queries" if tdo is None else "backward_tangent_dual_queries"
    width, config = host.block(q, v), host.settings(name, q, v)
    host.run(
        hopper_backward_tangent_queries_kernel, heads, config, q, k, spec,
        (*of.matrices(config.rows, q, tq, do, tdo), *of.matrices(config.cols, k, tk, v, tv),
         lse, mu, delta, tdelta, dq, *heads.strides(dq)),
        WIDTH=q.shape[-1], width=width, DUAL=tdo is not None,
    )  # fmt: skip
    return dq
