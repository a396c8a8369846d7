"""Device-side pieces that every attention kernel uses: addressing, tile loads and stores, products.

Conventions of all kernels in this folder. A *head* is one (N, d) problem; up to three leading dimensions are flattened
into one head index ``z`` with separate strides, so no layout needs a copy. Matrices come with ``strides = (s0, s1, s2,
row)`` and a unit stride along the width. Row vectors are contiguous, of shape (heads, N), in float32; for float32
inputs L, dL and their tangents are in float64. Offsets that grow with N or z are 64-bit; offsets within a tile are
32-bit. Exponents are in base 2, ``exp(s − L) = exp2(s·log₂e − L·log₂e)``, but natural for float32 inputs. An absent
tensor is ``None``, which Triton folds at compile time: its products are never issued.
"""

import triton
import triton.language as tl

SIZES = ("lead1", "lead2", "tiles", "heads", "n_q", "n_k")
"""Arguments that every kernel takes and on whose values none is specialised: a new length never compiles anew."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def program_head_and_tile(heads):
    """Splits the flat program index (grid axes x and y) into a head (int64) and a tile of that head.

    The first tiles of all heads come first: where these are the heaviest, the last programs are the lightest.
    """
    pid = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    return pid % heads, (pid // heads).to(tl.int32)


@triton.jit
def head_pointer(base, z, lead1, lead2, strides):
    """Address of head ``z`` of a matrix whose leading sizes are (·, lead1, lead2)."""
    outer = z // lead2
    return base + (outer // lead1) * strides[0] + (outer % lead1) * strides[1] + (z % lead2) * strides[2]


@triton.jit
def tile_pointers(base, first, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    first64 = first + tl.full([], 0, tl.int64)
    return base + first64 * stride + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]


@triton.jit
def tile_mask(first, limit, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    return ((first + tl.arange(0, ROWS)) < limit)[:, None] & (tl.arange(0, COLS) < WIDTH)[None, :]


@triton.jit
def round_to_tf32(x):
    """Rounds float32 to TF32 (nearest, ties away from zero); the tensor core by itself would truncate."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # a NaN of all ones would wrap around to zero


@triton.jit
def as_operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A float32 tile as an operand of a product: rounded to the inputs' dtype, or to TF32 where that was asked for."""
    if tl.float32 != DTYPE:
        return x.to(DTYPE)
    elif PRECISION == "tf32":
        return round_to_tf32(x)
    else:
        return x


@triton.jit
def load_tile(
    base,
    first,
    stride,
    limit,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CHECK: tl.constexpr,
    PRECISION: tl.constexpr,
    sees=None,
):
    """Rows ``first …`` of a head as a (ROWS, COLS) operand.

    Zeros beyond ``limit`` rows (if CHECK), beyond WIDTH columns, and in rows that do not see, whatever they hold.
    """
    pointers = tile_pointers(base, first, stride, ROWS, COLS)
    if sees is not None:
        x = tl.load(pointers, mask=sees[:, None] & (tl.arange(0, COLS) < WIDTH)[None, :], other=0.0)
    elif CHECK:
        x = tl.load(pointers, mask=tile_mask(first, limit, WIDTH, ROWS, COLS), other=0.0)
    elif WIDTH != COLS:
        x = tl.load(pointers, mask=(tl.arange(0, COLS) < WIDTH)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    if x.dtype == tl.float32:
        x = as_operand(x, tl.float32, PRECISION)
    return x


@triton.jit
def store_tile(base, value, first, stride, limit, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    pointers = tile_pointers(base, first, stride, ROWS, COLS)
    tl.store(pointers, value.to(base.dtype.element_ty), mask=tile_mask(first, limit, WIDTH, ROWS, COLS))


@triton.jit
def load_row_vector(base, first, limit, ROWS: tl.constexpr, CHECK: tl.constexpr, sees=None):
    """Float32 numbers of rows ``first …``: zeros beyond the end (if CHECK) and in rows that do not see."""
    rows = first + tl.arange(0, ROWS)
    x = tl.load(base + rows, mask=rows < limit, other=0.0) if CHECK else tl.load(base + rows)
    if sees is not None:
        x = tl.where(sees, x, 0.0)
    return x.to(tl.float32)


@triton.jit
def load_lse(base, first, limit, ROWS: tl.constexpr, CHECK: tl.constexpr):
    """(high, low) float32 parts of the log-sum-exp: in base 2 with low = 0 for 16-bit inputs, natural for float32 ones.

    Rows that see nothing (−∞) and rows beyond the end get +∞, so that their P is exactly 0.
    """
    rows = first + tl.arange(0, ROWS)
    lse = tl.load(base + rows, mask=rows < limit, other=float("inf")) if CHECK else tl.load(base + rows)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if lse.dtype == tl.float64:
        high = lse.to(tl.float32)
        finite = tl.where(lse == float("inf"), 0.0, lse)
        low = (finite - finite.to(tl.float32).to(tl.float64)).to(tl.float32)
    else:
        high = lse * LOG2E
        low = tl.zeros([ROWS], tl.float32)
    return high, low


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a·b`` accumulated in float32; ``acc`` may be ``None``.

    PRECISION (float32 operands) is Triton's ``input_precision``.
    """
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def dot_pair(a, b, c, d, PRECISION: tl.constexpr):
    """``a·bᵀ + c·dᵀ``, where a pair with an absent factor contributes nothing; one pair at least is whole."""
    if a is None or b is None:
        return dot(c, tl.trans(d), None, PRECISION)
    elif c is None or d is None:
        return dot(a, tl.trans(b), None, PRECISION)
    else:
        return dot(c, tl.trans(d), dot(a, tl.trans(b), None, PRECISION), PRECISION)
