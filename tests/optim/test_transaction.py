"""A step that fails leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sorder.curvature import CurvatureError, errors
from sorder.optim import NewtonCG


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Fixture:
    """A model in training whose every trace can be compared."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net().double()
        self.x, self.y = torch.randn(8, 4).double(), torch.randint(0, 3, (8,))
        self.optimizer = NewtonCG(self.net.parameters(), **options)
        self.fail: Callable[[Tensor], Tensor] = lambda loss: loss
        self.generator = torch.Generator().manual_seed(4)
        self.optimizer.step(self.closure)
        for p in self.net.parameters():
            p.grad = torch.ones_like(p)

    def closure(self) -> Tensor:
        noise = 1e-3 * torch.rand(8, 4, dtype=torch.float64, generator=self.generator)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(self.x + noise), self.y)
        return self.fail(loss)

    def trace(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "parameters": [p.detach() for p in self.net.parameters()],
                "gradients": [p.grad for p in self.net.parameters()],
                "buffers": list(self.net.buffers()),
                "random": torch.get_rng_state(),
                "generator": self.generator.get_state(),
                "optimizer": self.optimizer.state_dict(),
                "last step": self.optimizer.last_step,
            }
        )


def assert_unchanged(fixture: Fixture, before: dict[str, Any]) -> None:
    assert str(fixture.trace()) == str(before)
    for kind in ("parameters", "gradients", "buffers"):
        for a, b in zip(fixture.trace()[kind], before[kind], strict=True):
            assert torch.equal(a, b), kind
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
def test_a_closure_that_raises_at_any_call(mode: str, error: type[BaseException]) -> None:
    """In the first run, in a product, in a trial: wherever the closure runs."""
    fixture = Fixture(mode=mode, cg_iterations=3)
    before = fixture.trace()
    number, raised = 0, 0
    while True:
        number += 1
        calls = 0

        def fail(loss: Tensor, number: int = number) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == number:
                raise error("stop")
            return loss

        fixture.fail = fail
        try:
            fixture.optimizer.step(fixture.closure)
        except error:
            raised += 1
            assert_unchanged(fixture, before)
        else:
            break
    assert raised >= (2 if mode == "reverse-over-reverse" else 5)
    assert not torch.equal(next(fixture.net.parameters()), before["parameters"][0])


def test_a_step_after_a_failure_is_the_step_without_it() -> None:
    smooth, rough = Fixture(), Fixture()
    rough.fail = lambda loss: loss * float("nan")
    with pytest.raises(FloatingPointError):
        rough.optimizer.step(rough.closure)
    rough.fail = lambda loss: loss
    for fixture in (smooth, rough):
        torch.manual_seed(1)
        fixture.optimizer.step(fixture.closure)
    assert str(rough.trace()) == str(smooth.trace())


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * float("inf")


class NanProduct(torch.autograd.Function):
    """x² whose second derivative is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (2 * x + (x - x.detach()) * float("nan")).nan_to_num() + g * NanSlope.apply(x)


class NanSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * float("nan")


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda loss: loss * float("nan"), "the loss is nan"),
        (lambda loss: loss + float("inf"), "the loss is inf"),
        (NanGradient.apply, r"the gradient of parameter 0 \(shape \(6, 4\)\) is not finite"),
        (NanProduct.apply, "product .*not finite"),
    ],
    ids=["nan loss", "inf loss", "gradient", "product"],
)
@pytest.mark.filterwarnings("ignore:the backward of autograd.Function NanGradient")
def test_what_is_not_finite_is_an_error(fail: Callable[[Tensor], Tensor], message: str) -> None:
    fixture = Fixture()
    before = fixture.trace()
    fixture.fail = fail
    with pytest.raises(FloatingPointError, match=message):
        fixture.optimizer.step(fixture.closure)
    assert_unchanged(fixture, before)


def test_attention_is_exact_inside_a_step_and_refused_without(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x, target = torch.randn(2, 6, 8), torch.randn(2, 6, 8)

    def closure() -> Tensor:
        return F.mse_loss(layer(x, x, x, need_weights=False)[0], target)

    for curvature in ("ggn", "hessian"):
        monkeypatch.setattr(errors, "_warned", set())
        losses = []
        optimizer = NewtonCG(layer.parameters(), curvature=curvature)
        for _ in range(3):
            losses.append(optimizer.step(closure).item())
        assert losses[-1] < losses[0]
        without = NewtonCG(layer.parameters(), curvature=curvature, attention=None)
        before = [p.detach().clone() for p in layer.parameters()]
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            pytest.raises(CurvatureError, match=r"scaled_dot_product.*attention='exact'"),
        ):
            without.step(closure)
        assert all(torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))
