"""Makes ``torch.no_grad()`` inside a function stop tangents as it stops gradients.

Reverse mode takes what is computed under ``no_grad`` for a constant, forward mode does not: PyTorch's tangents pass
through. Forward over reverse would then give neither this function's Hessian nor any symmetric matrix.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

PROPERTY = ("__get__", "__set__", "__delete__")
"""Names of the functions behind attributes of tensors."""
VIEWS = frozenset(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))
"""Attributes that give a view of the tensor."""

# Frames between a context manager and this mode: torch.set_grad_enabled's constructor, and other modes.
_BETWEEN = ("__init__", "__torch_function__")


class NoGradStopsTangents(TorchFunctionMode):
    """Within this mode operations in a ``no_grad`` region, or after ``set_grad_enabled(False)``, see no tangents.

    Gradients that were off when the mode was entered, and those that autograd turns off around a custom Function's
    forward, count as on: only what the function itself says is followed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stopped = self._before = False
        self._outer: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            self._note(args[0], sys._getframe(1))
        if not self._stopped:
            return self.call(func, args, kwargs or {})
        if getattr(func, "__name__", "") in PROPERTY:
            found = func(*args, **(kwargs or {}))
            return found.detach() if func in VIEWS else found
        stopped: dict[int, Tensor] = {}

        def stop(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            constant = leaf.detach()
            stopped[id(constant)] = leaf
            return constant

        args, kwargs = tree_map(stop, (args, kwargs or {}))
        result = self.call(func, args, kwargs)
        return stopped.get(id(result), result)  # an operation in place returns its argument

    @property
    def lets_functions_pass(self) -> bool:
        """Whether it leaves custom Functions alone, for :mod:`sorder.ops.levels`."""
        return not self._stopped

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the mode does with an operation otherwise."""
        return func(*args, **kwargs)

    def _note(self, enabled: bool, frame: FrameType | None) -> None:
        """Follow what is set from ``frame``, on entering a context, on leaving one, or by a plain call.

        The value alone does not tell: ``no_grad`` that is entered sets what ``enable_grad`` that is left sets.
        """
        while frame is not None and (frame.f_code.co_name in _BETWEEN or _is_a_modes_call(frame)):
            frame = frame.f_back
        place = "" if frame is None else frame.f_code.co_name
        if place == "__exit__" and self._outer:
            self._stopped = self._outer.pop() and not enabled
            return
        if place == "__enter__" and frame is not None:
            # torch.set_grad_enabled sets when it is made, before it is entered.
            made = isinstance(frame.f_locals.get("self"), torch.set_grad_enabled)
            self._outer.append(self._before if made else self._stopped)
        else:
            self._before = self._stopped
        self._stopped = not enabled


def _is_a_modes_call(frame: FrameType) -> bool:
    """Whether ``frame`` is that of :meth:`NoGradStopsTangents.call` of a mode within this one."""
    return frame.f_code.co_name == "call" and isinstance(frame.f_locals.get("self"), NoGradStopsTangents)
