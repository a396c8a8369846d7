"""First- and second-order transforms of a scalar function of several tensors, each a product or gradient by its own
route through autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch.func import grad, jvp, linearize, vjp, vmap

Tensors = tuple[torch.Tensor, ...]


def _all(x: Tensors) -> tuple[int, ...]:
    return tuple(range(len(x)))


def loss_of(attention: Callable[..., Any], with_lse: bool = True) -> Callable[..., torch.Tensor]:
    """A scalar with a full second derivative through the output and, if asked, through the log-sum-exp."""

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        o, lse = attention(*inputs)
        weight = torch.arange(o.numel(), dtype=torch.float64, device=o.device).reshape(o.shape).sin()
        value = (o.double() * weight).sin().sum()
        finite = torch.where(lse.isfinite(), lse, 0.0)  # rows that see nothing are −∞
        return value + finite.double().cos().sum() if with_lse else value

    return loss


def forward_over_reverse(f: Callable[..., Any], x: Tensors, t: Tensors) -> Tensors:
    return jvp(grad(f, argnums=_all(x)), x, t)[1]


def reverse_over_forward(f: Callable[..., Any], x: Tensors, t: Tensors) -> Tensors:
    return grad(lambda x: jvp(f, x, t)[1])(x)


def reverse_over_reverse(f: Callable[..., Any], x: Tensors, t: Tensors) -> Tensors:
    def along(x: Tensors) -> torch.Tensor:
        return sum((g * s).double().sum() for g, s in zip(grad(f, argnums=_all(x))(*x), t, strict=True))

    return grad(along)(x)


def create_graph(f: Callable[..., Any], x: Tensors, t: Tensors) -> Tensors:
    leaves = [a.clone().requires_grad_() for a in x]
    gradients = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(gradients, leaves, t)


def linearized(f: Callable[..., Any], x: Tensors, t: Tensors) -> Tensors:
    return linearize(grad(f, argnums=_all(x)), *x)[1](*t)


def live_dual_numbers(f: Callable[..., Any], x: Tensors, t: Tensors) -> list[torch.Tensor]:
    leaves = [a.clone().requires_grad_() for a in x]
    with fwAD.dual_level():
        with torch.no_grad():
            for leaf, tangent in zip(leaves, t, strict=True):
                leaf.copy_(fwAD.make_dual(leaf.detach().clone(), tangent))
        return [fwAD.unpack_dual(g).tangent for g in torch.autograd.grad(f(*leaves), leaves)]


def over_tangents(f: Callable[..., Any], x: Tensors, t: Tensors) -> Tensors:
    batch = tuple(torch.stack([a, -a, 2 * a]) for a in t)
    return vmap(lambda *t: jvp(grad(f, argnums=_all(x)), x, t)[1])(*batch)


def gauss_newton(f: Callable[..., Any], x: Tensors, t: Tensors) -> Tensors:
    """Jᵀ J t of the loss's vector-valued inner function: jvp, then vjp."""
    tangent = jvp(f, x, t)[1]
    return vjp(f, *x)[1](tangent)


def per_sample_gradients(f: Callable[..., Any], x: Tensors, t: Tensors) -> Tensors:
    return vmap(grad(f, argnums=_all(x)))(*x)


PRODUCTS = [
    forward_over_reverse, reverse_over_forward, reverse_over_reverse, create_graph, linearized, live_dual_numbers,
    over_tangents, gauss_newton,
]  # fmt: skip
