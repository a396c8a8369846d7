"""How far a quadratic model is trusted: damping λ of B + λI, or the radius of a trust region."""

from __future__ import annotations

import math

from sorder.optim.line_search import LineSearchResult


def reduction_ratio(change: float, predicted: float, noise: float) -> float:
    """ρ = actual change of the loss / change predicted by the undamped quadratic; 1 where both are rounding.

    ``change`` may be infinite or NaN, which count as an increase.
    """
    if not math.isfinite(change):
        return -math.inf
    if abs(predicted) <= noise and change <= noise:
        return 1.0
    return change / predicted if predicted < 0.0 else -math.inf


def matching_damping(change: float, predicted: float, step_norm2: float, noise: float) -> float:
    """The λ with which the damped model would have told the loss at a step s: λ‖s‖²/2 = f(x + s) − m(s).

    Zero where the model was right or too pessimistic, so zero on a quadratic; infinite where the loss was not finite.
    """
    if not math.isfinite(change):
        return math.inf
    excess = change - predicted - noise
    return 2.0 * excess / step_norm2 if step_norm2 > 0.0 and excess > 0.0 else 0.0


def matching_where_it_ended(
    search: LineSearchResult, loss: float, slope: float, quadratic: float, step_norm: float, noise: float
) -> float:
    """:func:`matching_damping` at the length that a search came back to: at shorter steps the model errs less."""
    length = search.length or 1.0
    change = (search.loss if search.length else search.first) - loss
    predicted = length * slope + 0.5 * length**2 * quadratic
    return matching_damping(change, predicted, (length * step_norm) ** 2, noise)


def levenberg_marquardt(damping: float, ratio: float, decrease: float, increase: float) -> float:
    """λ after a step: λ·decrease if ρ > 1/2, λ·increase if ρ < 1/4 (Marquardt 1963; Martens 2010, 4.1).

    Martens decreases from 3/4 on, which steps of a transformer seldom reach: λ then stays where it started, far above
    the curvature along the steps.
    """
    if ratio > 0.5:
        return damping * decrease
    return damping * increase if ratio < 0.25 else damping


def raised_damping(damping: float, matching: float, length: float, gradient_norm: float, step_norm: float) -> float:
    """λ after a bad step, where that asks for more than Levenberg–Marquardt's factor.

    Where damping rules, steps shrink like 1/λ, so that λ/α asks for the step that a search of length α came back to;
    but not for more than the λ that would have told the loss there (``matching``), and for a tenth of that at least: a
    λ far too low is raised in one go. If that is not known and λ is zero, ten times the λ that bounds steps by
    ``step_norm``.
    """
    shrunk = damping / max(length, 0.1)
    if math.isfinite(matching):
        return min(matching, max(shrunk, 0.1 * matching))
    return shrunk if damping > 0.0 else 10.0 * gradient_norm / step_norm


def trust_radius(radius: float, ratio: float, step_norm: float, on_boundary: bool) -> float:
    """Radius after a step (Nocedal & Wright, *Numerical Optimization*, algorithm 4.1).

    A quarter of the step if ρ < 1/4; twice the radius if ρ > 3/4 and the step was stopped by it.
    """
    if ratio < 0.25:
        return 0.25 * min(radius, step_norm)
    return 2.0 * radius if ratio > 0.75 and on_boundary else radius
