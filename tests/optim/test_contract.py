"""What every optimizer keeps to, whatever its algorithm."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.optim import KFAC, AdaHessian, NewtonCG, SophiaG, SophiaH, gnb_loss
from tests.optim.problem import data, model, values

# With gammas that leave many coordinates unclipped, so that the curvature shows in the step.
MAKERS: dict[str, Callable[..., Any]] = {
    "NewtonCG": NewtonCG,
    "SophiaH": partial(SophiaH, lr=0.05, gamma=30.0, update_interval=3, weight_decay=0.01),
    "SophiaG": partial(SophiaG, lr=0.05, gamma=30.0, update_interval=3, weight_decay=0.01),
    "AdaHessian": partial(AdaHessian, lr=0.05, update_interval=2),
}


def step(optimizer: Any, net: nn.Module, seed: int = 1, style: str = "loss", sign: float = 1.0) -> Any:
    """One step on a batch, by a closure that returns the loss only, or that calls backward itself."""
    x, y = data(seed)

    def closure() -> Tensor:
        if style == "loss":
            return sign * F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss = sign * F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    if isinstance(optimizer, SophiaG):
        return optimizer.step(closure, curvature_closure=lambda: gnb_loss(net(x)))
    return optimizer.step(closure)


def refuses(optimizer: Any, state: dict[str, Any], message: str) -> None:
    """It refuses the state, and is as before."""
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == before


class Widened:
    """A model of float32, called as one of float64 is."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, x: Tensor) -> Tensor:
        return self.net(x.float()).double()


def is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


