"""Preconditioners shorten CG; diagonal estimates are what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sorder
from sorder.optim import NewtonCG
from sorder.optim.preconditioner import hutchinson_diagonal
from tests.optim.problem import closure_of, model, values


def test_hutchinson_estimates_the_diagonal_not_the_row_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    a = a @ a.T
    like = [torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]

    def product(v: Any) -> list[Tensor]:
        flat = a @ torch.cat([t.flatten() for t in v])
        return [flat[:4].view(2, 2), flat[4:]]

    draws = torch.stack(
        [torch.cat([t.flatten() for t in hutchinson_diagonal(product, like, seed)]) for seed in range(2000)]
    )
    standard = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - a.diagonal()).abs() < 4 * standard).all()
    assert ((draws.mean(0) - a.sum(1)).abs() > 10 * standard).any()
    exact = hutchinson_diagonal(lambda v: [3 * t for t in v], like, 0)
    assert all(torch.equal(d, torch.full_like(d, 3.0)) for d in exact)


def test_a_diagonal_preconditioner_shortens_cg_on_a_badly_scaled_problem() -> None:
    scales = torch.logspace(0, 6, 30, dtype=torch.float64)

    def run(preconditioner: Any) -> int:
        p = torch.ones(30, dtype=torch.float64, requires_grad=True)
        optimizer = NewtonCG(
            [p],
            preconditioner=preconditioner,
            preconditioner_power=1.0,
            cg_iterations=200,
            cg_stop="residual",
            cg_tolerance=1e-8,
        )
        optimizer.step(lambda: (scales * p**2).sum())
        return optimizer.last_step.cg_iterations

    assert run("diagonal") <= 2 < run(None)
    assert run(lambda r: [t / scales for t in r]) <= 2


def test_a_preconditioner_may_be_updated_with_every_step() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.dampings: list[float] = []

        def update(self, product: Callable[[list[Tensor]], list[Tensor]], damping: float) -> None:
            self.dampings.append(damping)

        def __call__(self, r: list[Tensor]) -> list[Tensor]:
            return list(r)

    net, recorder = model(), Recorder()
    optimizer = NewtonCG(net.parameters(), preconditioner=recorder)
    used = []
    for _ in range(3):
        optimizer.step(closure_of(net))
        used.append(optimizer.last_step.damping)
    assert recorder.dampings == used
    twin = NewtonCG(model().parameters())
    twin.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="pass it again"):
        twin.step(lambda: sum(p.square().sum() for p in twin.param_groups[0]["params"]))


def test_kfac_trains_a_classifier_with_fewer_cg_iterations() -> None:
    def run(seed: int, with_kfac: bool) -> tuple[int, float]:
        """CG iterations, and by how much ten steps lowered the loss."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(90, 8, dtype=torch.float64, generator=generator)
        y = x[:, :3].square().argmax(1)
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).double()
        optimizer = NewtonCG(
            net.parameters(),
            preconditioner=sorder.KFACPreconditioner(net) if with_kfac else None,
            cg_iterations=100,
            cg_stop="residual",
            cg_tolerance=0.1,
        )
        first, iterations = F.cross_entropy(net(x), y).item(), 0
        for _ in range(10):
            optimizer.step(lambda: F.cross_entropy(net(x), y))
            iterations += optimizer.last_step.cg_iterations
        return iterations, first - F.cross_entropy(net(x), y).item()

    costs = {}
    for with_kfac in (False, True):
        runs = [run(seed, with_kfac) for seed in range(4)]
        assert min(fall for _, fall in runs) > 0.8
        costs[with_kfac] = sum(n for n, _ in runs) / sum(fall for _, fall in runs)
    assert costs[True] < 0.9 * costs[False], costs


