"""vmap, gradcheck and batched gradients of masked attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

import sorder
from sorder.ops.mask import Mask

from . import oracle

Q, K, V = (torch.randn(4, n, w, dtype=torch.float64) for n, w in ((3, 4), (5, 4), (5, 2)))
BIAS = torch.randn(4, 3, 5, dtype=torch.float64)
SHOWN = torch.rand(4, 3, 5) > 0.3


def product(f: Callable[..., Tensor], *x: Tensor) -> tuple[Tensor, ...]:
    """Hessian times the point itself, in every argument."""
    return jvp(grad(lambda *x: f(*x).sin().sum(), argnums=tuple(range(len(x)))), x, x)[1]


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return sorder.attention(q, k, v, bias, softcap=2.0)


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return oracle.dense(q, k, v, bias=bias, softcap=2.0)[0]


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (0, None, None, None), (None, None, None, 0), (None, 0, 0, None)])
@pytest.mark.parametrize("inside", [True, False], ids=["vmap_of_product", "product_of_vmap"])
def test_vmap_over_any_inputs(in_dims: tuple[int | None, ...], inside: bool) -> None:
    x = tuple(a if dim == 0 else a[0] for a, dim in zip((Q, K, V, BIAS), in_dims, strict=True))
    for got, want in zip(*(over(f, in_dims, inside)(*x) for f in (biased, dense)), strict=True):
        assert oracle.relative_error(got, want) <= 1e-12


def over(f: Callable[..., Tensor], in_dims: tuple[int | None, ...], inside: bool) -> Callable[..., Any]:
    if inside:
        return vmap(lambda *x: product(f, *x), in_dims)
    return lambda *x: product(vmap(f, in_dims), *x)


def test_vmap_over_masks() -> None:
    """Boolean masks, lengths, ids and slopes may be mapped: what each sample sees is its own."""
    lengths, ids = torch.tensor([1, 5, 0, 3]), torch.randint(0, 2, (4, 5))
    slopes = torch.rand(4, 1)
    q, k, v = Q[:, None], K[:, None], V[:, None]
    masks: list[tuple[Callable[[Any], dict[str, Any]], Tensor]] = [
        (lambda x: {"attn_mask": x}, SHOWN),
        (lambda x: {"mask": Mask(key_stop=x)}, lengths),
        (lambda x: {"mask": Mask(documents=(x[:3], x))}, ids),
        (lambda x: {"mask": Mask(causal=True, alibi=x, alignment="bottom_right")}, slopes),
    ]
    for options, mapped in masks:
        got = vmap(lambda q, k, v, m, o=options: product(lambda *x: sorder.attention(*x, **o(m)), q, k, v))(
            q, k, v, mapped
        )
        for i in range(4):
            want = product(lambda *x, o=options, m=mapped[i]: sorder.attention(*x, **o(m)), q[i], k[i], v[i])
            for a, b in zip(got, want, strict=True):
                assert oracle.relative_error(a[i], b) <= 1e-13


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.7},
        {"dropout_p": 0.3},
        {"mask": Mask(causal=True, alignment=-1, alibi=torch.tensor([0.3, 0.2]))},
        {"sinks": True, "is_causal": True},
    ],
    ids=lambda o: next(iter(o)),
)
def test_gradcheck(options: dict[str, Any]) -> None:
    sizes = ((2, 3, 4), (1, 4, 4), (1, 4, 2), (2, 1, 4), (2,))
    x = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in sizes]

    def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        torch.manual_seed(1)
        extra = {**options, **({"sinks": sinks} if "sinks" in options else {})}
        o, lse = sorder.attention(q, k, v, bias, enable_gqa=True, return_lse=True, **extra)
        return o, torch.where(lse.isfinite(), lse, 0.0) + 0 * sinks.sum()

    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, x, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


def test_gradients_of_a_batch_of_cotangents() -> None:
    """``is_grads_batched``, which torch.autograd.functional uses: another vmap than torch.func's."""
    x = [a.clone().requires_grad_() for a in (Q, K, V, BIAS)]
    out = biased(*x)
    cotangents = torch.randn(3, *out.shape, dtype=torch.float64)
    got = torch.autograd.grad(out, x, cotangents, is_grads_batched=True, retain_graph=True)
    for i, cotangent in enumerate(cotangents):
        for a, b in zip(got, torch.autograd.grad(out, x, cotangent, retain_graph=True), strict=True):
            assert oracle.relative_error(a[i], b) <= 1e-14

    def f(q: Tensor, bias: Tensor) -> Tensor:
        torch.manual_seed(0)
        return sorder.attention(q, K[0], V[0], bias, dropout_p=0.2).sin().sum()

    blocks = torch.autograd.functional.hessian(f, (Q[0], BIAS[0]), vectorize=True)
    wanted = torch.autograd.functional.hessian(f, (Q[0], BIAS[0]))
    for row, row_wanted in zip(blocks, wanted, strict=True):
        for a, b in zip(row, row_wanted, strict=True):
            assert oracle.relative_error(a, b) <= 1e-13


