"""Where values and tangents of attention are asked for together, one kernel gives both; here the twin stands in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap

import sorder
from sorder.func import checkpoint, hvp
from sorder.kernels import twin
from sorder.ops import maps, memo

D = 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each map is computed, F and J in one counting as "both"."""
    counted: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            counted[name] += 1
            return function(*args)

        return count

    def both(q: Tensor, k: Tensor, v: Tensor, bias: Any, vis: Any, tq: Any, tk: Any, tv: Any, spec: Any) -> Any:
        if any(x is None for x in (tq, tk, tv)):
            return None
        counted["both"] += 1
        o, lse = twin.forward(q, k, v, bias, vis, spec)
        to, tl, _ = twin.tangent(q, k, v, bias, vis, o, lse, tq, tk, tv, None, spec)
        return o, lse, to, tl, torch.zeros_like(o)

    for name in ("forward", "tangent", "backward", "backward_tangent"):
        monkeypatch.setitem(maps._KERNELS, name, counting(name, getattr(twin, name)))
    monkeypatch.setattr(maps, "kernels_serve", lambda q: True)
    monkeypatch.setattr(maps, "_forward_tangent", both, raising=False)
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


PRODUCTS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "jvp": (lambda x, t: jvp(loss, (x,), (t,)), {"both": 1}),
    "live dual numbers": (live, {"both": 1}),
    "jvp of grad": (lambda x, t: jvp(grad(loss), (x,), (t,)), {"both": 1, "backward": 1, "backward_tangent": 1}),
    "jvp of vjp": (
        lambda x, t: jvp(lambda *x: vjp(lambda *x: sorder.attention(*x), *x)[1](x[0]), x, t),
        {"both": 1, "backward": 1, "backward_tangent": 1},
    ),
    "grad of jvp": (
        lambda x, t: grad(lambda x: jvp(loss, (x,), (t,))[1])(x),
        {"both": 0, "forward": 1, "tangent": 1, "backward": 1, "backward_tangent": 1},
    ),
    "vmap of jvp": (lambda x, t: vmap(lambda t: jvp(loss, (x,), (t,))[1])(tuple(a[None] for a in t)), {"both": 0}),
    "queries that move alone": (only_queries, {"both": 0, "forward": 1, "tangent": 1}),
    "checkpoint": (through_a_checkpoint, {"both": 0, "forward": 1}),
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
    monkeypatch.setattr(maps, "_forward_tangent", lambda *_: None)
    torch.testing.assert_close(got, product(x, t), rtol=1e-13, atol=1e-13)


def test_a_tangent_of_another_dtype_is_refused(calls: Counter[str]) -> None:
    x = torch.randn(1, 2, 5, D)
    with pytest.raises(TypeError, match="tangent of query must have its dtype"), forward_ad.dual_level():
        maps_of = [forward_ad.make_dual(a, b) for a, b in ((x, x.double()), (x, x), (x, x))]
        sorder.attention(*maps_of)
    assert not calls["both"]
