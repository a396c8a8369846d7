"""Snapshots of the buffers of the modules that a closure calls."""

from __future__ import annotations

import re
import threading
import warnings
from contextlib import suppress
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

# What torch says at every call of a compiled module while there is a global hook; a second visit does nothing here.
_SAID_OF_HOOKS: Any = (
    "ignore", re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"), UserWarning, None, 0
)  # fmt: skip
_open: WeakSet[BufferWatch] = WeakSet()


class BufferWatch:
    """Records the buffers of every module called inside ``with watch:``, as they were before the first call.

    An optimizer knows parameters, not modules; a global forward pre-hook meets the modules, those that
    the thread of the context calls: what other threads run meanwhile is not the closure's. On leaving the context
    only buffers that changed (in place, or by assignment to the attribute) are kept, with both values, so that
    :meth:`restore_before` and :meth:`restore_after` move between the two.

    A ``DistributedDataParallel`` module met on the way does not reduce gradients inside the context
    (``autograd.grad`` would leave its reducer waiting); ``watch.process_group`` tells its group.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}
        self._after: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}
        self._seen: set[nn.Module] = set()
        self._parallel: dict[DistributedDataParallel, bool] = {}

    @property
    def process_group(self) -> torch.distributed.ProcessGroup | None:
        """Group of the first ``DistributedDataParallel`` module that was called, if any was."""
        return next((module.process_group for module in self._parallel), None)

    def _meet(self, module: nn.Module, _inputs: object) -> None:
        if threading.get_ident() != self._thread or module in self._seen:
            return
        # All submodules at once: a parent may write a child's buffer without calling the child.
        for child in module.modules():
            if child in self._seen:
                continue
            self._seen.add(child)
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    self._before[child, name] = (buffer, buffer.detach().clone())
            if isinstance(child, DistributedDataParallel):
                self._parallel[child] = child.require_backward_grad_sync
                child.require_backward_grad_sync = False

    def __enter__(self) -> BufferWatch:
        self._thread = threading.get_ident()
        self._handle = register_module_forward_pre_hook(self._meet)
        _open.add(self)
        # Not by catch_warnings: leaving it shows again all warnings that are shown once, and undoes other threads'.
        warnings.filters.insert(0, _SAID_OF_HOOKS)  # type: ignore[attr-defined]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()
        _open.discard(self)
        # All of them: another thread that leaves catch_warnings may have brought old ones back. There may be none, if
        # the closure set filters of its own.
        with suppress(ValueError):
            while not _open:
                warnings.filters.remove(_SAID_OF_HOOKS)  # type: ignore[attr-defined]
        self._seen.clear()
        self.enable_gradient_sync()
        if kind is not None:
            return
        changed = self._changed()
        self._before = {key: self._before[key] for key in changed}
        for module, name in changed:
            buffer = module._buffers[name]
            if buffer is not None:
                self._after[module, name] = (buffer, buffer.detach().clone())

    def _changed(self) -> list[tuple[nn.Module, str]]:
        """Keys of the buffers that differ from their snapshot.

        By value: batch norm's kernels write running statistics without raising the version counter.
        """
        replaced, flags, keys = [], [], []
        for (module, name), (buffer, value) in self._before.items():
            if module._buffers.get(name) is not buffer:
                replaced.append((module, name))
            elif buffer.numel():
                keys.append((module, name))
                flags.append((buffer != value).any())
        verdicts = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
        return replaced + [key for key, verdict in zip(keys, verdicts, strict=True) if verdict]

    def disable_gradient_sync(self) -> None:
        """Keep the data-parallel modules met so far from reducing gradients."""
        for module in self._parallel:
            module.require_backward_grad_sync = False

    def enable_gradient_sync(self) -> None:
        """Undo :meth:`disable_gradient_sync`."""
        for module, flag in self._parallel.items():
            module.require_backward_grad_sync = flag

    def restore_before(self) -> None:
        """Buffers as they were before the watched run."""
        _restore(self._before)

    def restore_after(self) -> None:
        """Buffers as the watched run left them."""
        _restore(self._after)


def _restore(buffers: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]]) -> None:
    for (module, name), (buffer, value) in buffers.items():
        module._buffers[name] = buffer
        # Through .data, because a retained graph may hold the buffer: its version must not change.
        buffer.data.copy_(value)
