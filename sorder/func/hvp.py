"""Hessian-vector products of pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
from torch.utils._pytree import tree_leaves

from sorder.func._arguments import Argnums, Moving, check_scalar, moving, split_aux
from sorder.func._fused_attention import explained
from sorder.func.gradient import grad_and_value, is_differentiated, is_recorded
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

    - ``"forward-over-reverse"``, H v = ∂ₜ ∇f(x + t v): no graph of a graph is built, and with
      :func:`sorder.func.checkpoint` one block's exists at a time; needs forward-mode derivatives of every operation.
    - ``"reverse-over-reverse"``, H v = ∇(vᵀ∇f): reverse mode alone.
    - ``"reverse-over-forward"``, H v = ∇(∂ₜ f(x + t v)).

    PyTorch's layer, batch and instance norms have wrong second derivatives in reverse-over-forward, and layer norm
    in the other modes under ``vmap``; ``mse_loss`` and ``huber_loss`` have none in forward-over-reverse. There they
    are replaced by compositions (``sorder/func/written_out.py``), at some cost in memory.

    Args:
        f: function of ``primals`` that returns a scalar tensor, or ``(scalar, aux)`` with ``has_aux``.
        primals: tuple of arguments; those differentiated are pytrees of floating-point tensors.
        tangents: like the differentiated arguments, in their shapes, dtypes and devices: a tuple of pytrees, or with an
            int ``argnums`` one pytree. Entries of dicts are matched by key.
        argnums: which of ``primals`` are differentiated. Default: all.
        has_aux: whether ``f`` returns a second value, a pytree of tensors handed through. Default False.
        mode: as above.

    Returns:
        The product, like the differentiated arguments; with ``has_aux`` the pair (product, aux).

    Raises:
        ValueError: ``f`` does not return a scalar; a tangent's shape, dtype, device or place in the structure is not
            its primal's; ``argnums`` or ``mode`` is out of range.
        TypeError: ``f`` is not callable; a differentiated leaf is not a floating-point tensor.

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
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {mode!r}")
    m = moving("f", f, primals, tangents, argnums)

    norms = mode == "reverse-over-forward" or _is_mapped((m.primals, m.tangents))

    def with_aux(*values: Any) -> tuple[Any, Any]:
        with WrittenOut(norms, dropout=True):
            out = m.function(*values)
        value, aux = split_aux("f", out, has_aux)
        pair = not has_aux and isinstance(value, tuple) and len(value) == 2
        check_scalar("f", value, "; a function that returns (scalar, aux) needs has_aux=True" if pair else "")
        return value, aux

    with explained():
        value, gradient, product, aux = _MODES[mode](with_aux, m)
    results = (value, m.result(gradient), m.result(product))
    return (*results, aux) if has_aux else results


def _is_mapped(tree: Any) -> bool:
    """Whether ``vmap`` maps a tensor of ``tree``."""
    return any(torch._C._functorch.is_batchedtensor(leaf) for leaf in tree_leaves(tree))


def _forward_over_reverse(f: Callable[..., Any], m: Moving) -> tuple[Any, ...]:
    nested = is_differentiated(m.tangents)

    def tangent(keep_graph: Callable[[torch.Tensor], bool]) -> Any:
        return torch.func.jvp(grad_and_value(f, keep_graph), m.primals, m.tangents, has_aux=True)

    try:
        result = tangent(lambda value: nested or is_recorded(value))
    except NotImplementedError as error:
        if "forward AD" not in str(error):
            raise
        # Some operations have a differentiable backward pass only where that is recorded.
        result = tangent(lambda _: True)
    gradient, product, (value, aux) = result
    return value, gradient, product, aux


def _reverse_over_reverse(f: Callable[..., Any], m: Moving) -> tuple[Any, ...]:
    nested = is_differentiated(m.tangents)
    result: Any = torch.func.vjp(grad_and_value(f, lambda _: True), *m.primals, has_aux=True)
    gradient, pull, (value, aux) = result
    product = pull(m.tangents, retain_graph=False, create_graph=nested or is_recorded(value))
    return value, gradient, product, aux


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
