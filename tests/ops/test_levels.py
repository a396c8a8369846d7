"""LeveledFunction against a Function of PyTorch's own with the same rules, under every nesting of transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.overrides import TorchFunctionMode

import sorder
from sorder.ops.levels import LeveledFunction


class Pair(NamedTuple):
    factor: Tensor
    absent: Tensor | None


def rules(base: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """(x, y, c) → (c.factor·x³y, None), whose backward is differentiable."""

    class Product(base):  # type: ignore[valid-type, misc]
        @staticmethod
        def forward(x: Tensor, y: Tensor, c: Pair) -> Any:
            if x.numel() == 13:
                raise RuntimeError("unlucky")
            return c.factor * x**3 * y, None

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            x, y, ctx.c = inputs
            ctx.save_for_backward(x, y)
            ctx.save_for_forward(x, y)

        @staticmethod
        def backward(ctx: Any, g: Tensor, _: Any) -> Any:
            x, y = ctx.saved_tensors
            return 3 * g * ctx.c.factor * x**2 * y, g * ctx.c.factor * x**3, None

        @staticmethod
        def jvp(ctx: Any, tx: Tensor | None, ty: Tensor | None, _: Any) -> Any:
            x, y = ctx.saved_tensors
            tangent = torch.zeros_like(x)
            if tx is not None:
                tangent = tangent + 3 * ctx.c.factor * x**2 * y * tx
            return tangent if ty is None else tangent + ctx.c.factor * x**3 * ty, None

        @staticmethod
        def vmap(info: Any, dims: Any, x: Tensor, y: Tensor, c: Pair) -> Any:
            x, y = (
                a.expand(info.batch_size, *a.shape) if d is None else a.movedim(d, 0)
                for a, d in zip((x, y), dims[:2], strict=True)
            )
            return Product.apply(x, y, c), (0, None)

    return Product


OURS, THEIRS, JOINT = rules(LeveledFunction), rules(torch.autograd.Function), rules(LeveledFunction)
joint_calls = 0


def joint(inputs: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    global joint_calls
    x, y, c = inputs
    tx, ty, _ = tangents
    if tx is None:  # another way
        return None
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(a) for a in (x, y, tx))
    joint_calls += 1
    tangent = 3 * c.factor * x**2 * y * tx
    return (c.factor * x**3 * y, None), (tangent if ty is None else tangent + c.factor * x**3 * ty, None)


JOINT.joint = staticmethod(joint)  # type: ignore[attr-defined]
JOINT.may_join = staticmethod(lambda inputs: True)  # type: ignore[attr-defined]


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


def setting(function: type[torch.autograd.Function]) -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    x, t, y = (torch.randn(4, dtype=torch.float64) for _ in range(3))
    c = Pair(torch.tensor(1.5, dtype=torch.float64), None)
    return lambda x: (function.apply(x, y, c)[0] ** 2).sum() + function.apply(y, x, c)[0].sum(), x, t  # type: ignore[no-untyped-call]


def at_no_grad(f: Callable[..., Tensor], x: Tensor, t: Tensor) -> Any:
    def half(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = f(x)
        return constant * f(x)

    return jvp(grad(half), (x,), (t,))


def outlived(f: Callable[..., Tensor], x: Tensor, t: Tensor) -> Any:
    """The pullback is called after its level has ended, and differentiated."""
    _, pull = vjp(f, x)
    return jvp(lambda s: pull(s)[0], (torch.ones((), dtype=x.dtype),), (torch.ones((), dtype=x.dtype),))


def under_mode(f: Callable[..., Tensor], x: Tensor, t: Tensor) -> Any:
    with Seen() as seen:
        out = grad(f)(x)
    assert sum("custom_function_call" in name for name in seen.names) == 2
    return out


PRODUCTS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x, t: grad(f)(x),
    "jvp of grad": lambda f, x, t: jvp(grad(f), (x,), (t,)),
    "grad of jvp": lambda f, x, t: grad(lambda x: jvp(f, (x,), (t,))[1])(x),
    "grad of grad": lambda f, x, t: grad(lambda x: (grad(f)(x) * t).sum())(x),
    "jacfwd of jacrev": lambda f, x, t: jacfwd(jacrev(f))(x),
    "grad of vmap": lambda f, x, t: grad(lambda x: vmap(f)(torch.stack((x, t))).sum())(x),
    "vmap of jvp of grad": lambda f, x, t: vmap(lambda t: jvp(grad(f), (x,), (t,))[1])(torch.eye(4).to(x)),
    "linearize of grad": lambda f, x, t: linearize(grad(f), x)[1](t),
    "autograd over grad": lambda f, x, t: torch.autograd.functional.jvp(grad(f), x, t),
    "grad with a constant part": at_no_grad,
    "a pullback that outlived its level": outlived,
    "grad under a mode": under_mode,
    "grad of a subclass": lambda f, x, t: grad(f)(x.as_subclass(Sub)).as_subclass(torch.Tensor),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_is_as_pytorch_has_it(name: str) -> None:
    ours, theirs = (PRODUCTS[name](*setting(function)) for function in (OURS, THEIRS))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def live(f: Callable[..., Tensor], x: Tensor, t: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t)))


def live_and_recorded(f: Callable[..., Tensor], x: Tensor, t: Tensor) -> Any:
    with forward_ad.dual_level():
        x = x.clone().requires_grad_()
        out = forward_ad.unpack_dual(torch.autograd.grad(f(forward_ad.make_dual(x, t)), x)[0])
        return out.primal, out.tangent


# and how often values and tangents are computed together: once for each of two calls, unless one's x does not move
JOINTLY: dict[str, tuple[Callable[..., Any], int]] = {
    "jvp": (lambda f, x, t: jvp(f, (x,), (t,)), 1),
    "jvp of grad": (lambda f, x, t: jvp(grad(f), (x,), (t,)), 1),
    "grad of jvp": (lambda f, x, t: grad(lambda x: jvp(f, (x,), (t,))[1])(x), 0),
    "vmap of jvp": (lambda f, x, t: vmap(lambda t: jvp(f, (x,), (t,))[1])(torch.eye(4).to(x)), 0),
    "live dual numbers": (live, 1),
    "live dual numbers, recorded": (live_and_recorded, 0),
    "under a mode": (lambda f, x, t: jvp(lambda x: under_mode(f, x, t), (x,), (t,)), 0),
    "a call without tangents": (lambda f, x, t: jvp(lambda y: f(x) * y, (t.sum(),), (t.sum(),)), 0),
}


@pytest.mark.parametrize("name", JOINTLY)
def test_joint_values_and_tangents(name: str) -> None:
    global joint_calls
    product, times = JOINTLY[name]
    theirs = product(*setting(THEIRS))
    joint_calls = 0
    f, x, t = setting(JOINT)
    torch.testing.assert_close(product(f, x, t), theirs, rtol=1e-14, atol=0)
    assert joint_calls == times


def test_an_error_leaves_the_levels_as_they_were() -> None:
    f, x, t = setting(OURS)
    unlucky = torch.ones(13, dtype=torch.float64)
    c = Pair(torch.ones((), dtype=torch.float64), None)

    def guarded(x: Tensor) -> Tensor:
        try:
            OURS.apply(unlucky * x.sum(), unlucky, c)
        except RuntimeError as error:
            assert "unlucky" in str(error)
        else:
            raise AssertionError
        return f(x)

    torch.testing.assert_close(jvp(grad(guarded), (x,), (t,)), jvp(grad(f), (x,), (t,)), rtol=0, atol=0)
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert not torch._C._functorch.get_single_level_autograd_function_allowed()


def test_attention_makes_no_class_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: Any) -> Any:
        raise AssertionError("PyTorch's own way was taken")

    monkeypatch.setattr(torch._functorch.autograd_function, "generate_single_level_function", unexpected)
    q, t = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    f = lambda q: sorder.attention(q, q, q).square().sum()  # noqa: E731
    assert jvp(grad(f), (q,), (t,))[1].isfinite().all()
    with torch.device("cpu"):
        assert sorder.func.hvp(f, (q,), (t,))[0].isfinite().all()
