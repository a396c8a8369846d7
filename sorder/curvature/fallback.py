"""Goes from one way of taking a product to the next where an operation lacks a derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sorder.curvature.errors import among, curvature_error, missing_derivative, warn_once
from sorder.curvature.modes import Product, Vector

REVERSE, FORWARD = "reverse-over-reverse", "forward-over-reverse"


def first_that_works(ways: Sequence[tuple[str, Callable[[], Product]]], suspects: list[str]) -> Product:
    """A product that goes from one way to the next where an operation lacks a derivative."""
    remaining = list(ways)
    current: list[Product] = []
    missing: dict[str, str] = {}
    unsaid: list[tuple[str, str, str]] = []  # fallbacks to warn of once the way that is taken works

    def product(v: Vector) -> list[Tensor]:
        while True:
            name, make = remaining[0]
            try:
                if not current:
                    current.append(make())
                result = current[0](v)
                while unsaid:
                    _warn_fallback(*unsaid.pop(0), suspects)
                return result
            except RuntimeError as error:
                operation = missing_derivative(error)
                if operation is None:
                    raise
                missing[name] = operation
                if len(remaining) == 1:
                    # What reverse mode lacks is named by the operation; forward mode may know its kind only.
                    raise curvature_error(missing.get(REVERSE, operation), list(missing), suspects) from error
            current.clear()
            remaining.pop(0)
            if remaining[0][0] != name:
                unsaid.append((missing[name], name, remaining[0][0]))

    return product


def _warn_fallback(operation: str, failed: str, taken: str, suspects: Sequence[str]) -> None:
    cost = "twice the gradient's memory" if taken == REVERSE else "a run of the closure in every product"
    warn_once(
        f"{operation} {failed}",
        f"{failed} cannot differentiate {operation}{among(suspects)}; taking {taken} instead, at the cost of {cost}.",
    )
