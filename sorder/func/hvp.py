"""Hessian-vector products of pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
from torch.utils._pytree import tree_leaves

from sorder.func._arguments import Argnums, Moving, check_scalar, moving
from sorder.func.written_out import WrittenOut

Mode = Literal["forward-over-reverse", "reverse-over-reverse", "reverse-over-forward"]


def hvp(
    f: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: Any,
    *,
    argnums: Argnums = None,
    has_aux: bool = False,
    mode: Mode = "forward-over-reverse",
) -> Any:
    """Product of the Hessian of ``f`` at ``primals`` with ``tangents``.

    Pearlmutter, *Fast exact multiplication by the Hessian*, 1994. The modes differ in cost, not in value:

    - ``"forward-over-reverse"``, H v = ∂ₜ ∇f(x + t v): the least memory of the three, as no graph of a graph is
      built; needs forward-mode derivatives of every operation.
    - ``"reverse-over-reverse"``, H v = ∇(vᵀ∇f): reverse mode alone.
    - ``"reverse-over-forward"``, H v = ∇(∂ₜ f(x + t v)).

    PyTorch's layer, batch and instance norms have wrong second derivatives in reverse-over-forward, and layer norm
    in the other modes under ``vmap``; ``mse_loss`` and ``huber_loss`` have none in forward-over-reverse. There they
    are replaced by compositions (``sorder/func/written_out.py``), at some cost in memory.

    Args:
        f: function of ``primals`` that returns a scalar tensor, or ``(scalar, aux)`` with ``has_aux``.
        primals: tuple of arguments; those differentiated are pytrees of floating-point tensors.
        tangents: like the differentiated arguments: a tuple of pytrees, or with an int ``argnums`` one pytree.
        argnums: which of ``primals`` are differentiated. Default: all.
        has_aux: whether ``f`` returns a second value, a pytree of tensors handed through. Default False.
        mode: as above.

    Returns:
        The product, like ``tangents``; with ``has_aux`` the pair (product, aux).

    Raises:
        ValueError: ``f`` does not return a scalar; shapes or structures differ; ``mode`` is unknown.
        TypeError: a differentiated leaf is not a floating-point tensor.

    Example:
        >>> hvp(lambda x: (x**3).sum(), (torch.tensor([1.0, 2.0]),), (torch.tensor([1.0, 1.0]),))
        (tensor([ 6., 12.]),)
    """
    results = value_grad_hvp(f, primals, tangents, argnums=argnums, has_aux=has_aux, mode=mode)
    return (results[2], results[3]) if has_aux else results[2]


def value_grad_hvp(
    f: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: Any,
    *,
    argnums: Argnums = None,
    has_aux: bool = False,
    mode: Mode = "forward-over-reverse",
) -> tuple[Any, ...]:
    """Value, gradient and Hessian-vector product of ``f`` from one evaluation.

    Arguments and errors are those of :func:`hvp`.

    Returns:
        ``(value, gradient, product)``, and ``aux`` as a fourth entry with ``has_aux``.

    Example:
        >>> value_grad_hvp(lambda x: (x**3).sum(), (torch.tensor([2.0]),), torch.tensor([1.0]), argnums=0)
        (tensor(8.), tensor([12.]), tensor([12.]))
    """
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {mode!r}")
    m = moving(f, primals, tangents, argnums)

    norms = mode == "reverse-over-forward" or _is_mapped((m.primals, m.tangents))

    def with_aux(*values: Any) -> tuple[Any, Any]:
        with WrittenOut(norms, dropout=True):
            out = m.function(*values)
        value, aux = out if has_aux else (out, ())
        check_scalar("f", value)
        return value, aux

    value, gradient, product, aux = _MODES[mode](with_aux, m)
    results = (value, m.result(gradient), m.result(product))
    return (*results, aux) if has_aux else results


def _is_mapped(tree: Any) -> bool:
    """Whether ``vmap`` maps a tensor of ``tree``."""
    return any(torch._C._functorch.is_batchedtensor(leaf) for leaf in tree_leaves(tree))


def _gradient(f: Callable[..., Any], m: Moving) -> Callable[..., Any]:
    """x ↦ (∇f(x), (f(x), aux)) for an ``f`` with aux."""
    return torch.func.grad_and_value(f, argnums=tuple(range(len(m.primals))), has_aux=True)


def _forward_over_reverse(f: Callable[..., Any], m: Moving) -> tuple[Any, ...]:
    result: Any = torch.func.jvp(_gradient(f, m), m.primals, m.tangents, has_aux=True)
    gradient, product, (value, aux) = result
    return value, gradient, product, aux


def _reverse_over_reverse(f: Callable[..., Any], m: Moving) -> tuple[Any, ...]:
    result: Any = torch.func.vjp(_gradient(f, m), *m.primals, has_aux=True)
    gradient, pull, (value, aux) = result
    return value, gradient, pull(m.tangents), aux


def _reverse_over_forward(f: Callable[..., Any], m: Moving) -> tuple[Any, ...]:
    def derivative(*values: Any) -> tuple[Any, Any]:
        value, slope, aux = cast(Any, torch.func.jvp(f, values, m.tangents, has_aux=True))
        return (value, slope), aux

    result: Any = torch.func.vjp(derivative, *m.primals, has_aux=True)
    (value, slope), pull, aux = result
    one, zero = torch.ones_like(value), torch.zeros_like(slope)
    return value, pull((one, zero)), pull((torch.zeros_like(value), torch.ones_like(slope))), aux


_MODES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "forward-over-reverse": _forward_over_reverse,
    "reverse-over-reverse": _reverse_over_reverse,
    "reverse-over-forward": _reverse_over_forward,
}
