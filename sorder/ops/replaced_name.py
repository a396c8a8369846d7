"""Names in modules of torch, replaced while some thread needs them to be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class ReplacedName:
    """A name in a module, with another value from the first :meth:`acquire` to the last :meth:`release`.

    The name is one for all threads. A function is replaced by ``call(original, routing, *args)``, which gets what the
    calling thread passed to :meth:`replaced_for`, or None.

    Args:
        module: where the name is.
        name: an attribute of ``module``.
        call: what calls of the function become.
        value: what takes the place of something that is no function.
    """

    def __init__(
        self, module: ModuleType, name: str, call: Callable[..., Any] | None = None, value: Any = None
    ) -> None:
        self._module, self._name, self._call = module, name, call
        self._value = value if call is None else self._replacement
        self._lock = threading.RLock()  # release() may come from the garbage collector, at any moment
        self._users = 0
        self._original: Any = None
        self._local = threading.local()

    def acquire(self) -> None:
        with self._lock:
            if not self._users:
                self._original = getattr(self._module, self._name)
                setattr(self._module, self._name, self._value)
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                setattr(self._module, self._name, self._original)

    @contextmanager
    def replaced_for(self, routing: Any) -> Iterator[None]:
        """Context in which the calling thread's calls of the function get ``routing``."""
        before = getattr(self._local, "routing", None)
        self.acquire()
        self._local.routing = routing
        try:
            yield
        finally:
            self._local.routing = before
            self.release()

    def _replacement(self, *args: Any, **kwargs: Any) -> Any:
        assert self._call is not None
        return self._call(self._original, getattr(self._local, "routing", None), *args, **kwargs)
