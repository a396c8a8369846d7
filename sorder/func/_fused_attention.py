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
        if "Nested forward mode AD" in str(error):
            raise NotImplementedError(
                "PyTorch has no forward mode inside forward mode (jvp or linearize of a product that is itself one): "
                "take the inner product with mode='reverse-over-reverse', or the outer derivative in reverse mode"
            ) from error
        if "scaled_dot_product" not in str(error):
            raise
        raise NotImplementedError(
            "PyTorch's fused attention has first derivatives only: take the product under sorder.exact_attention(), or "
            "call sorder.attention in the model"
        ) from error
