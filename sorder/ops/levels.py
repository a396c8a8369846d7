"""``torch.autograd.Function`` under the transforms of torch.func, without the time that PyTorch's own way takes.

For every level of ``grad`` and ``jvp``, PyTorch makes a new class and maps trees over flat arguments, several times:
together longer than the kernels of a short problem. Here a Function has one class for its levels, and arguments are
tensors, tuples of tensors or constants. The rules are those of ``torch._functorch.autograd_function``: a level records
the call in its graph (or carries its tangents along) and hands it, unwrapped, to the level below.

The innermost transform, if it is forward mode, may get values and tangents from one call: see ``joint``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

_POINTERS: dict[TransformType, Any] = {
    TransformType.Grad: functorch.CGradInterpreterPtr,
    TransformType.Jvp: functorch.CJvpInterpreterPtr,
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class LeveledFunction(torch.autograd.Function):
    """A Function with ``setup_context`` and new tensors (or ``None``) for outputs, called by position.

    Attributes:
        joint: (inputs, their tangents) → (outputs, their tangents), or ``None`` where ``forward`` and ``jvp`` must do
            it. It is asked where nothing but forward mode differentiates the call.
    """

    joint: Callable[[tuple[Any, ...], tuple[Any, ...]], Any] | None = None
    _of_level: Any

    def __init_subclass__(cls) -> None:
        rules = {name: staticmethod(getattr(cls, name)) for name in ("setup_context", "backward", "jvp")}

        def forward(*operands: Any) -> Any:
            return _below(cls, operands)

        cls._of_level = type(cls.__name__, (_SingleLevelFunction,), {"forward": staticmethod(forward), **rules})

    @classmethod
    def apply(cls, *args: Any) -> Any:
        args = tuple(_each(functorch.unwrap_if_dead, x) for x in args)
        interpreter = functorch.peek_interpreter_stack()
        if cls.joint is not None and forward_ad._current_level >= 0:
            outputs = _jointly(cls, interpreter, args)
            if outputs is not None:
                return outputs
        if interpreter is None:
            return super(torch.autograd.Function, cls).apply(*args)
        pointer = _POINTERS.get(interpreter.key())
        if pointer is None or not _is_ordinary(args):
            return custom_function_call(cls, *args)
        lift = pointer(interpreter).lift
        allowed = functorch.get_single_level_autograd_function_allowed()
        functorch.set_single_level_autograd_function_allowed(True)
        try:
            return cls._of_level.apply(*(_each(lift, x) for x in args))
        finally:
            functorch.set_single_level_autograd_function_allowed(allowed)


def _below(function: type[LeveledFunction], operands: tuple[Any, ...]) -> Any:
    """The call at the next level, and its outputs as tensors of this one."""
    interpreter = functorch.peek_interpreter_stack()
    pointer = _POINTERS[interpreter.key()](interpreter)
    level = pointer.level()
    inputs = [_each(lambda x: functorch._unwrap_for_grad(x, level), x) for x in operands]
    # A Function turns both modes off; the transform remembers what they were where it was called.
    gradients = pointer.prevGradMode() if interpreter.key() == TransformType.Grad else True
    tangents = pointer.prevFwdGradMode() if interpreter.key() == TransformType.Jvp else True
    with torch.set_grad_enabled(gradients), _set_fwd_grad_enabled(tangents):
        top = functorch.pop_dynamic_layer_stack()
        try:
            outputs = function.apply(*inputs)
        finally:
            functorch.push_dynamic_layer_stack(top)
    return tuple(None if x is None else functorch._wrap_for_grad(x, level) for x in outputs)


def _jointly(function: type[LeveledFunction], interpreter: Any, args: tuple[Any, ...]) -> Any:
    """The call with its tangents, if they are all that is asked for below this level, and ``function`` does both."""
    if interpreter is not None and interpreter.key() != TransformType.Jvp:
        return None
    if not (torch._C._is_fwd_grad_enabled() and _is_ordinary(args)) or torch._C._len_torch_dispatch_stack():
        return None
    duals = [forward_ad.unpack_dual(x) if isinstance(x, torch.Tensor) else None for x in args]
    if all(x is None or x.tangent is None for x in duals):
        return None
    inputs = tuple(x if dual is None else dual.primal for x, dual in zip(args, duals, strict=True))
    tangents = tuple(None if dual is None else dual.tangent for dual in duals)
    if interpreter is None:
        outputs = _unrecorded(function, inputs, tangents)
        return outputs and _as_duals(*outputs)
    level = interpreter.level()

    def unwrapped(x: torch.Tensor) -> torch.Tensor:
        return functorch._unwrap_for_grad(x, level)

    inputs, tangents = (tuple(_each(unwrapped, x) for x in some) for some in (inputs, tangents))
    top = functorch.pop_dynamic_layer_stack()
    try:
        outputs = None if functorch.peek_interpreter_stack() else _unrecorded(function, inputs, tangents)
    finally:
        functorch.push_dynamic_layer_stack(top)

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        return functorch._wrap_for_grad(x, level)

    return outputs and _as_duals(*(tuple(_each(wrapped, x) for x in some) for some in outputs))


def _unrecorded(function: type[LeveledFunction], inputs: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """``joint``, unless autograd records the call, or a tangent is one that holds no memory."""
    found = [x for x in (*inputs, *tangents) if isinstance(x, torch.Tensor)]
    if (torch.is_grad_enabled() and any(x.requires_grad for x in found)) or any(x._is_zerotensor() for x in found):
        return None
    assert function.joint is not None
    return function.joint(inputs, tangents)


def _as_duals(outputs: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x if t is None else forward_ad.make_dual(x, t) for x, t in zip(outputs, tangents, strict=True))


def _each(change: Any, x: Any) -> Any:
    """``change`` of a tensor, or of every tensor of a named tuple."""
    if isinstance(x, torch.Tensor):
        return change(x)
    return type(x)(*(_each(change, y) for y in x)) if isinstance(x, tuple) else x


def _is_ordinary(args: tuple[Any, ...]) -> bool:
    """Neither a mode nor a subclass of tensors, whose ``__torch_function__`` would have to be asked, is about."""
    return not torch._C._is_torch_function_mode_enabled() and all(map(_is_plain, args))


def _is_plain(x: Any) -> bool:
    if isinstance(x, tuple):
        return all(map(_is_plain, x))
    return type(x) in _PLAIN or not isinstance(x, torch.Tensor)
