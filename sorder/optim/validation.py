"""Checks of NewtonCG's options, before anything changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sorder.curvature.point import MODES
from sorder.curvature.split import KINDS

CHOICES: dict[str, tuple[str | None, ...]] = {
    "curvature": KINDS,
    "mode": MODES,
    "damping_update": ("levenberg-marquardt", "constant", "trust-region"),
    "line_search": ("armijo", None),
    "cg_stop": ("relative-progress", "residual", "eisenstat-walker"),
    "preconditioner": (None, "diagonal", "squared-gradient", "custom"),
    "attention": ("exact", None),
}
# name: (lower bound, whether it is allowed itself, upper bound, whether it is allowed, whether None is)
RANGES: dict[str, tuple[float, bool, float, bool, bool]] = {
    "lr": (0.0, True, math.inf, False, False),
    "damping": (0.0, True, math.inf, False, True),
    "damping_decrease": (0.0, False, 1.0, True, False),
    "damping_increase": (1.0, True, math.inf, False, False),
    "trust_radius": (0.0, False, math.inf, False, True),
    "max_step_norm": (0.0, False, math.inf, False, True),
    "sufficient_decrease": (0.0, True, 0.5, False, False),
    "max_trials": (1, True, math.inf, False, False),
    "cg_iterations": (1, True, math.inf, False, False),
    "cg_tolerance": (0.0, True, 1.0, False, False),
    "warm_start": (0.0, True, 1.0, True, False),
    "preconditioner_decay": (0.0, True, 1.0, False, False),
    "preconditioner_power": (0.0, False, 1.0, True, False),
    "weight_decay": (0.0, True, math.inf, False, False),
}


def check_options(options: Mapping[str, Any]) -> None:
    """ValueError that names the first option out of its range, what it is and what is allowed."""
    for name, allowed in CHOICES.items():
        if options[name] not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {options[name]!r}")
    for name, (low, with_low, high, with_high, with_none) in RANGES.items():
        value = options[name]
        if value is None and with_none:
            continue
        number = math.nan if value is None else float(value)
        above = low <= number if with_low else low < number
        below = number <= high if with_high else number < high
        if not (above and below):
            span = f"{'[' if with_low else '('}{low}, {high}{']' if with_high else ')'}"
            raise ValueError(f"{name} must lie in {span}{' or be None' if with_none else ''}, got {value!r}")
