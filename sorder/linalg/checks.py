"""Checks of numbers that are given as arguments."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any


def check_number(name: str, value: Any, allowed: str, holds: Callable[[Any], bool], *, integer: bool = False) -> None:
    """TypeError unless ``value`` is a real number (an integer), no bool; ValueError unless it ``holds`` (no NaN does).

    ``allowed`` tells what ``holds`` asks for: "{name} must {allowed}, got {value}".
    """
    if not isinstance(value, Integral if integer else Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be {'an integer' if integer else 'a number'}, got {value!r}")
    if not holds(value):
        raise ValueError(f"{name} must {allowed}, got {value}")
