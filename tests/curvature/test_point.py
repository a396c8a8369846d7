"""Closures in every style, random generators and buffers, operations without derivatives, memory."""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from sorder.curvature import CurvatureError, CurvaturePoint, errors
from sorder.curvature.buffers import BufferWatch
from tests.cases import flatten, relative_error

MODES = ("reverse-over-reverse", "forward-over-reverse")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    errors._warned.clear()
    yield


def problem() -> tuple[nn.Module, list[Tensor], Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, list(model.parameters()), torch.randn(6, 4).double(), torch.randint(0, 3, (6,))


def ones(params: list[Tensor]) -> list[Tensor]:
    return [torch.ones_like(p) for p in params]


def test_no_filter_of_warnings_stays_behind() -> None:
    """Another thread that leaves ``catch_warnings`` may bring back filters that were there before."""
    before = list(warnings.filters)
    with BufferWatch(), BufferWatch():
        within = list(warnings.filters)
    assert warnings.filters == before
    warnings.filters[:] = within  # type: ignore[index]
    with BufferWatch():
        pass
    assert warnings.filters == before


# ---------------------------------------------------------------------- closures


def test_closures_of_every_style_are_one_function() -> None:
    model, params, x, y = problem()

    def loss_only() -> Tensor:
        return F.cross_entropy(model(x), y)

    def with_outputs() -> tuple[Tensor, Tensor]:
        z = model(x)
        return F.cross_entropy(z, y), z

    def lbfgs() -> Tensor:
        for p in params:
            p.grad = None
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def lightning() -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        return loss.detach().clone()

    def accumulating() -> float:
        model.zero_grad()
        total = 0.0
        for half in (slice(0, 3), slice(3, 6)):
            loss = F.cross_entropy(model(x[half]), y[half]) / 2
            loss.backward()
            assert all(p.grad is not None and p.grad.norm() > 0 for p in params)  # as a hook may look at it
            total += loss.item()
        return total

    gradient = torch.autograd.grad(loss_only(), params)
    for kind in ("ggn", "hessian"):
        want = None
        for closure in (loss_only, with_outputs, lbfgs, lightning, accumulating):
            for mode in MODES:
                model.zero_grad()
                with CurvaturePoint(closure, params, kind, mode=mode) as point:
                    product = flatten(point.product(ones(params)))
                    value = point.value()
                want = product if want is None else want
                assert relative_error(product, want) < 1e-12, closure.__name__
                assert relative_error(flatten(point.gradient), flatten(gradient)) < 1e-12
                assert relative_error(point.loss, loss_only()) < 1e-12
                assert relative_error(value, loss_only()) < 1e-12
                calls_backward = closure in (lbfgs, lightning, accumulating)
                for p, g in zip(params, gradient, strict=True):
                    if calls_backward:
                        assert relative_error(p.grad, g) < 1e-12 and p.grad.grad_fn is None
                    else:
                        assert p.grad is None


def test_micro_batches_are_summed() -> None:
    model, params, x, y = problem()
    halves = [lambda s=s: F.cross_entropy(model(x[s]), y[s]) / 2 for s in (slice(0, 3), slice(3, 6))]
    for mode in MODES:
        for kind in ("ggn", "hessian"):
            with (
                CurvaturePoint(halves, params, kind, mode=mode) as parts,
                CurvaturePoint(lambda: F.cross_entropy(model(x), y), params, kind) as whole,
            ):
                assert relative_error(parts.loss, whole.loss) < 1e-12
                assert relative_error(flatten(parts.gradient), flatten(whole.gradient)) < 1e-12
                product, want = parts.product(ones(params)), whole.product(ones(params))
                assert relative_error(flatten(product), flatten(want)) < 1e-12


def test_a_closure_that_differentiates_inside() -> None:
    """A physics-informed loss: the second derivative of the model in its input."""
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    params = list(model.parameters())
    x = torch.linspace(0, 1, 5).double()[:, None].requires_grad_()

    def closure() -> Tensor:
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        return (ddu + u).square().mean()

    gradient = torch.autograd.grad(closure(), params, create_graph=True)
    want = torch.autograd.grad(gradient, params, ones(params))
    with CurvaturePoint(closure, params) as point:
        assert relative_error(flatten(point.product(ones(params))), flatten(want)) < 1e-12
        point.value()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with CurvaturePoint(closure, params, mode="forward-over-reverse") as point:
            assert relative_error(flatten(point.product(ones(params))), flatten(want)) < 1e-12


@pytest.mark.parametrize(
    ("closure", "error", "message"),
    [
        (lambda p: p.sum().detach(), ValueError, "without a graph"),
        (lambda p: 1.0, ValueError, "returned 1.0 without a graph"),
        (lambda p: None, TypeError, "got None"),
        (lambda p: p * 2, ValueError, r"scalar loss, got one of shape \(3,\)"),
        (lambda p: (p.sum(), p, p), TypeError, "got 3 values"),
        (lambda p: (p.sum(), torch.ones(2, requires_grad=True)), ValueError, "does not depend on the outputs"),
    ],
)
def test_what_a_closure_may_not_return(closure: Callable[[Tensor], Any], error: type, message: str) -> None:
    p = torch.ones(3, requires_grad=True)
    with pytest.raises(error, match=message):
        CurvaturePoint(lambda: closure(p), [p])


def test_vectors_are_checked() -> None:
    model, params, x, y = problem()
    point = CurvaturePoint(lambda: F.cross_entropy(model(x), y), params)
    with pytest.raises(ValueError, match="one tensor for each of 4 parameters, got 1"):
        point.product(ones(params)[:1])
    with pytest.raises(ValueError, match=r"v\[0\] must have the parameter's shape \(5, 4\), got \(2,\)"):
        point.product([torch.ones(2), *ones(params)[1:]])
    with pytest.raises(ValueError, match=r"v\[0\] must be on the parameter's device cpu, got meta"):
        point.product([t.to("meta") for t in ones(params)])
    point.release()
    with pytest.raises(RuntimeError, match="after release"):
        point.product(ones(params))
    with pytest.raises(ValueError, match=r"number 0 is not: got a tensor of torch.float64 .* with requires_grad=False"):
        CurvaturePoint(lambda: x.sum(), [x])
    with pytest.raises(ValueError, match="number 1 is not: got a NoneType"):
        CurvaturePoint(lambda: model(x).sum(), [params[0], None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"number 0 is not: got a tensor of torch.float32 and nested with"):
        CurvaturePoint(lambda: x.sum(), [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])])
    for given, advice in (
        (dict(model.named_parameters()), r"got a dict: pass its values\(\)$"),
        (model, r"got the module Sequential: pass model.parameters\(\)$"),
        (model.named_parameters(), r"got \(name, parameter\) pairs: pass model.parameters\(\)$"),
    ):
        with pytest.raises(TypeError, match=f"^CurvaturePoint takes parameters, {advice}"):
            CurvaturePoint(lambda: model(x).sum(), given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("mode", MODES)
def test_products_of_a_point_that_has_moved_are_refused(mode: str, kind: str) -> None:
    model = torch.nn.Linear(3, 2)
    params = list(model.parameters())
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    with CurvaturePoint(lambda: F.cross_entropy(model(x), y), params, kind, mode=mode) as point:
        point.product(ones(params))
        with torch.no_grad():
            params[1].add_(1.0)
        with pytest.raises(RuntimeError, match=r"params\[1\] has changed since the point was made"):
            point.product(ones(params))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["hessian", "ggn", None])
