"""checkpoint under every transform, against the same model without it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import sorder
from sorder.func import checkpoint, ggnvp, hvp
from tests.cases import Block, Transformer, flatten, make_problem, relative_error

BOUND = 1e-13
Wrap = Callable[[nn.Module], Callable[..., Tensor]]

WRAPS: dict[str, Wrap] = {
    "module": lambda block: checkpoint(block),
    "method": lambda block: checkpoint(block.forward),
    "closure": lambda block: checkpoint(lambda h: block(h)),
    "default": lambda block: checkpoint(lambda h, b=block: b(h)),
    "partial": lambda block: checkpoint(functools.partial(lambda b, h: b(h), block)),
    "nested": lambda block: checkpoint(lambda h: checkpoint(block)(h) * 1.0),
}


class Substitute(TorchFunctionMode):
    """Swaps live parameters for a transform's tensors."""

    def __init__(self, replacements: dict[int, Tensor]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap = lambda t: self.replacements.get(id(t), t)  # noqa: E731
        return func(*tree_map(swap, args), **tree_map(swap, kwargs or {}))


def pair(wrap: Wrap) -> tuple[Transformer, Transformer, Callable[[nn.Module], Callable[..., Tensor]]]:
    """A transformer with ``wrap``, the same without, and the map from a module to its objective."""
    problem = make_problem("transformer")
    plain = problem.module
    wrapped = Transformer(wrap=wrap).double()
    wrapped.load_state_dict(plain.state_dict())

    def objective(module: nn.Module) -> Callable[..., Tensor]:
        def f(params: dict[str, Tensor] | None = None) -> Tensor:
            if params is None:
                return problem.loss_fn(module(problem.inputs))
            return problem.loss_fn(torch.func.functional_call(module, params, (problem.inputs,)))

        return f

    return wrapped, plain, objective


def backward(f: Callable[..., Tensor], module: nn.Module, params: Any, v: Any) -> Any:
    return torch.autograd.grad(f(), list(module.parameters()))


def create_graph(f: Callable[..., Tensor], module: nn.Module, params: Any, v: Any) -> Any:
    leaves = list(module.parameters())
    gradient = torch.autograd.grad(f(), leaves, create_graph=True)
    return torch.autograd.grad(gradient, leaves, list(v.values()))


def batched(f: Callable[..., Tensor], module: nn.Module, params: Any, v: Any) -> Any:
    leaves = list(module.parameters())
    gradient = torch.autograd.grad(f(), leaves, create_graph=True)
    return torch.autograd.grad(gradient, leaves, [torch.stack([t, 2 * t]) for t in v.values()], is_grads_batched=True)


def live_duals(f: Callable[..., Tensor], module: nn.Module, params: Any, v: Any) -> Any:
    leaves = list(module.parameters())
    with forward_ad.dual_level():
        with torch.no_grad():
            for p, t in zip(leaves, v.values(), strict=True):
                p.copy_(forward_ad.make_dual(p.detach().clone(), t))
        gradients = torch.autograd.grad(f(), leaves)
        return [forward_ad.unpack_dual(g).tangent.clone() for g in gradients]


def substituted(f: Callable[..., Tensor], module: nn.Module, params: Any, v: Any) -> Any:
    leaves = list(module.parameters())

    def pure(*values: Tensor) -> Tensor:
        with Substitute({id(p): value for p, value in zip(leaves, values, strict=True)}):
            return f()

    return hvp(pure, tuple(params.values()), tuple(v.values()))


def third(f: Callable[..., Tensor], module: nn.Module, params: Any, v: Any) -> Any:
    product = lambda p: torch.func.jvp(torch.func.grad(f), (p,), (v,))[1]  # noqa: E731
    return torch.func.jvp(product, (params,), (v,))[1]


def mapped_tangents(f: Callable[..., Tensor], module: nn.Module, params: Any, v: Any) -> Any:
    tangents = {n: torch.stack([t, 2 * t]) for n, t in v.items()}
    return torch.func.vmap(lambda t: hvp(f, (params,), (t,)))(tangents)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "backward": backward,
    "create_graph": create_graph,
    "is_grads_batched": batched,
    "live_duals": live_duals,
    "substituted": substituted,
    "grad": lambda f, m, p, v: torch.func.grad(f)(p),
    "jvp": lambda f, m, p, v: torch.func.jvp(f, (p,), (v,)),
    "jvp(grad)": lambda f, m, p, v: torch.func.jvp(torch.func.grad(f), (p,), (v,)),
    "grad(jvp)": lambda f, m, p, v: torch.func.grad(lambda q: torch.func.jvp(f, (q,), (v,))[1])(p),
    "vjp(grad)": lambda f, m, p, v: torch.func.vjp(torch.func.grad(f), p)[1](v),
    "vmap(jvp(grad))": mapped_tangents,
    "jvp(jvp(grad))": third,
    "hvp": lambda f, m, p, v: hvp(f, (p,), (v,), mode="reverse-over-forward"),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_same_numbers_under_every_transform(wrap: str, transform: str) -> None:
    v = make_problem("transformer").random_tangent()
    results = []
    for checkpointed in (True, False):
        wrapped, plain, objective = pair(WRAPS[wrap])
        module = wrapped if checkpointed else plain
        params = {n: p.detach().clone() for n, p in module.named_parameters()}
        results.append(flatten(TRANSFORMS[transform](objective(module), module, params, v)))
    assert relative_error(*results) < BOUND


def test_gradcheck_at_both_orders_with_pytrees_and_other_arguments() -> None:
    index = torch.tensor([2, 0, 2])

    @checkpoint
    def f(tree: dict[str, Any], index: Tensor, *, scale: float) -> dict[str, Any]:
        h = torch.tanh(tree["h"] @ tree["w"][0]) * scale
        return {"rows": h[index], "view": tree["h"].T, "ids": index + 1, "note": "kept", "same": tree["h"]}

    def loss(h: Tensor, w: Tensor) -> Tensor:
        out = f({"h": h, "w": [w]}, index, scale=3.0)
        assert out["note"] == "kept"
        assert torch.equal(out["ids"], torch.tensor([3, 1, 3]))
        return (out["rows"] ** 2).sum() + (out["view"] ** 3).sum() * out["same"].sum()

    h = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (h, w), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, (h, w), check_fwd_over_rev=True)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize() -> None:
    f = lambda h: checkpoint(lambda h: torch.tanh(h * h.sum()))(h).sum()  # noqa: E731
    h, v = torch.randn(3).double(), torch.randn(3).double()
    got = torch.func.linearize(torch.func.grad(f), h)[1](v)
    want = torch.func.jvp(torch.func.grad(lambda h: torch.tanh(h * h.sum()).sum()), (h,), (v,))[1]
    assert relative_error(got, want) < BOUND


