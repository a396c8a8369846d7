"""Rules that end an inner iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from sorder.linalg.checks import check_number

GOLDEN_RATIO = (1.0 + math.sqrt(5.0)) / 2.0


@dataclass
class Record:
    """What an iteration saw, as Python floats; entry 0 belongs to the start, entry i to the i-th iterate.

    Attributes:
        values: m(xᵢ) = ½ xᵢᵀA xᵢ − rhsᵀxᵢ.
        residual_norms: ‖rhs − A xᵢ‖₂.
        curvatures: pᵢᵀA pᵢ / pᵢᵀpᵢ along the i-th search direction; one entry fewer than the others, unless
            the last direction was of nonpositive curvature and no step was taken.
        rhs_norm: ‖rhs‖₂.
    """

    values: list[float]
    residual_norms: list[float]
    curvatures: list[float]
    rhs_norm: float

    @property
    def iterations(self) -> int:
        """Number of steps taken."""
        return len(self.values) - 1


class StoppingRule(Protocol):
    """Any callable that looks at the :class:`Record` so far and answers whether to stop."""

    def __call__(self, record: Record, /) -> bool: ...


@dataclass(frozen=True)
class Residual:
    """Stop when ‖r‖ ≤ max(rtol·‖rhs‖, atol)."""

    rtol: float = 1e-5
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            check_number(name, value, "be at least 0", lambda t: t >= 0.0)

    def __call__(self, record: Record, /) -> bool:
        return record.residual_norms[-1] <= max(self.rtol * record.rhs_norm, self.atol)


@dataclass(frozen=True)
class RelativeProgress:
    """Stop when the quadratic falls by less than ``eps`` per iteration, relative to its value.

    With k = max(``window``, ``fraction``·i): stop at iteration i > k if m(xᵢ) < 0 and
    (m(xᵢ) − m(xᵢ₋ₖ)) / m(xᵢ) < k·eps (Martens, *Deep learning via Hessian-free optimization*, ICML 2010,
    section 4.4, which takes eps = 5e-4, window 10 and fraction 0.1).
    """

    eps: float = 5e-4
    window: int = 10
    fraction: float = 0.1

    def __post_init__(self) -> None:
        check_number("eps", self.eps, "be positive", lambda t: t > 0.0)
        check_number("window", self.window, "be at least 1", lambda n: n >= 1, integer=True)
        check_number("fraction", self.fraction, "be at least 0 and finite", lambda t: 0.0 <= t < math.inf)

    def __call__(self, record: Record, /) -> bool:
        i = record.iterations
        k = max(self.window, math.ceil(self.fraction * i))
        if i <= k or record.values[i] >= 0.0:
            return False
        return (record.values[i] - record.values[i - k]) / record.values[i] < k * self.eps


@dataclass(frozen=True)
class EisenstatWalker:
    """Stop when ‖r‖ ≤ η‖rhs‖, the forcing term η following the convergence of the outer (Newton) iteration.

    The rule is immutable; :meth:`advance` gives the rule of the next outer iteration. With gₖ the gradient of
    outer iteration k and rₖ₋₁ the residual that CG left behind before it:

    - choice 1: ηₖ = |‖gₖ‖ − ‖rₖ₋₁‖| / ‖gₖ₋₁‖, at least ηₖ₋₁^((1+√5)/2) where that exceeds 0.1;
    - choice 2: ηₖ = γ(‖gₖ‖ / ‖gₖ₋₁‖)^α, at least γ ηₖ₋₁^α where that exceeds 0.1;

    and never more than ``eta_max``. The floors keep one lucky step from asking for a needlessly exact solve.
    Eisenstat & Walker, *Choosing the forcing terms in an inexact Newton method*, SIAM J. Sci. Comput. 17
    (1996).

    Args:
        eta: forcing term of this outer iteration; the first one is the caller's. Default 0.5.
        gradient_norm: ‖gₖ‖ of the outer iteration that ``eta`` serves; None before the first.
        choice: 1 or 2 (default).
        gamma: γ in (0, 1], default 0.9. alpha: α in (1, 2], default (1+√5)/2. eta_max: default 0.9.

    Example:
        >>> rule = EisenstatWalker().advance(gradient_norm=1.0)
        >>> rule.eta
        0.5
        >>> rule.advance(gradient_norm=0.5).eta < 0.5
        True
    """

    eta: float = 0.5
    gradient_norm: float | None = None
    choice: int = 2
    gamma: float = 0.9
    alpha: float = GOLDEN_RATIO
    eta_max: float = 0.9

    def __post_init__(self) -> None:
        check_number("choice", self.choice, "be 1 or 2", lambda n: n in (1, 2), integer=True)
        check_number("eta_max", self.eta_max, "lie in (0, 1)", lambda t: 0.0 < t < 1.0)
        check_number("eta", self.eta, f"lie in [0, eta_max = {self.eta_max}]", lambda t: 0.0 <= t <= self.eta_max)
        check_number("gamma", self.gamma, "lie in (0, 1]", lambda t: 0.0 < t <= 1.0)
        check_number("alpha", self.alpha, "lie in (1, 2]", lambda t: 1.0 < t <= 2.0)
        if self.gradient_norm is not None:
            _check_norm("gradient_norm", self.gradient_norm)

    def advance(self, gradient_norm: float, linear_residual_norm: float | None = None) -> EisenstatWalker:
        """The rule for the outer iteration whose gradient has norm ``gradient_norm``.

        Args:
            gradient_norm: ‖gₖ‖.
            linear_residual_norm: ‖rₖ₋₁‖, the last ``CGResult.residual_norm``; choice 1 needs it after the
                first call.
        """
        _check_norm("gradient_norm", gradient_norm)
        if linear_residual_norm is not None:
            _check_norm("linear_residual_norm", linear_residual_norm)
        if self.gradient_norm is None or self.gradient_norm == 0.0:
            return replace(self, gradient_norm=gradient_norm)
        if self.choice == 1:
            if linear_residual_norm is None:
                raise ValueError("choice 1 needs linear_residual_norm, the residual norm of the last solve")
            eta = abs(gradient_norm - linear_residual_norm) / self.gradient_norm
            floor = self.eta**GOLDEN_RATIO
        else:
            # The power is capped where eta_max would cut it anyway, so that a huge ratio cannot overflow.
            ratio = min(gradient_norm / self.gradient_norm, 1.0 / self.gamma)
            eta = self.gamma * ratio**self.alpha
            floor = self.gamma * self.eta**self.alpha
        if floor > 0.1:
            eta = max(eta, floor)
        return replace(self, eta=min(eta, self.eta_max), gradient_norm=gradient_norm)

    def __call__(self, record: Record, /) -> bool:
        return record.residual_norms[-1] <= self.eta * record.rhs_norm


def _check_norm(name: str, value: float) -> None:
    check_number(name, value, "be at least 0 and finite", lambda t: 0.0 <= t < math.inf)
