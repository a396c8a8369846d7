"""Diagonal preconditioners of the damped curvature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sorder.linalg.pytree import dot

Vector = Sequence[Tensor]


def hutchinson_diagonal(product: Callable[[Vector], list[Tensor]], like: Vector, seed: int) -> list[Tensor]:
    """One-probe estimate of the diagonal of B: z∘Bz with Rademacher z, whose mean is the diagonal.

    E[zᵢ Σⱼ Bᵢⱼ zⱼ] = Bᵢᵢ since E[zᵢzⱼ] = δᵢⱼ (Hutchinson 1990; Bekas, Kokiopoulou & Saad 2007). One product.
    """
    probe = rademacher(like, seed)
    return [z * b for z, b in zip(probe, product(probe), strict=True)]


def squared_gradient_diagonal(product: Callable[[Vector], list[Tensor]], gradient: Vector) -> list[Tensor]:
    """c·g∘g, a stand-in for the diagonal of B, with c such that gᵀ diag(c·g∘g) g = gᵀBg. One product.

    g∘g has the unit of a squared loss; c restores that of a curvature, so that steps do not depend on the loss's
    scale.
    """
    squared = [g.square() for g in gradient]
    along, fourth = abs(dot(gradient, product(gradient)).item()), dot(squared, squared).item()
    return [s * (along / fourth if fourth > 0.0 else 0.0) for s in squared]


def rademacher(like: Vector, seed: int) -> list[Tensor]:
    """Independent ±1 shaped like ``like``, a function of ``seed`` alone."""
    generators = {t.device: torch.Generator(t.device).manual_seed(seed) for t in like}
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        .bernoulli_(0.5, generator=generators[t.device])
        .mul_(2.0)
        .sub_(1.0)
        for t in like
    ]


def normal(like: Vector, seed: int) -> list[Tensor]:
    """Independent standard normal variates shaped like ``like``, a function of ``seed`` alone."""
    generators = {t.device: torch.Generator(t.device).manual_seed(seed) for t in like}
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format).normal_(generator=generators[t.device]) for t in like
    ]


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