class Counting(nn.Module):
    """Puts another tensor in its buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, h: Tensor) -> Tensor:
        self.count = self.count + 1
        return (h * self.count).sin()


@pytest.mark.parametrize("wrap", ["module", "nested"])
def test_a_replaced_buffer_moves_once(wrap: str) -> None:
    h = torch.randn(3, dtype=torch.float64)
    module = Counting()
    block = WRAPS[wrap](module)
    for count in (1, 2):
        got = torch.func.grad(lambda h: block(h).sum())(h)
        assert module.count == count
        assert relative_error(got, count * (count * h).cos()) < BOUND


def test_writing_to_a_differentiated_argument_is_refused() -> None:
    def written(h: Tensor) -> Tensor:
        return h.mul_(2.0).sin()

    h = torch.ones(3)
    with torch.no_grad():
        assert torch.equal(checkpoint(written)(h), torch.full((3,), 2.0).sin())
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"writes to its argument of shape \(3,\)"):
        checkpoint(written)(leaf * 1)
    with pytest.raises(RuntimeError, match=r"writes to its argument of shape \(3,\)"):
        torch.func.grad(lambda h: checkpoint(written)(h * 1).sum())(torch.ones(3))


def test_inference_mode() -> None:
    with torch.inference_mode():
        module = nn.BatchNorm1d(2)
        assert checkpoint(module)(torch.ones(3, 2)).shape == (3, 2)
        assert module.num_batches_tracked == 1


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_random_draws_that_a_trace_cannot_replay_are_refused() -> None:
    h, v = torch.randn(2, 3, 4).unbind()
    f = lambda x: checkpoint(lambda x: torch.nn.functional.dropout(x.sin(), 0.5))(x).square().sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="draws random numbers"):
        torch.func.linearize(torch.func.grad(f), h)
    torch.func.jvp(torch.func.grad(f), (h,), (v,))  # replays
    quiet = lambda x: checkpoint(lambda x: torch.nn.functional.dropout(x.sin(), 0.5, training=False))(x).sum()  # noqa: E731
    torch.func.linearize(torch.func.grad(quiet), h)


def test_linearize_attention() -> None:
    h, v = torch.randn(2, 3, 4, dtype=torch.float64).unbind()

    def product(wrap: Callable[..., Any], transform: Callable[..., Any]) -> Any:
        block = wrap(lambda h: sorder.attention(h, 2 * h, h.sin()))
        return transform(torch.func.grad(lambda h: block(h).square().sum()))

    got = product(checkpoint, lambda g: torch.func.linearize(g, h)[1](v))
    want = product(lambda f: f, lambda g: torch.func.jvp(g, (h,), (v,))[1])
    assert relative_error(got, want) < BOUND


def test_batched_cotangents_of_outputs_that_are_inputs() -> None:
    h = torch.randn(3, dtype=torch.float64, requires_grad=True)
    same, view = checkpoint(lambda h: (h, h[1:]))(h)
    value = same.square().sum() * view.sin().sum()
    (first,) = torch.autograd.grad(value, h, create_graph=True)
    (got,) = torch.autograd.grad(first, h, torch.eye(3, dtype=torch.float64), is_grads_batched=True)
    want = torch.autograd.functional.hessian(lambda h: h.square().sum() * h[1:].sin().sum(), h)
    assert relative_error(got, want) < BOUND


def test_a_loop_variable_in_the_closure_is_bound_at_the_call() -> None:
    h = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out = h
    for factor in (2.0, 3.0, 5.0):
        out = checkpoint(lambda x: torch.sin(factor * x))(out)  # noqa: B023 (what is tested)
    want = torch.sin(5 * torch.sin(3 * torch.sin(2 * h)))
    assert relative_error(torch.autograd.grad(out.sum(), h), torch.autograd.grad(want.sum(), h)) < BOUND


def test_dropout_draws_one_mask_and_leaves_the_generator_as_one_forward_does() -> None:
    dropping = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    params = {n: p.detach() for n, p in dropping.named_parameters()}
    v = {n: torch.randn_like(p) for n, p in params.items()}

    class Holder(nn.Module):
        def __init__(self, wrap: bool) -> None:
            super().__init__()
            self.inner = dropping
            self.wrap = wrap

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner)(x) if self.wrap else self.inner(x)

    def run(wrap: bool) -> tuple[Any, Tensor]:
        def f(params: dict[str, Tensor]) -> Tensor:
            named = {f"inner.{n}": p for n, p in params.items()}
            return torch.func.functional_call(Holder(wrap), named, (x,)).square().sum()

        torch.manual_seed(7)
        return hvp(f, (params,), (v,)), torch.get_rng_state()

    (got, state), (want, plain_state) = run(True), run(False)
    assert relative_error(got, want) < BOUND
    assert torch.equal(state, plain_state)

    torch.manual_seed(7)
    first = checkpoint(dropping, preserve_rng_state=False)(x).sum()
    torch.manual_seed(7)
    second = dropping(x).sum()
    leaves = list(dropping.parameters())
    assert relative_error(torch.autograd.grad(first, leaves), torch.autograd.grad(second, leaves)) > 1e-3


def test_autocast_is_replayed_after_its_region_is_left() -> None:
    block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    x = torch.randn(8, 16)
    leaves = list(block.parameters())

    def products(run: Callable[..., Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(x)
        assert out.dtype == torch.bfloat16
        gradient = torch.autograd.grad(out.float().square().sum(), leaves, create_graph=True)
        return [*gradient, *torch.autograd.grad(gradient, leaves, [torch.ones_like(p) for p in leaves])]

    got, want = products(checkpoint(block)), products(block)
    exact = products_float32(block, x)
    assert relative_error(got[:4], want[:4]) < 1e-2
    assert relative_error(got[4:], want[4:]) < 3e-2
    assert relative_error(want, exact) > 1e-4  # so that the bounds above mean something
    # The cast of a weight inside the block must not be served, without its graph, to code outside.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both = checkpoint(block)(x).float().sum() + block(x).float().sum()
    alone = torch.autograd.grad(checkpoint(block)(x).float().sum(), leaves)
    assert relative_error(torch.autograd.grad(both, leaves), [2 * g for g in alone]) < 3e-2


def products_float32(block: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = list(block.parameters())
    gradient = torch.autograd.grad(block(x).square().sum(), leaves, create_graph=True)
    return [*gradient, *torch.autograd.grad(gradient, leaves, [torch.ones_like(p) for p in leaves])]


def test_running_statistics_move_once() -> None:
    def block() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()).double()

    x = torch.randn(5, 3, dtype=torch.float64)
    results = []
    for wrap in (checkpoint, lambda b: b):
        module = block()
        leaves = list(module.parameters())
        for _ in range(2):
            g = torch.autograd.grad(wrap(module)(x).square().sum(), leaves, create_graph=True)
            products = torch.autograd.grad(g, leaves, [torch.ones_like(p) for p in leaves])
        results.append((products, [b.double() for b in module.buffers()]))
    assert relative_error(results[0][0], results[1][0]) < BOUND
    assert relative_error(results[0][1], results[1][1]) < BOUND


def test_function_modes_are_replayed() -> None:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return 2 * out if func is torch.sin else out

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with Doubled():
        out = checkpoint(torch.sin)(x)
    assert relative_error(torch.autograd.grad(out.sum(), x), 2 * x.cos()) < BOUND


def test_function_modes_serve_every_run_under_transforms() -> None:
    """A Function's apply is itself a call that modes handle, within which they are off."""

    class Cube(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] ** 3 if func is torch.tanh else func(*args, **(kwargs or {}))

    x, v = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def product(function: Callable[[Tensor], Tensor]) -> Tensor:
        with Cube():
            return torch.func.jvp(torch.func.grad(lambda x: function(x).sum()), (x,), (v,))[1]

    assert relative_error(product(checkpoint(lambda x: torch.tanh(x))), 6 * x * v) < BOUND


