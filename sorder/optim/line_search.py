"""Step length along a direction of descent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LineSearchResult:
    """``length`` is 0 where no trial lowered the loss enough; ``loss`` is the one there; ``first`` the one at
    length 1."""

    length: float
    loss: float
    first: float


def armijo(
    loss_at: Callable[[float], float],
    loss: float,
    slope: float,
    *,
    sufficient_decrease: float = 1e-4,
    max_trials: int = 10,
    expansions: int = 0,
    noise: float = 0.0,
) -> LineSearchResult:
    """Backtrack from length 1 until f(t) ≤ f(0) + c·t·f′(0) (Nocedal & Wright, *Numerical Optimization*, eq. 3.4).

    The next trial minimises the parabola through f(0), f′(0) and f(t), kept within [t/10, t/2] (ibid., section 3.5).
    A trial that is not finite has failed. ``noise`` is a difference of losses that rounding explains: without it, no
    step would pass near a minimum (Hager & Zhang 2005).

    Args:
        loss_at: t ↦ f(t). loss: f(0). slope: f′(0), not positive.
        sufficient_decrease: c. max_trials: number of lengths tried. Default 10.
        expansions: where length 1 passes at once, go on doubling it so often while the loss falls: along a direction
            of negative curvature the quadratic has no minimiser that would name a length. Default 0.
    """

    def passes(length: float, value: float) -> bool:
        return math.isfinite(value) and value <= loss + sufficient_decrease * length * slope + noise

    length = 1.0
    first = value = loss_at(length)
    for _ in range(max_trials - 1):
        if passes(length, value):
            break
        excess = value - loss - slope * length
        ratio = -slope * length / (2.0 * excess) if math.isfinite(excess) and excess > 0.0 else 0.1
        length *= min(0.5, max(0.1, ratio))
        value = loss_at(length)
    if not passes(length, value):
        return LineSearchResult(0.0, loss, first)
    if length == 1.0:
        for _ in range(expansions):
            further = loss_at(2.0 * length)
            if not (math.isfinite(further) and further < value - noise):
                break
            length, value = 2.0 * length, further
    return LineSearchResult(length, value, first)
