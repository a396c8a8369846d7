"""Losses that draw random numbers: one product sees one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sorder


def products() -> dict[str, Callable[..., Any]]:
    generator = torch.Generator()

    def fvp(*args: Any, **kwargs: Any) -> Any:
        return sorder.func.fvp(*args, **kwargs, generator=generator.manual_seed(0))

    return {"ggnvp": sorder.func.ggnvp, "fvp": fvp}


@pytest.mark.parametrize("name", ["ggnvp", "fvp"])
@pytest.mark.parametrize("closed_form", [True, False])
def test_products_are_symmetric(name: str, closed_form: bool) -> None:
    if name == "fvp" and not closed_form:
        pytest.skip("the Fisher needs a loss of known likelihood")
    x, y = torch.randn(20, 4).double(), torch.randint(0, 3, (20,))
    weights, u, v = (torch.randn(4, 3).double() for _ in range(3))

    def loss(z: Tensor) -> Tensor:
        first = int(torch.randint(15, ()))
        rows = slice(first, first + 5)
        return F.cross_entropy(z[rows], y[rows]) if closed_form else 2 * F.cross_entropy(z[rows], y[rows])

    def product(v: Tensor) -> Tensor:
        torch.manual_seed(1)
        return products()[name](lambda w: x @ w, loss, (weights,), v, argnums=0)

    left, right = (u * product(v)).sum(), (v * product(u)).sum()
    assert abs(left - right) < 1e-12 * abs(left)
    assert left.abs() > 1e-4


def test_all_rows_ignored_have_no_curvature() -> None:
    w, x, y = torch.randn(3, 5), torch.randn(4, 3), torch.full((4,), -100)
    for product in (sorder.func.ggnvp, sorder.func.fvp):
        assert torch.equal(product(lambda w: x @ w, lambda z: F.cross_entropy(z, y), (w,), w, argnums=0), 0 * w)
