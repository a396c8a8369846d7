"""K-FAC's factors of layers that run in 16 bits on a GPU: exact products of 16-bit numbers, summed in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sorder
from sorder.kfac import factors


def float32_bound(rows: int) -> float:
    """Relative error of a sum over so many rows, float32 as this GPU's tensor cores understand it.

    At each step they align k products, exact, and the sum so far, keep G bits below the last place of a float32, cut
    off the rest, and cut the new sum to a float32 again (Fasi et al., *Numerical behavior of NVIDIA tensor cores*,
    2021; Khattak and Mikaitis, *Accurate models of NVIDIA tensor cores*, 2025). Hence a step loses at most 1 + k·2⁻ᴳ
    units in the last place of the sum, which is halfway up on average. k and G are 16 and 2 on Hopper; on other GPUs,
    where this has not run, k is taken to be 8, or 4 before Ampere, and k·2⁻ᴳ to be 4 as well: five units a step. A
    model with Hopper's numbers loses 1.6e-5 in bfloat16 and 2.8e-5 in float16 of squares over 5,000 rows in one
    product, and an H200 1.6e-5 and 2.8e-5; the bound for 4,096 rows is 8e-5. Adding up in 16 bits, or only rounding
    the result to them, costs more than 1e-4.
    """
    major, _ = torch.cuda.get_device_capability()
    k = 16 if major == 9 else 8 if major >= 8 else 4
    unit = torch.finfo(torch.float32).eps
    return 5 * unit * min(rows, factors._ROWS) / k / 2 + unit * (rows // factors._ROWS)  # products, and their sum


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "size"), [(1000, 1), (5000, 7), (5000, 64), (40_000, 64), (40_000, 385)])
def test_sums_are_float32(dtype: torch.dtype, count: int, size: int) -> None:
    torch.manual_seed(0)
    rows = (torch.randn(2, count, size, device="cuda") + 1.0).to(dtype)
    expected = rows.double().mT @ rows.double()
    result = factors.gram(rows)
    assert result.dtype == torch.float32
    assert (result - expected).norm() < float32_bound(count) * expected.norm()


@pytest.mark.parametrize("count", [0, 1, 4096, 5000, 8192])
def test_every_row_is_in_one_product(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GPU's product into float32 replaced by one in float64."""
    rows = torch.randint(-9, 10, (2, count, 7)).half()
    products = []

    def bmm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        assert a.shape[1] == b.shape[2] == 8 and a.shape[2] <= 4096
        products.append(a.shape[2])
        return (a.double() @ b.double()).to(out_dtype)

    monkeypatch.setattr(torch, "bmm", bmm)
    result = factors.gram(rows)
    assert sum(products) == count and result.dtype == torch.float32
    assert torch.equal(result.double(), rows.double().mT @ rows.double())


@pytest.mark.gpu
def test_factors_under_autocast_are_those_of_what_the_layers_saw() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(30, 24), nn.LayerNorm(24), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 30)
    ).cuda()
    tokens = torch.randint(30, (16, 12), device="cuda")

    def loss(half: bool) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())

    inverses = []
    for half in (True, False):
        preconditioner = sorder.KFACPreconditioner(model, estimator="empirical")
        preconditioner.update_factors(lambda half=half: loss(half))
        preconditioner.update(None, 0.1)
        v = [torch.ones_like(p) for p in model.parameters()]
        inverses.append(torch.cat([x.flatten() for x in preconditioner(v)]))
    assert inverses[0].dtype == torch.float32
    assert (inverses[0] - inverses[1]).norm() < 2e-2 * inverses[1].norm()
