"""K-FAC as an optimizer: the shared contract, and what is its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.kfac import KFACPreconditioner
from sorder.optim.kfac import KFAC
from sorder.optim.kfac_model import quadratic_step
from tests.cases import Transformer, dense_ggn, flatten, make_problem, relative_error, unflatten
from tests.optim.problem import closure_of, data, model, values
from tests.optim.test_contract import TestContract as Contract
from tests.optim.test_contract import step

MAKERS: dict[str, Callable[..., Any]] = {
    "quadratic": partial(KFAC, estimator="type-2"),
    "kl": partial(KFAC, step_rule="kl", kl_bound=0.05, factor_interval=2, estimator="type-2"),
    "ekfac": partial(KFAC, inverse="ekfac", factor_interval=2, inverse_interval=3, estimator="type-2"),
    "sampled": KFAC,
}


class _Inherited:
    locals().update({k: v for k, v in vars(Contract).items() if k.startswith("test_")})


@pytest.mark.parametrize("name", list(MAKERS))
class TestContract(_Inherited):
    """The shared contract; what rests on another optimizer's state, or on a loss without labels, is replaced."""

    @pytest.fixture
    def make(self, name: str) -> Callable[..., Any]:
        return MAKERS[name]

    def test_micro_batches_are_one_large_batch(self, make: Callable[..., Any], name: str) -> None:
        if name == "sampled":
            pytest.skip("other labels are sampled for other batches")
        x, y = data()
        nets = [model(), model()]
        for net, parts in zip(nets, ([slice(0, 12)], [slice(0, 5), slice(5, 12)]), strict=True):
            optimizer = make(net.parameters())

            def loss(rows: slice, net: nn.Module = net) -> Tensor:
                return F.cross_entropy(net(x[rows]), y[rows], reduction="sum") / 12

            for _ in range(4):
                optimizer.step([partial(loss, rows) for rows in parts])
        assert relative_error(values(nets[1]), values(nets[0])) < 1e-9

    def test_a_gradient_clipped_in_the_closure_is_the_one_that_is_used(
        self, make: Callable[..., Any], name: str
    ) -> None:
        if name == "kl":
            Contract.test_a_gradient_clipped_in_the_closure_is_the_one_that_is_used(self, make)  # type: ignore[arg-type]
            return
        net = model()
        optimizer = make(net.parameters())
        before, (x, y) = values(net), data()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            return loss

        with pytest.raises(ValueError, match=r"changed \.grad"):
            optimizer.step(closure)
        assert torch.equal(values(net), before) and not optimizer.state

    def test_grad_scaler(self, make: Callable[..., Any], name: str) -> None:
        """Under a scale of 1024 steps and factors are those without; an overflow changes nothing."""
        x, y = data()
        x, nets = x.float(), [model().float(), model().float()]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if name != "kl":
            net = nets[0]
            scaler.scale(F.cross_entropy(net(x), y)).backward()
            with pytest.raises(TypeError, match="needs a closure"):
                scaler.step(make(net.parameters()))
            return
        optimizers = [make(net.parameters()) for net in nets]
        for scaled, net, optimizer in zip((False, True), nets, optimizers, strict=True):
            for number in range(4):
                optimizer.zero_grad()

                def loss(net: nn.Module = net, scaled: bool = scaled) -> Tensor:
                    value = F.cross_entropy(net(x), y)
                    return scaler.scale(value) if scaled else value

                if optimizer.curvature_due:
                    optimizer.update_curvature(loss, loss_scale=scaler.get_scale() if scaled else 1.0)
                loss().backward()
                if not scaled:
                    optimizer.step()
                    continue
                if number in (1, 2):
                    before, start = copy.deepcopy(optimizer.state_dict()), values(net)
                    net[0].weight.grad[0, 0] = float("inf")
                    scaler.step(optimizer)
                    assert torch.equal(values(net), start) and str(optimizer.state_dict()) == str(before)
                    scaler.update(1024.0)
                    optimizer.zero_grad()
                    loss().backward()
                scaler.step(optimizer)
                scaler.update(1024.0)
        assert relative_error(values(nets[1]), values(nets[0])) < 1e-5
        factors = [[t for n in (0, 1) for pair in o._factors().terms(n) for t in pair] for o in optimizers]
        assert relative_error(factors[1], factors[0]) < 1e-4

    def test_zero_curvature_is_no_obstacle(self, make: Callable[..., Any]) -> None:
        """A loss whose rows all weigh nothing but one, dead units, an unused parameter, and a group added later."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        with torch.no_grad():
            net[0].bias[:3] = -100.0
        unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = make([*net[0].parameters(), unused])
        x, y = data()
        y[1:] = -100
        losses = [float(optimizer.step(lambda: F.cross_entropy(net(x), y))) for _ in range(2)]
        optimizer.add_param_group({"params": list(net[2].parameters())})
        losses += [float(optimizer.step(lambda: F.cross_entropy(net(x), y))) for _ in range(2)]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
        assert values(net).isfinite().all() and (unused == 1.0).all()


def test_length_and_momentum_minimise_the_exact_quadratic() -> None:
    """No other α and μ do better, on a dense matrix; the second direction may be parallel, or missing."""
    problem = make_problem("mlp")
    b, params = dense_ggn(problem), problem.params
    g, d, last = (torch.randn(len(b), dtype=torch.float64) for _ in range(3))
    damping = 0.1

    def parts(v: Tensor) -> list[Tensor]:
        return list(unflatten(v, params).values())

    def model_value(s: Tensor) -> float:
        return float(g @ s + 0.5 * s @ b @ s + 0.5 * damping * s @ s)

    for second in (None, last, 3.0 * d):
        calls = []

        def product(v: Any, calls: list[int] = calls) -> list[Tensor]:
            calls.append(1)
            return parts(b @ flatten(v))

        found = quadratic_step(product, parts(g), parts(d), None if second is None else parts(second), damping)
        s = flatten(found.step)
        assert len(calls) == (1 if second is None else 2)
        assert found.slope == pytest.approx(float(g @ s)) and found.quadratic == pytest.approx(float(s @ b @ s))
        for direction in (d, d if second is None else second):
            for change in (-1e-3, 1e-3):
                assert model_value(s) <= model_value(s + change * direction) + 1e-12
        assert (found.momentum == 0.0) == (second is not last)


def test_one_step_solves_a_linear_least_squares_problem() -> None:
    """One linear layer with square loss: K-FAC is the exact GGN, and the step is Newton's."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x, y = torch.randn(40, 4).double(), torch.randn(40, 3).double()
    optimizer = KFAC(net, estimator="type-2", inverse="eigen", damping=1e-12)
    optimizer.step(lambda: F.mse_loss(net(x), y))
    best = torch.linalg.lstsq(F.pad(x, (0, 1), value=1.0), y).solution
    assert relative_error(torch.cat([net.weight.T, net.bias[None]]), best) < 1e-8
    assert optimizer.last_step.learning_rate == pytest.approx(1.0, rel=1e-8)
    assert optimizer.last_step.products == 1 and optimizer.last_step.reduction_ratio == pytest.approx(1.0)


