"""Checks of what curvature is taken of, for points, optimizers and preconditioners."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from torch import Tensor, nn

from sorder.curvature.evaluation import Closure
from sorder.curvature.fallback import FORWARD, REVERSE
from sorder.curvature.split import KINDS
from sorder.linalg.checks import check_number
from sorder.linalg.past_modes import sees_no_modes

MODES = ("auto", REVERSE, FORWARD)


def check_not_dict(name: str, params: Any, more: str = "") -> None:
    """TypeError where ``params``, given to ``name``, is a dict of parameters. ``more`` ends the message."""
    if isinstance(params, Mapping):
        raise TypeError(f"{name} takes parameters, got a {type(params).__name__}: pass its values(){more}")


def check_not_module(name: str, params: Any, more: str = "") -> None:
    """TypeError where ``params`` is a module; one that lists parameters is none here. ``more`` ends the message."""
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        raise TypeError(
            f"{name} takes parameters, got the module {type(params).__name__}: pass model.parameters(){more}"
        )


def check_point(
    closures: Sequence[Closure], params: Sequence[Tensor], kind: str | None, mode: str, sign: float, seed: int
) -> None:
    """Raises where an argument of a CurvaturePoint is wrong."""
    if not closures or not all(callable(c) for c in closures):
        raise TypeError(f"closure must be a callable or a nonempty sequence of callables, got {closures!r}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    check_number("sign", sign, "be finite", math.isfinite)
    check_number("seed", seed, "be an integer", lambda _: True, integer=True)
    if not params:
        raise ValueError("params is empty")
    if isinstance(params[0], tuple):
        raise TypeError("CurvaturePoint takes parameters, got (name, parameter) pairs: pass model.parameters()")
    for i, p in enumerate(params):
        if not isinstance(p, Tensor) or not p.requires_grad or not p.is_leaf or not p.is_floating_point():
            raise ValueError(
                "params must be real floating-point leaf tensors that require gradients; number "
                f"{i} is not: got {_described(p)}"
            )


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    flags = f"requires_grad={value.requires_grad} and is_leaf={value.is_leaf}"
    shape = "nested" if value.is_nested else f"shape {tuple(value.shape)}"
    return f"a tensor of {value.dtype} and {shape} with {flags}"


@sees_no_modes
def check_vector(v: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Raises where ``v`` is not like ``params``, one real floating-point tensor for each."""
    if isinstance(v, Tensor) or not isinstance(v, Sized):
        raise TypeError(f"v must be a sequence with one tensor per parameter, got {type(v).__name__}")
    if len(v) != len(params):
        raise ValueError(f"v must have one tensor for each of {len(params)} parameters, got {len(v)}")
    for i, (t, p) in enumerate(zip(v, params, strict=True)):
        if not isinstance(t, Tensor) or not t.is_floating_point():
            got = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"v[{i}] must be a real floating-point tensor, got {got}")
        if t.shape != p.shape:
            raise ValueError(f"v[{i}] must have the parameter's shape {tuple(p.shape)}, got {tuple(t.shape)}")
        if t.device != p.device:
            raise ValueError(f"v[{i}] must be on the parameter's device {p.device}, got {t.device}")
