"""Products stay differentiable where a derivative of them is asked for, and keep no graph where none is."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sorder.func import hvp

MODES = ["forward-over-reverse", "reverse-over-reverse"]


def quartic(x: Tensor, w: Tensor) -> Tensor:
    return (w * x.sin() * x.square()).sum() + x.prod()


def product(mode: str, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return hvp(lambda x: quartic(x, w), (x,), v, argnums=0, mode=mode).square().sum()


def reference(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return jvp(grad(lambda x: quartic(x, w)), (x,), (v,))[1].square().sum()


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(3), ids=["point", "captured", "direction"])
def test_a_product_can_be_differentiated(mode: str, number: int) -> None:
    values = inputs()
    expected = grad(reference, argnums=number)(*values)
    assert expected.norm() > 0.1
    torch.testing.assert_close(grad(lambda *a: product(mode, *a), argnums=number)(*values), expected)
    values[number].requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(product(mode, *values), values[number])[0], expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(3), ids=["point", "captured", "direction"])
def test_recorded_tangents_of_an_outer_jvp_keep_their_graph(mode: str, number: int) -> None:
    values = inputs()
    tangent = torch.ones(4, dtype=torch.float64, requires_grad=True)

    def slope(f: Callable[..., Tensor]) -> Tensor:
        one = lambda x: f(*values[:number], x, *values[number + 1 :])  # noqa: E731
        return jvp(one, (values[number],), (tangent,))[1]

    want, got = (slope(f) for f in (reference, lambda *a: product(mode, *a)))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, tangent), torch.autograd.grad(want, tangent))


@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode: Any) -> None:
    values = inputs()
    compiled = torch.compile(lambda x, w, v: product(mode, x, w, v), backend="eager")
    torch.testing.assert_close(compiled(*values), reference(*values))


@pytest.mark.parametrize("mode", MODES)
def test_under_no_grad_there_is_no_graph(mode: str) -> None:
    values = [x.requires_grad_() for x in inputs()]
    with torch.no_grad():
        found = product(mode, *values)
    assert not found.requires_grad
    torch.testing.assert_close(found, reference(*values).detach())


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes of tensors alive that were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
                self.peak = max(self.peak, sum(self.sizes.values()))
        return out


def peak(call: Callable[[], Any]) -> int:
    with LiveBytes() as live:
        call()
    return live.peak


@pytest.mark.parametrize(("mode", "bound"), [("forward-over-reverse", 2.3), ("reverse-over-reverse", 3.3)])
def test_memory_in_multiples_of_a_gradient(mode: Any, bound: float) -> None:
    model = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(8, 8), nn.GELU())))
    params = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(4096, 8)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, x).square().mean()

    def gradient() -> None:
        torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

    ratio = peak(lambda: hvp(loss, (params,), (params,), mode=mode)) / peak(gradient)
    assert 1.0 < ratio < bound
