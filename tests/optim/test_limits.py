"""Options at the ends of their range, and parameters that cannot be stepped, are named before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sorder.optim import AdaHessian, NewtonCG, SophiaG, SophiaH

LIMITS = {torch.bfloat16: 2.6e15, torch.float32: 2.6e15, torch.float64: 2.0e123}


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.linspace(0.5, 1.5, 3).to(dtype))


def made(params: list[nn.Parameter], **options: Any) -> Any:
    return NewtonCG(params, **options)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("value", [1.01, 1e20, 1e300])
@pytest.mark.parametrize("name", ["lr", "damping", "trust_radius", "weight_decay"])
def test_a_factor_too_large_for_the_dtype_is_named(name: str, value: float, dtype: torch.dtype) -> None:
    value = max(value, 1.01 * LIMITS[dtype])
    rule = "trust-region" if name == "trust_radius" else "levenberg-marquardt"
    message = rf"^{name} must be at most 2(\.6)?e\+\d+ for parameters of {dtype}, got "
    with pytest.raises(ValueError, match=message):
        made([parameter(dtype)], damping_update=rule, **{name: value})
    # Options may be written later, and in a group of its own.
    p, q = parameter(dtype), parameter(dtype)
    optimizer = NewtonCG([p, q], damping_update=rule)
    optimizer.param_groups[0][name] = value
    before = p.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step(lambda: (p**4).sum() + (q**4).sum())
    assert torch.equal(p, before) and not optimizer.state
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(dtype)], name: value})
    assert len(optimizer.param_groups) == 1


def test_the_narrowest_dtype_of_all_groups_bounds_the_damping() -> None:
    wide, narrow = parameter(torch.float64), parameter()
    optimizer = NewtonCG([wide], damping=1e30)
    optimizer.add_param_group({"params": [narrow], "damping": None})
    message = r"damping must be at most 2\.6e\+15 for .*float32, torch\.float64, got 1e\+30"
    with pytest.raises(ValueError, match=message):
        optimizer.step(lambda: (wide**4).sum() + (narrow**4).sum())


def test_a_number_beyond_floats_is_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"^damping must lie in \[0.0, inf\) or be None, got 1000"):
        NewtonCG([parameter()], damping=10**400)


@pytest.mark.parametrize("loss", [lambda p: (p**4).sum(), lambda p: -p.square().sum(), lambda p: p.exp().sum()])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("damping", {}),
        ("damping", {"damping_update": "constant"}),
        ("damping", {"damping_increase": 1e300}),
        ("damping", {"preconditioner": "diagonal"}),
        ("trust_radius", {"damping_update": "trust-region"}),
        ("lr", {}),
        ("weight_decay", {}),
    ],
)
def test_the_largest_factors_give_steps(
    name: str, options: dict[str, Any], dtype: torch.dtype, loss: Callable[[Tensor], Tensor]
) -> None:
    p = parameter(dtype)
    optimizer = made([p], curvature="hessian", **options, **{name: 0.99 * LIMITS[dtype]})
    for _ in range(2):
        # One that has no minimum is followed to where it is not finite.
        if float(p.detach().abs().max()) > 1e15:
            break
        optimizer.step(lambda: loss(p))
        assert bool(p.isfinite().all()) and optimizer.last_step.next_damping <= 1.02 * LIMITS[dtype]


def test_damping_and_radius_do_not_grow_beyond_what_the_next_step_takes() -> None:
    p, q = parameter(), parameter()
    start = p.detach().clone()
    rejected = made([p], curvature="hessian", damping=2.5e15, line_search=None)
    grown = made([q], damping_update="trust-region", trust_radius=2.5e15)
    for _ in range(2):
        rejected.step(lambda: 1e10 * p.square().sum() + (0.0 if torch.equal(p, start) else torch.inf))
        assert not rejected.last_step.accepted
        grown.step(lambda: q.sum())
        assert grown.last_step.accepted
    assert 2.5e15 < rejected.param_groups[0]["damping"] < 2.7e15
    assert 2.5e15 < grown.param_groups[0]["trust_radius"] < 2.7e15


@pytest.mark.parametrize("maker", [NewtonCG, SophiaH, SophiaG, AdaHessian])
def test_parameters_on_the_meta_device_are_named(maker: Callable[..., Any]) -> None:
    meta = nn.Parameter(torch.ones(2, 3, device="meta"))
    with pytest.raises(ValueError, match=r"number 1 \(shape \(2, 3\)\) is on the meta device: .*to_empty"):
        maker([parameter(), meta])
