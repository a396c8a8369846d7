"""State dicts, copies, resumption."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sorder.optim import AdaHessian, NewtonCG, SophiaG, SophiaH
from tests.optim.problem import closure_of, model, values

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "diagonal": {"preconditioner": "diagonal"},
    "squared gradient": {"preconditioner": "squared-gradient"},
    "trust region": {"damping_update": "trust-region"},
    "fisher": {"curvature": "fisher"},
    "eisenstat-walker": {"cg_stop": "eisenstat-walker", "curvature": "hessian"},
}


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_a_run_resumes_bit_identically(name: str) -> None:
    options = CONFIGURATIONS[name]
    net = model()
    optimizer = NewtonCG(net.parameters(), seed=5, **options)
    for i in range(3):
        optimizer.step(closure_of(net, i))
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for i in range(3, 6):
        optimizer.step(closure_of(net, i))

    resumed = model(seed=9)
    other = NewtonCG(resumed.parameters(), lr=0.1, damping=7.0, cg_iterations=2, seed=1, curvature="hessian")
    other.step(closure_of(resumed))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for i in range(3, 6):
        other.step(closure_of(resumed, i))
    assert torch.equal(values(resumed), values(net))
    assert other.last_step == optimizer.last_step


def test_a_state_dict_is_a_snapshot() -> None:
    net = model()
    optimizer = NewtonCG(net.parameters(), preconditioner="diagonal")
    optimizer.step(closure_of(net))
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    optimizer.step(closure_of(net))
    assert str(saved) == str(before)


def test_state_of_bfloat16_parameters_survives_in_float32() -> None:
    p = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    optimizer = NewtonCG([p])
    optimizer.step(lambda: p.float().pow(4).sum())
    q = p.detach().clone().requires_grad_()
    other = NewtonCG([q])
    other.load_state_dict(optimizer.state_dict())
    assert other.state[q]["direction"].dtype is torch.float32
    assert torch.equal(other.state[q]["direction"], optimizer.state[p]["direction"])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_continue_alike(clone: Callable[[Any], Any]) -> None:
    net = model()
    optimizer = NewtonCG(net.parameters(), preconditioner=scale_by_two)
    optimizer.step(closure_of(net))
    both = clone((net, optimizer))
    for n, o in ((net, optimizer), both):
        o.step(closure_of(n, 2))
    assert torch.equal(values(both[0]), values(net))
    assert both[1].last_step == optimizer.last_step and both[0] is not net


def scale_by_two(r: list[Tensor]) -> list[Tensor]:
    return [2.0 * t for t in r]


# ---------------------------------------------------------------------- what is refused


def saved_by(make: Callable[..., Any], groups: int = 1, steps: int = 1, width: int = 4) -> dict[str, Any]:
    """State of an optimizer of a small problem."""
    params = [torch.full((width,), 0.5 + i, requires_grad=True) for i in range(4)]
    size = 4 // groups
    optimizer = make([{"params": params[i : i + size]} for i in range(0, 4, size)])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p**4).sum() for p in params)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return optimizer.state_dict()


def without(state: dict[str, Any], *path: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    inner: Any = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


def with_option(state: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    state["param_groups"][0][name] = value
    return state


FOREIGN: dict[str, tuple[Callable[[], Any], str]] = {
    "AdamW": (lambda: saved_by(torch.optim.AdamW), "its group 0 lacks .* and [0-9]+ more: is it another optimizer's"),
    "SGD": (lambda: saved_by(lambda p: torch.optim.SGD(p, 0.1)), "its group 0 lacks"),
    "not a dict": (lambda: [1], "must have the keys 'state' and 'param_groups', got list"),
    "a model's": (lambda: {"weight": torch.ones(2)}, r"'param_groups', got the keys \['weight'\]"),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **FOREIGN,
    "SophiaH": (lambda: saved_by(SophiaH), "must be that of NewtonCG, but its state has an entry 'sophia_h'"),
    "more groups": (lambda: saved_by(NewtonCG, groups=2), "must have 1 parameter groups as this NewtonCG, got 2"),
    "fewer parameters": (
        lambda: without(saved_by(NewtonCG), "param_groups", 0, "params", 0),
        "group 0 of state_dict must have 4 parameters, got 3",
    ),
    "no damping": (lambda: without(saved_by(NewtonCG), "param_groups", 0, "damping"), "its group 0 lacks damping:"),
    "no params": (lambda: without(saved_by(NewtonCG), "param_groups", 0, "params"), "its group 0 lacks params:"),
    "no entry of its own": (
        lambda: without(saved_by(NewtonCG), "state", "newton_cg"),
        "its state lacks the entry 'newton_cg'",
    ),
    "a foreign entry": (
        lambda: {**saved_by(NewtonCG), "state": {"another": {}, "newton_cg": {}}},
        "its state has an entry 'another'",
    ),
    "an option out of range": (
        lambda: with_option(saved_by(NewtonCG), "damping", -1.0),
        r"group 0 of state_dict: damping must lie in \[0.0, inf\) or be None, got -1.0",
    ),
    "another model's": (
        lambda: saved_by(NewtonCG, width=3),
        r"direction of parameter 0 must have the parameter's shape \(4,\), got \(3,\)",
    ),
}


def assert_refused(make: Callable[..., Any], state: Any, message: str) -> None:
    params = [torch.full((4,), 0.5 + i, requires_grad=True) for i in range(4)]
    optimizer = make(params)
    optimizer.step(lambda: sum((p**4).sum() for p in params))
    before, options = copy.deepcopy(optimizer.state_dict()), dict(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == str(before)
    assert optimizer.param_groups[0].keys() == options.keys()
    optimizer.step(lambda: sum((p**4).sum() for p in params))


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_is_not_of_this_optimizer_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    assert_refused(NewtonCG, make(), message)


@pytest.mark.parametrize("make", [SophiaH, AdaHessian])
@pytest.mark.parametrize("case", FOREIGN)
def test_the_diagonal_family_refuses_other_states_too(make: Callable[..., Any], case: str) -> None:
    state, message = FOREIGN[case]
    assert_refused(make, state(), message)


@pytest.mark.parametrize("make", [NewtonCG, SophiaH, AdaHessian, SophiaG], ids=lambda m: m.__name__)
def test_a_state_from_before_the_first_step_and_one_with_a_schedulers_entries_load(make: Callable[..., Any]) -> None:
    net = model()
    optimizer = make(net.parameters())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=6, cycle_momentum=False)
    other = make(net.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]