def test_a_loss_of_none_of_the_parameters_is_refused(kind: str | None, mode: str) -> None:
    model, params, x, y = problem()
    other = [torch.ones(2, requires_grad=True)]
    with pytest.raises(ValueError, match="depends on the parameters, but it uses none of the 1 given"):
        CurvaturePoint(lambda: F.cross_entropy(model(x), y), other, kind, mode=mode)
    CurvaturePoint(lambda: F.cross_entropy(model(x), y), other + params, kind, mode=mode).release()


# ---------------------------------------------------------------------- generators and buffers


@pytest.mark.parametrize("mode", MODES)
def test_every_generator_is_replayed(mode: str) -> None:
    own = torch.Generator().manual_seed(7)
    p = torch.ones(4, dtype=torch.float64, requires_grad=True)
    calls: list[Tensor] = []

    def closure() -> Tensor:
        noise = torch.randn(4, dtype=torch.float64) + torch.rand(4, generator=own, dtype=torch.float64)
        noise = noise + random.random() + np.random.rand()  # noqa: NPY002
        calls.append(noise)
        return (p**3 * noise).sum()

    with CurvaturePoint(closure, [p], mode=mode) as point:
        after = own.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
        product = point.product([torch.ones(4, dtype=torch.float64)])
        value = point.value()
    for noise in calls[1:]:
        assert torch.equal(noise, calls[0])
    assert relative_error(product[0], 6 * calls[0]) < 1e-14
    assert torch.equal(value, point.loss)
    assert torch.equal(own.get_state(), after[0]) and torch.equal(torch.get_rng_state(), after[1])
    assert random.getstate() == after[2] and (np.random.get_state()[1] == after[3]).all()  # noqa: NPY002


