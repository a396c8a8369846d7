"""T in one sweep over key tiles on Hopper: see ``sorder.kernels.backward_tangent`` (10 products a tile, 12 with dȮ).

dK̇ and dV̇ accumulate in registers as in the key sweep; dQ̇ += ds·K̇ + dṡ·K is added to global memory tile by tile. Its
two products take dsᵀ and dṡᵀ from shared memory, so they start when all threads have stored these, beside the scores
of the next tile, and are complete when those are.

Per tile, in order of issue (one barrier of all threads at each bar):

    dQ̇ of the tile before, S, Ṡ | copies of the next tile, dP | P; dV̇; dṖ; ds, dK̇; dṡ, dK̇ |

All of a stage is awaited at once: then its barriers need no meeting of the threads before they are announced anew.

At width 64 a program is one warpgroup with 64 keys, and two of them share a multiprocessor; at 128 it is two with 64
keys each, dQ̇ᵀ is what they accumulate (a product has at least 64 rows), and each has half of it. There shared memory
is the limit: Q and Q̇ (dO and dȮ) of a stage are the upper and the lower rows of one buffer, one product with both reads
K (V) once, and S and K·Q̇ᵀ are the halves of its accumulator. Ṡ's other product has an accumulator of its own: where one
adds to half of another's, the compiler serialises all products.

Masks are a sixth of the instructions of a tile. At width 64 they have a loop of their own for the tiles that need them,
which come last: where that loop is the first, the compiler spills in the other. It spills, too, where a program serves
several query heads; there, and at 128, one loop masks every tile.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sorder.kernels import launch
from sorder.kernels.hopper import host
from sorder.kernels.hopper.fragments import add_fragments, new_sums, rows_of_fragments
from sorder.kernels.hopper.tiles import (
    LOG2E,
    add_product,
    async_load,
    barriers_ready,
    copy_tiles,
    halves,
    head_index,
    new_barriers,
    product,
    program_head_and_tile,
    rows_of,
    store_matrix,
    thread_barrier,
    tile_of,
)
from sorder.kernels.spec import AttentionSpec


@gluon.jit
def _expect_rows(
    bars, vector_bar, step, total, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Announces the ``step``-th tile of rows, before its copies start.

    One barrier a matrix: the compiler makes all threads meet between two uses of the same one, also between copies.
    """
    for j in gl.static_range(len(bars)):
        mbarrier.expect(bars[j].index(step % STAGES), ROWS * D * 2, pred=step < total)
    mbarrier.expect(vector_bar.index(step % STAGES), ROWS * 16, pred=step < total)


@gluon.jit
def turn(i, steps, masked, WHOLE: gl.constexpr):
    """The tile of the ``i``-th step: the ``masked`` first ones come last, unless one loop takes the WHOLE."""
    if not WHOLE:
        i = gl.where(i + masked < steps, i + masked, i + masked - steps)
    return i