@pytest.mark.parametrize(("momentum", "products"), [(0.9, 2), (0.0, 1)])
def test_products_and_evaluations_are_counted(momentum: float, products: int) -> None:
    net = model()
    optimizer = KFAC(net.parameters(), momentum=momentum, damping=0.1, damping_interval=3, factor_interval=2)
    seen = []
    for i in range(6):
        step(optimizer, net, i)
        seen.append(optimizer.last_step)
    assert [s.products for s in seen] == [1] + [products] * 5
    # The closure runs once, once more for factors (steps 1, 3, 5) and once for the damping (steps 1 and 4).
    assert [s.evaluations for s in seen] == [3, 1, 2, 2, 2, 1]
    assert [s.curvature_updated for s in seen] == [True, False] * 3
    assert [s.new_loss == s.new_loss for s in seen] == [True, False, False] * 2


def test_a_damping_is_adapted_and_a_bad_step_shortened_or_taken_back() -> None:
    net = model()
    optimizer = KFAC(net.parameters(), damping=1.0, estimator="type-2")
    step(optimizer, net)
    assert optimizer.last_step.reduction_ratio > 0.75 and optimizer.param_groups[0]["damping"] == 0.5
    for lr, accepted in ((1e4, True), (1e30, False)):
        bad, before = KFAC(net.parameters(), lr=lr, damping=1e-6), values(net)
        loss = float(step(bad, net).detach())
        last = bad.last_step
        assert last.accepted == accepted and last.step_length < 0.1 and last.reduction_ratio < 0.25
        assert bad.param_groups[0]["damping"] == last.next_damping >= 1.5e-6
        if accepted:
            assert last.new_loss == pytest.approx(float(closure_of(net)().detach()), rel=1e-12) and last.new_loss < loss
            assert last.step_norm == pytest.approx(float((values(net) - before).norm()), rel=1e-9)
        else:
            assert torch.equal(values(net), before) and last.step_norm == 0.0 and last.new_loss == loss
        assert torch.equal(torch.cat([bad.state[p]["last_step"].flatten() for p in net.parameters()]) * lr != 0,
                           values(net) != before)  # fmt: skip


