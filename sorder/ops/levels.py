"""``torch.autograd.Function`` under the transforms of torch.func, without the time that PyTorch's own way takes.

For every level of ``grad`` and ``jvp``, PyTorch makes a new class and maps trees over flat arguments, several times:
together longer than the kernels of a short problem. Here a Function has one class for its levels, and arguments are
tensors, named tuples of tensors or constants. The rules are those of ``torch._functorch.autograd_function``: a level
records the call in its graph (or carries its tangents along) and hands it, unwrapped, to the level below.

The innermost transform, if it is forward mode, may get values and tangents from one call: see ``joint``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_POINTERS: dict[TransformType, Any] = {
    TransformType.Grad: functorch.CGradInterpreterPtr,
    TransformType.Jvp: functorch.CJvpInterpreterPtr,
}
PLAIN = (torch.Tensor, torch.nn.Parameter)


class LeveledFunction(torch.autograd.Function):
    """A Function with ``setup_context`` and new tensors (or ``None``) for outputs, called by position.

    Attributes:
        joint: (inputs, their tangents) → (outputs, their tangents), or ``None`` where ``forward`` and ``jvp`` must do
            it. It is asked where nothing but forward mode differentiates the call, of tensors in plain memory.
        may_join: whether ``joint`` could take inputs of such shapes and dtypes; most calls end here.
    """

    joint: Callable[[tuple[Any, ...], tuple[Any, ...]], Any]
    _of_level: Any

    @staticmethod
    def may_join(inputs: tuple[Any, ...]) -> bool:
        return False

    def __init_subclass__(cls) -> None:
        rules = {name: staticmethod(getattr(cls, name)) for name in ("setup_context", "backward", "jvp")}

        def forward(*operands: Any) -> Any:
            return _below(cls, operands)

        cls._of_level = type(cls.__name__, (_SingleLevelFunction,), {"forward": staticmethod(forward), **rules})

    @classmethod
    def apply(cls, *args: Any) -> Any:
        args = tuple(_each(functorch.unwrap_if_dead, x) for x in args)
        interpreter = functorch.peek_interpreter_stack()
        dual = forward_ad._current_level >= 0 and cls.may_join(args)
        if interpreter is None and not dual:
            return super(torch.autograd.Function, cls).apply(*args)
        ordinary = all(map(_is_plain, args)) and all(map(_lets_pass, _modes()))
        if interpreter is None:
            outputs = _jointly(cls, None, args) if ordinary else None
            return super(torch.autograd.Function, cls).apply(*args) if outputs is None else outputs
        pointer = _POINTERS.get(interpreter.key())
        if pointer is None or not ordinary:
            return custom_function_call(cls, *args)
        # Modes of torch functions are off while they handle a call.
        with enable_single_level_autograd_function(), torch._C.DisableTorchFunction():
            outputs = _jointly(cls, interpreter, args) if dual else None
            if outputs is None:
                lift = pointer(interpreter).lift
                outputs = cls._of_level.apply(*(_each(lift, x) for x in args))
        return outputs


def _below(function: type[LeveledFunction], operands: tuple[Any, ...]) -> Any:
    """The call at the next level, and its outputs as tensors of this one."""
    interpreter = functorch.peek_interpreter_stack()
    pointer = _POINTERS[interpreter.key()](interpreter)
    level = pointer.level()
    inputs = [_each(lambda x: functorch._unwrap_for_grad(x, level), x) for x in operands]
    # A Function turns both modes off; the transform remembers what they were where it was called.
    gradients = pointer.prevGradMode() if interpreter.key() == TransformType.Grad else True
    tangents = pointer.prevFwdGradMode() if interpreter.key() == TransformType.Jvp else True
    with torch.set_grad_enabled(gradients), _set_fwd_grad_enabled(tangents), temporarily_pop_interpreter_stack():
        outputs = function.apply(*inputs)
    return tuple(None if x is None else functorch._wrap_for_grad(x, level) for x in outputs)


class _Known(_SingleLevelFunction):
    """(outputs, their tangents), dual inputs → the outputs, with these tangents."""

    @staticmethod
    def forward(known: Any, *_: Any) -> Any:
        return known[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.tangents = inputs[0][1]

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        return ctx.tangents


def _jointly(function: type[LeveledFunction], interpreter: Any, args: tuple[Any, ...]) -> Any:
    """The call with its tangents, if they are all that is asked for below this level, and ``function`` does both."""
    if (interpreter is not None and interpreter.key() != TransformType.Jvp) or not torch._C._is_fwd_grad_enabled():
        return None
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if any(map(functorch.is_legacy_batchedtensor, tensors)):  # these cannot be unpacked
        return None
    inference = torch.is_inference_mode_enabled()
    if any(x.is_inference() != inference for x in tensors):  # of these there are no views, such as a dual's primal
        return None
    if interpreter is None:
        duals, inputs, tangents = _unpacked(args)
        known = _unrecorded(function, inputs, tangents)
        return None if known is None else _Known.apply(known, *duals)  # type: ignore[attr-defined]
    if len(functorch.get_interpreter_stack()) > 1:
        return None
    level = interpreter.level()
    duals, *pair = _unpacked(args)
    inputs, tangents = (tuple(_each(lambda x: functorch._unwrap_for_grad(x, level), x) for x in some) for some in pair)
    with temporarily_pop_interpreter_stack():
        known = _unrecorded(function, inputs, tangents)
    if known is None:
        return None
    known = tuple(tuple(_each(lambda x: functorch._wrap_for_grad(x, level), x) for x in some) for some in known)
    return _Known.apply(known, *duals)  # type: ignore[attr-defined]


def _unpacked(args: tuple[Any, ...]) -> tuple[list[torch.Tensor], tuple[Any, ...], tuple[Any, ...]]:
    """(the dual numbers among the arguments, primals or what has no tangent, tangents)."""
    pairs = [forward_ad.unpack_dual(x) if isinstance(x, torch.Tensor) else (x, None) for x in args]
    duals = [x for x, (_, tangent) in zip(args, pairs, strict=True) if tangent is not None]
    return duals, tuple(p for p, _ in pairs), tuple(t for _, t in pairs)


def _unrecorded(function: type[LeveledFunction], inputs: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """``joint``, if there are tangents, autograd records nothing of the call, and a kernel can read all memory."""
    if all(t is None for t in tangents) or torch._C._len_torch_dispatch_stack():
        return None
    found = [x for x in (*inputs, *tangents) if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in found):
        return None
    if not all(_is_memory(x) and x.device == found[0].device for x in found):
        return None
    return function.joint(inputs, tangents)


def _is_memory(x: torch.Tensor) -> bool:
    """Whether the entries of ``x`` are where its address and its strides say."""
    wrapped = functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)
    other = x.layout != torch.strided or x.is_neg() or x._is_zerotensor() or torch._is_functional_tensor(x)
    return type(x) in PLAIN and not wrapped and not other


def _modes() -> list[Any]:
    return _get_current_function_mode_stack() if torch._C._is_torch_function_mode_enabled() else []


def _lets_pass(mode: Any) -> bool:
    """Whether a mode of torch functions does nothing with a Function: PyTorch's device, and ours that say so."""
    return isinstance(mode, DeviceContext) or getattr(mode, "lets_functions_pass", False)


def _each(change: Any, x: Any) -> Any:
    """``change`` of a tensor, or of every tensor of a named tuple."""
    if isinstance(x, torch.Tensor):
        return change(x)
    return type(x)(*(_each(change, y) for y in x)) if isinstance(x, tuple) else x


def _is_plain(x: Any) -> bool:
    """No tensor of a subclass, whose ``__torch_function__`` would have to be asked."""
    if isinstance(x, tuple):
        return all(map(_is_plain, x))
    return type(x) in PLAIN or not isinstance(x, torch.Tensor)
