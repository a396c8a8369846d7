"""F and J in one sweep on Hopper: 6 products a tile, and one exponential, for 2 + 5 products and two exponentials.

Weights are P = exp2(S − m) for an m of each row, which every sum over keys shares and every quotient loses: with
W = ΣP̃ and D = ΣṖ̃ of the weights rounded to bfloat16, as the products have them, and Ṗ = P∘Ṡ,

    O = ΣP̃V / W,   Ȯ = (ΣP̃V̇ + ΣṖ̃V − D·O) / W,   L = m + log2 ΣP,   L̇ = ΣṖ / ΣP.

O and Ȯ are quotients of sums over the same rounded weights, so a common offset of V cancels exactly.

m is the largest score of the first tile of keys, and stays: to follow the maximum, as an online softmax does (Dao 2023,
arXiv:2307.08691), would be to read the accumulators in every tile, for which the compiler lets no product overlap.
bfloat16 has the exponents of float32, so a weight above 1 is as accurate as one below. Where a later score is so much
larger that a row's ΣP exceeds 2⁶⁰, L is left infinite, and a second launch, whose other programs have nothing to do,
looks for that tile's maxima and does it again.

At width 128 registers leave room for 32 keys a tile. There K and K̇ of a stage are the upper and the lower rows of one
buffer: one product of Q with both reads Q once, and S and Q·K̇ᵀ are the halves of its accumulator.
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
    halves,
    head_index,
    key_tiles,
    matrix_mask,
    matrix_pointers,
    new_barriers,
    new_ones,
    partial_sums,
    product,
    program_head_and_tile,
    rows_of,
    store_in_two,
    thread_barrier,
    tile_of,
    visible,
)
from sorder.kernels.spec import AttentionSpec

_LARGE = gl.constexpr(2.0**60)


@gluon.jit
def _start(
    descs, buffers, bars, key_head, base, count, COLS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The first copies of a pass over the keys; ``base`` is the number of tiles of the passes before."""
    for i in gl.static_range(STAGES - 1):
        copy_tiles(descs, buffers, bars, (base + i) % STAGES, key_head, i * COLS, i < count, COLS * D * 8, D > 64)


