"""Estimators of the diagonal of a curvature matrix B that is known by its products v ↦ Bv.

All take ``product``, which maps one tensor per parameter to one tensor per parameter, and ``like``, the parameters,
or tensors of their shapes, dtypes and devices. All return one tensor per entry of ``like``, of its shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["bekas", "empirical", "exact", "gauss_newton_bartlett", "hutchinson", "probe"]

Vector = Sequence[Tensor]
Product = Callable[[Vector], Sequence[Tensor]]
DISTRIBUTIONS = ("rademacher", "normal")


def hutchinson(
    product: Product, like: Vector, generator: torch.Generator, *, probes: int = 1, distribution: str = "rademacher"
) -> list[Tensor]:
    """Mean of z∘Bz over random probes z, which is the diagonal of B in expectation.

    E[zᵢ Σⱼ Bᵢⱼ zⱼ] = Bᵢᵢ since E[zᵢzⱼ] = δᵢⱼ (Hutchinson 1990; Liu et al. 2023, algorithm 1). The variance of an entry
    for one probe is Σ_{j≠i} Bᵢⱼ² with Rademacher probes, and 2Bᵢᵢ² more with normal ones.

    Args:
        generator: source of the probes. Probes are drawn on its device, and moved.
        probes: number of probes and of products. Default 1.
        distribution: "rademacher" (±1, default) or "normal".

    Raises:
        ValueError: ``probes`` is less than 1, or ``distribution`` is unknown.

    Example:
        >>> b = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> generator = torch.Generator().manual_seed(0)
        >>> (d,) = hutchinson(lambda v: [b @ v[0]], [torch.zeros(2)], generator, probes=4000)
        >>> torch.allclose(d, torch.tensor([2.0, 3.0]), atol=0.1)
        True
    """
    _check(probes, distribution)
    total = [torch.zeros_like(t) for t in like]
    for _ in range(probes):
        z = probe(like, generator, distribution)
        torch._foreach_addcmul_(total, z, list(product(z)), value=1.0 / probes)
    return total


def bekas(
    product: Product, like: Vector, generator: torch.Generator, *, probes: int = 3, distribution: str = "normal"
) -> list[Tensor]:
    """Σ z∘Bz / Σ z∘z over random probes z, entry by entry (Bekas, Kokiopoulou & Saad 2007, eq. 2).

    The quotient removes what Bᵢᵢ itself adds to the variance of normal probes, so that it is exact for a diagonal B.
    Its mean is the diagonal; with normal probes its variance is finite from three probes on. With Rademacher probes
    it is :func:`hutchinson`.

    Args and errors: those of :func:`hutchinson`; defaults 3 and "normal".

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> (d,) = bekas(lambda v: [torch.tensor([2.0, 5.0]) * v[0]], [torch.zeros(2)], generator)
        >>> torch.allclose(d, torch.tensor([2.0, 5.0]))
        True
    """
    _check(probes, distribution)
    above, below = [torch.zeros_like(t) for t in like], [torch.zeros_like(t) for t in like]
    for _ in range(probes):
        z = probe(like, generator, distribution)
        torch._foreach_addcmul_(above, z, list(product(z)))
        torch._foreach_addcmul_(below, z, z)
    return list(torch._foreach_div(above, below))


def exact(product: Product, like: Vector) -> list[Tensor]:
    """The diagonal itself, by one product for each of the P coordinates: for small problems and for tests.

    Example:
        >>> b = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> exact(lambda v: [b @ v[0]], [torch.zeros(2)])
        [tensor([2., 3.])]
    """
    unit = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in like]
    found = [torch.zeros_like(t) for t in unit]
    for number, (u, d) in enumerate(zip(unit, found, strict=True)):
        for i in range(u.numel()):
            u.view(-1)[i] = 1.0
            d.view(-1)[i] = product(unit)[number].reshape(-1)[i]
            u.view(-1)[i] = 0.0
    return found


def gauss_newton_bartlett(gradient: Vector, rows: float) -> list[Tensor]:
    """ĝ∘ĝ / N, ĝ the gradient of the summed loss of N rows with labels sampled from the model.

    The scores of sampled labels are independent with mean zero, so that the expectation is the mean over rows of the
    squared scores, the diagonal of the mean loss's generalised Gauss–Newton matrix (GGN) where the labels are of the
    model's likelihood (Bartlett's identity; Liu et al. 2023, algorithm 2, whose ĝ is of the mean: N·(ĝ/N)∘(ĝ/N)).

    Example:
        >>> gauss_newton_bartlett([torch.tensor([2.0, -4.0])], 4)
        [tensor([1., 4.])]
    """
    return [g.square() / rows for g in gradient]


def empirical(gradients: Sequence[Vector], rows: int = 1) -> list[Tensor]:
    """The diagonal of the empirical Fisher matrix, the mean of g∘g over the gradients g of single rows.

    With batches of one row it is that mean. From gradients ḡ of larger batches it is unbiased if their rows are
    independent draws: N = K·``rows`` rows in all, with C the sample variance of the K gradients times ``rows``, which
    estimates the variance of single rows' gradients, and ḡ their mean, it is C + (ḡ∘ḡ − C/N). The square of one
    batch's gradient times its rows, which some optimizers use, exceeds it by (``rows`` − 1) times the mean gradient's
    square.

    The labels are those of the data, so that this is not the Gauss–Newton matrix's diagonal, nor the Hessian's, unless
    the model fits them (Kunstner, Balles & Hennig 2019); :func:`gauss_newton_bartlett` samples them.

    Args:
        gradients: K gradients, each of the mean loss of a batch. rows: in every batch. Default 1.

    Raises:
        ValueError: ``gradients`` is empty, or has one entry of several rows, or ``rows`` is less than 1.

    Example:
        >>> empirical([[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 0.0])]])
        [tensor([5., 2.])]
    """
    count = len(gradients)
    if rows < 1 or count < (1 if rows == 1 else 2):
        raise ValueError(f"gradients must be one or more, two with several rows each; got {count} with rows={rows}")
    found = []
    for same in zip(*gradients, strict=True):
        stacked = torch.stack(same)
        mean = stacked.mean(0)
        variance = rows * (stacked - mean).square().sum(0) / max(1, count - 1)
        found.append(variance * (1.0 - 1.0 / (count * rows)) + mean.square())
    return found


def probe(like: Vector, generator: torch.Generator, distribution: str = "rademacher") -> list[Tensor]:
    """Independent random entries of mean 0 and variance 1, shaped like ``like``: ±1 or standard normal."""
    drawn = []
    for t in like:
        z = torch.empty(t.shape, dtype=t.dtype, device=generator.device)
        if distribution == "normal":
            z.normal_(generator=generator)
        else:
            z.bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)
        drawn.append(z.to(t.device))
    return drawn


def _check(probes: int, distribution: str) -> None:
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {', '.join(map(repr, DISTRIBUTIONS))}, got {distribution!r}")
