"""sorder.attention under every first- and second-order transform, against dense attention under the same transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacrev, jvp, linearize, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import sorder
from sorder.kernels import twin
from sorder.ops import maps

from . import oracle
from .transforms import PRODUCTS, forward_over_reverse, loss_of, per_sample_gradients, reverse_over_reverse

Tensors = tuple[torch.Tensor, ...]


def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return sorder.attention(q, k, v, is_causal=True, return_lse=True)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return oracle.dense(q, k, v, causal=True)


def over_samples(f: Callable[..., Any], x: Tensors, t: Tensors) -> Tensors:
    """Per-sample products; the value and its tangent are shared by all samples."""
    v, tv = x[2][:, 0], t[2][:, 0]

    def one(q: torch.Tensor, k: torch.Tensor, tq: torch.Tensor, tk: torch.Tensor) -> Tensors:
        return jvp(grad(f, argnums=(0, 1, 2)), (q, k, v), (tq, tk, tv))[1]

    return vmap(one, in_dims=1)(x[0], x[1], t[0], t[1])


TRANSFORMS = [*PRODUCTS, over_samples, per_sample_gradients]


def problem(device: str, dtype: torch.dtype, n_q: int = 20, n_k: int = 23) -> tuple[Tensors, Tensors]:
    sizes = ((2, 2, n_q, 16), (2, 2, n_k, 16), (2, 2, n_k, 8))
    x, t = (tuple(torch.randn(*s).to(device, dtype) for s in sizes) for _ in range(2))
    return x, t


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("with_lse", [False, True], ids=["output", "output+lse"])
def test_equals_dense(setting: Any, transform: Callable[..., Any], with_lse: bool) -> None:
    device, dtype, bound = setting
    x, t = problem(device, dtype)
    wide = tuple(a.double() for a in x), tuple(a.double() for a in t)
    got = transform(loss_of(operator, with_lse), x, t)
    want = transform(loss_of(dense, with_lse), *wide)
    for name, a, b in zip("qkv", got, want, strict=True):
        assert oracle.relative_error(a, b) <= bound, name


def test_hessian(setting: Any) -> None:
    device, dtype, bound = setting
    if dtype is torch.bfloat16 or (bound == 3e-6 and device == "cpu"):
        pytest.skip("one precision a device suffices")
    x = tuple(a[0, 0, :5] for a in problem(device, dtype)[0])
    got = hessian(loss_of(operator), argnums=(0, 1, 2))(*x)
    want = hessian(loss_of(dense), argnums=(0, 1, 2))(*(a.double() for a in x))
    for row, row_want in zip(got, want, strict=True):
        for block, block_want in zip(row, row_want, strict=True):
            assert oracle.relative_error(block, block_want) <= 10 * bound


def test_jacobian_by_vmap_of_vjp(setting: Any) -> None:
    device, dtype, bound = setting
    x = tuple(a[:, :, :3] for a in problem(device, dtype)[0])
    got = jacrev(lambda *x: operator(*x)[0], argnums=(0, 1, 2))(*x)
    want = jacrev(lambda *x: dense(*x)[0], argnums=(0, 1, 2))(*(a.double() for a in x))
    for a, b in zip(got, want, strict=True):
        assert oracle.relative_error(a, b) <= bound


def test_gradcheck() -> None:
    x = [torch.randn(1, n, w, dtype=torch.float64, requires_grad=True) for n, w in ((3, 4), (5, 4), (5, 2))]
    assert torch.autograd.gradcheck(operator, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(operator, x, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("moving", ["q", "k", "v", "qv", "kv", "qk"])
def test_gradients_of_some_inputs_only(moving: str) -> None:
    """Case: the gradient with respect to the query alone, then of its squared norm.

    The other tangents are undefined.
    """
    x, _ = problem("cpu", torch.float64)

    def squared_gradient(attention: Callable[..., Any]) -> list[torch.Tensor]:
        leaves = [a.clone().requires_grad_(name in moving) for name, a in zip("qkv", x, strict=True)]
        active = [a for a in leaves if a.requires_grad]
        gradients = torch.autograd.grad(loss_of(attention, False)(*leaves), active, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in gradients), active))

    for a, b in zip(squared_gradient(operator), squared_gradient(dense), strict=True):
        assert oracle.relative_error(a, b) <= 1e-12


def test_absent_tangents_reach_the_maps_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[bool], Any]] = []

    def watch(name: str) -> None:
        original = getattr(twin, name)

        def spy(*args: Any) -> Any:
            seen.append((name, [a is not None for a in args[7:-2]], args[-2]))
            return original(*args)

        monkeypatch.setattr(twin, name, spy)

    for name in ("tangent", "backward", "backward_tangent"):
        watch(name)
    x, _ = problem("cpu", torch.float64)
    q = x[0].requires_grad_()
    (dq,) = torch.autograd.grad(sorder.attention(q, *x[1:]).sum(), q, create_graph=True)
    torch.autograd.grad(dq.square().sum(), q)
    assert [name for name, *_ in seen] == ["backward", "tangent", "backward_tangent"]
    assert seen[0] == ("backward", [True, False], "q")  # dO, no dL; only dQ wanted
    #                  dO    dL     Q̇     K̇      V̇     biaṡ   Ȯ     L̇     low    dȮ     dL̇
    assert seen[2] == (
        "backward_tangent",
        [True, False, True, False, False, False, True, True, False, False, False],
        "q",
    )


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """(map, wanted) of every map that runs from now on."""
    calls: list[tuple[str, Any]] = []
    for name in ("forward", "tangent", "backward", "backward_tangent"):
        original = getattr(twin, name)
        monkeypatch.setattr(twin, name, lambda *a, f=original, n=name: (calls.append((n, a[-2])), f(*a))[1])
    return calls


def test_only_gradients_that_a_pass_uses_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v all require gradients and have graphs; the passes ask for less."""
    (q, k, v), _ = problem("cpu", torch.float64)
    q, k, v = (a.requires_grad_().clone() for a in (q, k, v))
    do = torch.randn(2, 2, 20, 8, dtype=torch.float64, requires_grad=True)
    out = sorder.attention(q, k, v)
    calls = _watched(monkeypatch)
    torch.autograd.grad(out, q, do, retain_graph=True)
    assert calls == [("backward", "q")]
    first = torch.autograd.grad(out, (q, k, v), do, create_graph=True)
    calls.clear()
    (jvp_by_double_backward,) = torch.autograd.grad(first, do, (q, k, v))
    assert [name for name, _ in calls] == ["tangent"]  # no T
    want = jvp(lambda *x: oracle.dense(*x)[0], (q, k, v), (q, k, v))[1]
    assert oracle.relative_error(jvp_by_double_backward, want) <= 1e-13