@gluon.jit
def _copy_rows(
    descs, buffers, bars, vector_desc, vectors, vector_bar, step, at, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the ``step``-th tile of rows: the tiles from ``first`` on, head after head of the group.

    The tangents come last: the compiler makes all threads meet between two copies to one buffer.
    """
    head, z, first, steps, row_tiles, masked = at
    stage = step % STAGES
    member = step // steps if GROUP > 1 else 0
    tile = first + turn(step - member * steps, steps, masked, WHOLE)
    there = step < GROUP * steps
    place = [head[0], head[1], head[2] * GROUP + member, tile * ROWS, 0]
    vector = (z * GROUP + member) * row_tiles + tile
    for j in gl.static_range(0, len(descs), 2):
        async_load(
            descs[j], place, bars[j].index(stage), rows_of(buffers[j].index(stage), j % 2 == 1, ROWS), pred=there
        )
    async_load(vector_desc, [vector, 0], vector_bar.index(stage), vectors.index(stage), pred=there)
    for j in gl.static_range(1, len(descs), 2):
        async_load(
            descs[j], place, bars[j].index(stage), rows_of(buffers[j].index(stage), j % 2 == 1, ROWS), pred=there
        )


@gluon.jit
def row_vector(vectors, stage, j: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    return vectors.index(stage).slice(j * ROWS, ROWS, dim=1).load(layout)


@gluon.jit
def _weights(buffer, stage, COLS: gl.constexpr, ROWS: gl.constexpr):
    return buffer.index(stage).reshape([COLS, ROWS])


@gluon.jit
def _query_products(
    ds, tds, k, tk, ROWS: gl.constexpr, D: gl.constexpr, sums: gl.constexpr
):  # fmt: skip
    """dQ̇ of one tile, without the scale; its transpose where a tile has fewer than 64 rows."""
    if ROWS < 64:
        dq = product(tk.permute((1, 0)), ds, gl.zeros([D, ROWS], gl.float32, sums))
        dq = add_product(k.permute((1, 0)), tds, dq)
    else:
        dq = product(ds.permute((1, 0)), tk, gl.zeros([ROWS, D], gl.float32, sums))
        dq = add_product(tds.permute((1, 0)), k, dq)
    return dq


@gluon.jit
def _add_queries(
    DQ, dq, step, at, ROWS: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, WHOLE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Adds dQ̇ of the tile before the ``step``-th (before the first there is none, and zeros are added)."""
    _, z, first, steps, row_tiles, masked = at
    step = gl.maximum(step - 1, 0)
    member = step // steps if GROUP > 1 else 0
    tile = (z * GROUP + member).to(gl.int64) * row_tiles + first + turn(step - member * steps, steps, masked, WHOLE)
    add_fragments(DQ + tile * (ROWS * D), dq, ROWS if ROWS < 64 else D, num_warps)


@gluon.jit
def _sweep(
    resident, zero, descs, buffers, bars, vector_desc, vectors, vector_bar, ds_buffer, tds_buffer, DQ, at, member,
    start, stop, col0, n_k, scale, dk, dv,
    ROWS: gl.constexpr, COLS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    CAUSAL: gl.constexpr, DUAL: gl.constexpr, LENT: gl.constexpr, PAIRED: gl.constexpr,
    WHOLE: gl.constexpr, MASKED: gl.constexpr, scores: gl.constexpr, operand: gl.constexpr, sums: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = resident[0].dtype
    _, _, first, steps, _, masked = at
    empty = gl.zeros([COLS, ROWS], gl.float32, scores)
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 2 * ROWS, 16])
    empty_pair = gl.zeros([COLS, 2 * ROWS], gl.float32, wide)
    # The first row that sees a key; none sees one beyond the end, where weights of scores 0 may be infinite.
    cols = col0 + gl.arange(0, COLS, layout=gl.SliceLayout(1, scores))
    since = gl.where(cols < n_k, cols if CAUSAL else 0, 2147483647)
    for i in range(start, stop):
        step = member * steps + i
        stage = step % STAGES
        phase = (step // STAGES) & 1
        k = resident[0].index(i * zero).reshape([COLS, D])
        tk = resident[1].index(i * zero).reshape([COLS, D])
        v = resident[2].index(i * zero).reshape([COLS, D])
        tv = resident[3].index(i * zero).reshape([COLS, D])
        q = rows_of(tile_of(buffers[0], stage), False, ROWS)
        tq = rows_of(tile_of(buffers[1], stage), True, ROWS)
        do = rows_of(tile_of(buffers[2], stage), False, ROWS)
        tds_before = _weights(tds_buffer, (step + STAGES - 1) % STAGES if LENT else i * zero, COLS, ROWS)
        dq = _query_products(_weights(ds_buffer, i * zero, COLS, ROWS), tds_before, k, tk, ROWS, D, sums)
        for j in gl.static_range(len(bars)):
            mbarrier.wait(bars[j].index(stage), phase)
        mbarrier.wait(vector_bar.index(stage), phase)
        if PAIRED:
            s = product(k, tile_of(buffers[0], stage).permute((1, 0)), empty_pair)
            ts = product(tk, q.permute((1, 0)), empty)
        else:
            s = product(k, q.permute((1, 0)), empty)
            ts = product(k, tq.permute((1, 0)), empty)
            ts = add_product(tk, q.permute((1, 0)), ts)
        dq = warpgroup_mma_wait(2 if PAIRED else 3, deps=(dq,))
        _add_queries(DQ, dq, step, at, ROWS, D, GROUP, WHOLE, num_warps)
        thread_barrier()  # the tile before is done with
        _copy_rows(
            descs, buffers, bars, vector_desc, vectors, vector_bar, step + STAGES - 1, at, ROWS, STAGES, GROUP, WHOLE
        )  # fmt: skip
        if PAIRED:
            thread_barrier()  # otherwise the compiler puts one before the first product with Q̇
        if PAIRED and DUAL:
            dp = product(v, tile_of(buffers[2], stage).permute((1, 0)), empty_pair)
        else:
            dp = product(v, do.permute((1, 0)), empty)
        s = warpgroup_mma_wait(2 if PAIRED else 3, deps=(s,))
        if PAIRED:
            s, k_tq = halves(s, ROWS, scores)
        p = gl.exp2(s * (scale * LOG2E) - row_vector(vectors, stage, 0, ROWS, scores))
        if MASKED:
            rows = (first + turn(i, steps, masked, WHOLE)) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, scores))
            p = gl.where(rows[None, :] >= since[:, None], p, 0.0)
        ts = warpgroup_mma_wait(1, deps=(ts,))
        if PAIRED:
            ts += k_tq
        tp = p * (ts * scale - row_vector(vectors, stage, 1, ROWS, scores))
        dv = add_product(gl.convert_layout(tp.to(dtype), operand), do, dv)
        tdp = product(tv, do.permute((1, 0)), empty)
        if DUAL:
            tdo = rows_of(tile_of(buffers[3], stage), True, ROWS)
            dv = add_product(gl.convert_layout(p.to(dtype), operand), tdo, dv)
            if not PAIRED:
                tdp = add_product(v, tdo.permute((1, 0)), tdp)
        dp = warpgroup_mma_wait((2 if PAIRED else 3) if DUAL else 1, deps=(dp,))
        if PAIRED and DUAL:
            dp, v_tdo = halves(dp, ROWS, scores)
        delta = row_vector(vectors, stage, 2, ROWS, scores)
        tdelta = row_vector(vectors, stage, 3, ROWS, scores)
        centred = dp - delta
        ds = (p * centred).to(dtype)
        tp = tp * centred
        dk = add_product(gl.convert_layout(ds, operand), tq, dk)
        _weights(ds_buffer, i * zero, COLS, ROWS).store(ds)
        tdp = warpgroup_mma_wait(1, deps=(tdp,))
        if PAIRED and DUAL:
            tdp += v_tdo
        tds = (tp + p * (tdp - tdelta)).to(dtype)
        dk = add_product(gl.convert_layout(tds, operand), q, dk)
        _weights(tds_buffer, stage if LENT else i * zero, COLS, ROWS).store(tds)
        _expect_rows(bars, vector_bar, step + STAGES, GROUP * steps, ROWS, D, STAGES)
        fence_async_shared()
        thread_barrier()
    return dk, dv