def test_a_derivative_that_would_be_lost_raises() -> None:
    h = torch.randn(2, 3)
    hidden = torch.randn(3, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="would be lost"):
        checkpoint(lambda h: h @ hidden)(h)
    for transform in (
        lambda f: torch.func.grad(f)(hidden.detach()),
        lambda f: torch.func.jvp(f, (hidden.detach(),), (hidden.detach(),)),
        lambda f: torch.func.vmap(f)(hidden.detach()[None]),
    ):
        with pytest.raises(RuntimeError, match="would be lost"):
            transform(lambda w: checkpoint(lambda h: h @ w)(h).sum())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hidden.detach(), hidden.detach())
        with pytest.raises(RuntimeError, match="would be lost"):
            checkpoint(lambda h: h @ dual)(h)
    with torch.no_grad():  # nothing to lose
        assert torch.equal(checkpoint(lambda h: h @ hidden)(h), h @ hidden)
    constant = hidden.detach()
    assert torch.equal(checkpoint(lambda h: h @ constant)(h), h @ constant)


def test_frozen_parameters_cost_and_get_nothing() -> None:
    block = Block(4, 2)
    block.mlp.requires_grad_(False)
    h = torch.randn(1, 3, 4)
    checkpoint(block)(h).sum().backward()
    assert block.mlp.weight.grad is None
    assert block.attention.qkv.weight.grad is not None


