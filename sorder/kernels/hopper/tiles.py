"""Device-side pieces of the Hopper kernels: heads, bulk copies of tiles, asynchronous products.

Every program is one or two warpgroups that own 64 rows of a score tile each. Operands arrive by bulk copies (TMA), one
barrier a stage, and rest in shared memory; scores and accumulators rest in registers. The products of the next tile
are issued while the last ones still accumulate: waiting for a tile's scores implies that everything issued before is
complete, so that is where the stage of the tile before is free again. Tiles beyond the end of a matrix are zeros.

Resident operands are indexed by ``iteration · zero`` with an argument ``zero`` that is 0 at run time: otherwise the
compiler keeps a 64-bit address of each of their slices in registers throughout the loop and spills accumulators.
(Masked and unmasked tiles have a loop each: one loop that branches was miscompiled by Triton 3.6.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

LOG2E = gl.constexpr(1.4426950408889634)
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed after Triton 3.6
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed after Triton 3.7


@gluon.jit
def program_head_and_tile(heads):
    """Flat program index to (head, tile): all heads' first tiles come first, so the last programs are the lightest.

    (To take the heads in groups whose operands fit in the L2 cache gains less in the cache than it loses at the end.)
    """
    pid = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    return pid % heads, pid // heads


@gluon.jit
def head_index(z, lead1, lead2):
    """Indices along the three leading dimensions."""
    return z // (lead1 * lead2), (z // lead2) % lead1, z % lead2


@gluon.jit
def grouped(head, GROUP: gl.constexpr):
    """Index of the key head that serves a query head."""
    return head[0], head[1], head[2] // GROUP


@gluon.jit
def product(a, b, like):
    """``a·b`` in a new accumulator of the shape of ``like``, asynchronous."""
    return warpgroup_mma(a, b, like, use_acc=False, is_async=True)


@gluon.jit
def add_product(a, b, acc):
    """``acc + a·b``, asynchronous."""
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def new_barriers(COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def barriers_ready():
    fence_async_shared()
    thread_barrier()


@gluon.jit
def copy_tiles(
    descs, buffers, bars, stage, head, first, pred, BYTES: gl.constexpr, PAIRED: gl.constexpr = False
):  # fmt: skip
    """Starts the copies of rows ``first …`` of one head of every matrix into ``stage``; BYTES in all on its barrier.

    If PAIRED, the last matrix goes to the lower rows of the first one's buffer. (It is the last since the compiler
    makes all threads meet between two copies to one buffer.)
    """
    bar = bars.index(stage)
    mbarrier.expect(bar, BYTES, pred=pred)
    for j in gl.static_range(len(descs)):
        to = rows_of(buffers[j].index(stage), PAIRED and j == len(descs) - 1, descs[j].block_shape[3])
        async_load(descs[j], [head[0], head[1], head[2], first, 0], bar, to, pred=pred)


@gluon.jit
def rows_of(tile, LOWER: gl.constexpr, ROWS: gl.constexpr):
    """ROWS rows of a tile of a buffer: the lower ones, or the upper (all, where the buffer is one matrix's own)."""
    HEIGHT: gl.constexpr = tile.shape[len(tile.shape) - 2]
    return tile.slice(HEIGHT - ROWS if LOWER else 0, ROWS, dim=len(tile.shape) - 2)


@gluon.jit
def tile_of(buffer, stage):
    return buffer.index(stage).reshape([buffer.shape[4], buffer.shape[5]])


@gluon.jit
def halves(x, COLS: gl.constexpr, layout: gl.constexpr):
    """The left and the right half of an accumulator, COLS wide each, which lie in registers of their own."""
    left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, COLS]), [0, 2, 1]))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def side_by_side(left, right, layout: gl.constexpr):
    """The inverse of :func:`halves`, in ``layout``."""
    both = gl.permute(gl.join(left, right), [0, 2, 1])
    return gl.convert_layout(gl.reshape(both, [left.shape[0], 2 * left.shape[1]]), layout, assert_trivial=True)