@gluon.jit(do_not_specialize=host.SIZES)
def hopper_backward_tangent_kernel(
    q_desc, tq_desc, do_desc, tdo_desc, k_desc, tk_desc, v_desc, tv_desc, vector_desc, DQ, DK, DV, dk_strides,
    dv_strides, row_tiles, lead1, lead2, heads, tiles, n_q, n_k, zero, scale,
    WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr, DUAL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(heads)
    col0 = tile * COLS  # the heaviest causal keys first
    MEMBERS: gl.constexpr = GROUP // SPLITS  # query heads of a program; a split counts as a key head of its own
    head = head_index(z, lead1, lead2)
    PAIRED: gl.constexpr = D > 64
    dtype: gl.constexpr = k_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS if ROWS < 64 else D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    k = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    tk = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    tv = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, 2 * ROWS if PAIRED else ROWS, D], q_desc.layout)
    tq = q if PAIRED else gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, ROWS, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, 2 * ROWS if PAIRED and DUAL else ROWS, D], q_desc.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 4 * ROWS], vector_desc.layout)
    weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLS, ROWS], dtype)
    ds_buffer = gl.allocate_shared_memory(dtype, [1, COLS, ROWS], weights)
    nothing = gl.zeros([COLS, ROWS], dtype, scores)
    _weights(ds_buffer, 0, COLS, ROWS).store(nothing)
    # dȮ's place is free when dṡ is there: a buffer less, without which two programs would not fit.
    LENT: gl.constexpr = DUAL and COLS == D and ROWS == D
    if DUAL:
        tdo = do if PAIRED else gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, ROWS, D], q_desc.layout)
        buffers = (q, tq, do, tdo)
        descs = (q_desc, tq_desc, do_desc, tdo_desc)
        bars = (new_barriers(STAGES), new_barriers(STAGES), new_barriers(STAGES), new_barriers(STAGES))
    else:
        buffers = (q, tq, do)
        descs = (q_desc, tq_desc, do_desc)
        bars = (new_barriers(STAGES), new_barriers(STAGES), new_barriers(STAGES))
    if LENT:
        tds_buffer = tdo
    else:
        tds_buffer = gl.allocate_shared_memory(dtype, [1, COLS, ROWS], weights)
    _weights(tds_buffer, STAGES - 1 if LENT else 0, COLS, ROWS).store(nothing)
    vector_bar = new_barriers(STAGES)
    resident_bar = new_barriers(1)
    barriers_ready()
    resident = (k, tk, v, tv)
    key_head = (head[0], head[1], head[2] // SPLITS)
    copy_tiles((k_desc, tk_desc, v_desc, tv_desc), resident, resident_bar, 0, key_head, col0, True, COLS * D * 8)
    first = col0 // ROWS if CAUSAL else 0
    steps = gl.maximum(row_tiles - first, 0)
    DIAGONAL: gl.constexpr = (COLS + ROWS - 1) // ROWS if CAUSAL else 0
    WHOLE: gl.constexpr = D > 64 or MEMBERS > 1
    masked = gl.minimum(steps, DIAGONAL) if col0 + COLS <= n_k else steps
    at = (head, z, first, steps, row_tiles, masked)
    for i in gl.static_range(STAGES):
        _expect_rows(bars, vector_bar, i, MEMBERS * steps, ROWS, D, STAGES)
    thread_barrier()
    for i in gl.static_range(STAGES - 1):
        _copy_rows(descs, buffers, bars, vector_desc, vectors, vector_bar, i, at, ROWS, STAGES, MEMBERS, WHOLE)
    dk = warpgroup_mma_init(gl.zeros([COLS, D], gl.float32, output))
    dv = warpgroup_mma_init(gl.zeros([COLS, D], gl.float32, output))
    mbarrier.wait(resident_bar.index(0), 0)
    thread_barrier()  # otherwise the compiler puts one at the head of the loop
    for member in range(MEMBERS):
        if not WHOLE:
            dk, dv = _sweep(
                resident, zero, descs, buffers, bars, vector_desc, vectors, vector_bar, ds_buffer, tds_buffer, DQ, at,
                member, 0, steps - masked, col0, n_k, scale, dk, dv,
                ROWS, COLS, D, STAGES, MEMBERS, CAUSAL, DUAL, LENT, PAIRED, WHOLE, False, scores, operand, sums,
                num_warps,
            )  # fmt: skip
        dk, dv = _sweep(
            resident, zero, descs, buffers, bars, vector_desc, vectors, vector_bar, ds_buffer, tds_buffer, DQ, at,
            member, 0 if WHOLE else steps - masked, steps, col0, n_k, scale, dk, dv,
            ROWS, COLS, D, STAGES, MEMBERS, CAUSAL, DUAL, LENT, PAIRED, WHOLE, True, scores, operand, sums, num_warps,
        )  # fmt: skip
    total = MEMBERS * steps
    tds = _weights(tds_buffer, (total + STAGES - 1) % STAGES if LENT else 0, COLS, ROWS)
    dq = _query_products(
        _weights(ds_buffer, 0, COLS, ROWS), tds, k.index(0).reshape([COLS, D]), tk.index(0).reshape([COLS, D]),
        ROWS, D, sums,
    )  # fmt: skip
    dk, dv, dq = warpgroup_mma_wait(0, deps=(dk, dv, dq))
    if steps > 0:
        _add_queries(DQ, dq, total, at, ROWS, D, MEMBERS, WHOLE, num_warps)
    store_matrix(dk * scale, DK, head, dk_strides, col0, n_k, WIDTH, COLS, D, output)
    store_matrix(dv, DV, head, dv_strides, col0, n_k, WIDTH_V, COLS, D, output)


def gradients(
    heads: launch.Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor,
    tq: torch.Tensor, tk: torch.Tensor, tv: torch.Tensor, tdo: torch.Tensor | None, vectors: torch.Tensor,
    config: launch.Config, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ̇ (folded), dK̇ and dV̇ of folded matrices.

    Args:
        vectors: from :func:`row_scalars.packed_row_scalars`, in tiles of ``config.rows`` rows.
        config: an entry of :mod:`host` of the name "backward_tangent" or "backward_tangent_dual".
    """
    width = host.block(q, v)
    of = host.Descriptors(heads, width)
    splits = heads.splits(q, k.shape[-2], config.cols, occupancy=4)
    sums = new_sums(heads, q, config.rows, width)
    dk, dv = heads.new_key_matrix(k, splits), heads.new_key_matrix(v, splits)
    host.run(
        hopper_backward_tangent_kernel, heads, config, q, k, spec,
        (
            *of.matrices(config.rows, q, tq, do, tdo), *of.matrices(config.cols, k, tk, v, tv),
            of.pieces(vectors), sums, dk, dv, *heads.strides(dk, dv), launch.cdiv(q.shape[-2], config.rows),
        ),
        WIDTH=k.shape[-1], WIDTH_V=v.shape[-1], width=width, DUAL=tdo is not None, over_keys=True, splits=splits,
    )  # fmt: skip
    (dq,) = rows_of_fragments(heads, sums, q, spec.scale)
    return dq, heads.merged(dk, k.dtype, splits), heads.merged(dv, v.dtype, splits)  # type: ignore[return-value]
