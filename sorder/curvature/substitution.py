"""Makes a plain closure over live parameters a pure function of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from sorder.curvature.errors import MissingDerivativeError
from sorder.func.ambient import FirstCallMode
from sorder.func.no_grad import PROPERTY, VIEWS


class Substitute(FirstCallMode):
    """Context in which torch functions that are given a parameter get its substitute.

    This makes a closure over a module's live parameters a function that ``torch.func`` can transform: no module is
    rebuilt, tied weights are one parameter. ``p.data`` escapes, since it is not the parameter; ``escaped`` tells.
    """

    def __init__(self, params: Sequence[Tensor], substitutes: Sequence[Tensor]) -> None:
        super().__init__()
        self._substitutes = {id(p): s for p, s in zip(params, substitutes, strict=True)}
        self._used: set[int] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Properties such as p.shape, p.requires_grad and p.grad are of the parameter itself.
        if getattr(function, "__name__", "") in PROPERTY and function not in VIEWS:
            return function(*args, **(kwargs or {}))
        args = tuple([self._swap(a) for a in args])
        return function(*args, **{k: self._swap(v) for k, v in (kwargs or {}).items()})

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            substitute = self._substitutes.get(id(value))
            if substitute is None:
                return value
            self._used.add(id(value))
            return substitute
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self._swap(v) for v in value])
        if kind is dict:
            return {k: self._swap(v) for k, v in value.items()}
        return value

    def escaped(self, params: Sequence[Tensor]) -> list[int]:
        """Numbers of the ``params`` that were never substituted."""
        return [i for i, p in enumerate(params) if id(p) not in self._used]


def functional(
    closure: Callable[[], Any], params: Sequence[Tensor], expected: Sequence[int] = ()
) -> Callable[..., Any]:
    """``closure`` as a function of its parameters' values.

    Raises (when called):
        MissingDerivativeError: a parameter whose number is in ``expected`` escaped substitution.
    """

    def function(*values: Tensor) -> Any:
        with Substitute(params, values) as mode:
            result = closure()
        escaped = set(mode.escaped(params)) & set(expected)
        if escaped:
            raise MissingDerivativeError(f"parameter {min(escaped)}, used through .data,")
        return result

    return function


@contextmanager
def dual_parameters(params: Sequence[Tensor], tangents: Sequence[Tensor], graph: bool = True) -> Iterator[None]:
    """Context in which the live ``params`` are dual numbers with ``tangents``. Such contexts do not nest.

    With ``graph=False`` they require no gradients, so that no graph is recorded.
    """
    # The values stay, so graphs that hold the parameters stay valid, and their versions must, too.
    with forward_ad.dual_level():
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(params)):
            for p, tangent in zip(params, tangents, strict=True):
                p.copy_(forward_ad.make_dual(p.detach().clone(), tangent))
        for p in params:
            p.requires_grad_(graph)
        try:
            yield
        finally:
            for p in params:
                p.requires_grad_()