@gluon.jit
def matrix_pointers(base, head, strides, first, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """Addresses of a (ROWS, COLS) tile in global memory, as ``layout`` holds it."""
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    base += head[0].to(gl.int64) * strides[0] + head[1].to(gl.int64) * strides[1] + head[2].to(gl.int64) * strides[2]
    return base + rows.to(gl.int64)[:, None] * strides[3] + cols[None, :]


@gluon.jit
def matrix_mask(first, limit, WIDTH: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    return (rows < limit)[:, None] & (cols < WIDTH)[None, :]


@gluon.jit
def store_matrix(
    x, base, head, strides, first, limit, WIDTH: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Stores a (ROWS, COLS) tile in global memory, but for rows from ``limit`` and columns from WIDTH on."""
    inside = matrix_mask(first, limit, WIDTH, ROWS, COLS, layout)
    pointers = matrix_pointers(base, head, strides, first, ROWS, COLS, layout)
    gl.store(pointers, x.to(base.dtype.element_ty), mask=inside)


@gluon.jit
def visible(row0, col0, n_k, ROWS: gl.constexpr, COLS: gl.constexpr, CAUSAL: gl.constexpr, layout: gl.constexpr):
    """Mask of the score tile at (row0, col0), rows along the first dimension."""
    cols = col0 + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    mask = (cols < n_k)[None, :]
    if CAUSAL:
        rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        mask = mask & (rows[:, None] >= cols[None, :])
    return mask


@gluon.jit
def key_tiles(row0, n_k, ROWS: gl.constexpr, COLS: gl.constexpr, CAUSAL: gl.constexpr):
    """(tiles of keys that a tile of rows sees, how many of them it sees whole); these come first."""
    if CAUSAL:
        count = (gl.minimum(row0 + ROWS, n_k) + COLS - 1) // COLS
        full = gl.minimum(row0 + 1, n_k) // COLS
    else:
        count = (n_k + COLS - 1) // COLS
        full = n_k // COLS
    return count, full


@gluon.jit
def store_in_two(
    x, HIGH, LOW, head, high_strides, low_strides, first, inside, ROWS: gl.constexpr, COLS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Stores a tile rounded, in HIGH, and what the rounding loses, rounded, in LOW, where ``inside`` is true."""
    dtype: gl.constexpr = HIGH.dtype.element_ty
    high = x.to(dtype)
    gl.store(matrix_pointers(HIGH, head, high_strides, first, ROWS, COLS, layout), high, mask=inside)
    low = (x - high.to(gl.float32)).to(dtype)
    gl.store(matrix_pointers(LOW, head, low_strides, first, ROWS, COLS, layout), low, mask=inside)


@gluon.jit
def new_ones(dtype: gl.constexpr, COLS: gl.constexpr, num_warps: gl.constexpr):
    """(8, COLS) ones in shared memory: a product with their transpose has the sums of rows in every column."""
    ones = gl.allocate_shared_memory(dtype, [8, COLS], gl.NVMMASharedLayout.get_default_for([8, COLS], dtype))
    ones.store(gl.full([8, COLS], 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])))
    return ones


@gluon.jit
def partial_sums(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    """(ROWS, 8): sums over every eighth column, for which no thread needs another's elements."""
    return gl.sum(gl.reshape(x, [ROWS, COLS // 8, 8]), 1)


@gluon.jit
def load_lse(L, rows, n_q):
    """Log-sum-exp in base 2; +∞, so that P is 0, beyond the end and for rows that see nothing."""
    lse = gl.load(L + rows, mask=rows < n_q, other=float("inf"))
    return gl.where(lse == float("-inf"), float("inf"), lse) * LOG2E


@gluon.jit
def load_row_vector(base, rows, n_q):
    return gl.load(base + rows, mask=rows < n_q, other=0.0)
