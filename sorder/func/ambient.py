"""The surroundings of a call that decide what it computes: random state, autocast, function modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from sorder.func.random_state import RandomState


class FirstCallMode(TorchFunctionMode):
    """A function mode that belongs to one call and is not replayed."""


class Ambient:
    """A snapshot at construction; :meth:`replay` runs a later call in the same surroundings.

    Recomputation in a backward pass happens after the caller has left his ``autocast`` region or function mode,
    and with other random numbers ahead. Without the snapshot the recomputed function would be another one.

    Args:
        tensors: the call's tensors; the generators of their devices, and the CPU's, are recorded.
        preserve_rng_state: whether to record random states.
    """

    def __init__(self, tensors: Iterable[Tensor], preserve_rng_state: bool) -> None:
        devices = sorted({tensor.device for tensor in tensors}, key=str)
        self._random = RandomState(devices) if preserve_rng_state else None
        kinds = sorted({device.type for device in devices} | {"cpu"})
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        self._modes: list[TorchFunctionMode] = [
            mode for mode in _get_current_function_mode_stack() if not isinstance(mode, FirstCallMode)
        ]

    def has_drawn(self) -> bool:
        """Whether random numbers that :meth:`replay` would draw again have been drawn since."""
        return self._random is not None and self._random.has_moved()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The recorded autocast settings without the cache of cast weights.

        A weight cast while no gradient is recorded would be served again to code that needs one.
        """
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The recorded function modes, of which those that are handling the present call are off otherwise."""
        present = _get_current_function_mode_stack()
        with ExitStack() as stack:
            for mode in self._modes:
                if not any(mode is other for other in present):
                    # Not `with mode`: only the interception is wanted, not what else entering may do.
                    _push_mode(mode)
                    stack.callback(_pop_mode)
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Random state, autocast and function modes as recorded; on leaving, as they were on entry."""
        with ExitStack() as stack:
            if self._random is not None:
                stack.enter_context(self._random.replay())
            stack.enter_context(self.autocast())
            stack.enter_context(self.modes())
            yield
