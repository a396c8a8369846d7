"""Row scalars in pieces, as the Hopper kernels copy them, against those in rows."""

from __future__ import annotations

import math

import pytest
import torch

launch = pytest.importorskip("sorder.kernels.launch")
row_scalars = pytest.importorskip("sorder.kernels.row_scalars")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("n", [1, 64, 70, 100, 128])
@pytest.mark.parametrize("low", [True, False])
def test_pieces_hold_the_same_scalars(n: int, rows: int, low: bool, device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are compiled, not interpreted")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, n, *shape, generator=generator, device=device)

    o, do, to, tdo = (normal(16).half() for _ in range(4))
    to_low = normal(16).half() * 1e-3 if low else None
    lse, tl, dl, tdl = (normal() for _ in range(4))
    heads = launch.Heads(o, o)
    delta, tdelta = row_scalars.row_scalars(
        heads, o, do, dl, to=to, to_low=to_low, tdo=tdo, tdl=tdl, second_order=True
    )  # fmt: skip
    packed = row_scalars.packed_row_scalars(heads, o, do, dl, lse, tl, to, to_low, tdo, tdl, rows)
    tiles = -(-n // rows)
    assert packed.shape == (6 * tiles, 4 * rows)
    unpacked = packed.view(2, 3, tiles, 4, rows).movedim(3, 0).flatten(-2)
    assert torch.equal(unpacked[..., n:], torch.zeros_like(unpacked[..., n:]))
    for got, want in zip(unpacked[..., :n], (lse * math.log2(math.e), tl, delta, tdelta), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