@gluon.jit
def _scores(
    q, buffer, stage, row0, col0, n_k, scale,
    ROWS: gl.constexpr, COLS: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """Masked scores of one tile in base 2, for the maxima."""
    k = rows_of(tile_of(buffer, stage), False, COLS)
    s = product(q.index(0).reshape([ROWS, D]), k.permute((1, 0)), gl.zeros([ROWS, COLS], gl.float32, scores))
    s = warpgroup_mma_wait(0, deps=(s,))
    return gl.where(visible(row0, col0, n_k, ROWS, COLS, CAUSAL, scores), s * (scale * LOG2E), float("-inf"))


@gluon.jit
def _maxima(
    q, top, descs, buffers, bars, key_head, row0, count, n_k, scale,
    ROWS: gl.constexpr, COLS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    scores: gl.constexpr,
):  # fmt: skip
    """The largest score of every row, in a pass over the keys of its own."""
    for i in range(count):
        mbarrier.wait(bars.index(i % STAGES), (i // STAGES) & 1)
        s = _scores(q, buffers[0], i % STAGES, row0, i * COLS, n_k, scale, ROWS, COLS, D, CAUSAL, scores)
        top = gl.maximum(top, gl.max(s, 1))
        thread_barrier()
        ahead = i + STAGES - 1
        copy_tiles(
            descs, buffers, bars, ahead % STAGES, key_head, ahead * COLS, ahead < count, COLS * D * 8, D > 64
        )  # fmt: skip
    return top


@gluon.jit
def _sweep(
    resident, ones, zero, descs, buffers, bars, key_head, top, row0, base, start, stop, count, n_k, scale, acc, sums,
    ROWS: gl.constexpr, COLS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, scores: gl.constexpr, operand: gl.constexpr, summand: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = resident[0].dtype
    PAIRED: gl.constexpr = D > 64
    empty = gl.zeros([ROWS, COLS], gl.float32, scores)
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], scores.warps_per_cta, [16, 2 * COLS, 16])
    empty_pair = gl.zeros([ROWS, 2 * COLS], gl.float32, wide)
    o, to = acc
    total, mu, weight, drift = sums
    for i in range(start, stop):
        step = base + i
        stage = step % STAGES
        mbarrier.wait(bars.index(stage), (step // STAGES) & 1)
        q = resident[0].index(i * zero).reshape([ROWS, D])
        tq = resident[1].index(i * zero).reshape([ROWS, D])
        keys = tile_of(buffers[0], stage)
        v = tile_of(buffers[1], stage)
        tv = tile_of(buffers[2], stage)
        if PAIRED:
            s = product(q, keys.permute((1, 0)), empty_pair)
            ts = product(tq, rows_of(keys, False, COLS).permute((1, 0)), empty)
            s = warpgroup_mma_wait(1, deps=(s,))
            s, q_tk = halves(s, COLS, scores)
        else:
            s = product(q, keys.permute((1, 0)), empty)
            ts = product(tq, keys.permute((1, 0)), empty)
            ts = add_product(q, tile_of(buffers[3], stage).permute((1, 0)), ts)
            s = warpgroup_mma_wait(2, deps=(s,))
        thread_barrier()  # the tile before is done with
        ahead = i + STAGES - 1
        copy_tiles(
            descs, buffers, bars, (base + ahead) % STAGES, key_head, ahead * COLS, ahead < count, COLS * D * 8,
            D > 64,
        )  # fmt: skip
        p = gl.exp2(s * (scale * LOG2E) - top[:, None])
        if MASKED:
            p = gl.where(visible(row0, i * COLS, n_k, ROWS, COLS, CAUSAL, scores), p, 0.0)
        rounded = p.to(dtype)
        to = add_product(gl.convert_layout(rounded, operand), tv, to)
        o = add_product(gl.convert_layout(rounded, operand), v, o)
        weight = add_product(gl.convert_layout(rounded, summand), ones.permute((1, 0)), weight)
        total += partial_sums(p, ROWS, COLS)
        ts = warpgroup_mma_wait(3, deps=(ts,))
        if PAIRED:
            ts += q_tk
        pts = p * (ts * scale)
        rounded = pts.to(dtype)
        to = add_product(gl.convert_layout(rounded, operand), v, to)
        drift = add_product(gl.convert_layout(rounded, summand), ones.permute((1, 0)), drift)
        mu += partial_sums(pts, ROWS, COLS)
    return (o, to), (total, mu, weight, drift)


@gluon.jit
def _is_wanted(L, row0, n_q, ROWS: gl.constexpr, REDO: gl.constexpr, num_warps: gl.constexpr):
    """Whether a program has something to do: in the second launch, if the first found a row's ΣP too large."""
    if REDO:
        rows = row0 + gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
        wanted = gl.max(gl.load(L + rows, mask=rows < n_q, other=float("-inf")), 0) == float("inf")
    else:
        wanted = n_q > 0
    return wanted


@gluon.jit
def _program(
    q_desc, tq_desc, k_desc, tk_desc, v_desc, tv_desc, O, L, TO, LOW, TL, o_strides, to_strides, low_strides,
    lead1, lead2, n_q, n_k, zero, scale, z, row0,
    WIDTH: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, REDO: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    head = head_index(z, lead1, lead2)
    key_head = grouped(head, GROUP)
    dtype: gl.constexpr = k_desc.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, COLS, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    eights: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 8, 16])
    summand: gl.constexpr = gl.DotOperandLayout(0, eights, 2)
    q = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, ROWS, D], q_desc.layout)
    tq = gl.allocate_shared_memory(dtype, [1, 1, 1, 1, ROWS, D], q_desc.layout)
    PAIRED: gl.constexpr = D > 64
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, 2 * COLS if PAIRED else COLS, D], k_desc.layout)
    tk = k if PAIRED else gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    tv = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, COLS, D], k_desc.layout)
    ones = new_ones(dtype, COLS, num_warps)
    bars = new_barriers(STAGES)
    resident_bar = new_barriers(1)
    barriers_ready()
    copy_tiles((q_desc, tq_desc), (q, tq), resident_bar, 0, head, row0, True, ROWS * D * 4)
    descs = (k_desc, v_desc, tv_desc, tk_desc)
    buffers = (k, v, tv, tk)
    count, full = key_tiles(row0, n_k, ROWS, COLS, CAUSAL)
    base = count if REDO else 0
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    vectors = z.to(gl.int64) * n_q + rows
    _start(descs, buffers, bars, key_head, 0, count, COLS, D, STAGES)
    mbarrier.wait(resident_bar.index(0), 0)
    if REDO:
        low = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
        top = _maxima(
            q, low, descs, buffers, bars, key_head, row0, count, n_k, scale, ROWS, COLS, D, STAGES, CAUSAL, scores
        )  # fmt: skip
        _start(descs, buffers, bars, key_head, base, count, COLS, D, STAGES)
    else:
        mbarrier.wait(bars.index(0), 0)
        top = gl.max(_scores(q, k, 0, row0, 0, n_k, scale, ROWS, COLS, D, CAUSAL, scores), 1)
    nothing = partial_sums(gl.zeros([ROWS, COLS], gl.float32, scores), ROWS, COLS)
    acc = (
        warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, output)),
        warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, output)),
    )
    sums = (
        nothing,
        nothing,
        warpgroup_mma_init(gl.zeros([ROWS, 8], gl.float32, eights)),
        warpgroup_mma_init(gl.zeros([ROWS, 8], gl.float32, eights)),
    )
    acc, sums = _sweep(
        (q, tq), ones, zero, descs, buffers, bars, key_head, top, row0, base, 0, full, count, n_k, scale, acc, sums,
        ROWS, COLS, D, STAGES, CAUSAL, False, scores, operand, summand,
    )  # fmt: skip
    acc, sums = _sweep(
        (q, tq), ones, zero, descs, buffers, bars, key_head, top, row0, base, full, count, count, n_k, scale, acc, sums,
        ROWS, COLS, D, STAGES, CAUSAL, True, scores, operand, summand,
    )  # fmt: skip
    o, to, weight, drift = warpgroup_mma_wait(0, deps=(acc[0], acc[1], sums[2], sums[3]))
    total = gl.convert_layout(gl.sum(sums[0], 1), gl.SliceLayout(1, scores))
    mu = gl.convert_layout(gl.sum(sums[1], 1), gl.SliceLayout(1, scores))
    lse = (top + gl.log2(total)) * (1 / LOG2E)
    if not REDO:
        lse = gl.where(total <= _LARGE, lse, float("inf"))  # to be done again
    gl.store(L + vectors, lse, mask=rows < n_q)
    gl.store(TL + vectors, mu / total, mask=rows < n_q)
    weight = gl.sum(weight, 1) * (1 / 8)  # every column has the sum
    drift = gl.sum(drift, 1) * (1 / 8)
    inside = matrix_mask(row0, n_q, WIDTH, ROWS, D, output)
    o = o / gl.convert_layout(weight, gl.SliceLayout(1, output))[:, None]
    to = to / gl.convert_layout(weight, gl.SliceLayout(1, output))[:, None]
    to -= gl.convert_layout(drift / weight, gl.SliceLayout(1, output))[:, None] * o
    gl.store(matrix_pointers(O, head, o_strides, row0, ROWS, D, output), o.to(dtype), mask=inside)
    store_in_two(to, TO, LOW, head, to_strides, low_strides, row0, inside, ROWS, D, output)


