"""What a K-FAC step decides: its length and momentum from the exact quadratic model, or a bound on its divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sorder.linalg.pytree import dot

Vector = Sequence[Tensor]
Product = Callable[[Vector], list[Tensor]]


@dataclass(frozen=True)
class KFACStep:
    """Record of one step, in the units of the loss and the parameters; see :class:`sorder.optim.KFAC`.

    Attributes:
        loss: loss before the step; NaN where the step was given no closure. new_loss: loss of the same function after
            it, before weight decay; equal to ``loss`` where the step was rejected; NaN where it was not evaluated.
        gradient_norm: ‖g‖₂.
        learning_rate: factor of the preconditioned gradient, before lr: α of the quadratic model, or what the bound on
            the divergence leaves of 1. momentum: factor of the step before.
        products: exact curvature products. evaluations: runs of the closures.
        reduction_ratio: ρ, the loss's change over the one that the quadratic predicted, for the full step; NaN where
            not evaluated.
        damping: λ of this step. next_damping: of the next.
        step_length: factor by which the step was shortened until the loss fell; 0 where it was rejected.
        step_norm: norm of what the parameters moved by, before weight decay.
        curvature_updated: whether the factors were measured.
        accepted: whether the parameters moved.
    """

    loss: float
    new_loss: float
    gradient_norm: float
    learning_rate: float
    momentum: float
    products: int
    evaluations: int
    reduction_ratio: float
    damping: float
    next_damping: float
    step_length: float
    step_norm: float
    curvature_updated: bool
    accepted: bool


@dataclass(frozen=True)
class QuadraticStep:
    """s = αΔ + μδ, its slope gᵀs and its quadratic form sᵀBs."""

    step: list[Tensor]
    learning_rate: float
    momentum: float
    slope: float
    quadratic: float


def quadratic_step(
    product: Product, gradient: Vector, direction: Vector, last: Vector | None, damping: float
) -> QuadraticStep:
    """The minimiser of gᵀs + ½ sᵀ(B + λ)s over s = αΔ + μδ (Martens & Grosse 2015, section 7).

    Args:
        product: v ↦ Bv; one product for Δ, and one for δ where it is given.
        gradient: g. direction: Δ. last: δ, the step before, or None for μ = 0. damping: λ.

    Raises:
        FloatingPointError: a product is not finite.
    """
    vectors = [list(direction)] if last is None else [list(direction), list(last)]
    products = [product(v) for v in vectors]
    curved = [[dot(v, b).item() for b in products] for v in vectors]
    inner = [[dot(v, w).item() for w in vectors] for v in vectors]
    slopes = [dot(gradient, v).item() for v in vectors]
    if not all(math.isfinite(c) for row in curved for c in row):
        raise FloatingPointError("a curvature product is not finite")
    alpha, mu = _minimiser(curved, inner, slopes, damping)
    step = [alpha * d for d in direction]
    if last is not None and mu:
        step = [s + mu * d for s, d in zip(step, last, strict=True)]
    factors = [alpha, mu][: len(vectors)]
    slope = sum(f * s for f, s in zip(factors, slopes, strict=True))
    count = range(len(factors))
    quadratic = sum(factors[i] * factors[j] * 0.5 * (curved[i][j] + curved[j][i]) for i in count for j in count)
    return QuadraticStep(step, alpha, mu, slope, quadratic)


def _minimiser(
    curved: Sequence[Sequence[float]], inner: Sequence[Sequence[float]], slopes: Sequence[float], damping: float
) -> tuple[float, float]:
    """α and μ. Where the curvature along Δ vanishes α is 1, the preconditioner's own length."""
    a = curved[0][0] + damping * inner[0][0]
    alone = -slopes[0] / a if a > 0.0 else 1.0
    if len(slopes) == 1:
        return alone, 0.0
    b = 0.5 * (curved[0][1] + curved[1][0]) + damping * inner[0][1]
    c = curved[1][1] + damping * inner[1][1]
    determinant = a * c - b * b
    # Parallel directions leave nothing for μ to choose; and rounding decides near that.
    if not determinant > 1e-6 * a * c or a <= 0.0:
        return alone, 0.0
    return (b * slopes[1] - c * slopes[0]) / determinant, (b * slopes[0] - a * slopes[1]) / determinant


def divergence_bound(gradient: Vector, direction: Vector, rates: Sequence[float], kl: float | None) -> float:
    """ν ≤ 1 with which Σ lr²·ν²·Δᵀg ≤ ``kl`` (Ba et al. 2017, section 5).

    Δᵀg with Δ = K⁻¹g is ΔᵀKΔ, twice the Kullback–Leibler divergence that a step Δ makes, to second order.
    """
    if kl is None:
        return 1.0
    size = dot([r * d for r, d in zip(rates, direction, strict=True)], [
        r * g for r, g in zip(rates, gradient, strict=True)
    ]).item()  # fmt: skip
    return min(1.0, math.sqrt(kl / size)) if size > 0.0 else 1.0


def curvature_along(product: Product, gradient: Vector) -> float:
    """gᵀBg / gᵀg, 0 for a gradient of zero."""
    gg = dot(gradient, gradient).item()
    value = dot(gradient, product(gradient)).item() / gg if gg > 0.0 else 0.0
    if not math.isfinite(value):
        raise FloatingPointError("the curvature product with the gradient is not finite")
    return value


def shortened(step: list[Tensor], limit: float | None) -> tuple[list[Tensor], float, float]:
    """``step`` within the norm ``limit``, its norm, and the factor that it was multiplied by."""
    norm = math.sqrt(dot(step, step).item())
    if limit is None or norm <= limit:
        return step, norm, 1.0
    return list(torch._foreach_mul(step, limit / norm)), limit, limit / norm
