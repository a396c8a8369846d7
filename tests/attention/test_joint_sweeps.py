"""Where values and tangents of attention are asked for together, one kernel gives both; here the twin stands in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.utils._pytree import tree_map

import sorder
from sorder.func import checkpoint, hvp
from sorder.kernels import backward_and_tangent, forward_and_tangent, twin
from sorder.kernels.hopper import dispatch
from sorder.kernels.spec import AttentionSpec
from sorder.ops import maps, memo
from tests.cases import counting

D = 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each map is computed; F and J in one are "both", B and T in one "both_backward"."""
    counted: Counter[str] = Counter()

    def serves(q: Tensor, k: Tensor, v: Tensor, bias: Any, vis: Any, spec: Any, *needed: Any) -> bool:
        return not any(x is None for x in needed)

    def both(q: Tensor, k: Tensor, v: Tensor, tq: Tensor, tk: Tensor, tv: Tensor, spec: Any) -> Any:
        assert all(type(x) is Tensor and x.data_ptr() for x in (q, k, v, tq, tk, tv))
        counted["both"] += 1
        o, lse = twin.forward(q, k, v, None, None, spec)
        to, tl, _ = twin.tangent(q, k, v, None, None, o, lse, tq, tk, tv, None, spec)
        return o, lse, to, tl, torch.zeros_like(o)

    def both_backward(*args: Any) -> Any:
        q, k, v, o, lse, do, tq, tk, tv, to, tl, to_low, tdo, spec = args
        counted["both_backward"] += 1
        first = twin.backward(q, k, v, None, None, o, lse, do, None, "qkv", spec)[:3]
        caches = (q, k, v, None, None, o, lse, do, None, tq, tk, tv, None, to, tl, to_low, tdo, None)
        return *first, *twin.backward_tangent(*caches, "qkv", spec)[:3]

    for name in ("forward", "tangent", "backward", "backward_tangent"):
        monkeypatch.setitem(maps._KERNELS, name, counting(counted, name, getattr(twin, name)))
    monkeypatch.setattr(maps, "kernels_serve", lambda q: True)
    monkeypatch.setattr(forward_and_tangent, "serves", serves)
    monkeypatch.setattr(forward_and_tangent, "forward_and_tangent", both)
    monkeypatch.setattr(backward_and_tangent, "serves", serves)
    monkeypatch.setattr(backward_and_tangent, "backward_and_tangent", both_backward)
    return counted


def loss(x: tuple[Tensor, ...]) -> Tensor:
    return sorder.attention(*x, is_causal=True).square().sum()


