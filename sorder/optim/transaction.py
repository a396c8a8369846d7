"""An optimizer step that happens wholly or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from sorder.curvature import CurvaturePoint
from sorder.func.random_state import RandomState


class Transaction:
    """Context that, if left by an exception (a keyboard interrupt included), puts everything back.

    Everything is: the values of ``params`` and their ``.grad``, the optimizer's ``state``, random generators, and the
    buffers of the modules called by the closures of the ``points`` added. ``start`` holds the parameters' values at
    the beginning.
    """

    def __init__(self, params: Sequence[Tensor], state: dict[Any, Any]) -> None:
        self._params = params
        self._state = state

    def __enter__(self) -> Transaction:
        self.start = [p.detach().clone() for p in self._params]
        # By value, too: a closure may zero them in place.
        self._grads = [None if p.grad is None else (p.grad, p.grad.detach().clone()) for p in self._params]
        self._saved = {k: dict(v) if isinstance(v, dict) else v for k, v in self._state.items()}
        self._random = RandomState()
        self._points: list[CurvaturePoint] = []
        return self

    def add(self, point: CurvaturePoint) -> CurvaturePoint:
        """Have the buffers behind ``point`` put back, too, and its graphs freed at the end."""
        self._points.append(point)
        return point

    def write(self, step: Sequence[Tensor] | None = None, length: float = 1.0) -> None:
        """Set the parameters to their values at the start, plus ``length``·``step``."""
        # The version counter stays, so that a retained graph is valid when the parameters are back at the start.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self._params)):
            for i, (p, start) in enumerate(zip(self._params, self.start, strict=True)):
                # The sum is formed in the wider dtype and rounded once.
                p.copy_(start if step is None else start + length * step[i])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.write()
            for p, kept in zip(self._params, self._grads, strict=True):
                p.grad = None if kept is None else kept[0]
                if kept is not None:
                    kept[0].detach().copy_(kept[1])
            self._state.clear()
            self._state.update(self._saved)
            for point in reversed(self._points):
                point.rollback()
            self._random.restore()
        for point in self._points:
            point.release()
