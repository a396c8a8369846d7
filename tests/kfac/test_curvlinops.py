"""Agreement with curvlinops, where that is installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sorder.kfac import KFACPreconditioner
from tests.cases import relative_error
from tests.kfac.blocks import multiply


def linear_net() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(30, 4).double()


def conv_net() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(3, 4, 2, dilation=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip
    # As many samples as make every factor invertible: in a null space the eigenbasis is anyone's choice.
    return net.double(), torch.randn(40, 2, 6, 6).double()


@pytest.mark.parametrize("inverse", ["cholesky", "ekfac"])
@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("estimator", ["type-2", "empirical"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss])
@pytest.mark.parametrize("make", [linear_net, conv_net])
def test_products_are_those_of_curvlinops(
    make: Callable[[], tuple[nn.Module, Tensor]], loss: Any, estimator: str, approximation: str, inverse: str
) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    net, x = make()
    y = torch.randint(0, 3, (len(x),)) if loss is nn.CrossEntropyLoss else torch.randn(len(x), 3).double()
    loss_fn, params = loss(), list(net.parameters())
    theirs = curvlinops.EKFACLinearOperator if inverse == "ekfac" else curvlinops.KFACLinearOperator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operator = theirs(
            net, loss_fn, params, [(x, y)], fisher_type=estimator, kfac_approx=approximation,
            separate_weight_and_bias=False,
        )  # fmt: skip
    kfac = KFACPreconditioner(net, estimator=estimator, approximation=approximation, inverse=inverse)
    kfac.update_factors(lambda: loss_fn(net(x), y))
    v = [torch.randn_like(p) for p in params]
    with torch.no_grad():
        assert relative_error(multiply(kfac, v), operator @ v) < 1e-12
