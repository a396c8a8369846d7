"""Makes repeated runs of a closure runs of one function: same random numbers, same buffers, moved once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sorder.curvature.buffers import BufferWatch
from sorder.func.random_state import RandomState


class Replay:
    """The world around a closure: ``first()`` runs it for good, ``again()`` repeats that run without a trace.

    A run inside ``again()`` starts from the random state and the buffers that the first one started from; after it
    both are as before ``again()``. So dropout draws the same mask, and running statistics move once.
    """

    def __init__(self) -> None:
        self.before = RandomState()
        self.buffers = BufferWatch()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context of the run that counts."""
        # Casts of the weights that an enclosing autocast region cached may belong to other values of them.
        torch.clear_autocast_cache()
        with self.buffers:
            yield
        torch.clear_autocast_cache()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context of a repetition."""
        torch.clear_autocast_cache()
        with self.undisturbed():
            self.before.restore()
            self.buffers.restore_before()
            self.buffers.disable_gradient_sync()
            try:
                yield
            finally:
                self.buffers.enable_gradient_sync()
                torch.clear_autocast_cache()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context that leaves no trace in generators and buffers; a backward pass may run modules, too."""
        state = RandomState(generators=self.before.generators)
        try:
            yield
        finally:
            state.restore()
            self.buffers.restore_after()

    def rollback(self) -> None:
        """Everything as it was before the first run."""
        self.before.restore()
        self.buffers.restore_before()
