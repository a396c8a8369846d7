"""J on Hopper: see ``sorder.kernels.tangent`` for the maths (5 products a tile, one sweep over key tiles).

The sums of the rounded weights are products with ones, as there.
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
    matrix_mask,
    matrix_pointers,
    new_barriers,
    new_ones,
    partial_sums,
    product,
    program_head_and_tile,
    store_in_two,
    thread_barrier,
    visible,
)
from sorder.kernels.spec import AttentionSpec


@gluon.jit
def _sweep(
    resident, ones, zero, descs, buffers, bars, key_head, lse, row0, start, stop, count, n_k, scale, acc, sums,
    ROWS: gl.constexpr, COLS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, scores: gl.constexpr, operand: gl.constexpr, summand: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = resident[0].dtype
    empty = gl.zeros([ROWS, COLS], gl.float32, scores)
    mu, weight, drift = sums
    for i in range(start, stop):
        stage = i % STAGES
        mbarrier.wait(bars.index(stage), (i // STAGES) & 1)
        q = resident[0].index(i * zero).reshape([ROWS, D])
        tq = resident[1].index(i * zero).reshape([ROWS, D])
        k = buffers[0].index(stage).reshape([COLS, D])
        tk = buffers[1].index(stage).reshape([COLS, D])
        v = buffers[2].index(stage).reshape([COLS, D])
        tv = buffers[3].index(stage).reshape([COLS, D])
        s = product(q, k.permute((1, 0)), empty)
        ts = product(tq, k.permute((1, 0)), empty)
        ts = add_product(q, tk.permute((1, 0)), ts)
        s = warpgroup_mma_wait(2, deps=(s,))
        thread_barrier()  # the tile before is done with
        ahead = i + STAGES - 1
        copy_tiles(descs, buffers, bars, ahead % STAGES, key_head, ahead * COLS, ahead < count, COLS * D * 8)
        p = gl.exp2(s * (scale * LOG2E) - lse[:, None])
        if MASKED:
            p = gl.where(visible(row0, i * COLS, n_k, ROWS, COLS, CAUSAL, scores), p, 0.0)
        rounded = p.to(dtype)
        acc = add_product(gl.convert_layout(rounded, operand), tv, acc)
        weight = add_product(gl.convert_layout(rounded, summand), ones.permute((1, 0)), weight)
        ts = warpgroup_mma_wait(2, deps=(ts,))
        pts = p * (ts * scale)
        rounded = pts.to(dtype)
        acc = add_product(gl.convert_layout(rounded, operand), v, acc)
        drift = add_product(gl.convert_layout(rounded, summand), ones.permute((1, 0)), drift)
        mu += partial_sums(pts, ROWS, COLS)
    return acc, (mu, weight, drift)


@gluon.jit(do_not_specialize=host.SIZES)
def hopper_tangent_kernel(
    q_desc, tq_desc, k_desc, tk_desc, v_desc, tv_desc, O, L, TO, LOW, TL,
    o_strides, to_strides, low_strides,
    lead1, lead2, heads, tiles, n_q, n_k, zero, scale,
    WIDTH: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(heads)
    row0 = (tiles - 1 - tile) * ROWS  # the heaviest causal rows first
    head = head_index(z, lead1, lead2)
    key_head = grouped(head, GROUP)
    dtype: gl.constexpr = k_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, COLS, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 8, 16])
    summand: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    q = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, ROWS, D], q_desc.layout)
    tq = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    tk = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    tv = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    ones = new_ones(dtype, COLS, num_warps)
    bars = new_barriers(STAGES)
    resident_bar = new_barriers(1)
    barriers_ready()
    copy_tiles((q_desc, tq_desc), (q, tq), resident_bar, 0, head, row0, True, ROWS * D * 4)
    descs = (k_desc, tk_desc, v_desc, tv_desc)
    buffers = (k, tk, v, tv)
    count, full = key_tiles(row0, n_k, ROWS, COLS, CAUSAL)
    for i in gl.static_range(STAGES - 1):
        copy_tiles(descs, buffers, bars, i, key_head, i * COLS, i < count, COLS * D * 8)
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    L += z.to(gl.int64) * n_q
    TL += z.to(gl.int64) * n_q
    lse = load_lse(L, rows, n_q)
    acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, output))
    nothing = warpgroup_mma_init(gl.zeros([ROWS, 8], gl.float32, sums_layout))
    sums = (partial_sums(gl.zeros([ROWS, COLS], gl.float32, scores), ROWS, COLS), nothing, nothing)
    mbarrier.wait(resident_bar.index(0), 0)
    acc, sums = _sweep(
        (q, tq), ones, zero, descs, buffers, bars, key_head, lse, row0, 0, full, count, n_k, scale, acc, sums,
        ROWS, COLS, D, STAGES, CAUSAL, False, scores, operand, summand,
    )  # fmt: skip
    acc, sums = _sweep(
        (q, tq), ones, zero, descs, buffers, bars, key_head, lse, row0, full, count, count, n_k, scale, acc, sums,
        ROWS, COLS, D, STAGES, CAUSAL, True, scores, operand, summand,
    )  # fmt: skip
    mu, weight, drift = sums
    acc, weight, drift = warpgroup_mma_wait(0, deps=(acc, weight, drift))
    weight = gl.sum(weight, 1) * (1 / 8)  # every column has the sum
    drift = gl.sum(drift, 1) * (1 / 8)
    mu = gl.convert_layout(gl.sum(mu, 1), gl.SliceLayout(1, scores))
    gl.store(TL + rows, mu, mask=rows < n_q)
    inside = matrix_mask(row0, n_q, WIDTH, ROWS, D, output)
    o = gl.load(matrix_pointers(O, head, o_strides, row0, ROWS, D, output), mask=inside, other=0.0)
    acc -= gl.convert_layout(drift, gl.SliceLayout(1, output))[:, None] * o.to(gl.float32)
    acc = acc / gl.convert_layout(weight, gl.SliceLayout(1, output))[:, None]
    store_in_two(acc, TO, LOW, head, to_strides, low_strides, row0, inside, ROWS, D, output)


def tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    tq: torch.Tensor, tk: torch.Tensor, tv: torch.Tensor, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Ȯ, L̇ and the part of Ȯ that its rounding loses, where :func:`dispatch.serves`, with all three tangents."""
    heads = launch.Heads(q, k)
    q, k, v, o, tq, tk, tv = heads.fold(q, k, v, o, tq, tk, tv)
    (lse,) = launch.row_vectors(lse)
    to, low = launch.new_matrix(o, o.shape[-1]), launch.new_matrix(o, o.shape[-1])
    tl = torch.empty_like(lse)
    width, config = host.block(q, v), host.settings("tangent", q, v)
    of = host.Descriptors(heads, width)
    host.run(
        hopper_tangent_kernel, heads, config, q, k, spec,
        (*of.matrices(config.rows, q, tq), *of.matrices(config.cols, k, tk, v, tv),
         o, lse, to, low, tl, *heads.strides(o, to, low)),
        WIDTH=v.shape[-1], width=width,
    )  # fmt: skip
    return heads.unfold(to), tl, heads.unfold(low)
