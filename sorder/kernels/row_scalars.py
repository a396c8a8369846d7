"""D and Ḋ, the two row scalars through which the softmax's normalisation enters B and T.

    D = rowsum(dO∘O) − dL          Ḋ = rowsum(dȮ∘O + dO∘Ȯ) − dL̇

Always accumulated and kept in float32; absent tensors contribute nothing. For 16-bit inputs Ȯ comes in two parts, the
second being what the first lost by its rounding: where dO and Ȯ have means, that rounding would cost Ḋ its digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sorder.kernels import launch
from sorder.kernels.tiles import LOG2E, SIZES, head_pointer, load_row_vector, load_tile, program_head_and_tile

_ROWS = 64


@triton.jit
def _row_dot(a, b):
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)


@triton.jit(do_not_specialize=SIZES)
def row_scalars_kernel(
    O, DO, TO, LOW, TDO, DL, TDL, L, TL, DELTA, TDELTA, PACKED, o_strides, do_strides, to_strides, low_strides,
    tdo_strides, lead1, lead2, tiles, heads, n_q,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    z, tile = program_head_and_tile(heads)
    if tile >= tiles:
        return
    row0 = tile * ROWS
    O = head_pointer(O, z, lead1, lead2, o_strides)
    DO = head_pointer(DO, z, lead1, lead2, do_strides) if DO is not None else None
    TO = head_pointer(TO, z, lead1, lead2, to_strides) if TO is not None else None
    LOW = head_pointer(LOW, z, lead1, lead2, low_strides) if LOW is not None else None
    TDO = head_pointer(TDO, z, lead1, lead2, tdo_strides) if TDO is not None else None
    o = load_tile(O, row0, o_strides[3], n_q, DV, ROWS, BLOCK_DV, True, "ieee")
    do = load_tile(DO, row0, do_strides[3], n_q, DV, ROWS, BLOCK_DV, True, "ieee") if DO is not None else None
    rows = row0 + tl.arange(0, ROWS)
    delta = tl.zeros([ROWS], tl.float32)
    if DO is not None:
        delta += _row_dot(do, o)
    if DL is not None:
        delta -= load_row_vector(DL + z * n_q, row0, n_q, ROWS, True)
    if DELTA is not None:
        tl.store(DELTA + z * n_q + rows, delta, mask=rows < n_q)
    if TDELTA is not None or PACKED is not None:
        tdelta = tl.zeros([ROWS], tl.float32)
        if TDO is not None:
            tdelta += _row_dot(load_tile(TDO, row0, tdo_strides[3], n_q, DV, ROWS, BLOCK_DV, True, "ieee"), o)
        if DO is not None and TO is not None:
            tdelta += _row_dot(do, load_tile(TO, row0, to_strides[3], n_q, DV, ROWS, BLOCK_DV, True, "ieee"))
        if DO is not None and LOW is not None:
            tdelta += _row_dot(do, load_tile(LOW, row0, low_strides[3], n_q, DV, ROWS, BLOCK_DV, True, "ieee"))
        if TDL is not None:
            tdelta -= load_row_vector(TDL + z * n_q, row0, n_q, ROWS, True)
        if TDELTA is not None:
            tl.store(TDELTA + z * n_q + rows, tdelta, mask=rows < n_q)
        if PACKED is not None:
            lse = load_row_vector(L + z * n_q, row0, n_q, ROWS, True)
            mu = load_row_vector(TL + z * n_q, row0, n_q, ROWS, True)
            piece = rows // PIECE
            pieces = (n_q + PIECE - 1) // PIECE
            PACKED += z.to(tl.int64) * pieces * (4 * PIECE) + piece * (3 * PIECE) + rows
            inside = piece < pieces
            tl.store(PACKED, lse * LOG2E, mask=inside)
            tl.store(PACKED + PIECE, mu, mask=inside)
            tl.store(PACKED + 2 * PIECE, delta, mask=inside)
            tl.store(PACKED + 3 * PIECE, tdelta, mask=inside)


def row_scalars(
    heads: launch.Heads, o: torch.Tensor, do: torch.Tensor | None, dl: torch.Tensor | None,
    *, to: torch.Tensor | None = None, to_low: torch.Tensor | None = None,
    tdo: torch.Tensor | None = None, tdl: torch.Tensor | None = None, second_order: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """D and, if ``second_order``, Ḋ, float32 (..., N), from folded matrices and contiguous row vectors."""
    delta = heads.new_row_vector(o)
    tdelta = torch.empty_like(delta) if second_order else None
    _launch(heads, (o, do, to, to_low, tdo), (dl, tdl, None, None), (delta, tdelta, None))
    return delta, tdelta


def packed_row_scalars(
    heads: launch.Heads, o: torch.Tensor, do: torch.Tensor, dl: torch.Tensor | None, lse: torch.Tensor,
    tl_: torch.Tensor, to: torch.Tensor, to_low: torch.Tensor | None, tdo: torch.Tensor | None,
    tdl: torch.Tensor | None, rows: int,
) -> torch.Tensor:  # fmt: skip
    """(log-sum-exp in base 2, L̇, D, Ḋ) of every tile of ``rows`` rows (32 or 64) of every head, float32 (·, 4·rows).

    Zeros stand for the rows beyond the end.
    """
    packed = o.new_empty((heads.count * launch.cdiv(o.shape[-2], rows), 4 * rows), dtype=torch.float32)
    _launch(heads, (o, do, to, to_low, tdo), (dl, tdl, lse, tl_), (None, None, packed), rows)
    return packed


def _launch(
    heads: launch.Heads,
    matrices: tuple[torch.Tensor | None, ...],
    vectors: tuple[torch.Tensor | None, ...],
    outputs: tuple[torch.Tensor | None, ...],
    piece: int = 1,
) -> None:
    o = matrices[0]
    assert o is not None
    n_q, dv = o.shape[-2:]
    tiles = launch.cdiv(n_q, _ROWS)
    with torch.cuda.device_of(o):
        row_scalars_kernel[heads.grid(tiles)](
            *matrices, *vectors, *outputs, *heads.strides(*matrices), *heads.folded[1:], tiles, heads.count, n_q,
            DV=dv, BLOCK_DV=launch.block(dv), ROWS=_ROWS, PIECE=piece,
        )  # fmt: skip