@pytest.mark.parametrize(
    "options", [{}, {"mask": Mask(causal=True, key_padding=torch.arange(5) != 1)}, {"dropout_p": 0.3}]
)
def test_gradients_of_a_batch_of_cotangents_keep_their_graph(options: dict[str, Any]) -> None:
    x = [a.clone().requires_grad_() for a in (Q, K, V, BIAS)]
    out = sorder.attention(*x, **options)
    cotangents = torch.randn(3, *out.shape, dtype=torch.float64)

    def product(gradients: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        loss = sum(x.sin().sum() for row in gradients for x in row)
        return torch.autograd.grad(loss, x, retain_graph=True)

    batch = torch.autograd.grad(out, x, cotangents, is_grads_batched=True, create_graph=True)
    got = product(zip(*batch, strict=True))
    want = product(torch.autograd.grad(out, x, c, create_graph=True) for c in cotangents)
    for a, b in zip(got, want, strict=True):
        assert oracle.relative_error(a, b) <= 1e-13


@pytest.mark.parametrize("moving", ["b", "qb", "v"])
def test_gradients_of_some_inputs_only(moving: str) -> None:
    def squared_gradient(attention: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [a.clone().requires_grad_(name in moving) for name, a in zip("qkvb", (Q, K, V, BIAS), strict=True)]
        active = [a for a in leaves if a.requires_grad]
        gradients = torch.autograd.grad(attention(*leaves).sin().sum(), active, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in gradients), active))

    for a, b in zip(squared_gradient(biased), squared_gradient(dense), strict=True):
        assert oracle.relative_error(a, b) <= 1e-12


def test_third_order_in_the_bias_raises() -> None:
    bias = BIAS.clone().requires_grad_()
    (g,) = torch.autograd.grad(biased(Q, K, V, bias).sin().sum(), bias, create_graph=True)
    (h,) = torch.autograd.grad(g.sin().sum(), bias, create_graph=True)
    with pytest.raises(NotImplementedError, match="third"):
        torch.autograd.grad(h.sum(), bias)


def test_a_tangent_of_the_bias_of_another_dtype_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"the tangent of attn_mask must have its dtype torch.float64, got torch.float32"
    ):
        jvp(biased, (Q, K, V, BIAS), (Q, K, V, BIAS.float()))


def test_bias_keeps_its_dtype() -> None:
    x = tuple(a.to(torch.bfloat16) for a in (Q, K, V))
    bias = BIAS.float().requires_grad_()
    out, pull = vjp(lambda b: sorder.attention(*x, b), bias)
    assert out.dtype is torch.bfloat16
    assert pull(torch.ones_like(out))[0].dtype is torch.float32


@pytest.mark.parametrize("transform", ["requires_grad", "grad", "jvp", "vmap of grad"])
def test_slopes_are_not_silently_constant(transform: str) -> None:
    def f(slopes: Tensor) -> Tensor:
        return sorder.attention(Q[:2], K[:2], V[:2], mask=Mask(causal=True, alibi=slopes)).sum()

    slopes = torch.rand(2)
    call = {
        "requires_grad": lambda: f(slopes.requires_grad_()),
        "grad": lambda: grad(f)(slopes),
        "jvp": lambda: jvp(f, (slopes,), (slopes,)),
        "vmap of grad": lambda: vmap(grad(f))(slopes[None]),
    }[transform]
    with pytest.raises(ValueError, match=r"mask.alibi is differentiated.*attn_mask = slopes"):
        call()
    assert grad(lambda x: f(slopes.detach() * 2) * x)(torch.ones(()))  # made under a transform, but a constant of it