def test_forward_over_reverse_sweeps_no_second_time_for_row_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("forward", "tangent", "backward", "backward_tangent"):
        original = getattr(maps, name)
        monkeypatch.setattr(maps, name, lambda *a, f=original, n=name: (calls.append(n), f(*a))[1])
    x, t = problem("cpu", torch.float64)
    forward_over_reverse(loss_of(operator), x, t)
    assert sorted(calls) == ["backward", "backward_tangent", "forward", "tangent"]


def test_products_are_differentiable_in_their_vector() -> None:
    """As torch.autograd.functional.hvp needs: it differentiates a double backward with respect to the vector."""
    x, t = problem("cpu", torch.float64)
    for got, want in zip(
        torch.autograd.functional.hvp(loss_of(operator), x, t)[1],
        torch.autograd.functional.hvp(loss_of(dense), x, t)[1],
        strict=True,
    ):
        assert oracle.relative_error(got, want) <= 1e-13
    for product in (forward_over_reverse, reverse_over_reverse):
        got, want = (
            jvp(lambda *t, f=f, product=product: product(loss_of(f), x, t), t, x)[1] for f in (operator, dense)
        )
        pulled, pulled_want = (
            vjp(lambda *t, f=f, product=product: product(loss_of(f), x, t), *t)[1](x) for f in (operator, dense)
        )
        for a, b in zip((*got, *pulled), (*want, *pulled_want), strict=True):
            assert oracle.relative_error(a, b) <= 1e-13


