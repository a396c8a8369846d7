"""The Newton direction: conjugate gradients on the damped curvature, negative curvature followed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sorder.linalg import CGResult, EisenstatWalker, RelativeProgress, Residual, StoppingRule, StopReason, cg
from sorder.linalg.pytree import dot
from sorder.optim.preconditioner import normal

Vector = Sequence[Tensor]
Product = Callable[[Vector], list[Tensor]]
# By the names of NewtonCG's option cg_stop.
_RULES = {RelativeProgress: "relative-progress", Residual: "residual", EisenstatWalker: "eisenstat-walker"}


@dataclass
class Direction:
    """A step s with what the undamped quadratic m(s) = gᵀs + ½ sᵀBs says of it.

    Attributes:
        step: s. slope: gᵀs. quadratic: sᵀBs. negative: s holds a direction of negative curvature, whose length the
            quadratic does not tell. iterations, stop, on_boundary: of conjugate gradients.
    """

    step: list[Tensor]
    slope: float
    quadratic: float
    negative: bool
    iterations: int
    stop: str
    on_boundary: bool


def newton_direction(
    product: Product,
    gradient: Vector,
    *,
    damping: float,
    radius: float | None,
    start: Vector | None,
    preconditioner: Callable[[Vector], Vector] | None,
    stopping: StoppingRule,
    iterations: int,
) -> Direction:
    """Minimise m(s) + λ‖s‖²/2, within ‖s‖ ≤ ``radius`` if there is one, from ``start``.

    Where a direction d of nonpositive curvature ends the iteration without a trust region, the step goes along it by
    rᵀd/|dᵀ(B + λ)d|, r the residual: the Newton length with the curvature's sign turned around, as in Dauphin et al.,
    *Identifying and attacking the saddle point problem* (2014).
    """

    def damped(v: Vector) -> list[Tensor]:
        found = product(v)
        if damping:
            for b, t in zip(found, v, strict=True):
                b.add_(t, alpha=damping)
        return found

    rhs = [-g for g in gradient]
    result = cg(
        damped,
        rhs,
        x0=start,
        preconditioner=preconditioner,
        max_iterations=iterations,
        stopping=[stopping, Residual(min(torch.finfo(g.dtype).eps for g in gradient) ** 0.75)],
        trust_radius=radius,
    )
    step, quadratic = result.x, result.quadratic
    negative = result.direction is not None and radius is None
    if negative:
        step, quadratic = _follow(result, rhs)
    slope = dot(step, gradient).item()
    if start is not None and slope >= 0.0:
        # The start was no help, and too few iterations have made up for it.
        return newton_direction(
            product,
            gradient,
            damping=damping,
            radius=radius,
            start=None,
            preconditioner=preconditioner,
            stopping=stopping,
            iterations=iterations,
        )
    if damping:
        quadratic -= damping * dot(step, step).item()
    boundary = (StopReason.BOUNDARY, StopReason.NEGATIVE_CURVATURE)
    on_boundary = radius is not None and result.reason in boundary
    return Direction(
        step,
        slope,
        quadratic,
        negative,
        result.iterations,
        result.reason.value if result.rule is None else _RULES[type(result.rule)],
        on_boundary,
    )


def _follow(result: CGResult, rhs: Vector) -> tuple[list[Tensor], float]:
    """x plus a step along the direction of nonpositive curvature, and its damped quadratic form."""
    d = result.direction
    assert d is not None and result.direction_curvature is not None
    # Where the curvature vanishes, the largest one seen gives the scale.
    scale = max(abs(result.direction_curvature), 1e-3 * max(abs(c) for c in result.record.curvatures))
    dd, rd, bd = dot(d, d).item(), dot(d, result.residual).item(), dot(d, rhs).item()
    length = rd / (scale * dd) if scale > 0.0 else 1.0
    # From a zero start rhsᵀd > 0; from a warm one d may point uphill, and −d has the same curvature.
    length = length if bd >= 0.0 else -length
    quadratic = result.quadratic + 2.0 * length * (bd - rd) + length**2 * result.direction_curvature * dd
    return [x + length * p for x, p in zip(result.x, d, strict=True)], quadratic


def negative_curvature_probe(
    product: Product, like: Vector, iterations: int, seed: int
) -> tuple[CGResult, list[Tensor] | None]:
    """A unit direction of negative curvature from a random start, for where the gradient is zero.

    Conjugate gradients on B x = z meet one, if there is one, in as many iterations as B has distinct eigenvalues.
    """
    result = cg(product, normal(like, seed), max_iterations=iterations, stopping=Residual(1e-6))
    d, curvature = result.direction, result.direction_curvature
    largest = max((abs(c) for c in result.record.curvatures), default=0.0)
    if d is None or curvature is None or not curvature < -1e-6 * largest:
        return result, None
    length = dot(d, d).item() ** 0.5
    return result, [t / length for t in d]
