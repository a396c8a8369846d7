"""Newton-CG as an optimizer of models: groups, closures, counts, learning."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sorder.func
from sorder.optim import NewtonCG
from tests.cases import relative_error
from tests.optim.problem import closure_of, data, model, values

# ---------------------------------------------------------------------- groups and options


def test_an_ordinary_closure_gets_the_ggn_and_learns() -> None:
    net = model()
    optimizer, closure = NewtonCG(net.parameters()), closure_of(net)
    losses = [optimizer.step(closure).item() for _ in range(15)]
    assert optimizer.last_step.curvature == "ggn"
    assert losses[-1] < 0.05 * losses[0]
    assert optimizer.last_step.loss == losses[-1]


@pytest.mark.parametrize("curvature", ["hessian", "ggn", "fisher"])
def test_the_curvature_asked_for_is_taken(curvature: str) -> None:
    net = model()
    optimizer, closure = NewtonCG(net.parameters(), curvature=curvature), closure_of(net)
    losses = [optimizer.step(closure).item() for _ in range(15)]
    assert optimizer.last_step.curvature == curvature
    assert losses[-1] < 0.3 * losses[0]


def test_groups_scale_their_part_of_the_step() -> None:
    whole, parts = model(), model()
    NewtonCG(whole.parameters(), damping=0.1).step(closure_of(whole))
    start = values(parts)
    first, last = parts[0], parts[2]
    groups = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.0}]
    optimizer = NewtonCG(groups, lr=0.5, damping=0.1, line_search=None)
    optimizer.step(closure_of(parts))
    moved, full = values(parts) - start, values(whole) - start
    size = sum(p.numel() for p in first.parameters())
    torch.testing.assert_close(moved[:size], 0.5 * full[:size])
    assert torch.equal(moved[size:], torch.zeros_like(moved[size:]))
    assert optimizer.last_step.products == optimizer.last_step.cg_iterations + 1  # sᵀBs of the scaled step


def test_schedulers() -> None:
    for make in (
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 0.5**i),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=6, cycle_momentum=False),
    ):
        net = model()
        optimizer = NewtonCG(net.parameters())
        scheduler, closure = make(optimizer), closure_of(net)
        losses, rates = [], []
        for _ in range(5):
            rates.append(optimizer.param_groups[0]["lr"])
            losses.append(optimizer.step(closure).item())
            scheduler.step()
        assert len(set(rates)) == 5 and losses[-1] < losses[0]


def test_damping_can_be_scheduled_through_the_group() -> None:
    net = model()
    optimizer = NewtonCG(net.parameters(), damping_update="constant", damping=1.0)
    for damping in (1.0, 0.3):
        optimizer.param_groups[0]["damping"] = damping
        optimizer.step(closure_of(net))
        assert optimizer.last_step.damping == optimizer.last_step.next_damping == damping


def test_decoupled_weight_decay() -> None:
    plain, decayed = model(), model()
    NewtonCG(plain.parameters(), lr=0.5).step(closure_of(plain))
    NewtonCG(decayed.parameters(), lr=0.5, weight_decay=0.1).step(closure_of(decayed))
    torch.testing.assert_close(values(decayed), 0.95 * values(plain))


class Odd(nn.Module):
    """An unused parameter, a frozen one, one that enters linearly, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(self.embedding(tokens)))) + self.shift


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_unused_frozen_linear_and_tied_parameters_and_a_group_added_later(curvature: str) -> None:
    net, extra = Odd().double(), nn.Parameter(torch.zeros(5, dtype=torch.float64))
    tokens = torch.randint(0, 5, (20,))
    optimizer = NewtonCG(net.parameters(), curvature=curvature, cg_iterations=30)
    frozen, unused = net.frozen.weight.clone(), net.unused.detach().clone()

    def closure() -> Tensor:
        return F.cross_entropy(net(tokens) + extra, (tokens + 1) % 5)

    first = optimizer.step(closure).item()
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    for _ in range(12):
        last = optimizer.step(closure).item()
    assert last < 0.2 * first
    assert torch.equal(net.frozen.weight, frozen) and torch.equal(net.unused.detach(), unused)
    assert extra.abs().sum() > 0 and net.head.weight is net.embedding.weight