def test_no_step_raises_the_loss_of_its_batch_from_a_transformers_start() -> None:
    """Where the curvature is tiny, and the quadratic says nothing of what lies a step away."""
    torch.manual_seed(0)
    net = Transformer()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.05)
    optimizer, generator, lengths = KFAC(net), torch.Generator().manual_seed(0), []
    for _ in range(6):
        tokens, y = (torch.randint(0, 5, (4, 4), generator=generator) for _ in range(2))

        def loss(tokens: Tensor = tokens, y: Tensor = y) -> Tensor:
            return F.cross_entropy(net(tokens).flatten(0, 1), y.flatten())

        before = float(optimizer.step(loss))
        assert float(loss().detach()) <= before
        lengths.append(optimizer.last_step.step_length)
    assert min(lengths) < 1.0, "a step had to be shortened"


@pytest.mark.parametrize("rule", ["quadratic", "kl"])
def test_a_curvature_closure_has_factors_and_products_alone(rule: str) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4).double(), *model())
    once, (x, y) = copy.deepcopy(net), data(1)
    few, labels = data(2, rows=5)
    optimizer = KFAC(net, step_rule=rule, damping=0.1, estimator="type-2", momentum=0.0, kl_bound=None)
    kfac = KFACPreconditioner(once, estimator="type-2", least_damping=0.0)
    kfac.update_factors(lambda: F.cross_entropy(once(few), labels))
    kfac.update(None, 0.1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)

    def small() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(few), labels)
        loss.backward()
        return loss

    loss = F.cross_entropy(once(x), y)
    natural = kfac(torch.autograd.grad(loss, list(once.parameters())))
    before = values(net)
    assert float(optimizer.step(lambda: F.cross_entropy(net(x), y), curvature_closure=small)) == float(loss.detach())
    length = optimizer.last_step.learning_rate * optimizer.last_step.step_length
    assert relative_error(before - values(net), length * flatten(natural)) < 1e-9
    assert all((p.grad == 1.0).all() for p in net.parameters())
    for a, b in zip(net.buffers(), once.buffers(), strict=True):
        assert torch.equal(a, b), "the statistics are those of one run on the loss's batch"


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_a_scaled_loss_has_the_same_iterates(scale: float) -> None:
    nets = [model(), model()]
    for net, factor in zip(nets, (1.0, scale), strict=True):
        optimizer = KFAC(net.parameters(), estimator="type-2")
        for i in range(5):
            closure = closure_of(net, i)
            optimizer.step(lambda closure=closure, factor=factor: factor * closure())
    assert relative_error(values(nets[1]), values(nets[0])) < 1e-6


def test_the_divergence_of_a_step_is_bounded() -> None:
    net = model()
    optimizer = KFAC(net, step_rule="kl", kl_bound=1e-4, lr=0.5, damping=1e-3, momentum=0.0, estimator="type-2")
    kfac = KFACPreconditioner(net, estimator="type-2", least_damping=0.0)
    kfac.update_factors(closure_of(net))
    kfac.update(None, 1e-3)
    gradient = torch.autograd.grad(closure_of(net)(), list(net.parameters()))
    natural, before = kfac(gradient), values(net)
    optimizer.step(closure_of(net))
    moved = before - values(net)
    share = optimizer.last_step.learning_rate
    assert share < 1.0 and relative_error(moved, 0.5 * share * flatten(natural)) < 1e-12
    assert (0.5 * share) ** 2 * float(flatten(natural) @ flatten(gradient)) == pytest.approx(1e-4)
    assert optimizer.last_step.products == 0


