"""Generalised Gauss-Newton products of pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from sorder.func._arguments import Argnums, check_callable, check_scalar, moving, split_aux
from sorder.func._fused_attention import explained
from sorder.func.hvp import hvp
from sorder.func.loss_call import LossCall, find_loss_call
from sorder.func.random_state import RandomState, with_the_same_draws
from sorder.func.wide_norms import ForwardMode

Loss = Callable[[Any], Tensor]


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
        The product, like the differentiated arguments; with ``has_aux`` the pair (product, aux).

    Raises:
        ValueError, TypeError: as :func:`sorder.func.hvp`; ``model_fn`` returns other things than floating-point
            tensors; ``model_fn`` and ``loss_fn`` are swapped.

    Example:
        >>> W, x, y = torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([1])
        >>> loss = lambda logits: torch.nn.functional.cross_entropy(logits, y)
        >>> ggnvp(lambda W: x @ W, loss, (W,), torch.tensor([[1.0, 0.0], [0.0, 0.0]]), argnums=0)
        tensor([[ 0.1966, -0.1966],
                [ 0.3932, -0.3932]])
    """

    def output_map(loss_fn: Loss, checked: Loss, outputs: Any, moved: Any) -> Any:
        if find_loss_call(loss_fn, outputs) is not None:
            return through_loss_call(loss_fn, outputs, moved, LossCall.hvp)
        return hvp(checked, (outputs,), moved, argnums=0)

    return gauss_newton_product(model_fn, loss_fn, primals, tangents, argnums, has_aux, output_map)


def gauss_newton_product(
    model_fn: Callable[..., Any],
    loss_fn: Callable[[Any], Tensor],
    primals: tuple[Any, ...],
    tangents: Any,
    argnums: Argnums,
    has_aux: bool,
    output_map: Callable[[Loss, Loss, Any, Any], Any],
) -> Any:
    """Jᵀ B(J v), with B u = ``output_map(loss, checked, outputs, u)``.

    ``loss`` is ``loss_fn``, every run of which draws the same random numbers, and ``checked`` is it with its result
    checked.
    """
    m = moving("model_fn", model_fn, primals, tangents, argnums)
    check_callable("loss_fn", loss_fn)
    loss_fn = with_the_same_draws(loss_fn)
    leaves = torch.utils._pytree.tree_leaves((m.primals, primals))
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    before = RandomState(devices)

    def model(*values: Any) -> Any:
        try:
            with ForwardMode():
                returned = m.function(*values)
        except Exception as error:
            raise_if_swapped(model_fn, loss_fn, primals, error)
            raise
        out, aux = split_aux("model_fn", returned, has_aux)
        _check_outputs(out)
        return (out, aux) if has_aux else out

    def checked(out: Any) -> Tensor:
        try:
            value = loss_fn(out)
        except Exception as error:
            raise_if_swapped(model_fn, loss_fn, primals, error)
            raise
        check_scalar("loss_fn", value, swap_hint(out))
        return value

    # Two passes rather than one that records both: no graph of the tangents is kept.
    with explained():
        forward: Any = torch.func.jvp(model, m.primals, m.tangents, has_aux=has_aux)
    out, moved = forward[:2]
    cotangent = output_map(loss_fn, checked, out, moved)
    del out, moved, forward  # the second pass has outputs of its own
    with before.replay():
        result: Any = torch.func.vjp(model, *m.primals, has_aux=has_aux)
    product = m.result(result[1](cotangent))
    return (product, result[2]) if has_aux else product


def swap_hint(outputs: Any) -> str:
    """What to ask where a loss fails on outputs that look like a loss."""
    scalar = isinstance(outputs, Tensor) and outputs.dim() == 0
    return "; model_fn returns a scalar: are model_fn and loss_fn swapped?" if scalar else ""


def raise_if_swapped(
    model_fn: Callable[..., Any], loss_fn: Callable[..., Any], primals: tuple[Any, ...], error: Exception
) -> None:
    """Raise ValueError from ``error`` if the two functions work in the other order."""
    if isinstance(error, torch.OutOfMemoryError):
        return
    try:
        with torch.no_grad():
            value = model_fn(loss_fn(*primals))
    except Exception:
        return
    if isinstance(value, Tensor) and value.dim() == 0:
        raise ValueError(
            f"model_fn and loss_fn look swapped: model_fn maps primals to outputs, and comes first; loss_fn maps "
            f"outputs to a scalar. As given they fail with {type(error).__name__}: {error}"
        ) from error


def _check_outputs(outputs: Any) -> None:
    leaves = tree_flatten_with_path(outputs)[0]
    if not leaves:
        raise TypeError(f"model_fn must return tensors, got {outputs!r}")
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            got = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            place = f" at {keystr(path)}" if path else ""
            raise TypeError(
                f"model_fn must return a pytree of floating-point tensors, got {got}{place}; "
                "with has_aux=True it can return other values beside them"
            )


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
