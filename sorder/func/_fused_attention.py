"""Tells what to do where PyTorch's fused attention lacks a derivative."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explained() -> Iterator[None]:
    """Context in which such an error points to :func:`sorder.exact_attention`."""
    try:
        yield
    except RuntimeError as error:
        if "scaled_dot_product" not in str(error):
            raise
        raise NotImplementedError(
            "PyTorch's fused attention has first derivatives only: take the product under sorder.exact_attention(), or "
            "call sorder.attention in the model"
        ) from error
