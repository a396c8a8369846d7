"""K-FAC's factors of layers that run in 16 bits on a GPU: exact products of 16-bit numbers, summed in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sorder
from sorder.kfac.factors import gram

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 64, 385])
def test_sums_are_float32(dtype: torch.dtype, size: int) -> None:
    rows = (torch.randn(2, 5000, size, device="cuda") + 1.0).to(dtype)
    expected = rows.double().mT @ rows.double()
    result = gram(rows)
    assert result.dtype == torch.float32
    assert (result - expected).norm() < 1e-6 * expected.norm()


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
