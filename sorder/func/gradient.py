"""The gradient of a pure function, with a graph of its own only where a derivative of it is asked for.

``torch.func.grad`` always records the backward pass. Under ``torch.func.jvp`` nobody reads that record, but it keeps
every intermediate of the backward pass, and all that the forward pass saved, until the end: nearly twice the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch import eager_transforms
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def is_differentiated(*trees: Any) -> bool:
    """Whether an enclosing transform, or autograd through a tensor of ``trees``, may differentiate a result.

    Under a forward-mode level autograd may have the tangents, which are not looked at.
    """
    transforms = {t.key() for t in get_interpreter_stack() or ()}
    nested = forward_ad._current_level >= 0 or not transforms.isdisjoint({TransformType.Grad, TransformType.Jvp})
    return nested or any(map(is_recorded, tree_leaves(trees)))


def grad_and_value(f: Callable[..., Any], keep_graph: Callable[[Tensor], bool]) -> Callable[..., Any]:
    """x ↦ (∇f(x), (f(x), aux)), over all arguments, for an ``f`` that returns (scalar, aux).

    ``keep_graph`` tells from the value, before the backward pass, whether that is to be recorded. Without a record,
    tensors that only the backward pass meets, in hooks, are constants.
    """
    if torch.compiler.is_compiling():  # dynamo knows torch.func's own
        return lambda *primals: torch.func.grad_and_value(f, tuple(range(len(primals))), has_aux=True)(*primals)

    @eager_transforms.doesnt_support_saved_tensors_hooks
    def function(*primals: Any) -> tuple[Any, ...]:
        with eager_transforms.grad_increment_nesting() as level, torch.enable_grad():
            wrapped = eager_transforms._wrap_all_tensors(primals, level)
            leaves, spec = tree_flatten(wrapped)
            eager_transforms._create_differentiable(leaves, level)
            value, aux = f(*wrapped)
            gradients = eager_transforms._autograd_grad((value,), leaves, create_graph=keep_graph(value))
            gradient = tree_unflatten(gradients, spec)
            results = gradient, (value, aux)
            return tuple(eager_transforms._undo_create_differentiable(r, level) for r in results)

    return function


def is_recorded(leaf: Any) -> bool:
    """Whether autograd, below all transforms, has ``leaf`` in a graph."""
    if not isinstance(leaf, Tensor):
        return False
    while is_functorch_wrapped_tensor(leaf):
        leaf = get_unwrapped(leaf)
    return leaf.requires_grad
