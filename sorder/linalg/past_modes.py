"""Small operations past torch-function modes, such as ``exact_attention``'s.

A solver makes thousands of operations a step on the leaves of vectors. Under a mode each of them, the reading of a
dtype included, is a call in Python that takes as long as a small kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

_F = TypeVar("_F", bound=Callable[..., Any])


@contextmanager
def past_modes(leaves: Iterable[Any]) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Within, no mode sees an operation. Yields the context for calls that modes shall see: those of the user.

    Where ``leaves`` hold tensors of a subclass with a ``__torch_function__`` of its own, operations are seen as ever:
    past modes they would give plain tensors.
    """
    if not torch._C._is_torch_function_enabled() or not all(map(_is_plain, leaves)):
        yield nullcontext
        return
    with torch._C.DisableTorchFunction():
        yield torch._C._EnableTorchFunction


def sees_no_modes(function: _F) -> _F:
    """Decorates a function that calls none of the user's."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def _is_plain(leaf: Any) -> bool:
    kind = type(leaf)
    return kind is Tensor or getattr(kind, "__torch_function__", None) in (None, torch._C._disabled_torch_function_impl)
