"""What a function computes under no_grad is a constant of its derivatives, in every mode and at every order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

from sorder.curvature import CurvaturePoint
from sorder.func import checkpoint, ggnvp, hvp
from tests.attention.oracle import relative_error

Y = torch.tensor([0, 1, 2, 1, 0, 2])


def plain(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.std()
    return (h / scale).tanh()


def set_by_call(h: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    scale = h.std()
    torch.set_grad_enabled(True)
    return (h / scale).tanh()


def nested(h: Tensor) -> Tensor:
    with torch.no_grad():
        with torch.enable_grad():
            pass
        with torch.set_grad_enabled(False):
            scale = h.T.std()
        shift = h.mean()
    return ((h - shift) / scale).tanh()


@torch.no_grad()
def decorated(h: Tensor) -> Tensor:
    return h.std()


def in_place(h: Tensor) -> Tensor:
    buffer = torch.zeros_like(h[0])
    with torch.no_grad():
        buffer.mul_(0.5).add_(h.std(0))
    return (h / buffer / decorated(h)).tanh()


def checkpointed(h: Tensor) -> Tensor:
    return checkpoint(lambda h: plain(nested(h)))(h)


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [plain, set_by_call, nested, in_place, checkpointed]


class Case:
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        x, self.w, self.v = make(6, 4), make(4, 3), make(4, 3)
        self.outputs = lambda w: function(x @ w)
        w = self.w.clone()
        n = w.numel()
        b = hessian(lambda w: self.loss(self.outputs(w)), w).reshape(n, n)
        j = jacobian(self.outputs, w).reshape(-1, n)
        middle = hessian(self.loss, self.outputs(w)).reshape(len(j), len(j))
        self.expected = {
            "hessian": (b @ self.v.flatten()).view_as(w),
            "ggn": (j.T @ middle @ j @ self.v.flatten()).view_as(w),
        }

    def loss(self, outputs: Tensor) -> Tensor:
        return F.cross_entropy(outputs, Y)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mode", ["forward-over-reverse", "reverse-over-reverse", "reverse-over-forward"])
def test_hvp(function: Callable[[Tensor], Tensor], mode: Any) -> None:
    case = Case(function)
    found = hvp(lambda w: case.loss(case.outputs(w)), (case.w,), case.v, argnums=0, mode=mode)
    assert relative_error(found, case.expected["hessian"]) < 1e-12


@pytest.mark.parametrize("function", FUNCTIONS)
def test_ggnvp(function: Callable[[Tensor], Tensor]) -> None:
    case = Case(function)
    found = ggnvp(case.outputs, case.loss, (case.w,), case.v, argnums=0)
    assert relative_error(found, case.expected["ggn"]) < 1e-12


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mode", ["forward-over-reverse", "reverse-over-reverse"])
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_point(function: Callable[[Tensor], Tensor], mode: str, kind: str) -> None:
    case = Case(function)
    w = nn.Parameter(case.w)
    with CurvaturePoint(lambda: case.loss(case.outputs(w)), [w], kind, mode=mode) as point:
        (found,) = point.product([case.v])
    assert relative_error(found, case.expected[kind]) < 1e-12
    assert w.requires_grad


def test_gradients_turned_on_where_autograd_has_them_off() -> None:
    """In the forward of checkpoint's Function, within the modes of two products."""
    w, v = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()

    def block(h: Tensor) -> Tensor:
        return torch.func.grad(lambda x: x.sin().square().sum())(h)

    def product(wrap: Callable[..., Any]) -> Tensor:
        def curvature(w: Tensor) -> Tensor:
            return hvp(lambda w: wrap(block)(w).square().sum(), (w,), v, argnums=0).dot(v)

        return hvp(curvature, (w,), v, argnums=0)

    expected = product(lambda f: f)
    assert expected.norm() > 0
    assert relative_error(product(checkpoint), expected) < 1e-12
