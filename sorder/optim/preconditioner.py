"""Diagonal preconditioners of the damped curvature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sorder.curvature.diagonal import hutchinson, probe
from sorder.linalg.pytree import dot

Vector = Sequence[Tensor]


def hutchinson_diagonal(product: Callable[[Vector], list[Tensor]], like: Vector, seed: int) -> list[Tensor]:
    """One-probe estimate of the diagonal of B with Rademacher probes, a function of ``seed``. One product."""
    return hutchinson(product, like, _generator(like, seed))


def squared_gradient_diagonal(product: Callable[[Vector], list[Tensor]], gradient: Vector) -> list[Tensor]:
    """c·g∘g, a stand-in for the diagonal of B, with c such that gᵀ diag(c·g∘g) g = gᵀBg. One product.

    g∘g has the unit of a squared loss; c restores that of a curvature, so that steps do not depend on the loss's
    scale.
    """
    squared = [g.square() for g in gradient]
    along, fourth = abs(dot(gradient, product(gradient)).item()), dot(squared, squared).item()
    return [s * (along / fourth if fourth > 0.0 else 0.0) for s in squared]


def normal(like: Vector, seed: int) -> list[Tensor]:
    """Independent standard normal variates shaped like ``like``, a function of ``seed`` alone."""
    return probe(like, _generator(like, seed), "normal")


def _generator(like: Vector, seed: int) -> torch.Generator:
    return torch.Generator(like[0].device).manual_seed(seed)


def inverse_power(diagonal: Vector, damping: float, power: float) -> Callable[[Vector], list[Tensor]]:
    """r ↦ r / (|d| + λ)^power, Martens' preconditioner (2010, section 4.7, with power 3/4).

    Estimates of d may be negative, or zero where a parameter is not used; a floor of 1e-8 of the mean keeps the
    latter finite without damping.
    """
    size = [d.abs() for d in diagonal]
    mean = dot(size, [torch.ones_like(d) for d in size]).item() / max(1, sum(d.numel() for d in size))
    floor = damping + 1e-8 * mean
    if floor == 0.0:
        return list
    inverse = [d.add(floor).pow(-power) for d in size]
    return lambda r: [t * m for t, m in zip(r, inverse, strict=True)]