def test_graph_holds_inputs_only_and_the_block_is_recomputed() -> None:
    calls = 0

    def deep(h: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        for _ in range(10):
            h = torch.tanh(h @ w)
        return h

    w = torch.randn(6, 6, requires_grad=True)
    h = torch.randn(5, 6, requires_grad=True)

    def saved(f: Callable[..., Tensor]) -> list[Tensor]:
        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            f(h, w)
        return held

    addresses = {t.data_ptr() for t in saved(checkpoint(deep))}
    assert addresses == {h.data_ptr(), w.data_ptr()}
    assert len({t.data_ptr() for t in saved(deep)}) > 10

    calls = 0
    out = checkpoint(deep)(h, w).sum()
    assert calls == 1
    gradient = torch.autograd.grad(out, (h, w), create_graph=True)
    assert relative_error(gradient, torch.autograd.grad(deep(h, w).sum(), (h, w))) < 1e-5


def hvp_by_transform(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(torch.func.grad(f), (x,), (x,))[1]


def hvp_by_live_duals(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        with torch.no_grad():
            leaf.copy_(forward_ad.make_dual(x, x))
        return forward_ad.unpack_dual(torch.autograd.grad(f(leaf), leaf)[0]).tangent


@pytest.mark.parametrize("product", [hvp_by_transform, hvp_by_live_duals])
def test_activations_of_a_block_die_with_the_call(product: Callable[..., Tensor]) -> None:
    alive: list[weakref.ref[Tensor]] = []
    peak = 0

    class Probe(TorchFunctionMode):
        """Counts results of ``torch.sin`` that are still alive, derivative levels included."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal peak
            out = func(*args, **(kwargs or {}))
            if func is torch.sin:
                alive.append(weakref.ref(out))
                peak = max(peak, sum(ref() is not None for ref in alive))
            return out

    def block(h: Tensor) -> Tensor:
        for _ in range(4):
            h = torch.cos(torch.sin(h))
        return h

    def run(wrap: Callable[..., Any]) -> int:
        nonlocal peak
        peak = 0
        alive.clear()

        def f(h: Tensor) -> Tensor:
            for _ in range(6):
                h = wrap(block)(h)
            return h.sum()

        with Probe():
            product(f, torch.ones(3))
        return peak

    assert run(lambda f: f) >= 24
    assert run(checkpoint) <= 5


def test_a_pullback_frees_what_its_evaluation_saved() -> None:
    saved: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Stage(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            out = x.exp()
            saved.append(weakref.ref(out.untyped_storage()))
            return out

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in saved))
            return cotangent * ctx.saved_tensors[0]

    def block(h: Tensor) -> Tensor:
        for _ in range(6):
            h = Stage.apply(-h)
        return h

    checkpoint(block)(torch.ones(3, requires_grad=True)).sum().backward()
    assert len(alive) == 6
    assert alive[0] >= 6
    assert alive[-1] <= 3  # with the block's result, and the one that is passed just now


def test_dead_levels_under_forward_mode() -> None:
    """A pullback that outlived ``vjp``, with tangents and without a graph."""
    x, one = torch.ones(3, dtype=torch.float64), torch.ones((), dtype=torch.float64)

    def product(wrap: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        pull = torch.func.vjp(lambda h: wrap(torch.sin)(h).square().sum(), x)[1]
        with torch.no_grad():
            return torch.func.jvp(lambda c: pull(c)[0], (one,), (2 * one,))

    assert relative_error(product(checkpoint), product(lambda f: f)) < 1e-14


def test_ggnvp_of_a_checkpointed_model() -> None:
    problem = make_problem("transformer")
    wrapped, _, _ = pair(WRAPS["module"])
    params, v = problem.params, problem.random_tangent()
    model = lambda p: torch.func.functional_call(wrapped, p, (problem.inputs,))  # noqa: E731
    got = ggnvp(model, problem.loss_fn, (params,), (v,))
    assert relative_error(got, ggnvp(problem.model_fn, problem.loss_fn, (params,), (v,))) < BOUND


def test_vmap_over_an_ensemble_and_random_masks() -> None:
    members = [nn.Linear(3, 3).double() for _ in range(2)]
    params, _ = torch.func.stack_module_state(members)
    x = torch.randn(4, 3, dtype=torch.float64)

    def loss(p: dict[str, Tensor], wrap: bool) -> Tensor:
        class Member(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = members[0]

            def forward(self, x: Tensor) -> Tensor:
                run = lambda x: F.dropout(torch.tanh(self.layer(x)), 0.5)  # noqa: E731
                return checkpoint(run)(x) if wrap else run(x)

        named = {f"layer.{n}": t for n, t in p.items()}
        return torch.func.functional_call(Member(), named, (x,)).square().sum()

    results = []
    for wrap in (True, False):
        torch.manual_seed(1)
        per_member = torch.func.vmap(torch.func.grad(lambda p: loss(p, wrap)), randomness="different")  # noqa: B023
        results.append(per_member({n: p.detach() for n, p in params.items()}))
    assert relative_error(*results) < BOUND


def test_not_callable() -> None:
    with pytest.raises(TypeError, match="function must be callable, got int"):
        checkpoint(3)  # type: ignore[type-var]