@gluon.jit(do_not_specialize=host.SIZES)
def hopper_forward_and_tangent_kernel(
    q_desc, tq_desc, k_desc, tk_desc, v_desc, tv_desc, O, L, TO, LOW, TL,
    o_strides, to_strides, low_strides,
    lead1, lead2, heads, tiles, n_q, n_k, zero, scale,
    WIDTH: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, REDO: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(heads)
    row0 = (tiles - 1 - tile) * ROWS  # the heaviest causal rows first
    if _is_wanted(L + z.to(gl.int64) * n_q, row0, n_q, ROWS, REDO, num_warps):
        _program(
            q_desc, tq_desc, k_desc, tk_desc, v_desc, tv_desc, O, L, TO, LOW, TL, o_strides, to_strides, low_strides,
            lead1, lead2, n_q, n_k, zero, scale, z, row0,
            WIDTH, D, ROWS, COLS, STAGES, CAUSAL, GROUP, REDO, num_warps,
        )  # fmt: skip


def forward_and_tangent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    tq: torch.Tensor, tk: torch.Tensor, tv: torch.Tensor, spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(O, L, Ȯ, L̇, the part of Ȯ that its rounding loses) where :func:`dispatch.serves`, with all three tangents."""
    heads = launch.Heads(q, k)
    q, k, v, tq, tk, tv = heads.fold(q, k, v, tq, tk, tv)
    o, to, low = (launch.new_matrix(q, v.shape[-1]) for _ in range(3))
    lse, tl = (heads.new_row_vector(q) for _ in range(2))
    width, config = host.block(q, v), host.settings("forward_and_tangent", q, v)
    of = host.Descriptors(heads, width)
    arguments = (
        *of.matrices(config.rows, q, tq), *of.matrices(config.cols, k, tk, v, tv), o, lse, to, low, tl,
        *heads.strides(o, to, low),
    )  # fmt: skip
    for redo in (False, True):
        host.run(
            hopper_forward_and_tangent_kernel, heads, config, q, k, spec, arguments,
            WIDTH=v.shape[-1], width=width, REDO=redo,
        )  # fmt: skip
    return heads.unfold(o), lse, heads.unfold(to), tl, heads.unfold(low)