@pytest.mark.parametrize("inverse", ["cholesky", "eigen", "ekfac"])
def test_kfac_is_positive_definite_without_damping(inverse: str) -> None:
    net = model()
    # The derivatives at the logits sum to zero, so that their factor is singular.
    kfac = sorder.KFACPreconditioner(net, estimator="type-2", inverse=inverse)
    optimizer = NewtonCG(
        net.parameters(), preconditioner=kfac, damping=0.0, damping_update="constant", cg_iterations=50
    )
    first = closure_of(net)().item()
    for _ in range(3):
        optimizer.step(closure_of(net))
    assert closure_of(net)().item() < first
    rows = []
    for e in torch.eye(values(net).numel(), dtype=torch.float64):
        v = [
            t.view_as(p) for t, p in zip(e.split([p.numel() for p in net.parameters()]), net.parameters(), strict=True)
        ]
        rows.append(torch.cat([t.flatten() for t in kfac(v)]))
    dense = torch.stack(rows)
    assert torch.linalg.eigvalsh(0.5 * (dense + dense.T))[0] > 0.0


@pytest.mark.parametrize("measured", [False, True])
def test_a_step_that_fails_leaves_the_preconditioner_as_it_was(measured: bool) -> None:
    net, twin = model(), model()
    kfac, other = sorder.KFACPreconditioner(net), sorder.KFACPreconditioner(twin)
    optimizer, reference = (NewtonCG(n.parameters(), preconditioner=k) for n, k in ((net, kfac), (twin, other)))
    if measured:
        optimizer.step(closure_of(net))
        reference.step(closure_of(twin))
    before, updates = str(kfac.state_dict()), kfac.factors.updates
    plain = closure_of(net)

    def closure() -> Tensor:
        if kfac.factors.updates > updates and kfac.damping:
            raise KeyboardInterrupt  # in the trials, after the refresh
        return plain()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert str(kfac.state_dict()).replace("'diagonals': {}", "'diagonals': None") == before.replace(
        "'diagonals': {}", "'diagonals': None"
    )
    optimizer.step(plain)
    reference.step(closure_of(twin))
    assert torch.equal(values(net), values(twin))


def test_refresh_is_called_before_update_with_the_point_of_the_curvature() -> None:
    calls: list[Any] = []

    class Recorder:
        def refresh(self, point: Any, *, rank: int, mean: Any) -> None:
            assert mean([torch.ones(2)])[0].tolist() == [1.0, 1.0]
            calls.append(("refresh", rank, point.kind, len(point.product(point.gradient))))

        def update(self, product: Any, damping: float) -> None:
            calls.append("update")

        def __call__(self, r: list[Tensor]) -> list[Tensor]:
            return list(r)

    net = model()
    optimizer = NewtonCG(net.parameters(), preconditioner=Recorder())
    optimizer.step(closure_of(net, 1), curvature_closure=closure_of(net, 2))
    assert calls == [("refresh", 0, "ggn", 4), "update"]


CHOICES = (
    r"^preconditioner must be one of None, 'diagonal', 'squared-gradient', or, as an argument of NewtonCG itself, a "
    r"callable such as sorder.KFACPreconditioner\(model\), got "
)


@pytest.mark.parametrize("value", ["kfac", "custom", 3])
def test_what_is_no_preconditioner_is_told_what_is(value: Any) -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"{CHOICES}{value!r}$"):
        NewtonCG(net.parameters(), preconditioner=value)
    with pytest.raises(ValueError, match=f"{CHOICES}{value!r}$"):
        NewtonCG([{"params": net.parameters(), "preconditioner": value}])


def test_a_callable_is_no_option_of_a_group() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=CHOICES):
        NewtonCG([{"params": net.parameters(), "preconditioner": sorder.KFACPreconditioner(net)}])


def test_a_class_is_no_preconditioner() -> None:
    net = nn.Linear(2, 2)
    message = r"got the class KFACPreconditioner; make one, as in sorder.KFACPreconditioner\(model\)"
    with pytest.raises(TypeError, match=message):
        NewtonCG(net.parameters(), preconditioner=sorder.KFACPreconditioner)


def test_a_group_may_inherit_the_options_of_another() -> None:
    net, more = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = NewtonCG(net.parameters(), preconditioner=sorder.KFACPreconditioner(net))
    optimizer.add_param_group({**optimizer.param_groups[0], "params": list(more.parameters())})
    assert len(optimizer.param_groups) == 2