def test_plain_steps_between_updates_and_a_clear_error_without_a_closure() -> None:
    net, other = model(), model()
    closed, plain = (KFAC(n, step_rule="kl", factor_interval=3, damping=0.1) for n in (net, other))
    for _ in range(7):
        closed.step(closure_of(net))
        plain.zero_grad()
        closure_of(other)().backward()
        if plain.curvature_due:
            with pytest.raises(TypeError, match=r"update_curvature\(closure\)"):
                plain.step()
            plain.update_curvature(closure_of(other))
        plain.step()
    assert relative_error(values(other), values(net)) < 1e-12
    with pytest.raises(TypeError, match="needs a closure"):
        KFAC(net).step()


@pytest.mark.parametrize("options", [{}, {"step_rule": "kl"}, {"damping": 1.0, "step_rule": "kl"}], ids=str)
@pytest.mark.parametrize("call", ["step", "curvature_closure", "update_curvature"])
@pytest.mark.parametrize("outputs", [False, True], ids=["loss", "loss and outputs"])
def test_a_loss_without_labels_is_refused_at_once(outputs: bool, call: str, options: dict[str, Any]) -> None:
    net, (x, _) = model(), data()
    optimizer = KFAC(net, **options)

    def closure() -> Any:
        z = net(x)
        return (z.logsumexp(0).sum(), z) if outputs else z.logsumexp(0).sum()

    before = values(net)
    with pytest.raises(
        ValueError, match=r"^K-FAC needs a loss that defines a distribution of labels: the closure must"
    ):
        if call == "update_curvature":
            optimizer.update_curvature(closure)
        else:
            optimizer.step(closure if call == "step" else closure_of(net), curvature_closure=closure)
    assert torch.equal(values(net), before) and not optimizer.state


def test_maximize_where_the_closure_calls_backward() -> None:
    for rule in ("quadratic", "kl"):
        nets = [model(), model()]
        for net, maximize in zip(nets, (False, True), strict=True):
            optimizer = KFAC(net, maximize=maximize, step_rule=rule, damping=0.1)
            for i in range(3):
                step(optimizer, net, i, style="backward", sign=-1.0 if maximize else 1.0)
        assert relative_error(values(nets[1]), values(nets[0])) < 1e-9


def test_the_report_names_parameters_and_what_has_no_block() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 3)).double()
    optimizer = KFAC(net)
    assert "no factors yet" in optimizer.report()
    with pytest.warns(RuntimeWarning, match=r"only the diagonal of the curvature is estimated for 1\.weight"):
        optimizer.step(closure_of(net))
    lines = {line.split()[0]: line for line in optimizer.report().splitlines()}
    assert "K-FAC 3 ⊗ 5" in lines["2.weight"] and "fallback: used by prelu" in lines["1.weight"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"step_rule": "newton"}, "step_rule must be one of 'quadratic', 'kl', got 'newton'"),
        ({"damping": 0.0}, r"damping must lie in \(0.0, inf\), got 0.0"),
        ({"damping_interval": 0}, "damping_interval must be an integer of at least 1, got 0"),
        ({"damping_decrease": 2.0}, "damping_decrease must lie in"),
        ({"least_damping": -1.0}, r"least_damping must lie in \[0.0, inf\), got -1.0"),
        ({"momentum": 1.0}, r"momentum must lie in \[0.0, 1.0\), got 1.0"),
        ({"kl_bound": -1.0}, "kl_bound must lie in"),
        ({"lr": None}, r"lr must lie in \[0.0, inf\), got None"),
        ({"seed": 0.5}, "seed must be an integer, got 0.5"),
        ({"maximize": None}, "maximize must be True or False, got None"),
        ({"mode": "forward"}, "mode must be one of 'auto'"),
        ({"inverse": "lu"}, "inverse must be one of"),
    ],
)
def test_options_are_checked(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFAC(model(), **option)


@pytest.mark.parametrize("method", ["step", "update_curvature"])
def test_a_step_inside_its_own_closure_is_refused(method: str) -> None:
    net = model()
    optimizer, plain, before = KFAC(net), closure_of(net), values(net)

    def nested() -> Tensor:
        optimizer.step(plain)
        return plain()

    with pytest.raises(RuntimeError, match="while a step of the same optimizer runs"):
        getattr(optimizer, method)(nested)
    assert torch.equal(values(net), before) and not optimizer.state
    optimizer.step(plain)
    assert not torch.equal(values(net), before)


def test_parameters_on_the_meta_device_are_refused() -> None:
    with pytest.raises(ValueError, match="meta device"):
        KFAC(nn.Linear(2, 2, device="meta"))