class Fails(nn.Module):
    """A layer that raises, or spoils the value or the gradient, when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()
        self.dropout = nn.Dropout(0.1)
        self.failure: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(x))
        if self.failure == "nan":
            return x * float("nan")
        if self.failure is not None:
            raise self.failure
        return x


@pytest.mark.parametrize("name", list(MAKERS))
class TestContract:
    @pytest.fixture
    def make(self, name: str) -> Callable[..., Any]:
        return MAKERS[name]

    @pytest.mark.parametrize("style", ["loss", "backward"])
    def test_it_learns(self, make: Callable[..., Any], style: str) -> None:
        net = model()
        optimizer = make(net.parameters())
        losses = [float(step(optimizer, net, style=style)) for _ in range(30)]
        assert losses[-1] < 0.6 * losses[0]

    def test_both_styles_of_closure_take_the_same_step(self, make: Callable[..., Any]) -> None:
        nets = [model(), model()]
        for net, style in zip(nets, ("loss", "backward"), strict=True):
            optimizer = make(net.parameters())
            for i in range(4):
                step(optimizer, net, i, style)
        torch.testing.assert_close(values(nets[0]), values(nets[1]), rtol=1e-9, atol=1e-9)

    def test_groups_have_their_own_learning_rate(self, make: Callable[..., Any]) -> None:
        net = model()
        before = copy.deepcopy(net)
        optimizer = make([{"params": net[0].parameters(), "lr": 0.0}, {"params": net[2].parameters()}])
        step(optimizer, net)
        assert torch.equal(values(net[0]), values(before[0]))
        assert not torch.equal(values(net[2]), values(before[2]))

    @pytest.mark.parametrize(
        "schedule",
        [
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 0.5 * float(i < 2)),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 2),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(
                o, 0.05, total_steps=3, cycle_momentum="betas" in o.defaults, final_div_factor=float("inf")
            ),
        ],
        ids=["lambda", "cosine", "one cycle"],
    )
    def test_schedulers(self, make: Callable[..., Any], schedule: Callable[[Any], Any]) -> None:
        """They move lr, and where it has come to zero the parameters stay."""
        net = model()
        optimizer = make(net.parameters())
        scheduler = schedule(optimizer)
        moved = []
        for _ in range(3):
            before = values(net)
            step(optimizer, net)
            moved.append(not torch.equal(values(net), before))
            if len(moved) < 3:
                scheduler.step()
        assert moved == [True, True, False]

    def test_a_group_added_later_takes_part_at_once(self, make: Callable[..., Any]) -> None:
        net = model()
        optimizer = make(net[0].parameters())
        for _ in range(2):
            step(optimizer, net)
        before = values(net[2])
        optimizer.add_param_group({"params": list(net[2].parameters())})
        step(optimizer, net)
        assert (values(net[2]) != before).all()

    def test_a_run_resumes_bit_identically(self, make: Callable[..., Any]) -> None:
        net = model()
        optimizer = make(net.parameters(), seed=5)
        for i in range(2):
            step(optimizer, net, i)
        file = io.BytesIO()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        for i in range(2, 6):
            step(optimizer, net, i)
        resumed = model(seed=9)
        other = make(resumed.parameters(), lr=0.3, weight_decay=0.5, seed=1)
        step(other, resumed)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        for i in range(2, 6):
            step(other, resumed, i)
        assert torch.equal(values(resumed), values(net))

    @pytest.mark.parametrize("steps", [0, 2])
    def test_the_state_of_another_optimizer_is_refused(self, make: Callable[..., Any], steps: int) -> None:
        net = model()
        optimizer = make(net.parameters())
        message = f"state_dict must be that of {type(optimizer).__name__}, but its .* another"
        for maker in (*MAKERS.values(), KFAC, torch.optim.AdamW):
            foreign = maker(net.parameters())
            if type(foreign) is not type(optimizer):
                for _ in range(steps):
                    step(foreign, net)
                refuses(optimizer, foreign.state_dict(), message)
        optimizer.load_state_dict(make(net.parameters()).state_dict())

    def test_the_seed_matters_to_the_state_alone(self, make: Callable[..., Any]) -> None:
        net = model()
        optimizer = make(net.parameters())
        before = torch.get_rng_state()
        for _ in range(3):
            step(optimizer, net)
        assert torch.equal(torch.get_rng_state(), before)

    def test_maximize(self, make: Callable[..., Any]) -> None:
        nets = [model(), model()]
        for net, options, sign in zip(nets, ({}, {"maximize": True}), (1.0, -1.0), strict=True):
            optimizer = make(net.parameters(), **options)
            for _ in range(4):
                step(optimizer, net, sign=sign)
        torch.testing.assert_close(values(nets[0]), values(nets[1]), rtol=1e-9, atol=1e-9)

    def test_frozen_and_unused_parameters_stay(self, make: Callable[..., Any]) -> None:
        net = model()
        net.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        net.forward = lambda x: net[2](net[1](net[0](x)))  # type: ignore[method-assign]
        net[0].bias.requires_grad_(False)
        optimizer = make(net.parameters(), weight_decay=0.0)
        frozen, start = net[0].bias.clone(), values(net[2])
        for i in range(4):
            step(optimizer, net, i, style="loss" if i % 2 else "backward")
        assert torch.equal(net[0].bias, frozen) and (net.unused == 1).all()
        assert not torch.equal(values(net[2]), start)

    def test_tied_parameters_are_one(self, make: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        weight = nn.Parameter(0.3 * torch.randn(4, 4, dtype=torch.float64))
        head = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
                self.a.weight = self.b.weight = weight
                self.head = head

            def forward(self, x: Tensor) -> Tensor:
                return self.b(self.a(x).tanh()).tanh() @ self.head.T

        net = Tied()
        optimizer = make(net.parameters())
        assert len(optimizer.param_groups[0]["params"]) == 2
        losses = [float(step(optimizer, net)) for _ in range(20)]
        assert losses[-1] < losses[0] and net.a.weight is net.b.weight

    def test_memory_is_flat_without_the_garbage_collector(self, make: Callable[..., Any]) -> None:
        net = model()
        optimizer = make(net.parameters())

        def live() -> int:
            return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

        for _ in range(6):
            step(optimizer, net)
        gc.collect()
        gc.disable()
        try:
            before = live()
            for _ in range(100):
                step(optimizer, net)
            assert live() <= before + 4
        finally:
            gc.enable()

    @pytest.mark.parametrize(
        "clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
    )
    def test_copies_continue_alike(self, make: Callable[..., Any], clone: Callable[[Any], Any]) -> None:
        net = model()
        optimizer = make(net.parameters())
        step(optimizer, net)
        other_net, other = clone((net, optimizer))
        for i in range(2, 5):
            step(optimizer, net, i)
            step(other, other_net, i)
        assert torch.equal(values(other_net), values(net)) and other_net is not net

    @pytest.mark.parametrize("number", [1, 2], ids=["update step", "the step after"])
    @pytest.mark.parametrize("failure", ["nan", RuntimeError("stop"), KeyboardInterrupt()], ids=repr)
    def test_a_failure_leaves_nothing_behind(self, make: Callable[..., Any], failure: Any, number: int) -> None:
        fails = Fails()
        net = nn.Sequential(fails, *model())
        optimizer = make(net.parameters())
        for _ in range(number - 1):
            step(optimizer, net)
        for p in net.parameters():
            p.grad = torch.ones_like(p)

        def trace() -> list[Any]:
            tensors = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters()), torch.get_rng_state()]
            state = [v for s in optimizer.state.values() for v in s.values()]
            return [t.clone() if isinstance(t, Tensor) else t for t in (*tensors, *state)]

        before = trace()
        fails.failure = failure
        with pytest.raises(FloatingPointError if failure == "nan" else type(failure)):
            step(optimizer, net)
        for a, b in zip(trace(), before, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
        fails.failure = None
        step(optimizer, net)
        assert not torch.equal(next(net.parameters()), before[0])

    @pytest.mark.parametrize("target", [pytest.param("cuda", marks=pytest.mark.gpu), "float32"])
    def test_a_run_moves_to_another_device_or_dtype(self, make: Callable[..., Any], target: str) -> None:
        """The state goes with the parameters, and the next step is the same within rounding."""
        net = model()
        # Damped, so that Newton-CG's step is not as ill-conditioned as the curvature.
        options = {"damping": 1.0, "damping_update": "constant"} if make is NewtonCG else {}
        optimizer = make(net.parameters(), seed=5, **options)
        for i in range(2):
            step(optimizer, net, i)
        moved = copy.deepcopy(net)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        moved = moved.float() if target == "float32" else moved.to(target)
        other = make(moved.parameters(), lr=0.3, seed=1)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        device = next(moved.parameters()).device
        assert all(v.device == device for p in moved.parameters() for v in other.state[p].values() if is_vector(v))
        if target == "cuda":  # probes of another device are other ones
            return
        step(optimizer, net, 2)
        step(other, Widened(moved), 2)
        torch.testing.assert_close(values(moved).double(), values(net), rtol=2e-3, atol=2e-4)

    def test_a_compiled_model_takes_the_same_steps(self, make: Callable[..., Any]) -> None:
        nets = [model(), model()]
        called = [nets[0], torch.compile(nets[1], backend="aot_eager")]
        for net, callee in zip(nets, called, strict=True):
            optimizer = make(net.parameters())
            for i in range(3):
                step(optimizer, callee, i)
        torch.testing.assert_close(values(nets[1]), values(nets[0]), rtol=1e-8, atol=1e-8)

    def test_a_compiled_model_is_called_without_a_warning(self, make: Callable[..., Any]) -> None:
        net = model()
        compiled = torch.compile(net, backend="eager")
        optimizer = make(net.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            filters = list(warnings.filters)
            for _ in range(2):
                step(optimizer, compiled)
            assert warnings.filters == filters

    def test_micro_batches_are_one_large_batch(self, make: Callable[..., Any]) -> None:
        """Closures for its parts, of means weighted by their rows, in one step."""
        x, y = data()
        nets = [model(), model()]
        for net, parts in zip(nets, ([slice(0, 12)], [slice(0, 5), slice(5, 12)]), strict=True):
            optimizer = make(net.parameters())

            def loss(rows: slice, net: nn.Module = net) -> Tensor:
                return F.cross_entropy(net(x[rows]), y[rows], reduction="sum") / 12

            def counted(rows: slice, net: nn.Module = net) -> tuple[Tensor, int]:
                return F.cross_entropy(net(x[rows]), y[rows], reduction="sum"), len(y[rows])

            own = isinstance(optimizer, SophiaG)
            for _ in range(4):
                optimizer.step(
                    [partial(loss, rows) for rows in parts],
                    curvature_closure=[partial(counted, rows) for rows in parts] if own else None,
                )
        torch.testing.assert_close(values(nets[1]), values(nets[0]), rtol=1e-5, atol=1e-6)

    def test_a_gradient_clipped_in_the_closure_is_the_one_that_is_used(self, make: Callable[..., Any]) -> None:
        """With the gradient clipped to nothing, the parameters stay."""
        net = model()
        optimizer = make(net.parameters(), weight_decay=0.0)
        before = values(net)
        x, y = data()

        def closure(bound: float) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), bound)
            return loss

        own = {"curvature_closure": lambda: gnb_loss(net(x))} if isinstance(optimizer, SophiaG) else {}
        if isinstance(optimizer, NewtonCG):  # whose model of the loss needs the loss's gradient
            with pytest.raises(ValueError, match=r"changed \.grad"):
                optimizer.step(partial(closure, 1e-300))
            assert torch.equal(values(net), before)
            return
        optimizer.step(partial(closure, 1e-300), **own)
        torch.testing.assert_close(values(net), before, rtol=1e-9, atol=1e-9)
        optimizer.step(partial(closure, 1e3), **own)
        assert (values(net) - before).norm() > 1e-6

    def test_grad_scaler(self, make: Callable[..., Any]) -> None:
        """Under a scale of 1024 the steps, and the curvature, are those without; an overflow changes nothing."""
        nets = [model().float(), model().float()]
        x, y = data()
        x, scaler = x.float(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizers = [make(net.parameters()) for net in nets]
        if isinstance(optimizers[0], NewtonCG):
            # Its gradient and its line search are of the closure, which needs no scale; torch's scaler takes none.
            scaler.scale(F.cross_entropy(nets[0](x), y)).backward()
            with pytest.raises(TypeError, match="closure"):
                scaler.step(optimizers[0])
            return
        for scaled, net, optimizer in zip((False, True), nets, optimizers, strict=True):
            for number in range(4):
                optimizer.zero_grad()
                if optimizer.curvature_due:
                    gnb, plain = lambda net=net: gnb_loss(net(x)), lambda net=net: F.cross_entropy(net(x), y)
                    optimizer.update_curvature(gnb if isinstance(optimizer, SophiaG) else plain)
                loss = F.cross_entropy(net(x), y)
                if not scaled:
                    loss.backward()
                    optimizer.step()
                    continue
                scaler.scale(loss).backward()
                if number in (1, 2):
                    before, kept = copy.deepcopy(optimizer.state_dict()), net[0].weight.grad[0, 0].item()
                    start = values(net)
                    net[0].weight.grad[0, 0] = float("inf")
                    scaler.step(optimizer)
                    assert torch.equal(values(net), start) and str(optimizer.state_dict()) == str(before)
                    scaler.update(1024.0)
                    optimizer.zero_grad()
                    scaler.scale(F.cross_entropy(net(x), y)).backward()
                    assert net[0].weight.grad[0, 0].item() == pytest.approx(kept)
                scaler.step(optimizer)
                scaler.update(1024.0)
        torch.testing.assert_close(values(nets[1]), values(nets[0]), rtol=1e-5, atol=1e-6)
        name = optimizers[0].CURVATURE
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(optimizers[1].state[q][name], optimizers[0].state[p][name], rtol=1e-4, atol=1e-7)

    def test_buffers_move_once_and_a_step_sees_one_function(self, make: Callable[..., Any]) -> None:
        """Batch norm in training, and dropout: loss, statistics and draws are those of one forward pass."""
        net = nn.Sequential(nn.BatchNorm1d(4).double(), nn.Dropout(0.1), *model())
        once = copy.deepcopy(net)
        optimizer = make(net.parameters(), weight_decay=0.0)
        torch.manual_seed(3)
        loss = step(optimizer, net)
        drawn = torch.rand(1)
        torch.manual_seed(3)
        want = F.cross_entropy(once(data()[0]), data()[1])
        assert torch.equal(torch.rand(1), drawn), "the step drew from the global generator as one forward pass does"
        assert float(loss) == pytest.approx(float(want), rel=1e-12)
        for name, buffer in once.named_buffers():
            torch.testing.assert_close(net.get_buffer(name), buffer, msg=lambda m, name=name: f"{name}: {m}")

    def test_zero_curvature_is_no_obstacle(self, make: Callable[..., Any]) -> None:
        """A parameter that enters linearly, and one of a group added later."""
        linear, square, late = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(3))
        optimizer = make([linear, square])

        def loss() -> Tensor:
            return linear.sum() + (square**2).sum() + (late**2).sum()

        def counted() -> tuple[Tensor, int]:
            return loss(), 1

        own = {"curvature_closure": counted} if isinstance(optimizer, SophiaG) else {}
        losses = [float(optimizer.step(loss, **own))]
        optimizer.add_param_group({"params": [late]})
        losses += [float(optimizer.step(loss, **own)), float(loss())]
        assert losses[0] > losses[1] > losses[2]
        for p in (linear, square, late):
            assert p.isfinite().all() and (p != 1.0).all()

    def test_bad_options_are_named(self, make: Callable[..., Any]) -> None:
        for name in ("lr", "weight_decay"):
            with pytest.raises(ValueError, match=f"{name} must lie in .* got -1"):
                make(model().parameters(), **{name: -1.0})
        net = model()
        optimizer = make(net[0].parameters())
        with pytest.raises(ValueError, match="lr must lie in"):
            optimizer.add_param_group({"params": list(net[2].parameters()), "lr": float("nan")})
        assert len(optimizer.param_groups) == 1


EVERY: dict[str, Callable[..., Any]] = {**MAKERS, "KFAC": KFAC}


@pytest.mark.parametrize("name", EVERY)
class TestWhatANewcomerPasses:
    @pytest.mark.parametrize(
        ("given", "got"),
        [(torch.ones(()), "Tensor"), (3.0, "float"), ([], r"\[\]"), ([torch.ones(())], r"\[Tensor\]")],
        ids=["loss", "number", "none", "losses"],
    )
    def test_a_loss_for_a_closure(self, name: str, given: Any, got: str) -> None:
        net = model()
        optimizer = EVERY[name](net.parameters())
        before, start = str(optimizer.state_dict()), values(net)
        message = f"^{name}.{{}} takes a closure that evaluates the loss, as in lambda: .*: {{}} must be .*, got {got}$"
        with pytest.raises(TypeError, match=message.format("step", "closure")):
            optimizer.step(given)
        with pytest.raises(TypeError, match=message.format("step", "curvature_closure")):
            optimizer.step(lambda: net(data(1)[0]).sum(), curvature_closure=given)
        if name != "NewtonCG":
            with pytest.raises(TypeError, match=message.format("update_curvature", "closure")):
                optimizer.update_curvature(given)
        assert str(optimizer.state_dict()) == before and torch.equal(values(net), start)

    @pytest.mark.parametrize("backward", [False, True])
    def test_a_closure_over_another_model(self, name: str, backward: bool) -> None:
        net, other, (x, y) = model(), model(), data(1)
        optimizer = EVERY[name](net.parameters())
        before, start = str(optimizer.state_dict()), values(net)

        def closure() -> Tensor:
            loss = F.cross_entropy(other(x), y)
            if backward:
                loss.backward()
            return loss

        own = {"curvature_closure": lambda: gnb_loss(net(x))} if name == "SophiaG" else {}
        message = "^closure must return a loss that depends on the parameters, but it uses none of the 4 given"
        with pytest.raises(ValueError, match=message):
            optimizer.step(closure, **own)
        assert str(optimizer.state_dict()) == before and torch.equal(values(net), start)

    def test_an_option_of_all_parameters_in_a_later_group(self, name: str) -> None:
        make, nets = EVERY[name], [model(), model()]
        own = {"lr", "weight_decay", "betas", "eps", "gamma", "hessian_power", "block_size", "block_average"}
        own |= {"state_dtype"}
        shared = {k: v for k, v in make([torch.ones(1, requires_grad=True)]).defaults.items() if k not in own}
        assert {"seed", "maximize"} <= shared.keys()
        first, later = list(nets[0].parameters()), list(nets[1].parameters())
        for key, value in shared.items():
            other = not value if isinstance(value, bool) else 7 if isinstance(value, int) else 0.25
            pattern = (
                rf"^{key} .* the first group, which has {re.escape(repr(value))}, but parameter group 1 of {name} "
            )
            pattern += f"has {other}: leave it out"
            with pytest.raises(ValueError, match=pattern):
                make([{"params": first}, {"params": later, key: other}])
            optimizer = make(first)
            before = str(optimizer.state_dict())
            with pytest.raises(ValueError, match=pattern):
                optimizer.add_param_group({"params": later, key: other})
            assert str(optimizer.state_dict()) == before
        assert len(make([{"params": first}, {"params": later, **shared}]).param_groups) == 2

    def test_a_first_groups_options_change_later_and_other_groups_join(self, name: str) -> None:
        net = model()
        groups = [{"params": net[0].weight, "seed": 3, "lr": 0.1}, {"params": net[0].bias, "lr": 0.2}]
        optimizer = EVERY[name](groups)
        step(optimizer, net)
        optimizer.param_groups[0]["seed"] = 5
        optimizer.add_param_group({"params": list(net[2].parameters()), "seed": 5, "name": "head", "initial_lr": 1.0})
        step(optimizer, net)
        other = EVERY[name](optimizer.param_groups[:1])
        for group in optimizer.param_groups[1:]:
            other.add_param_group(group.copy())
        assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
        other.load_state_dict(optimizer.state_dict())
        assert [g["seed"] for g in other.param_groups] == [g["seed"] for g in optimizer.param_groups]

    def test_groups_that_were_made_here_are_taken_again(self, name: str) -> None:
        """Steps write damping to the first group; torch fills the others with defaults."""
        net = model()
        given = {"damping": 0.5} if "damping" in EVERY[name](net.parameters()).defaults else {"seed": 3}
        optimizer = EVERY[name]([{"params": net[0].parameters()}], **given)
        optimizer.add_param_group({"params": net[2].bias})
        step(optimizer, net)
        optimizer.param_groups[0].update(dict.fromkeys(given, 1.5) if "damping" in given else {"seed": 4})
        optimizer.add_param_group({"params": net[2].weight, **optimizer.defaults})
        again = EVERY[name](optimizer.param_groups, **given)
        assert [len(g["params"]) for g in again.param_groups] == [2, 1, 1]
        with pytest.raises(ValueError, match=r"^seed "):
            again.add_param_group({"params": [torch.ones(2, requires_grad=True)], "seed": np.ones(2)})

    def test_a_misspelled_option_in_a_group(self, name: str) -> None:
        net = model()
        optimizer = EVERY[name](net[0].parameters())
        for key, meant in (("weight_decy", "weight_decay"), ("weightdecay", "weight_decay")):
            expected = rf"^parameter group 1 of {name} has '{key}': did you mean '{meant}'\?$"
            with pytest.raises(ValueError, match=expected):
                optimizer.add_param_group({"params": list(net[2].parameters()), key: 1})
            with pytest.raises(ValueError, match="group 0 of"):
                EVERY[name]([{"params": net[2].parameters(), key: 1}])
        assert len(optimizer.param_groups) == 1

    def test_keys_that_others_write_into_groups_are_kept(self, name: str) -> None:
        keys = ["name", "model", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "betas"]
        for kind in vars(torch.optim).values():
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
                keys += kind([torch.ones(2, 2, requires_grad=True)], lr=0.1).defaults
        make = EVERY[name]
        foreign = dict.fromkeys(set(keys) - make([torch.ones(1, requires_grad=True)]).defaults.keys(), 3)
        assert {"dampening", "nesterov", "line_search_fn", "max_lr"} <= foreign.keys()
        group = make([{"params": torch.ones(1, requires_grad=True), **foreign}]).param_groups[0]
        assert foreign.items() <= group.items()

    @pytest.mark.parametrize("where", ["params", "other"])
    def test_a_parameter_that_is_not_finite_is_named(self, name: str, where: str) -> None:
        """Whatever becomes not finite first by it; nothing is said of parameters that are finite."""
        net, (x, y) = model(), data()
        with torch.no_grad():
            (net[2].weight if where == "params" else x)[1, 2] = float("inf")
        own = {"curvature_closure": lambda: gnb_loss(net(x))} if name == "SophiaG" else {}
        culprit = r"; parameter 2 \(shape \(3, 6\)\) itself is not finite" if where == "params" else ""
        with pytest.raises(FloatingPointError, match=rf"^the .*(is nan|is not finite){culprit}$"):
            EVERY[name](net.parameters()).step(lambda: F.cross_entropy(net(x), y), **own)

    def test_a_module_for_parameters(self, name: str) -> None:
        net, message = model(), rf"^{name} takes parameters, got the module \w+: pass model.parameters\(\)"
        if name == "KFAC":
            assert len(KFAC(net).param_groups[0]["params"]) == len(list(net.parameters()))
        else:
            for module in (net, nn.Linear(2, 2)):  # of which one can be iterated over
                with pytest.raises(TypeError, match=message):
                    EVERY[name](module)
        with pytest.raises(TypeError, match=message):
            EVERY[name]([{"params": net}])
        for given in (dict(net.named_parameters()), [{"params": dict(net.named_parameters())}]):
            with pytest.raises(TypeError, match=rf"^{name} takes parameters, got a dict: pass its values\(\), or"):
                EVERY[name](given)
        optimizer = EVERY[name](net.parameters())
        with pytest.raises(TypeError, match=message):
            optimizer.add_param_group({"params": nn.Linear(2, 2)})
        assert len(optimizer.param_groups) == 1
        params = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(2))
        assert len(EVERY[name](params).param_groups[0]["params"]) == 2
