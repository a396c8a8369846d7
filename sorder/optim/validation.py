"""Checks of options and state dicts, before anything changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

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
INTEGERS = ("max_trials", "cg_iterations", "seed")


def check_options(options: Mapping[str, Any]) -> None:
    """ValueError that names the first option out of its range, what it is and what is allowed."""
    for name, allowed in CHOICES.items():
        if options[name] not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {options[name]!r}")
    for name, (low, with_low, high, with_high, with_none) in RANGES.items():
        value = options[name]
        if value is None and with_none:
            continue
        try:
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        above = low <= number if with_low else low < number
        below = number <= high if with_high else number < high
        if not (above and below):
            span = f"{'[' if with_low else '('}{low}, {high}{']' if with_high else ')'}"
            raise ValueError(f"{name} must lie in {span}{' or be None' if with_none else ''}, got {value!r}")
    for name in INTEGERS:
        if not isinstance(options[name], int) or isinstance(options[name], bool):
            raise ValueError(f"{name} must be an integer, got {options[name]!r}")
    if not isinstance(options["maximize"], bool):
        raise ValueError(f"maximize must be True or False, got {options['maximize']!r}")


def check_state_dict(
    optimizer: Optimizer, state_dict: Any, own: str, check_options: Callable[[Mapping[str, Any]], None]
) -> None:
    """ValueError unless ``state_dict`` is one that an optimizer like ``optimizer`` has made.

    Args:
        own: key of the optimizer's own entry in ``state_dict["state"]``, which it has from its first step on.
        check_options: raises ValueError for options out of range.
    """
    name = type(optimizer).__name__
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        got = f"the keys {list(state_dict)[:6]}" if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"state_dict must have the keys 'state' and 'param_groups', got {got}")
    groups, state = state_dict["param_groups"], state_dict["state"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"state_dict must have {len(optimizer.param_groups)} parameter groups as this {name}, got {len(groups)}"
        )
    parameters: dict[Any, Tensor] = {}
    for i, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        missing = [option for option in ("params", *optimizer.defaults) if option not in saved]
        if missing:
            raise ValueError(
                f"state_dict must be that of a {name}, but its group {i} lacks {', '.join(missing[:4])}"
                f"{f' and {len(missing) - 4} more' if len(missing) > 4 else ''}: is it another optimizer's?"
            )
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"group {i} of state_dict must have {len(group['params'])} parameters, got {len(saved['params'])}"
            )
        try:
            check_options(saved)
        except ValueError as error:
            raise ValueError(f"group {i} of state_dict: {error}") from None
        parameters |= dict(zip(saved["params"], group["params"], strict=True))
    others = [key for key in state if key != own and key not in parameters]
    if others or (state and own not in state):
        what = f"has an entry {others[0]!r}" if others else f"lacks the entry {own!r}"
        raise ValueError(f"state_dict must be that of a {name}, but its state {what}: is it another optimizer's?")
    for key, p in parameters.items():
        for entry, value in state.get(key, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                raise ValueError(
                    f"state_dict: {entry} of parameter {key} must have the parameter's shape {tuple(p.shape)}, got "
                    f"{tuple(value.shape)}: is it another model's?"
                )