class Moves(nn.Module):
    """Moves one buffer in place, replaces another, and depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))
        self.register_buffer("constant", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = (self.w**3 * x * self.mean + self.count).sum()
        self.count += 1
        self.mean = 0.5 * self.mean + 0.5 * x
        return out


@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_replayed_and_move_once(mode: str) -> None:
    model, x = Moves(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    constant = model.constant
    with CurvaturePoint(lambda: model(x), [model.w], mode=mode) as point:
        for _ in range(2):
            assert relative_error(point.product([torch.ones_like(x)])[0], 6 * x) < 1e-14
            assert torch.equal(point.value(), point.loss)
    assert model.count == 1 and torch.equal(model.mean, 0.5 + 0.5 * x)
    assert model.constant is constant and constant._version == 0
    point.rollback()
    assert model.count == 0 and torch.equal(model.mean, torch.ones_like(x))


def test_a_raising_closure_leaves_no_trace() -> None:
    model, x = Moves(), torch.ones(3, dtype=torch.float64)

    def closure() -> Tensor:
        torch.rand(2)
        model(x)
        raise KeyboardInterrupt

    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        CurvaturePoint(closure, [model.w])
    assert torch.equal(torch.get_rng_state(), state)
    assert model.count == 0 and torch.equal(model.mean, torch.ones_like(x))
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_a_closure_that_is_another_function_each_time_is_noticed() -> None:
    p = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    batches = iter(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], dtype=torch.float64))
    point = CurvaturePoint(lambda: (p**3 * next(batches)).sum(), [p], mode="forward-over-reverse")
    with pytest.warns(RuntimeWarning, match="randomness"):
        point.product([torch.ones_like(p)])


@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
def test_a_linear_loss_has_products_that_can_be_written_to(mode: str) -> None:
    p = torch.tensor([1.0, -2.0], requires_grad=True)
    with CurvaturePoint(lambda: p.abs().sum(), [p], "hessian", mode=mode) as point:
        (product,) = point.product([torch.ones(2)])
    assert torch.equal(product.add_(1.0), torch.ones(2))


def test_rounding_in_an_inner_autocast_region_is_not_taken_for_randomness(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(16, 16), torch.randn(64, 16)
    runs = iter((1.0, *[1.0 + 2.0**-8] * 9))  # other kernels, as CUDA may choose, move a bfloat16 by its last bit

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x) * next(runs)
        return outputs.float().square().mean()

    point = CurvaturePoint(closure, list(model.parameters()), "hessian", mode="forward-over-reverse")
    product = point.product([torch.ones_like(p) for p in model.parameters()])
    assert not recwarn
    assert product[0].norm() > 0.1


# ---------------------------------------------------------------------- operations without derivatives


class NoForward(torch.autograd.Function):
    """Cube without a forward-mode rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class OnceOnly(torch.autograd.Function):
    """Cube whose backward is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_without_forward_mode_reverse_takes_over_with_one_warning(kind: str) -> None:
    p = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    target = torch.zeros(2, dtype=torch.float64)

    def closure() -> Tensor:
        return F.mse_loss(NoForward.apply(p), target, reduction="sum")

    want = {"hessian": 30 * p**4, "ggn": 18 * p**4}[kind]
    with pytest.warns(
        RuntimeWarning, match="autograd.Function.*NoForward.*taking reverse-over-reverse instead.*memory"
    ):
        product = CurvaturePoint(closure, [p], kind, mode="forward-over-reverse").product([torch.ones_like(p)])
    assert relative_error(product[0], want) < 1e-14
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CurvaturePoint(closure, [p], kind, mode="forward-over-reverse").product([torch.ones_like(p)])


def test_without_any_second_derivative_the_error_names_operation_and_remedy() -> None:
    p = torch.tensor([1.0, 2.0], requires_grad=True)
    point = CurvaturePoint(lambda: OnceOnly.apply(p).sum(), [p])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*taking.*")  # nothing is taken instead
        with pytest.raises(CurvatureError, match=r"OnceOnly.*Remedy: write its backward"):
            point.product([torch.ones_like(p)])


@pytest.mark.parametrize("mode", ["auto", *MODES])
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_fused_attention_is_an_error_and_never_zero(kind: str, mode: str) -> None:
    q = torch.randn(1, 2, 8, 16, requires_grad=True)

    def closure() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.mse_loss(F.scaled_dot_product_attention(q, q, q, is_causal=True), torch.zeros(1, 2, 8, 16))

    point = CurvaturePoint(closure, [q], kind, mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CurvatureError, match=r"scaled_dot_product.*Remedy: .*exact_attention"):
            point.product([torch.ones_like(q)])


def test_a_reentrant_checkpoint_is_refused_with_the_remedy() -> None:
    model, params, x, y = problem()

    def closure() -> Tensor:
        h = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
        return F.cross_entropy(h, y)

    with pytest.raises(CurvatureError, match="use_reentrant=False"):
        CurvaturePoint(closure, params, "hessian").product(ones(params))


@pytest.mark.filterwarnings("error:.*global hooks.*")
def test_a_compiled_model_runs_eagerly() -> None:
    model, params, x, y = problem()
    want = flatten(CurvaturePoint(lambda: F.cross_entropy(model(x), y), params, "hessian").product(ones(params)))
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    for mode in MODES:
        point = CurvaturePoint(lambda: F.cross_entropy(compiled(x), y), params, "hessian", mode=mode)
        assert relative_error(flatten(point.product(ones(params))), want) < 1e-12


# ---------------------------------------------------------------------- memory


class PeakBytes(TorchDispatchMode):
    """Bytes of live storages that operations made, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in self.live:
                    self.live[key] = storage.nbytes()
                    self.peak = max(self.peak, sum(self.live.values()))
                    weakref.finalize(storage, self.live.pop, key, None)
        return result


