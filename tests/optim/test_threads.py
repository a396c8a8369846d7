"""Steps of one thread and what other threads do meanwhile leave each other alone."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sorder.curvature import CurvaturePoint
from sorder.optim import KFAC, NewtonCG, SophiaH
from tests.optim.problem import closure_of, model, values

TIMEOUT = 30.0


@contextmanager
def beside(function: Callable[[], Any]) -> Iterator[Callable[[], None]]:
    """A thread that waits to be told to run ``function``; calling what this yields does that and waits for the end.

    An error in the thread is raised on leaving.
    """
    start, end = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            assert start.wait(TIMEOUT)
            function()
        except BaseException as error:
            errors.append(error)
        finally:
            end.set()

    def go() -> None:
        start.set()
        assert end.wait(TIMEOUT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield go
    finally:
        start.set()
        thread.join(TIMEOUT)
    if errors:
        raise errors[0]


def once(function: Callable[[], Any]) -> Callable[[], None]:
    """``function`` at the first call, nothing at later ones: closures run several times a step."""
    left = [function]
    return lambda: left.pop()() if left else None


def stepped(net: nn.Module, during: Callable[[], Any] = lambda: None, calls_backward: bool = True) -> Tensor:
    """Parameters after one step, inside whose closure ``during`` is called once."""
    optimizer, losses, first = NewtonCG(net.parameters()), closure_of(net), once(during)

    def closure() -> Tensor:
        if calls_backward:
            optimizer.zero_grad()
        first()
        loss = losses()
        if calls_backward:
            loss.backward()
        return loss

    optimizer.step(closure)
    return values(net)


# ---------------------------------------------------------------------- torch.autograd.backward


def test_steps_that_overlap_in_two_threads_leave_backward_as_it_was() -> None:
    original, want = torch.autograd.backward, [stepped(model(seed)) for seed in (0, 1)]
    inside, first_done = threading.Event(), threading.Event()
    nets = [model(seed) for seed in (0, 1)]
    found: list[Tensor] = []

    def second() -> None:
        def wait() -> None:
            inside.set()
            assert first_done.wait(TIMEOUT)

        found.append(stepped(nets[1], wait))

    # The second step begins inside the first one, and ends after it.
    thread = threading.Thread(target=second)

    def start() -> None:
        thread.start()
        assert inside.wait(TIMEOUT)

    found.append(stepped(nets[0], start))
    first_done.set()
    thread.join(TIMEOUT)
    assert torch.autograd.backward is original
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    w = torch.ones(2, requires_grad=True)
    w.square().sum().backward()
    assert w.grad is not None and w.grad.tolist() == [2.0, 2.0]


def test_the_calls_of_a_thread_without_a_step_pass_with_all_their_arguments() -> None:
    w, u = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    net = model()
    weight = next(net.parameters())

    def other() -> None:
        y = w**3 * u
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            torch.autograd.backward([y], [torch.tensor([1.0, 2.0])], create_graph=True, inputs=[w])
        assert w.grad is not None and w.grad.tolist() == [3.0, 6.0] and w.grad.requires_grad and u.grad is None
        w.grad = None  # it holds itself through its graph
        y.sum().backward(retain_graph=False, inputs=u)
        assert u.grad is not None and u.grad.tolist() == [1.0, 1.0]
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
        # Parameters of the step are nothing to another thread, either.
        (2.0 * weight).sum().backward()
        assert weight.grad is not None and weight.grad.eq(2.0).all()
        weight.grad = None

    with beside(other) as go:
        assert torch.equal(stepped(net, go), stepped(model()))


def test_interceptions_nest() -> None:
    original = torch.autograd.backward
    inner, outer = model(1), model()
    parts: list[list[Tensor]] = []

    def inside() -> Tensor:
        loss = closure_of(inner)()
        loss.backward()
        # Parameters of the point outside, whose handler takes these.
        closure_of(outer)().backward(inputs=list(outer.parameters()))
        return loss

    def outside() -> Tensor:
        parts.append(CurvaturePoint(inside, list(inner.parameters())).gradient)
        assert torch.autograd.backward is not original
        loss = closure_of(outer)()
        loss.backward()
        return loss

    point = CurvaturePoint(outside, list(outer.parameters()), None)
    for found, net, factor in ((parts[0], inner, 1.0), (point.gradient, outer, 2.0)):
        for g, want in zip(found, torch.autograd.grad(closure_of(net)(), list(net.parameters())), strict=True):
            assert (g - factor * want).norm() <= 1e-12 * want.norm()
    assert torch.autograd.backward is original


def test_an_error_in_a_closure_ends_the_interception() -> None:
    original = torch.autograd.backward

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stepped(model(), fail)
    assert torch.autograd.backward is original


def test_a_wrapper_that_others_install_during_a_step_stays_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # puts the original back at the end
    want, calls = stepped(model()), []

    def wrap() -> None:
        wrapped = torch.autograd.backward

        def wrapper(*args: Any, **kwargs: Any) -> None:
            calls.append(args)
            wrapped(*args, **kwargs)

        torch.autograd.backward = wrapper

    assert torch.equal(stepped(model(), wrap), want)
    seen = len(calls)
    assert seen and torch.autograd.backward.__name__ == "wrapper"
    assert torch.equal(stepped(model()), want)
    w, u = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def unrelated() -> None:
        (w * u).sum().backward(inputs=[w])

    assert torch.equal(stepped(model(), unrelated), want)
    assert len(calls) > seen and w.grad is not None and w.grad.tolist() == [1.0, 1.0] and u.grad is None


# ---------------------------------------------------------------------- buffers


@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
def test_buffers_of_modules_that_another_thread_runs_move_on(mode: str) -> None:
    norm, mine = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 5.0
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    with beside(lambda: norm(x)) as go:
        first = once(go)

        def closure() -> Tensor:
            first()
            return (mine(x * weight) ** 4).sum()

        point = CurvaturePoint(closure, [weight], "hessian", mode=mode)
    for _ in range(3):
        norm(x)
    assert norm.running_mean is not None and norm.num_batches_tracked is not None
    before = norm.running_mean.clone()
    point.product([torch.ones_like(weight)])
    assert norm.num_batches_tracked == 4 and torch.equal(norm.running_mean, before)
    # The closure's own module is still watched.
    assert mine.num_batches_tracked == 1
    point.rollback()
    assert norm.num_batches_tracked == 4 and torch.equal(norm.running_mean, before)
    assert mine.num_batches_tracked == 0


class Parallel(DistributedDataParallel):
    """What the watch looks at in a DistributedDataParallel, without a process group to reduce over."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.require_backward_grad_sync = True

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_data_parallel_modules_of_another_thread_keep_reducing() -> None:
    theirs, ours = Parallel(), Parallel()
    flags: list[tuple[bool, bool]] = []
    weight = nn.Parameter(torch.ones(4))

    with beside(lambda: theirs(torch.ones(1))) as go:
        first = once(go)

        def closure() -> Tensor:
            first()
            loss = (ours(weight) ** 4).sum()
            flags.append((theirs.require_backward_grad_sync, ours.require_backward_grad_sync))
            return loss

        # So that no process group is asked for: ours has none.
        ours.process_group = None  # type: ignore[assignment]
        point = CurvaturePoint(closure, [weight], "hessian", mode="forward-over-reverse")
        point.product([torch.ones_like(weight)])
    assert len(flags) > 1 and set(flags) == {(True, False)}
    assert theirs.require_backward_grad_sync and ours.require_backward_grad_sync


# ---------------------------------------------------------------------- one optimizer, two threads


@pytest.mark.parametrize("maker", [NewtonCG, SophiaH, KFAC])
def test_a_step_while_another_thread_steps_the_same_optimizer_is_refused(maker: Callable[..., Any]) -> None:
    net, alone = model(), model()
    optimizer = maker(net.parameters())
    refusals: list[str] = []

    def intrude() -> None:
        with pytest.raises(RuntimeError) as caught:
            optimizer.step(closure_of(net))
        refusals.append(str(caught.value))

    with beside(intrude) as go:
        first = once(go)

        def closure() -> Tensor:
            first()
            return closure_of(net)()

        optimizer.step(closure)
    assert len(refusals) == 1 and "while a step of the same optimizer runs" in refusals[0]
    maker(alone.parameters()).step(closure_of(alone))
    assert torch.equal(values(net), values(alone))
    # Other optimizers, and the same one afterwards, are free.
    optimizer.step(closure_of(net))
