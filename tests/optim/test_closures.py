"""What a closure may return and do, and that anything else is refused by name before a step changes anything."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.curvature import errors
from sorder.optim import KFAC, AdaHessian, NewtonCG, SophiaG, SophiaH, gnb_loss
from tests.optim.problem import closure_of, data, model, values


def clip(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def clip_value(net: nn.Module) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 1e-3)


def unscale(net: nn.Module) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad.div_(1024.0)


def replace(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = None if p.grad is None else 0.1 * p.grad


def zero(net: nn.Module) -> None:
    net.zero_grad(set_to_none=False)


@pytest.mark.parametrize("where", ["step", "micro-batches", "curvature"])
@pytest.mark.parametrize("change", [clip, clip_value, unscale, replace, zero])
def test_a_closure_that_changes_its_gradient_is_refused(change: Callable[[nn.Module], None], where: str) -> None:
    net = model()
    optimizer = NewtonCG(net.parameters())
    before, state = values(net), str(optimizer.state_dict())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = closure_of(net)()
        loss.backward()
        change(net)
        return loss

    with pytest.raises(ValueError, match=r"changed .grad after backward\(\) \(of parameter 0.*max_step_norm="):
        if where == "curvature":
            optimizer.step(closure_of(net), curvature_closure=closure)
        else:
            optimizer.step(closure if where == "step" else [closure_of(net), closure])
    assert torch.equal(values(net), before) and str(optimizer.state_dict()) == state
    assert all(p.grad is None for p in net.parameters())


def test_a_change_between_two_backward_calls_is_seen() -> None:
    net = model()
    optimizer = NewtonCG(net.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        first, second = closure_of(net, 1)(), closure_of(net, 2)()
        first.backward()
        clip(net)
        second.backward()
        return first + second

    with pytest.raises(ValueError, match=r"changed \.grad after backward"):
        optimizer.step(closure)


class Scaled:
    """Closures that scale the loss for backward, accumulate, or drop the gradients at the end."""

    def __init__(self) -> None:
        self.net = model()
        self.optimizer = NewtonCG(self.net.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def scaled(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = closure_of(self.net)()
        self.scaler.scale(loss).backward()
        return loss

    def accumulated(self) -> Tensor:
        self.optimizer.zero_grad()
        losses = [0.5 * closure_of(self.net, i)() for i in (1, 1)]
        for loss in losses:
            loss.backward()
        return losses[0] + losses[1]

    def of_one_element(self) -> Tensor:
        return closure_of(self.net)().reshape(1)

    def dropped(self) -> Tensor:
        loss = closure_of(self.net)()
        loss.backward()
        self.optimizer.zero_grad()
        return loss

    def not_zeroed(self) -> Tensor:
        loss = closure_of(self.net)()
        loss.backward()
        return loss


@pytest.mark.parametrize("style", ["scaled", "accumulated", "of_one_element", "dropped", "not_zeroed"])
def test_closures_that_leave_the_gradient_alone_take_the_plain_step(style: str) -> None:
    plain, other = model(), Scaled()
    optimizer = NewtonCG(plain.parameters())
    for _ in range(3):
        optimizer.step(closure_of(plain))
        other.optimizer.step(getattr(other, style))
    assert (values(other.net) - values(plain)).norm() <= 1e-6 * values(plain).norm()


class Output(OrderedDict):  # type: ignore[type-arg]
    """Like the outputs of Hugging Face's models: a dict with attributes."""

    @property
    def loss(self) -> Tensor:
        return self["loss"]


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dict": (
        lambda loss: {"loss": loss, "logits": loss},
        r"got a dict with the keys 'loss', 'logits': return its entry",
    ),
    "model output": (lambda loss: Output(loss=loss), r"got a Output with the keys 'loss': return its entry 'loss'"),
    "dict without loss": (lambda loss: {"l": loss}, r"got a dict with the keys 'l'$"),
    "namespace": (lambda loss: SimpleNamespace(loss=loss), r"got a SimpleNamespace: return its attribute \.loss"),
    "string": (lambda loss: "loss", r"got a str, 'loss'$"),
    "None": (lambda loss: None, "got None"),
    "complex": (lambda loss: loss * 1j, "got a tensor of torch.complex128"),
    "three values": (lambda loss: (loss, loss, loss), "got 3 values"),
    "dict for the loss": (lambda loss: ({"loss": loss}, loss), r"got a dict .* in place of the loss: return its entry"),
    "generator": (lambda loss: (x for x in (loss,)), "got a generator"),
    "module": (lambda loss: nn.Linear(1, 1), "got a Linear"),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_loss_is_named(case: str, backward: bool) -> None:
    net = model()
    optimizer = NewtonCG(net.parameters())
    before = values(net)
    returned, message = WRONG[case]

    def closure() -> Any:
        loss = closure_of(net)()
        if backward:
            loss.backward()
        return returned(loss)

    with pytest.raises(
        TypeError, match=r"closure must return the loss, a scalar tensor, or \(loss, outputs\), " + message
    ):
        optimizer.step(closure)
    assert torch.equal(values(net), before) and all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("loss", [lambda: torch.ones(()), lambda: 1.0, lambda: torch.ones((), dtype=torch.int64)])
