"""B and T in one sweep over key tiles on Hopper, at width 64: 13 products a tile, 15 with dȮ, for 5 + 10 (12) of two.

    S  = K·Qᵀ           Ṡ  = K·Q̇ᵀ + K̇·Qᵀ        P = exp2(c·log₂e·S − L)        Ṗ = P∘(c·Ṡ − L̇)
    dP = V·dOᵀ          dṖ = V̇·dOᵀ + V·dȮᵀ      dS = P∘(dP − D)                dṠ = Ṗ∘(dP − D) + P∘(dṖ − Ḋ)
    dV += P·dO          dK += dS·Q              dQᵀ += Kᵀ·dS
    dV̇ += Ṗ·dO + P·dȮ   dK̇ += dS·Q̇ + dṠ·Q       dQ̇ᵀ += K̇ᵀ·dS + Kᵀ·dṠ

and c times dQ, dK, dQ̇ and dK̇ at the end, c the scale; the scalars of a query row (L in base 2, L̇, D, Ḋ) are those of
``sorder.kernels.row_scalars``. Tiles have the keys along their rows, as in :mod:`backward_tangent_one_sweep`, whose
order of tiles this is.

A program is one warpgroup with 64 keys, and two of them share a multiprocessor. Its four accumulators leave registers
for tiles of 32 queries. Q and Q̇ (dO and dȮ, dSᵀ and dṠᵀ) are the upper and the lower rows of one buffer: a product of
64 columns with both reads K (V, Kᵀ) once, and what it gives lies in registers as two halves. The other product of a sum
has an accumulator of its own: where one adds to half of another's, the compiler serialises all products. Q and Q̇ (dO
and dȮ) are stacked in global memory, so that one copy brings both: copies are a tenth of the instructions of a tile.

Per tile, in order of issue (a barrier of all threads at each bar):

    dQ and dQ̇ of the tile before; S, K·Q̇ᵀ; K̇·Qᵀ | copies of the next tile | dP, V·dȮᵀ; P, dV; Ṗ, dV̇; V̇·dOᵀ;
    dS, dK, dK̇; dṠ, dK̇ |

With dȮ, V̇·dOᵀ waits for dP: registers are scarce. Tiles that need masks have a loop of their own, the last. All
products are complete between the two: where a loop hands on products in flight, the compiler finds too few registers
for either. So it does for two loops where a program serves several query heads; there one loop masks every tile.
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
from sorder.kernels.hopper.backward_tangent_one_sweep import row_vector, turn
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
    side_by_side,
    store_matrix,
    thread_barrier,
)
from sorder.kernels.row_scalars import packed_row_scalars
from sorder.kernels.spec import AttentionSpec


@gluon.jit
def _expect_rows(
    bars, step, total, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DUAL: gl.constexpr
):  # fmt: skip
    """Announces the bytes of the ``step``-th tile of rows, before its copies start; one barrier a copy, as in T."""
    mbarrier.expect(bars[0].index(step % STAGES), ROWS * D * 4, pred=step < total)
    mbarrier.expect(bars[1].index(step % STAGES), ROWS * D * (4 if DUAL else 2), pred=step < total)
    mbarrier.expect(bars[2].index(step % STAGES), ROWS * 16, pred=step < total)


@gluon.jit
def _copy_rows(
    descs, buffers, bars, step, at, ROWS: gl.constexpr, STAGES: gl.constexpr, MEMBERS: gl.constexpr, DUAL: gl.constexpr
):  # fmt: skip
    """Starts the copies of the ``step``-th tile of rows: the tiles from ``first`` on, head after head of the group.

    ``at``: key head, its number, first tile of rows, tiles, those of the whole matrix, those that need masks.
    """
    head, z, first, steps, row_tiles, masked = at
    stage = step % STAGES
    member = step // steps if MEMBERS > 1 else 0
    tile = first + turn(step - member * steps, steps, masked, False)
    there = step < MEMBERS * steps
    query = z * MEMBERS + member
    async_load(descs[0], [0, query, tile * ROWS, 0], bars[0].index(stage), buffers[0].index(stage), pred=there)
    if DUAL:
        async_load(descs[1], [0, query, tile * ROWS, 0], bars[1].index(stage), buffers[1].index(stage), pred=there)
    else:
        place = [head[0], head[1], head[2] * MEMBERS + member, tile * ROWS, 0]
        async_load(descs[1], place, bars[1].index(stage), buffers[1].index(stage), pred=there)
    async_load(descs[2], [query * row_tiles + tile, 0], bars[2].index(stage), buffers[2].index(stage), pred=there)


@gluon.jit
def _rows(buffer, stage, HEIGHT: gl.constexpr, D: gl.constexpr):
    """A stage of a buffer; of two matrices, the tile of the first above that of the second."""
    return buffer.index(stage).reshape([HEIGHT, D])


@gluon.jit
def _query_products(weights, i, k, tk, ROWS: gl.constexpr, D: gl.constexpr, sums: gl.constexpr, wide: gl.constexpr):
    """[dQᵀ, Kᵀ·dṠ] and K̇ᵀ·dS of one tile."""
    pair = weights.index(i).permute((1, 0))
    ds = weights.index(i).slice(0, ROWS, dim=0).permute((1, 0))
    dq = product(k.permute((1, 0)), pair, gl.zeros([D, 2 * ROWS], gl.float32, wide))
    tdq = product(tk.permute((1, 0)), ds, gl.zeros([D, ROWS], gl.float32, sums))
    return dq, tdq


@gluon.jit
def _add_queries(
    SUMS, dq, tdq, step, at, ROWS: gl.constexpr, D: gl.constexpr, MEMBERS: gl.constexpr, sums: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Adds dQ and dQ̇ of the tile before the ``step``-th (before the first there is none, and zeros are added)."""
    _, z, first, steps, row_tiles, masked = at
    step = gl.maximum(step - 1, 0)
    member = step // steps if MEMBERS > 1 else 0
    tile = (z * MEMBERS + member).to(gl.int64) * row_tiles + first + turn(step - member * steps, steps, masked, False)
    dq, k_tds = halves(dq, ROWS, sums)
    place = SUMS + tile * (2 * ROWS * D)
    add_fragments(place, dq, ROWS, num_warps)
    add_fragments(place + ROWS * D, tdq + k_tds, ROWS, num_warps)


