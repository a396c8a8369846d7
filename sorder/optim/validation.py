"""Checks of calls, parameters, options and state dicts, before anything changes."""

from __future__ import annotations

import difflib
import functools
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from sorder.curvature import checks
from sorder.curvature.checks import MODES
from sorder.curvature.split import KINDS
from sorder.linalg.pytree import wide_dtype

CHOICES: dict[str, tuple[str | None, ...]] = {
    "curvature": KINDS,
    "mode": MODES,
    "damping_update": ("levenberg-marquardt", "constant", "trust-region"),
    "line_search": ("armijo", None),
    "cg_stop": ("relative-progress", "residual", "eisenstat-walker"),
    "attention": ("exact", None),
}
PRECONDITIONERS = (None, "diagonal", "squared-gradient")
# What groups, and so state dicts, hold in the place of a callable preconditioner.
CUSTOM = "custom"
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
# Options that multiply vectors, and so are bounded by the range of the parameters' dtype.
FACTORS = ("lr", "damping", "trust_radius", "weight_decay")
# Options that steps write, to the first group alone; None in another one says nothing.
WRITTEN = ("damping", "trust_radius")

Method = TypeVar("Method", bound=Callable[..., Any])
_running: set[int] = set()
_running_lock = threading.Lock()


@contextmanager
def new_group(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """The parameter group that has just been added, within which it is checked; an error takes it out again."""
    try:
        yield optimizer.param_groups[-1]
    except Exception:
        optimizer.param_groups.pop()
        raise


def not_nested(method: Method) -> Method:
    """Decorator of an optimizer's methods that run closures: RuntimeError where one of them is already running.

    A step inside a closure of another one of the same optimizer, or in a second thread, would move the parameters
    and the state under its feet.
    """

    @functools.wraps(method)
    def guarded(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _running_lock:
            if id(self) in _running:
                raise RuntimeError(
                    f"{type(self).__name__}.{method.__name__}() was called while a step of the same optimizer runs, "
                    "by its closure or in another thread. A closure must only evaluate the loss; call "
                    f"{method.__name__}() after the step, or use an optimizer of its own for other parameters"
                )
            _running.add(id(self))
        try:
            return method(self, *args, **kwargs)
        finally:
            _running.discard(id(self))

    return cast(Method, guarded)


def check_not_module(optimizer: Optimizer, params: Any) -> None:
    """TypeError where ``params`` of an optimizer or of a group is a module or a dict."""
    check_not_dict(optimizer, params)
    more = " or model.named_parameters(). (Of sorder's optimizers only KFAC takes a module itself.)"
    checks.check_not_module(type(optimizer).__name__, params, more)


def check_not_dict(optimizer: Optimizer, params: Any) -> None:
    """TypeError where ``params`` of an optimizer or of a group is a dict."""
    checks.check_not_dict(type(optimizer).__name__, params, ", or a list of it if it is a parameter group")


def check_closure(optimizer: Optimizer, method: str, name: str, closure: Any) -> None:
    """TypeError unless ``closure``, the argument ``name`` of a method, is a callable or a nonempty sequence of some."""
    several = isinstance(closure, Sequence) and not isinstance(closure, str)
    if callable(closure) or (several and closure and all(map(callable, closure))):
        return
    got = f"[{', '.join(type(c).__name__ for c in closure)}]" if several else type(closure).__name__
    raise TypeError(
        f"{type(optimizer).__name__}.{method} takes a closure that evaluates the loss, as in lambda: "
        f"F.cross_entropy(model(x), y): {name} must be a callable or a nonempty sequence of callables, got {got}"
    )


def check_step(optimizer: Optimizer, closure: Any, curvature_closure: Any) -> None:
    """:func:`check_closure` of what ``step`` was given; None is nothing."""
    for name, given in (("closure", closure), ("curvature_closure", curvature_closure)):
        if given is not None:
            check_closure(optimizer, "step", name, given)


def check_preconditioner(value: Any) -> None:
    """TypeError for a class, ValueError for what is neither a preconditioner's name nor callable."""
    if isinstance(value, type):
        raise TypeError(
            f"preconditioner must be an instance, got the class {value.__name__}; make one, as in "
            "sorder.KFACPreconditioner(model)"
        )
    if not callable(value):
        _check_preconditioner_name(value)


def _check_preconditioner_name(value: Any) -> None:
    if value not in PRECONDITIONERS:
        raise ValueError(
            f"preconditioner must be one of {', '.join(map(repr, PRECONDITIONERS))}, or, as an argument of NewtonCG "
            f"itself, a callable such as sorder.KFACPreconditioner(model), got {value!r}"
        )


def check_parameters(params: Sequence[Tensor]) -> None:
    """ValueError that names the first parameter that is not real floating-point, or has no values."""
    for i, p in enumerate(params):
        if not p.is_floating_point():
            raise ValueError(f"parameters must be real floating-point, but number {i} is {p.dtype}")
        if p.is_meta:
            raise ValueError(
                f"parameters must have values, but number {i} (shape {tuple(p.shape)}) is on the meta device: make "
                "the optimizer after the model has been materialised, by to_empty() or load_state_dict(assign=True)"
            )


def culprit(params: Sequence[Tensor]) -> str:
    """For messages about what is not finite: the first of ``params`` that is not, or nothing."""
    with suppress(RuntimeError):  # what is being reported counts for more than, say, a lack of memory here
        for i, p in enumerate(params):
            if not bool(p.detach().isfinite().all()):
                return f"; parameter {i} (shape {tuple(p.shape)}) itself is not finite"
    return ""


def check_loss(loss: float, params: Sequence[Tensor]) -> None:
    """FloatingPointError unless ``loss``, a function of ``params``, is finite."""
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}{culprit(params)}")


def largest_factor(params: Sequence[Tensor]) -> float:
    """Bound on :data:`FACTORS`: squared norms of vectors times such a factor stay in the range of the dtype.

    About 2.6e15 for parameters of 16 and 32 bits, whose vectors are float32, and 2e123 for float64.
    """
    return min(torch.finfo(wide_dtype(p.dtype)).max ** 0.4 for p in params)


def check_factors(options: Mapping[str, Any], params: Sequence[Tensor]) -> None:
    """ValueError that names an option of :data:`FACTORS` too large for the dtype of ``params``."""
    if not params:
        return
    limit = largest_factor(params)
    for name in FACTORS:
        if options[name] is not None and float(options[name]) > limit:
            dtypes = ", ".join(sorted({str(p.dtype) for p in params}))
            raise ValueError(f"{name} must be at most {limit:.2g} for parameters of {dtypes}, got {options[name]!r}")


def check_options(options: Mapping[str, Any]) -> None:
    """ValueError that names the first option out of its range, what it is and what is allowed."""
    for name, allowed in CHOICES.items():
        if options[name] not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {options[name]!r}")
    if options["preconditioner"] != CUSTOM:
        _check_preconditioner_name(options["preconditioner"])
    for name, (low, with_low, high, with_high, with_none) in RANGES.items():
        value = options[name]
        if value is None and with_none:
            continue
        try:
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        above = low <= number if with_low else low < number
        below = number <= high if with_high else number < high
        if not (above and below):
            span = f"{'[' if with_low else '('}{low}, {high}{']' if with_high else ')'}"
            raise ValueError(f"{name} must lie in {span}{' or be None' if with_none else ''}, got {value!r}")
    for name in INTEGERS:
        check_integer(options, name)
    check_maximize(options)


def check_group(optimizer: Optimizer, group: Mapping[str, Any], own: Collection[str] = ("lr", "weight_decay")) -> None:
    """TypeError for a module in place of parameters; ValueError for options that ``group``, to be added, does not have.

    These are options that concern all parameters, which are those outside ``own``, with another value than the first
    group's, and misspelled options. (Any other key is kept, as torch does. A default says nothing: torch writes it.)
    """
    check_not_module(optimizer, group.get("params"))
    name, index, options = type(optimizer).__name__, len(optimizer.param_groups), optimizer.defaults
    for key, value in group.items():
        # So high that what schedulers and other optimizers write into groups is no option misspelled.
        meant = [] if key in options else difflib.get_close_matches(str(key), options, 1, cutoff=0.9)
        if meant:
            raise ValueError(f"parameter group {index} of {name} has {key!r}: did you mean {meant[0]!r}?")
        if not index or key not in options or key in own:
            continue
        first = optimizer.param_groups[0][key]
        if _differ(value, first) and _differ(value, options[key]) and not (value is None and key in WRITTEN):
            raise ValueError(
                f"{key} concerns all parameters, and is read from the first group, which has {first!r}, but parameter "
                f"group {index} of {name} has {value!r}: leave it out there. (A group's own are {', '.join(own)}.)"
            )


def _differ(a: object, b: object) -> bool:
    try:
        return bool(a != b)
    except (RuntimeError, ValueError):  # arrays: what ranges are checked for names them
        return False


def check_range(options: Mapping[str, Any], name: str, low: float, high: float = math.inf, open_: str = "") -> None:
    """ValueError unless ``low ≤ options[name] ≤ high``; strict at the ends that ``open_`` ("low", "high") names."""
    value = options[name]
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    above = low < number if "low" in open_ else low <= number
    below = number < high if "high" in open_ or high == math.inf else number <= high
    if not (above and below):
        left, right = "(" if "low" in open_ else "[", ")" if "high" in open_ or high == math.inf else "]"
        raise ValueError(f"{name} must lie in {left}{low}, {high}{right}, got {value!r}")


def check_integer(options: Mapping[str, Any], name: str, low: int | None = None) -> None:
    """ValueError unless ``options[name]`` is an integer, of at least ``low`` where that is given."""
    value = options[name]
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        least = "" if low is None else f" of at least {low}"
        raise ValueError(f"{name} must be an integer{least}, got {value!r}")


def check_maximize(options: Mapping[str, Any]) -> None:
    """ValueError unless ``options["maximize"]`` is True or False."""
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
    foreign = [key for key in state if isinstance(key, str) and key != own]
    if foreign:
        what = f"has an entry {foreign[0]!r}"
        raise ValueError(f"state_dict must be that of {name}, but its state {what}: is it another optimizer's?")
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"state_dict must have {len(optimizer.param_groups)} parameter groups as this {name}, got {len(groups)}"
        )
    parameters: dict[Any, Tensor] = {}
    for i, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        missing = [option for option in ("params", *optimizer.defaults) if option not in saved]
        if missing:
            raise ValueError(
                f"state_dict must be that of {name}, but its group {i} lacks {', '.join(missing[:4])}"
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
        raise ValueError(f"state_dict must be that of {name}, but its state {what}: is it another optimizer's?")
    for key, p in parameters.items():
        for entry, value in state.get(key, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                raise ValueError(
                    f"state_dict: {entry} of parameter {key} must have the parameter's shape {tuple(p.shape)}, got "
                    f"{tuple(value.shape)}: is it another model's?"
                )
