"""Snapshots of the random generators that a function can draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class RandomState:
    """State of global random generators, and of the ``torch.Generator`` objects named to it.

    Args:
        devices: torch's default generators of the CPU and of these devices. Default None: every global generator, that
            is Python's :mod:`random`, NumPy's legacy generator where NumPy is loaded, torch's CPU generator, and the
            default generator of every CUDA, XPU or MPS device in use.
        generators: beside the global ones.

    Example:
        >>> state = RandomState()
        >>> first = torch.rand(3)
        >>> state.restore()
        >>> bool((torch.rand(3) == first).all())
        True
    """

    def __init__(
        self, devices: Iterable[torch.device] | None = None, generators: Iterable[torch.Generator] = ()
    ) -> None:
        self._devices = None if devices is None else list(devices)
        self._restore: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (torch.set_rng_state, (torch.get_rng_state(),)),
            *(_everything() if self._devices is None else _of_devices(self._devices)),
        ]
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
        for setter, arguments in self._restore:
            setter(*arguments)
        for generator, state in self._generators.items():
            generator.set_state(state)

    def has_moved(self) -> bool:
        """Whether torch's default generators are no longer as they were when the snapshot was taken."""
        present = RandomState(self._devices)
        pairs = zip(self._restore, present._restore, strict=True)
        return any(not torch.equal(a[0], b[0]) for (_, a), (_, b) in pairs if isinstance(a[0], Tensor))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run from the recorded state; afterwards the generators are as they were on entry."""
        present = RandomState(self._devices, self.generators)
        self.restore()
        try:
            yield
        finally:
            present.restore()


def with_the_same_draws(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose later calls draw the random numbers of its first, and leave the generators as they were."""
    first: list[RandomState] = []

    def replayed(*args: Any) -> Any:
        if first:
            with first[0].replay():
                return function(*args)
        first.append(RandomState())
        return function(*args)

    return replayed


def _everything() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    yield random.setstate, (random.getstate(),)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.random.set_state, (numpy.random.get_state(),)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_available() and backend.is_initialized():
            yield backend.set_rng_state_all, (backend.get_rng_state_all(),)
    if torch.backends.mps.is_available():
        yield torch.mps.set_rng_state, (torch.mps.get_rng_state(),)


def _of_devices(devices: Iterable[torch.device]) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    for device in devices:
        if device.type == "mps":
            yield torch.mps.set_rng_state, (torch.mps.get_rng_state(),)
        elif device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            yield module.set_rng_state, (module.get_rng_state(device), device)