@gluon.jit
def _sweep(
    resident, zero, descs, buffers, bars, weights, SUMS, at, member, start, stop, col0, n_k, scale, acc,
    MASKED: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    MEMBERS: gl.constexpr, CAUSAL: gl.constexpr, DUAL: gl.constexpr, scores: gl.constexpr, operand: gl.constexpr,
    wide: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Steps ``start`` to ``stop`` over the rows of one query head; ``zero`` is explained in :mod:`tiles`."""
    dtype: gl.constexpr = resident[0].dtype
    _, _, first, steps, _, masked = at
    dk, tdk, dv, tdv = acc
    empty = gl.zeros([COLS, ROWS], gl.float32, scores)
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
        q_tq = _rows(buffers[0], stage, 2 * ROWS, D)
        do_tdo = _rows(buffers[1], stage, 2 * ROWS if DUAL else ROWS, D)
        q, tq, do = rows_of(q_tq, False, ROWS), rows_of(q_tq, True, ROWS), rows_of(do_tdo, False, ROWS)
        dq, tdq = _query_products(weights, i * zero, k, tk, ROWS, D, scores, wide)
        for j in gl.static_range(len(bars)):
            mbarrier.wait(bars[j].index(stage), phase)
        s = product(k, q_tq.permute((1, 0)), empty_pair)
        # Row scalars are read before the products that they meet are awaited: shared memory has its latency, too.
        lse = row_vector(buffers[2], stage, 0, ROWS, scores)
        tlse = row_vector(buffers[2], stage, 1, ROWS, scores)
        dq, tdq = warpgroup_mma_wait(1, deps=(dq, tdq))
        _add_queries(SUMS, dq, tdq, step, at, ROWS, D, MEMBERS, scores, num_warps)
        ts = product(tk, q.permute((1, 0)), empty)
        thread_barrier()  # the tile before is done with
        _copy_rows(descs, buffers, bars, step + STAGES - 1, at, ROWS, STAGES, MEMBERS, DUAL)
        _expect_rows(bars, step + STAGES, MEMBERS * steps, ROWS, D, STAGES, DUAL)
        thread_barrier()  # otherwise the compiler puts one before the first product with Q̇
        dp = product(v, do_tdo.permute((1, 0)), empty_pair if DUAL else empty)
        s = warpgroup_mma_wait(2, deps=(s,))
        s, k_tq = halves(s, ROWS, scores)
        p = gl.exp2(s * (scale * LOG2E) - lse)
        if MASKED:
            rows = (first + turn(i, steps, masked, False)) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, scores))
            p = gl.where(rows[None, :] >= since[:, None], p, 0.0)
        weight = gl.convert_layout(p.to(dtype), operand)
        dv = add_product(weight, do, dv)
        ts = warpgroup_mma_wait(2, deps=(ts,))
        tp = p * ((ts + k_tq) * scale - tlse)
        tdv = add_product(gl.convert_layout(tp.to(dtype), operand), do, tdv)
        delta = row_vector(buffers[2], stage, 2, ROWS, scores)
        if DUAL:
            tdv = add_product(weight, rows_of(do_tdo, True, ROWS), tdv)
            dp = warpgroup_mma_wait(3, deps=(dp,))
            dp, v_tdo = halves(dp, ROWS, scores)
            tdp = product(tv, do.permute((1, 0)), empty)  # only now: three accumulators in flight are too many
        else:
            tdp = product(tv, do.permute((1, 0)), empty)
            dp = warpgroup_mma_wait(3, deps=(dp,))
        centred = dp - delta
        ds = (p * centred).to(dtype)
        tp = tp * centred
        dk = add_product(gl.convert_layout(ds, operand), q, dk)
        tdk = add_product(gl.convert_layout(ds, operand), tq, tdk)
        tdelta = row_vector(buffers[2], stage, 3, ROWS, scores)
        tdp = warpgroup_mma_wait(2, deps=(tdp,))
        if DUAL:
            tdp += v_tdo
        tds = (tp + p * (tdp - tdelta)).to(dtype)
        tdk = add_product(gl.convert_layout(tds, operand), q, tdk)
        weights.index(i * zero).permute((1, 0)).store(side_by_side(ds, tds, wide))
        fence_async_shared()
        thread_barrier()
    dk, tdk, dv, tdv = warpgroup_mma_wait(0, deps=(dk, tdk, dv, tdv))
    return warpgroup_mma_init(dk), warpgroup_mma_init(tdk), warpgroup_mma_init(dv), warpgroup_mma_init(tdv)


@gluon.jit(do_not_specialize=host.SIZES)
def hopper_backward_and_tangent_kernel(
    q_desc, do_desc, k_desc, tk_desc, v_desc, tv_desc, vector_desc, SUMS, DK, TDK, DV, TDV,
    dk_strides, tdk_strides, dv_strides, tdv_strides, row_tiles, lead1, lead2, heads, tiles, n_q, n_k, zero, scale,
    WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr, DUAL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(heads)
    col0 = tile * COLS  # the heaviest causal keys first
    MEMBERS: gl.constexpr = GROUP // SPLITS  # query heads of a program; a split counts as a key head of its own
    head = head_index(z, lead1, lead2)
    dtype: gl.constexpr = k_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 2 * ROWS, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    k = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    tk = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    tv = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, COLS, D], k_desc.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 2, 1, ROWS, D], q_desc.layout)
    if DUAL:
        do = gl.allocate_shared_memory(dtype, [STAGES, 2, 1, ROWS, D], do_desc.layout)
    else:
        do = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, ROWS, D], do_desc.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 4 * ROWS], vector_desc.layout)
    # dSᵀ above dṠᵀ, so that dS alone is whole rows of the buffer, as a product reads it.
    weights = gl.allocate_shared_memory(
        dtype, [1, 2 * ROWS, COLS], gl.NVMMASharedLayout.get_default_for([2 * ROWS, COLS], dtype)
    )
    nothing = gl.zeros([COLS, ROWS], dtype, scores)
    for j in gl.static_range(2):
        weights.index(0).slice(j * ROWS, ROWS, dim=0).permute((1, 0)).store(nothing)
    buffers = (q, do, vectors)
    descs = (q_desc, do_desc, vector_desc)
    bars = (new_barriers(STAGES), new_barriers(STAGES), new_barriers(STAGES))
    resident_bar = new_barriers(1)
    barriers_ready()
    resident = (k, tk, v, tv)
    key_head = (head[0], head[1], head[2] // SPLITS)
    copy_tiles((k_desc, tk_desc, v_desc, tv_desc), resident, resident_bar, 0, key_head, col0, True, COLS * D * 8)
    first = col0 // ROWS if CAUSAL else 0
    steps = gl.maximum(row_tiles - first, 0)
    DIAGONAL: gl.constexpr = (COLS + ROWS - 1) // ROWS if CAUSAL else 0
    masked = gl.minimum(steps, DIAGONAL) if MEMBERS == 1 and col0 + COLS <= n_k else steps
    at = (head, z, first, steps, row_tiles, masked)
    for i in gl.static_range(STAGES):
        _expect_rows(bars, i, MEMBERS * steps, ROWS, D, STAGES, DUAL)
    thread_barrier()
    for i in gl.static_range(STAGES - 1):
        _copy_rows(descs, buffers, bars, i, at, ROWS, STAGES, MEMBERS, DUAL)
    nil = gl.zeros([COLS, D], gl.float32, output)
    acc = (warpgroup_mma_init(nil), warpgroup_mma_init(nil), warpgroup_mma_init(nil), warpgroup_mma_init(nil))
    mbarrier.wait(resident_bar.index(0), 0)
    thread_barrier()  # otherwise the compiler puts one at the head of the loop
    for member in range(MEMBERS):
        if MEMBERS == 1:
            acc = _sweep(
                resident, zero, descs, buffers, bars, weights, SUMS, at, member, 0, steps - masked, col0, n_k, scale,
                acc, False, ROWS, COLS, D, STAGES, MEMBERS, CAUSAL, DUAL, scores, operand, wide, num_warps,
            )  # fmt: skip
        acc = _sweep(
            resident, zero, descs, buffers, bars, weights, SUMS, at, member, steps - masked, steps, col0, n_k, scale,
            acc, True, ROWS, COLS, D, STAGES, MEMBERS, CAUSAL, DUAL, scores, operand, wide, num_warps,
        )  # fmt: skip
    dq, tdq = _query_products(
        weights, 0, k.index(0).reshape([COLS, D]), tk.index(0).reshape([COLS, D]), ROWS, D, scores, wide
    )
    dk, tdk, dv, tdv, dq, tdq = warpgroup_mma_wait(0, deps=(acc[0], acc[1], acc[2], acc[3], dq, tdq))
    if steps > 0:
        _add_queries(SUMS, dq, tdq, MEMBERS * steps, at, ROWS, D, MEMBERS, scores, num_warps)
    store_matrix(dk * scale, DK, head, dk_strides, col0, n_k, WIDTH, COLS, D, output)
    store_matrix(tdk * scale, TDK, head, tdk_strides, col0, n_k, WIDTH, COLS, D, output)
    store_matrix(dv, DV, head, dv_strides, col0, n_k, WIDTH_V, COLS, D, output)
    store_matrix(tdv, TDV, head, tdv_strides, col0, n_k, WIDTH_V, COLS, D, output)


def backward_and_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    tq: torch.Tensor, tk: torch.Tensor, tv: torch.Tensor, to: torch.Tensor, tl_: torch.Tensor,
    to_low: torch.Tensor | None, tdo: torch.Tensor | None, spec: AttentionSpec,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(dQ, dK, dV, dQ̇, dK̇, dV̇) of a problem of width 64 that :func:`dispatch.serves`, with all three tangents."""
    heads = launch.Heads(q, k)
    q, k, v, o, do, tq, tk, tv, to, to_low, tdo = heads.fold(q, k, v, o, do, tq, tk, tv, to, to_low, tdo)
    lse, tl_ = launch.row_vectors(lse, tl_)
    config = host.settings("backward_and_tangent", q, v)
    vectors = packed_row_scalars(heads, o, do, None, lse, tl_, to, to_low, tdo, None, config.rows)
    width = host.block(q, v)
    of = host.Descriptors(heads, width)
    splits = heads.splits(q, k.shape[-2], config.cols, occupancy=4)
    sums = new_sums(heads, q, config.rows, width, count=2)
    dk, tdk, dv, tdv = (heads.new_key_matrix(x, splits) for x in (k, tk, v, tv))
    host.run(
        hopper_backward_and_tangent_kernel, heads, config, q, k, spec,
        (
            of.pair(config.rows, q, tq),
            of.matrices(config.rows, do)[0] if tdo is None else of.pair(config.rows, do, tdo),
            *of.matrices(config.cols, k, tk, v, tv), of.pieces(vectors), sums, dk, tdk, dv, tdv,
            *heads.strides(dk, tdk, dv, tdv), launch.cdiv(q.shape[-2], config.rows),
        ),
        WIDTH=k.shape[-1], WIDTH_V=v.shape[-1], width=width, DUAL=tdo is not None, over_keys=True, splits=splits,
    )  # fmt: skip
    dq, tdq = map(heads.unfold, rows_of_fragments(heads, sums, q, spec.scale))
    dk, tdk, dv, tdv = (heads.merged(x, k.dtype, splits) for x in (dk, tdk, dv, tdv))
    return dq, dk, dv, tdq, tdk, tdv
