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

from sorder.optim import NewtonCG
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