def test_vmap_of_a_linearized_gradient() -> None:
    x, t = problem("cpu", torch.float64)
    batch = tuple(torch.stack([a, 2 * a]) for a in t)
    got, want = (vmap(linearize(grad(loss_of(f), argnums=(0, 1, 2)), *x)[1])(*batch) for f in (operator, dense))
    for a, b in zip(got, want, strict=True):
        assert oracle.relative_error(a, b) <= 1e-13


@pytest.mark.parametrize(
    "third",
    [
        lambda f, x, t: grad(lambda x: sum(h.sum() for h in forward_over_reverse(f, x, t)))(x),
        lambda f, x, t: grad(lambda x: sum(h.sum() for h in reverse_over_reverse(f, x, t)))(x),
        lambda f, x, t: jvp(lambda *x: forward_over_reverse(f, x, t), x, t),
        lambda f, x, t: jvp(lambda *x: reverse_over_reverse(f, x, t), x, t),
    ],
)
def test_third_order_raises(third: Callable[..., Any]) -> None:
    x, t = problem("cpu", torch.float64)
    with pytest.raises(NotImplementedError, match="third"):
        third(loss_of(operator), x, t)


def test_third_order_by_the_way_that_the_error_names() -> None:
    x, t = problem("cpu", torch.float64)

    def third(attend: Callable[..., Any]) -> torch.Tensor:
        def f(q: torch.Tensor) -> torch.Tensor:
            return attend(q, *x[1:], is_causal=True).square().sum()

        return grad(lambda q: (jvp(grad(f), (q,), t[:1])[1] * t[0]).sum())(x[0])

    with sorder.exact_attention(), pytest.raises(NotImplementedError, match=r"within exact_attention\(False\)"):
        third(F.scaled_dot_product_attention)
    with sorder.exact_attention(), sorder.exact_attention(False), sdpa_kernel(SDPBackend.MATH):
        got = third(F.scaled_dot_product_attention)
    want = third(lambda *x, is_causal: oracle.dense(*x, is_causal)[0])
    assert oracle.relative_error(got, want) <= 1e-12


def test_third_order_with_create_graph_raises() -> None:
    (q, k, v), _ = problem("cpu", torch.float64)
    q.requires_grad_()
    (g,) = torch.autograd.grad(loss_of(operator)(q, k, v), q, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="third"):
        torch.autograd.grad(h.sum(), q)


def test_forward_over_forward_names_what_works() -> None:
    x, t = problem("cpu", torch.float64)
    with pytest.raises(NotImplementedError, match=r"jvp of grad"):
        jvp(lambda *x: jvp(loss_of(operator), x, t)[1], x, t)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast(device: str) -> None:
    x, t = problem(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        assert sorder.attention(*x).dtype is torch.bfloat16
        got = forward_over_reverse(loss_of(operator), x, t)
        wide = sorder.attention(*(a.double() for a in x))
    assert wide.dtype is torch.float64
    assert all(a.dtype is torch.float32 for a in got)
    want = forward_over_reverse(loss_of(dense), tuple(a.double() for a in x), tuple(a.double() for a in t))
    for name, a, b in zip("qkv", got, want, strict=True):
        assert oracle.relative_error(a, b) <= 2e-2, name


def test_the_same_tensor_thrice() -> None:
    x, t = problem("cpu", torch.float64)
    got, want = (jvp(grad(lambda x, f=f: f(x, x, x)[0].sin().sum()), (x[0],), (t[0],)) for f in (operator, dense))
    for a, b in zip(got, want, strict=True):
        assert oracle.relative_error(a, b) <= 1e-13