def test_a_linear_loss_is_followed() -> None:
    p = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = NewtonCG([p])
    for _ in range(3):
        optimizer.step(lambda: p.sum())
        assert torch.isfinite(p).all() and optimizer.last_step.accepted
    assert p.sum() < 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr must lie in \[0.0, inf\), got -1.0"),
        ({"damping": float("nan")}, "damping must lie in"),
        ({"damping_decrease": 0.0}, "damping_decrease"),
        ({"damping_increase": 0.5}, "damping_increase"),
        ({"trust_radius": 0.0}, "trust_radius"),
        ({"max_step_norm": -1.0}, "max_step_norm"),
        ({"cg_iterations": 0}, "cg_iterations"),
        ({"warm_start": 1.5}, "warm_start"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"curvature": "gauss"}, "curvature must be one of 'auto', 'hessian', 'ggn', 'fisher', got 'gauss'"),
        ({"damping_update": "lm"}, "damping_update must be one of"),
        ({"line_search": "wolfe"}, "line_search must be one of 'armijo', None, got 'wolfe'"),
        ({"preconditioner": "kfac"}, "preconditioner must be one of"),
        ({"mode": "forward"}, "mode must be one of"),
        ({"attention": "flash"}, "attention must be one of"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NewtonCG([torch.ones(2, requires_grad=True)], **options)


def test_a_bad_group_is_refused_before_anything_changes() -> None:
    optimizer = NewtonCG([torch.ones(2, requires_grad=True)])
    with pytest.raises(ValueError, match="lr must lie in"):
        optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)], "lr": -1.0})
    with pytest.raises(ValueError, match="real floating-point"):
        optimizer.add_param_group({"params": [torch.ones(1, dtype=torch.complex64, requires_grad=True)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("options", [{"dampning": 1e-3}, {"cg_iteration": 3}, {"damping": 1e-3}, {"cg_iterations": 7}])
def test_what_concerns_all_parameters_is_refused_in_a_later_group(options: dict[str, Any]) -> None:
    net, message = model(), "parameter group 1 of NewtonCG has"
    first, later = ({"params": net[i].parameters()} for i in (0, 2))
    with pytest.raises(ValueError, match=message):
        NewtonCG([{**first, "cg_iterations": 3}, {**later, **options}])
    optimizer = NewtonCG(net[0].parameters())
    optimizer.step(closure_of(net))
    # What steps have written to the first group is none of a later group's business.
    optimizer.add_param_group({"params": list(net[2].parameters()), "damping": None})
    with pytest.raises(ValueError, match="line_search concerns all"):  # where None is a value like others
        optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)], "line_search": None})
    with pytest.raises(ValueError, match=message.replace("1", "2")):
        optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)], **options})
    assert len(optimizer.param_groups) == 2
    optimizer.step(closure_of(net))


def test_a_closure_is_needed() -> None:
    optimizer = NewtonCG([torch.ones(2, requires_grad=True)])
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()
    frozen = NewtonCG([torch.ones(2)])
    with pytest.raises(ValueError, match="requires a gradient"):
        frozen.step(lambda: torch.ones(()))


# ---------------------------------------------------------------------- closures


def test_closures_of_both_styles_take_the_same_steps() -> None:
    results = []
    x, y = data()
    for style in ("loss", "outputs", "lbfgs", "lightning"):
        net = model()
        optimizer = NewtonCG(net.parameters())

        def closure(net: nn.Module = net, optimizer: NewtonCG = optimizer, style: str = style) -> Any:
            z = net(x)
            loss = F.cross_entropy(z, y)
            if style == "outputs":
                return loss, z
            if style != "loss":
                optimizer.zero_grad()
                loss.backward()
            return loss.detach() if style == "lightning" else loss

        for _ in range(3):
            before = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
            returned = optimizer.step(closure)
            assert not returned.requires_grad and returned.item() == optimizer.last_step.loss
        if style in ("lbfgs", "lightning"):
            for p, g in zip(net.parameters(), before, strict=True):
                torch.testing.assert_close(p.grad, g)
        assert optimizer.last_step.curvature == "ggn"
        results.append(values(net))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-12)


