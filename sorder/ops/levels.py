"""``torch.autograd.Function`` under the transforms of torch.func, without the time that PyTorch's own way takes.

For every level of ``grad`` and ``jvp``, PyTorch makes a new class and maps trees over flat arguments, several times:
together longer than the kernels of a short problem. Here a Function has one class for its levels, and arguments are
tensors, tuples of tensors or constants. The rules are those of ``torch._functorch.autograd_function``: a level records
the call in its graph (or carries its tangents along) and hands it, unwrapped, to the level below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _functorch as functorch
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

_POINTERS: dict[TransformType, Any] = {
    TransformType.Grad: functorch.CGradInterpreterPtr,
    TransformType.Jvp: functorch.CJvpInterpreterPtr,
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class LeveledFunction(torch.autograd.Function):
    """A Function with ``setup_context`` and new tensors (or ``None``) for outputs, called by position."""

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
        if interpreter is None:
            return super(torch.autograd.Function, cls).apply(*args)
        pointer = _POINTERS.get(interpreter.key())
        if pointer is None or torch._C._is_torch_function_mode_enabled() or not all(map(_is_plain, args)):
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


def _each(change: Any, x: Any) -> Any:
    """``change`` of a tensor, or of every tensor of a named tuple."""
    if isinstance(x, torch.Tensor):
        return change(x)
    return type(x)(*(_each(change, y) for y in x)) if isinstance(x, tuple) else x


def _is_plain(x: Any) -> bool:
    """No tensor of a subclass, whose ``__torch_function__`` would have to be asked."""
    if isinstance(x, tuple):
        return all(map(_is_plain, x))
    return type(x) in _PLAIN or not isinstance(x, torch.Tensor)