@pytest.mark.parametrize("mode", MODES)
def test_a_large_vocabulary_needs_no_second_graph(mode: str) -> None:
    """50,000 words: a GGN product holds few matrices of logits, not the tens of a double backward."""
    rows, width, words = 64, 8, 50_000
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, words, bias=False))
    params = list(model.parameters())
    x, y = torch.randn(rows, width), torch.randint(0, words, (rows,))
    logits = 4 * rows * words

    def peak(work: Callable[[], Any]) -> float:
        with PeakBytes() as meter:
            work()
        return meter.peak / logits

    def gradient() -> Any:
        z = model(x)
        return torch.autograd.grad(F.cross_entropy(z, y), params)

    def product() -> Any:
        with CurvaturePoint(lambda: F.cross_entropy(model(x), y), params, mode=mode) as point:
            return point.product(ones(params))

    assert peak(product) < 1.7 * peak(gradient)


def test_arguments_of_another_type_are_named() -> None:
    model, params, x, y = problem()

    def closure() -> Tensor:
        return F.cross_entropy(model(x), y)

    make: Any = CurvaturePoint
    for arguments, message in (
        ((None, params), "closure must be a callable or .* got"),
        ((3, params), "closure must be a callable or .* got"),
        ((closure, params, "ggn", {"sign": "a"}), "sign must be a number, got 'a'"),
        ((closure, params, "fisher", {"seed": "a"}), "seed must be an integer, got 'a'"),
        ((closure, params, "fisher", {"seed": 1.5}), "seed must be an integer, got 1.5"),
    ):
        options = arguments[3] if len(arguments) > 3 else {}
        with pytest.raises(TypeError, match=message):
            make(*arguments[:3], **options)
    v: Any
    with CurvaturePoint(closure, params) as point:
        for v, message in (
            (None, "v must be a sequence .* got NoneType"),
            (params[0].detach(), "v must be a sequence .* got Tensor"),
            ([None, *params[1:]], r"v\[0\] must be a real floating-point tensor, got NoneType"),
            ([*params[:3], torch.ones(3, dtype=torch.int32)], r"v\[3\] must be a real .* got torch.int32"),
            ([t.detach() * 1j for t in params], r"v\[0\] must be a real .* got torch.complex128"),
        ):
            with pytest.raises(TypeError, match=message):
                point.product(v)
        assert point.products == 0
