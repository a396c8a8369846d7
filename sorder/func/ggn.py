"""Generalised Gauss-Newton products of pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sorder.func._arguments import Argnums, check_scalar, moving
from sorder.func.ambient import RandomState
from sorder.func.hvp import hvp
from sorder.func.loss_call import LossCall, find_loss_call


def ggnvp(
    model_fn: Callable[..., Any],
    loss_fn: Callable[[Any], Tensor],
    primals: tuple[Any, ...],
    tangents: Any,
    *,
    argnums: Argnums = None,
    has_aux: bool = False,
) -> Any:
    """Product Jᵀ H J v of the generalised Gauss-Newton matrix of ``loss_fn(model_fn(*primals))``.

    J is the Jacobian of the model's outputs in the differentiated arguments, H the Hessian of the loss in the outputs
    (Schraudolph 2002). Where ``loss_fn`` returns the result of ``F.cross_entropy``, ``F.nll_loss``, ``F.mse_loss`` or
    ``F.binary_cross_entropy_with_logits`` (reduction "mean" or "sum") on the outputs or on a view or cast of them, H is
    applied in closed form: no graph over the classes is built. ``F.nll_loss`` counts as a cross-entropy of the
    log-softmax's input (on its own it is linear, and H would vanish). Any other loss is differentiated twice.

    The model is evaluated twice, forward and for the vector-Jacobian product, with the same random numbers.

    Args:
        model_fn: function of ``primals`` to a pytree of tensors, or ``(outputs, aux)`` with ``has_aux``.
        loss_fn: function of the outputs to a scalar tensor; it may be evaluated more than once.
        primals, tangents, argnums: as in :func:`sorder.func.hvp`.
        has_aux: whether ``model_fn`` returns a second value, a pytree of tensors handed through. Default False.

    Returns:
        The product, like ``tangents``; with ``has_aux`` the pair (product, aux).

    Raises:
        ValueError, TypeError: as :func:`sorder.func.hvp`.

    Example:
        >>> W, x, y = torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([1])
        >>> loss = lambda logits: torch.nn.functional.cross_entropy(logits, y)
        >>> ggnvp(lambda W: x @ W, loss, (W,), torch.tensor([[1.0, 0.0], [0.0, 0.0]]), argnums=0)
        tensor([[ 0.1966, -0.1966],
                [ 0.3932, -0.3932]])
    """
    return gauss_newton_product(
        model_fn, primals, tangents, argnums, has_aux, lambda out, u: output_product(loss_fn, out, u)
    )


def gauss_newton_product(
    model_fn: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: Any,
    argnums: Argnums,
    has_aux: bool,
    output_map: Callable[[Any, Any], Any],
) -> Any:
    """Jᵀ B(J v), with B u = ``output_map(outputs, u)``."""
    m = moving(model_fn, primals, tangents, argnums)
    leaves = torch.utils._pytree.tree_leaves((m.primals, primals))
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    before = RandomState(devices)
    # Two passes rather than one that records both: no graph of the tangents is kept.
    forward: Any = torch.func.jvp(m.function, m.primals, m.tangents, has_aux=has_aux)
    out, moved = forward[:2]
    cotangent = output_map(out, moved)
    del out, moved, forward  # the second pass has outputs of its own
    with before.replay(devices):
        result: Any = torch.func.vjp(m.function, *m.primals, has_aux=has_aux)
    product = m.result(result[1](cotangent))
    return (product, result[2]) if has_aux else product


def output_product(loss_fn: Callable[[Any], Tensor], outputs: Any, tangents: Any) -> Any:
    """Hessian of ``loss_fn`` in ``outputs`` times ``tangents``, in closed form where there is one."""
    if find_loss_call(loss_fn, outputs) is not None:
        return through_loss_call(loss_fn, outputs, tangents, LossCall.hvp)

    def checked(out: Any) -> Tensor:
        value = loss_fn(out)
        check_scalar("loss_fn", value)
        return value

    return hvp(checked, (outputs,), tangents, argnums=0)


def through_loss_call(
    loss_fn: Callable[[Any], Tensor],
    outputs: Any,
    tangents: Any,
    product: Callable[[LossCall, Tensor], Tensor],
) -> Any:
    """``product`` for the loss call that ``loss_fn`` ends in, carried through the views before it and back."""

    def loss_input(out: Any) -> tuple[Tensor, LossCall]:
        call = find_loss_call(loss_fn, out)
        assert call is not None
        return call.input, call

    moved = torch.func.jvp(lambda out: loss_input(out)[0], (outputs,), (tangents,))[1]
    pull = torch.func.vjp(lambda out: loss_input(out)[0], outputs)[1]
    call = loss_input(outputs)[1]
    return pull(product(call, moved))[0]