def live(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
    with forward_ad.dual_level(), torch.no_grad():
        return forward_ad.unpack_dual(loss(tuple(map(forward_ad.make_dual, x, t))))


def only_queries(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
    return jvp(lambda q: loss((q, *x[1:])), (x[0],), (t[0],))


def through_a_checkpoint(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
    return hvp(lambda x: checkpoint(lambda *x: sorder.attention(*x, is_causal=True))(*x).square().sum(), (x,), (t,))


def by_hvp(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
    with sorder.exact_attention(), torch.device("cpu"):  # modes that leave Functions alone
        return hvp(lambda x: F.scaled_dot_product_attention(*x, is_causal=True).square().sum(), (x,), (t,))


def in_inference_mode(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
    with torch.inference_mode():
        return grad(lambda x: jvp(loss, (x,), (t,))[1])(x)


def partly_in_inference_mode(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
    def partly(q: Tensor) -> Tensor:
        with torch.inference_mode():
            o = sorder.attention(q, *x[1:])
        return o.sum() * q.sum()

    return jvp(grad(partly), (x[0],), (t[0],))


def changed_in_place(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    with forward_ad.dual_level():
        duals = tuple(map(forward_ad.make_dual, x, t))
        with torch.no_grad():
            o, other = sorder.attention(*duals), sorder.attention(*duals)
        o *= w
        other.detach_()
        return forward_ad.unpack_dual(o).tangent.detach(), other.sum()


def batched_tangents(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Any:
    return torch.autograd.functional.jacobian(
        lambda q: sorder.attention(q, q, q), x[0], vectorize=True, strategy="forward-mode"
    )


PRODUCTS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "jvp": (lambda x, t: jvp(loss, (x,), (t,)), {"both": 1}),
    "live dual numbers": (live, {"both": 1}),
    "jvp of grad": (
        lambda x, t: jvp(grad(loss), (x,), (t,)),
        {"both": 1, "both_backward": 1, "backward": 0, "backward_tangent": 0},
    ),
    "jvp of vjp": (
        lambda x, t: jvp(lambda *x: vjp(lambda *x: sorder.attention(*x), *x)[1](x[0]), x, t),
        {"both": 1, "both_backward": 1, "backward": 0, "backward_tangent": 0},
    ),
    "grad of jvp": (
        lambda x, t: grad(lambda x: jvp(loss, (x,), (t,))[1])(x),
        {"both": 0, "forward": 1, "tangent": 1, "backward": 1, "backward_tangent": 1},
    ),
    "vmap of jvp": (lambda x, t: vmap(lambda t: jvp(loss, (x,), (t,))[1])(tuple(a[None] for a in t)), {"both": 0}),
    "queries that move alone": (only_queries, {"both": 0, "forward": 1, "tangent": 1}),
    "checkpoint": (through_a_checkpoint, {"both": 0, "forward": 1}),
    "hvp": (by_hvp, {"both": 1, "both_backward": 1, "backward": 0, "backward_tangent": 0}),
    "grad of jvp in inference mode": (in_inference_mode, {"both": 0, "forward": 1}),
    "jvp of grad, partly in inference mode": (partly_in_inference_mode, {"both": 0}),
    "changed in place": (changed_in_place, {"both": 2}),
    "batched tangents": (batched_tangents, {"both": 0}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_tangents_are_computed_together(
    name: str, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo, "_MIN_SCORES", 0)
    product, expected = PRODUCTS[name]
    torch.manual_seed(0)
    x, t = (tuple(torch.randn(1, 2, 5, D, dtype=torch.float64) for _ in range(3)) for _ in range(2))
    got = product(x, t)
    assert {kind: calls[kind] for kind in expected} == expected
    monkeypatch.setattr(forward_and_tangent, "serves", lambda *_: False)
    monkeypatch.setattr(backward_and_tangent, "serves", lambda *_: False)
    torch.testing.assert_close(got, product(x, t), rtol=1e-13, atol=1e-13)


def test_where_backward_and_its_tangent_are_one_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(d: int, causal: bool) -> bool:
        x = torch.empty(1, 2, 5, d, dtype=torch.bfloat16)
        return backward_and_tangent.serves(x, x, x, None, None, AttentionSpec(1.0, causal), x)

    monkeypatch.setattr(dispatch, "serves", lambda *_: True)
    assert served(64, True)
    assert served(40, True)
    assert not served(128, True)
    assert not served(64, False)
    torch.use_deterministic_algorithms(True)
    try:
        assert not served(64, True)
    finally:
        torch.use_deterministic_algorithms(False)


class Wrapper(Tensor):
    """Holds another tensor, and no memory of its own."""

    held: Tensor

    @staticmethod
    def __new__(cls, x: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, strides=x.stride())  # type: ignore[attr-defined]
        made.held = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))


def test_tensors_that_hold_no_memory_go_another_way(calls: Counter[str]) -> None:
    x, t = torch.randn(2, 1, 2, 5, D)
    jvp(lambda x: sorder.attention(x, x, x), (Wrapper(x),), (t,))
    for primal, tangent in ((x, Wrapper(t)), (Wrapper(x), Wrapper(t))):
        with forward_ad.dual_level(), torch.no_grad():
            dual = forward_ad.make_dual(primal, tangent)
            sorder.attention(dual, dual, dual)
    assert not calls["both"]
    assert calls["tangent"] == 3


@pytest.mark.parametrize("dual", [False, True])
def test_batched_cotangents_within_a_dual_level(dual: bool, calls: Counter[str]) -> None:
    """Gradients, their tangents, and what is recorded of them, are those of the cotangents one by one."""
    x = [torch.randn(1, 2, 5, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    cotangents, t = torch.randn(3, 1, 2, 5, D, dtype=torch.float64), torch.randn(1, 2, 5, D, dtype=torch.float64)

    def gradients(batched: bool, create_graph: bool) -> list[Tensor]:
        with forward_ad.dual_level():
            o = sorder.attention(forward_ad.make_dual(x[0], t) if dual else x[0], *x[1:], is_causal=True)
            if batched:
                first = torch.autograd.grad(o, x, cotangents, is_grads_batched=True, create_graph=create_graph)
            else:
                each = [torch.autograd.grad(o, x, c, retain_graph=True, create_graph=create_graph) for c in cotangents]
                first = tuple(map(torch.stack, zip(*each, strict=True)))
            pairs = [forward_ad.unpack_dual(g) for g in first]
            assert all((tangent is not None) == dual for _, tangent in pairs)
            found = [g for pair in pairs for g in pair if g is not None]
            if create_graph and not dual:  # of a tangent it would be a third derivative
                found += torch.autograd.grad(sum(g.primal.square().sum() for g in pairs), x)
            return [g.detach().clone() for g in found]

    for create_graph in (False, True):
        torch.testing.assert_close(
            gradients(True, create_graph), gradients(False, create_graph), rtol=1e-12, atol=1e-12
        )


def test_a_tangent_on_another_device_is_refused() -> None:
    x = torch.randn(1, 2, 5, D)
    with pytest.raises(ValueError, match="tangent of query must be on its device cpu, got meta"):
        jvp(lambda x: sorder.attention(x, x, x), (x,), (x.to("meta"),))


def test_dual_numbers_made_in_compiled_code_keep_their_tangents() -> None:
    def f(x: Tensor, t: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, t)
            return forward_ad.unpack_dual(sorder.attention(dual, x, x)).tangent

    x, t = torch.randn(2, 1, 2, 5, D, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(f, backend="eager")(x, t), f(x, t))


def test_a_tangent_of_another_dtype_is_refused(calls: Counter[str]) -> None:
    x = torch.randn(1, 2, 5, D)
    with pytest.raises(TypeError, match="tangent of query must have its dtype"), forward_ad.dual_level():
        maps_of = [forward_ad.make_dual(a, b) for a, b in ((x, x.double()), (x, x), (x, x))]
        sorder.attention(*maps_of)
    assert not calls["both"]