def test_micro_batches_and_a_curvature_batch() -> None:
    x, y = data()
    whole, parts = model(), model()
    one, many = NewtonCG(whole.parameters()), NewtonCG(parts.parameters())
    for _ in range(3):
        one.step(lambda: F.cross_entropy(whole(x), y))
        thirds = [slice(0, 4), slice(4, 8), slice(8, 12)]
        returned = many.step([lambda s=s: F.cross_entropy(parts(x[s]), y[s]) / 3 for s in thirds])
    torch.testing.assert_close(values(parts), values(whole), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(returned.item(), one.last_step.loss)

    seen: list[int] = []

    def count(net: nn.Module, rows: int) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            seen.append(rows)
            return F.cross_entropy(net(x[:rows]), y[:rows])

        return closure

    optimizer = NewtonCG(whole.parameters(), mode="forward-over-reverse")
    optimizer.step(count(whole, 12), curvature_closure=count(whole, 4))
    step = optimizer.last_step
    assert step.curvature == "ggn" and step.products > 1
    assert seen.count(4) == step.products + 1  # the point, and each product
    assert seen.count(12) + seen.count(4) == step.evaluations


def test_products_and_evaluations_are_counted() -> None:
    net, calls = model(), []

    def closure() -> Tensor:
        calls.append(1)
        return closure_of(net)()

    optimizer = NewtonCG(net.parameters(), cg_iterations=5, cg_tolerance=0.0, mode="reverse-over-reverse")
    for i in range(3):
        calls.clear()
        optimizer.step(closure)
        step = optimizer.last_step
        assert step.evaluations == len(calls)
        assert step.cg_iterations == 5
        # The Cauchy step at first, and the warm start's residual later, take one product each.
        assert step.products == 6
        assert len(calls) == 2 + (i == 0) or step.step_length < 1.0


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
def test_dropout_and_batch_norm_are_one_function_through_a_step(mode: str) -> None:
    torch.manual_seed(0)
    net = Noisy().double()
    x, y = data()
    losses: list[float] = []

    def closure() -> Tensor:
        loss = F.cross_entropy(net(x), y)
        losses.append(float(loss.detach()))
        return loss

    twin = copy.deepcopy(net)
    optimizer = NewtonCG(net.parameters(), lr=0.0, mode=mode)
    state = torch.get_rng_state()
    optimizer.step(closure)
    # With lr 0 every run is at the same point but that of the first damping's trial.
    assert sum(abs(loss - losses[0]) > 1e-12 for loss in losses) <= 1
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    twin(x)
    assert torch.equal(torch.get_rng_state(), after)
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)


def test_sorder_checkpoint_inside() -> None:
    plain, wrapped = model(), model()
    block = sorder.func.checkpoint(wrapped)
    x, y = data()
    for mode in ("reverse-over-reverse", "forward-over-reverse"):
        NewtonCG(plain.parameters(), mode=mode).step(lambda: F.cross_entropy(plain(x), y))
        NewtonCG(wrapped.parameters(), mode=mode).step(lambda: F.cross_entropy(block(x), y))
        torch.testing.assert_close(values(wrapped), values(plain), rtol=1e-9, atol=1e-12)


def test_autocast() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    x, y = data()
    optimizer = NewtonCG(net.parameters())

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(net(x.float()), y)

    first = optimizer.step(closure).item()
    for _ in range(10):
        last = optimizer.step(closure).item()
    assert last < 0.3 * first and next(net.parameters()).dtype is torch.float32


def test_a_grad_scaler_scales_the_loss_in_the_closure() -> None:
    """As documented: the steps are the same, loss and λ are scaled, and an overflow changes nothing."""
    nets, (x, y) = [model().float(), model().float()], data()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain, scaled = optimizers = [NewtonCG(net.parameters()) for net in nets]

    def scaled_loss() -> Tensor:
        return scaler.scale(F.cross_entropy(nets[1](x.float()), y))

    for _ in range(3):
        loss = plain.step(lambda: F.cross_entropy(nets[0](x.float()), y))
        assert float(scaled.step(scaled_loss)) == pytest.approx(1024.0 * float(loss), rel=1e-4)
        first, second = (o.last_step for o in optimizers)
        assert first is not None and second is not None and second.curvature == first.curvature == "ggn"
        assert second.damping == pytest.approx(1024.0 * first.damping, rel=1e-3)
    assert relative_error(values(nets[1]), values(nets[0])) < 1e-4
    with pytest.raises((RuntimeError, AssertionError)):
        scaler.step(scaled, scaled_loss)
    scaler.update(3e38)
    before, start = str(scaled.state_dict()), values(nets[1])
    with pytest.raises(FloatingPointError):
        scaled.step(lambda: 100.0 * scaled_loss())
    assert str(scaled.state_dict()) == before and torch.equal(values(nets[1]), start)
    scaler.update(1024.0)
    assert float(scaled.step(scaled_loss)) < 1024.0 * float(loss)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_memory_is_flat_without_the_garbage_collector(curvature: str) -> None:
    net = model()
    optimizer, closure = NewtonCG(net.parameters(), curvature=curvature, preconditioner="diagonal"), closure_of(net)

    def live() -> int:
        return sum(type(o) in (Tensor, nn.Parameter) for o in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            optimizer.step(closure)
        early = live()
        for _ in range(27):
            optimizer.step(closure)
        assert live() == early
    finally:
        gc.enable()
