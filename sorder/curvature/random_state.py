"""Snapshots of the random generators that a closure can draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class RandomState:
    """State of every global random generator, and of the ``torch.Generator`` objects named to it.

    Covers Python's :mod:`random`, NumPy's legacy generator where NumPy is loaded, torch's CPU generator, and the
    default generator of every CUDA, XPU or MPS device in use.

    Example:
        >>> state = RandomState()
        >>> first = torch.rand(3)
        >>> state.restore()
        >>> bool((torch.rand(3) == first).all())
        True
    """

    def __init__(self, generators: tuple[torch.Generator, ...] = ()) -> None:
        self._restore: list[tuple[Callable[[Any], Any], Any]] = [
            (random.setstate, random.getstate()),
            (torch.set_rng_state, torch.get_rng_state()),
        ]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._restore.append((numpy.random.set_state, numpy.random.get_state()))
        for backend in (torch.cuda, torch.xpu):
            if backend.is_available() and backend.is_initialized():
                self._restore.append((backend.set_rng_state_all, backend.get_rng_state_all()))
        if torch.backends.mps.is_available():
            self._restore.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
        self._generators: dict[torch.Generator, Tensor] = {}
        for generator in generators:
            self.include(generator)

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Generators beside the global ones."""
        return tuple(self._generators)

    def include(self, generator: torch.Generator) -> None:
        """Add ``generator`` in its present state, unless it was added before."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def restore(self) -> None:
        """Put every generator back into the state it had when the snapshot was taken."""
        for setter, state in self._restore:
            setter(state)
        for generator, state in self._generators.items():
            generator.set_state(state)