def test_a_loss_without_a_graph(loss: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="without a graph: is it detached"):
        NewtonCG(model().parameters()).step(loss)


def test_a_number_passes_where_backward_was_called() -> None:
    net = model()
    optimizer = NewtonCG(net.parameters())

    def closure() -> float:
        loss = closure_of(net)()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == optimizer.last_step.loss


@pytest.mark.parametrize("closure", [3, "loss", [], [3], torch.ones(())], ids=str)
def test_what_is_no_closure_is_named(closure: Any) -> None:
    optimizer = NewtonCG(model().parameters())
    with pytest.raises(
        TypeError,
        match=r"^NewtonCG.step takes a closure .*: closure must be a callable or a nonempty sequence of callables, got",
    ):
        optimizer.step(closure)
    net = model()
    with pytest.raises(TypeError, match=r"^NewtonCG.step takes a closure .*: curvature_closure must be a callable"):
        NewtonCG(net.parameters()).step(closure_of(net), curvature_closure=closure)


# ---------------------------------------------------------------------- why "auto" takes the Hessian


def caught(closure: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch, steps: int = 2, **options: Any) -> Any:
    monkeypatch.setattr(errors, "_warned", set())
    net = model()
    optimizer = NewtonCG(net.parameters(), **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.step(lambda: closure(net))
    return optimizer.last_step.curvature, found


def penalised(net: nn.Module) -> Tensor:
    return closure_of(net)() + 1e-3 * sum(p.square().sum() for p in net.parameters())


def test_a_penalty_by_hand_turns_auto_to_the_hessian_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    curvature, found = caught(penalised, monkeypatch)
    assert curvature == "hessian"
    (warning,) = found
    assert "cross_entropy" in str(warning.message) and "weight_decay=" in str(warning.message)
    assert "(loss, outputs)" in str(warning.message) and warning.filename == __file__


def test_no_warning_where_the_hessian_was_asked_for_or_no_loss_of_torch_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()

    def with_outputs(net: nn.Module) -> Any:
        z = net(x)
        return F.cross_entropy(z, y) + 1e-3 * sum(p.square().sum() for p in net.parameters()), z

    def by_hand(net: nn.Module) -> Tensor:
        return -net(x).log_softmax(-1).gather(1, y[:, None]).mean()

    assert caught(penalised, monkeypatch, curvature="hessian") == ("hessian", [])
    assert caught(with_outputs, monkeypatch) == ("ggn", [])
    assert caught(by_hand, monkeypatch) == ("hessian", [])
    assert caught(lambda net: -closure_of(net)(), monkeypatch, maximize=True) == ("ggn", [])


# ---------------------------------------------------------------------- a step inside its own closure


@pytest.mark.parametrize("where", ["closure", "curvature_closure"])
@pytest.mark.parametrize("call", ["step", "step without a closure", "update_curvature"])
@pytest.mark.parametrize("maker", [NewtonCG, SophiaH, SophiaG, AdaHessian, KFAC])
def test_a_step_inside_its_own_closure_is_refused(maker: Callable[..., Any], call: str, where: str) -> None:
    net = model()
    optimizer = maker(net.parameters())
    method = call.split()[0]
    if not hasattr(optimizer, method):
        pytest.skip("it has no such method")
    plain, x = closure_of(net), data()[0]

    def curvature() -> Any:
        return gnb_loss(net(x)) if maker is SophiaG else plain()

    optimizer.step(plain, curvature_closure=curvature)
    if "update_interval" in optimizer.defaults:
        optimizer.param_groups[0]["update_interval"] = 1
    before, state = values(net), str(optimizer.state_dict())

    def nested() -> Tensor:
        loss = plain()
        getattr(optimizer, method)(*(() if call == "step without a closure" else (curvature,)))
        return loss

    closures = {"closure": plain, "curvature_closure": curvature} | {where: nested}
    message = rf"^{maker.__name__}\.{method}\(\) was called while a step of the same optimizer runs, by its closure"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(**closures)
    if call != "step" and hasattr(optimizer, "update_curvature"):
        with pytest.raises(RuntimeError, match=message):
            optimizer.update_curvature(nested)
    assert torch.equal(values(net), before) and str(optimizer.state_dict()) == state
    assert all(p.grad is None for p in net.parameters())
    # It was the call, not the optimizer, that was wrong.
    optimizer.step(plain, curvature_closure=curvature)
    assert not torch.equal(values(net), before)


def test_a_step_of_another_optimizer_inside_a_closure_is_none_of_its_business() -> None:
    net, other = model(), model(1)
    inner = NewtonCG(other.parameters())
    start = values(other)

    def closure() -> Tensor:
        inner.step(closure_of(other))
        return closure_of(net)()

    NewtonCG(net.parameters()).step(closure)
    alone = model()
    NewtonCG(alone.parameters()).step(closure_of(alone))
    assert torch.equal(values(net), values(alone)) and not torch.equal(values(other), start)
