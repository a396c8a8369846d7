"""Which losses are recognised, and as what; everything else is left to the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.curvature import CurvaturePoint

Y = torch.tensor([0, 2, 1, 1, 0])
P = torch.rand(5, 3)

SEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda z: F.cross_entropy(z, Y),
    "module": lambda z: nn.CrossEntropyLoss(label_smoothing=0.1)(z, Y),
    "divided": lambda z: F.cross_entropy(z, Y) / 4,
    "multiplied from the left": lambda z: 0.5 * F.cross_entropy(z, Y, reduction="sum"),
    "by a tensor": lambda z: F.cross_entropy(z, Y) * torch.tensor(2.0),
    "plus a constant": lambda z: F.cross_entropy(z, Y) + 1.0,
    "sum of two": lambda z: F.cross_entropy(z, Y) + 0.3 * F.mse_loss(z, P),
    "python's sum": lambda z: sum([F.cross_entropy(z[:2], Y[:2]), F.cross_entropy(z[2:], Y[2:])]),
    "added in place": lambda z: torch.zeros(()).add_(F.cross_entropy(z, Y)),
    "nll of log_softmax": lambda z: F.nll_loss(F.log_softmax(z, -1), Y),
    "nll of a method": lambda z: nn.NLLLoss()(z.log_softmax(dim=1), Y),
    "nll of reshaped": lambda z: F.nll_loss(F.log_softmax(z.view(1, 5, 3), -1).view(-1, 3), Y),
    "kl_div": lambda z: F.kl_div(F.log_softmax(z, -1), P.softmax(-1), reduction="batchmean"),
    "bce of sigmoid": lambda z: F.binary_cross_entropy(torch.sigmoid(z), P),
    "bce with logits": lambda z: F.binary_cross_entropy_with_logits(z, P),
    "mse swapped": lambda z: F.mse_loss(P, z),
    "huber": lambda z: F.huber_loss(z, P),
    "mean of none": lambda z: F.cross_entropy(z, Y, reduction="none").mean(),
    "masked mean": lambda z: (F.cross_entropy(z, Y, reduction="none") * (Y > 0)).sum() / (Y > 0).sum(),
    "soft targets": lambda z: F.cross_entropy(z, P.softmax(-1)),
}
UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "regularised": lambda z: F.cross_entropy(z, Y) + z.square().sum(),
    "negated": lambda z: -F.cross_entropy(z, Y),
    "mixed signs": lambda z: F.cross_entropy(z, Y) - 0.5 * F.mse_loss(z, P),
    "squared": lambda z: F.cross_entropy(z, Y) ** 2,
    "product of two": lambda z: F.cross_entropy(z, Y) * F.mse_loss(z, P),
    "changed in place": lambda z: F.cross_entropy(z, Y).square_(),
    "l1": lambda z: F.l1_loss(z, P),
    "plain nll": lambda z: F.nll_loss(z, Y),
    "trained target": lambda z: F.cross_entropy(z, z.softmax(-1)),
    "complex on the way": lambda z: (F.cross_entropy(z, Y) * 1j * torch.tensor(-1j)).real,
    "by hand": lambda z: -z.log_softmax(-1).gather(1, Y[:, None]).mean(),
}


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def point(model: nn.Module, loss: Callable[[Tensor], Tensor], **options: object) -> tuple[CurvaturePoint, Tensor]:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double()
    made = CurvaturePoint(lambda: loss(model(x)), list(model.parameters()), **options)
    return made, x


@pytest.fixture(autouse=True)
def double() -> None:
    global P
    P = P.double()


@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
@pytest.mark.parametrize("name", list(SEEN))
def test_product_is_that_of_the_loss_in_the_outputs(model: nn.Module, name: str, mode: str) -> None:
    loss = SEEN[name]
    made, x = point(model, loss, mode=mode)
    assert made.kind == "ggn"
    params = list(model.parameters())
    v = [torch.randn_like(p) for p in params]
    # If sigmoid or softmax lies before the loss, the split is before it: the loss as a function of z.
    z = model(x)
    u = torch.autograd.functional.jvp(
        lambda *values: torch.func.functional_call(
            model, dict(zip([n for n, _ in model.named_parameters()], values, strict=True)), (x,)
        ),
        tuple(params),
        tuple(v),
    )[1]
    h = torch.autograd.functional.hessian(lambda t: loss(t.view(5, 3)), z.detach().flatten())
    want = torch.autograd.grad(z, params, (h @ u.flatten()).view_as(z))
    for got, expected in zip(made.product(v), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", list(UNSEEN))
def test_other_losses_get_the_hessian(model: nn.Module, name: str) -> None:
    made, _ = point(model, UNSEEN[name])
    assert made.kind == "hessian"


def test_a_negated_loss_that_is_maximised_is_convex(model: nn.Module) -> None:
    made, _ = point(model, lambda z: -F.cross_entropy(z, Y), sign=-1.0)
    assert made.kind == "ggn"
    made, _ = point(model, lambda z: F.cross_entropy(z, Y), sign=-1.0)
    assert made.kind == "hessian"


def test_the_kind_asked_for_is_given_or_refused(model: nn.Module) -> None:
    assert point(model, SEEN["function"], kind="hessian")[0].kind == "hessian"
    with pytest.raises(ValueError, match=r"^the Gauss-Newton matrix, 'ggn', needs the model's outputs"):
        point(model, UNSEEN["by hand"], kind="ggn")
    with pytest.raises(ValueError, match=r"^the Fisher matrix, 'fisher', needs .* a distribution of labels"):
        point(model, SEEN["huber"], kind="fisher")
    with pytest.raises(ValueError, match="kind must be one of auto, hessian, ggn, fisher, got 'fischer'"):
        point(model, SEEN["function"], kind="fischer")


def test_a_loss_without_gradient_is_not_recorded(model: nn.Module) -> None:
    def loss(z: Tensor) -> Tensor:
        with torch.no_grad():
            F.cross_entropy(z, Y)  # a metric
        return z.square().sum()

    assert point(model, loss)[0].kind == "hessian"


def in_place_metric(logits: Tensor) -> None:
    p = logits.detach()
    p.sub_(p.amax(-1, keepdim=True)).exp_()


def overwrite(logits: Tensor) -> None:
    with torch.no_grad():
        logits.zero_()


@pytest.mark.parametrize("change", [in_place_metric, overwrite, Tensor.exp_])
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: F.nll_loss(F.log_softmax(z, -1), y)])
def test_outputs_changed_after_the_loss_are_refused(change: Any, loss: Any) -> None:
    w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0, 2])

    def closure() -> Tensor:
        logits = x @ w
        value = loss(logits, y)
        change(logits)
        return value

    with pytest.raises(ValueError, match=r"changed the outputs of shape \(6, 3\) in place after cross_entropy"):
        CurvaturePoint(closure, [w], "auto")
