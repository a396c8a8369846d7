"""The ``attention`` option of optimizers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sorder.ops.routing import exact_attention


def routed_attention(choice: str | None) -> AbstractContextManager[Any]:
    """What closures run under: SDPA routed through :func:`sorder.attention` for "exact", as it is for None."""
    return nullcontext() if choice is None else exact_attention()
