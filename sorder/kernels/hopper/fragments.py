"""Sums over programs, in global memory, of accumulators of products: added as they lie in the registers.

An accumulator X of (16·warps, N) elements is kept as its fragments: of every eight columns, four neighbouring elements
a thread (two columns of rows r and r + 8), thread after thread. So every addition is one of 16 bytes, and a warp's are
512 bytes in a row. The order in which programs add is not determined, and neither is the last bit of a sum.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sorder.kernels import launch
from sorder.kernels.hopper.tiles import head_index, store_matrix


@gluon.jit
def add_fragments(base, x, N: gl.constexpr, num_warps: gl.constexpr):
    """Adds the accumulator ``x`` to the 16·warps·N float32 numbers at ``base``."""
    x = gl.reshape(x, [num_warps, 2, 8, N // 8, 4, 2])
    x = gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [num_warps * 16 * N])
    places = base + gl.arange(0, num_warps * 16 * N, layout=x.type.layout)
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [places.to(gl.int64, bitcast=True), x],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit(do_not_specialize=("n_q", "lead1", "lead2"))
def hopper_rows_of_fragments_kernel(
    SUMS, Y, TY, strides, lead1, lead2, n_q, scale,
    WIDTH: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    tile = gl.program_id(0) % ((n_q + ROWS - 1) // ROWS)
    z = gl.program_id(0) // ((n_q + ROWS - 1) // ROWS)
    TRANSPOSED: gl.constexpr = ROWS < 64
    N: gl.constexpr = ROWS if TRANSPOSED else D
    piece = gl.program_id(0).to(gl.int64) * gl.num_programs(1) + gl.program_id(1)
    places = gl.arange(0, ROWS * D, layout=gl.BlockedLayout([4], [32], [num_warps], [0]))
    x = gl.load(SUMS + piece * (ROWS * D) + places)
    x = gl.permute(gl.reshape(x, [N // 8, ROWS * D // N // 16, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = gl.reshape(x, [ROWS * D // N, N])
    if TRANSPOSED:
        x = gl.permute(x, [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    y = gl.convert_layout(x, layout) * scale
    head = head_index(z, lead1, lead2)
    if gl.program_id(1) == 0:
        store_matrix(y, Y, head, strides, tile * ROWS, n_q, WIDTH, ROWS, D, layout)
    else:
        store_matrix(y, TY, head, strides, tile * ROWS, n_q, WIDTH, ROWS, D, layout)


def new_sums(heads: launch.Heads, q: torch.Tensor, rows: int, width: int, count: int = 1) -> torch.Tensor:
    """Zeros for the sums of tiles of ``rows`` rows of one or two matrices like Q, padded to ``width`` columns."""
    tiles = launch.cdiv(q.shape[-2], rows)
    return torch.zeros(heads.count, tiles, count, rows, width, dtype=torch.float32, device=q.device)


def rows_of_fragments(heads: launch.Heads, sums: torch.Tensor, like: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """``scale`` times the sums, as folded matrices like ``like``."""
    _, tiles, count, rows, width = sums.shape
    matrices = [launch.new_matrix(like, like.shape[-1]) for _ in range(count)]
    with torch.cuda.device_of(like):
        hopper_rows_of_fragments_kernel[(heads.count * tiles, count)](
            sums, matrices[0], matrices[-1], *heads.strides(matrices[0]), *heads.folded[1:], like.shape[-2], scale,
            WIDTH=like.shape[-1], D=width, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return matrices
