"""Inverses of damped Kronecker products, as tensors that a state dict can hold and a function that applies them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

Inverse = dict[str, Any]
# Of the mean eigenvalue: what a factor whose factorisation fails is damped by at least, tenfold at each further try.
FIRST_JITTER = 1e-8
TRIES = 12
# Of the mean curvature: λ counts as no less. Newton-CG may have λ = 0, and factors are often singular (derivatives
# at logits sum to zero). Rounding would decide what their inverses are, and even their sign.
LEAST_DAMPING = 1e-8


def apply(inverse: Inverse, x: Tensor, damping: float) -> Tensor:
    """The inverse times (groups, m, n). ``damping`` is used where the form has it outside the factors.

    Two forms: ``left · x · right``; and ``left · [(leftᵀ x right) / (scale + λ)] · rightᵀ``, with None for the
    identity.
    """
    left, right = inverse["left"], inverse["right"]
    if inverse["scale"] is None:
        return _from_right(_from_left(left, x), right)
    x = _from_right(_from_left(_transposed(left), x), right)
    x = x / positive(inverse["scale"], damping if inverse["damped"] else 0.0)
    return _from_right(_from_left(left, x), _transposed(right))


def _transposed(factor: Tensor | None) -> Tensor | None:
    return factor if factor is None or factor.dim() == 2 else factor.mT


def positive(scale: Tensor, damping: float) -> Tensor:
    """scale + λ, but no less than 1e-8 of its mean in each matrix; 1 where that is zero, too."""
    below = scale.clamp_min(0.0) + damping
    below = torch.maximum(below, FIRST_JITTER * below.mean((-2, -1), keepdim=True))
    return torch.where(below > 0.0, below, torch.ones_like(below))


def _from_left(factor: Tensor | None, x: Tensor) -> Tensor:
    if factor is None:
        return x
    return factor.unsqueeze(-1) * x if factor.dim() == 2 else factor @ x


def _from_right(x: Tensor, factor: Tensor | None) -> Tensor:
    if factor is None:
        return x
    return x * factor.unsqueeze(-2) if factor.dim() == 2 else x @ factor


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """Mean eigenvalue of every matrix of (groups, k, k) or (groups, k)."""
    diagonal = factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)
    return diagonal.mean(-1)


def damped(left: Tensor, right: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """left + √λ/π, right + √λ·π with π² = mean eigenvalue of right over that of left.

    So balanced, the norm of what the product has in excess of left ⊗ right + λ is smallest (Martens & Grosse 2015,
    section 6.3). λ counts as at least ``LEAST_DAMPING`` of the product of those means, or ten units in the last place.
    """
    below, above = mean_eigenvalue(left), mean_eigenvalue(right)
    known = (below > 0.0) & (above > 0.0)
    pi = torch.where(known, (above / torch.where(known, below, 1.0)), torch.ones_like(above)).sqrt()
    least = max(LEAST_DAMPING, 10.0 * torch.finfo(left.dtype).eps)
    root = (least * below * above).clamp_min(damping).sqrt()
    return _plus(left, root / pi), _plus(right, root * pi)


def _plus(factor: Tensor, amount: Tensor) -> Tensor:
    if factor.dim() == 2:
        return factor + amount[:, None]
    return factor + amount[:, None, None] * torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)


def cholesky(factor: Tensor, name: str) -> Tensor:
    """Lower Cholesky factors; where a matrix is not positive definite its damping is raised, with a warning."""
    raised = factor
    amount = FIRST_JITTER * mean_eigenvalue(factor)
    amount = torch.where(amount > 0.0, amount, torch.ones_like(amount))
    for attempt in range(TRIES):
        lower, info = torch.linalg.cholesky_ex(raised)
        failed = info != 0
        if not bool(failed.any()):
            if attempt:
                warnings.warn(
                    f"K-FAC: a factor of {name} was not positive definite; its damping was raised by "
                    f"{float(amount.max()):.1e}, so that the preconditioner is a little weaker there",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return lower
        amount = amount * (10.0 if attempt else 1.0)
        raised = _plus(factor, torch.where(failed, amount, torch.zeros_like(amount)))
    raise FloatingPointError(f"K-FAC: a factor of {name} cannot be factorised, whatever its damping")


def eigenbasis(factor: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues (groups, k) and eigenvectors; for a diagonal factor itself, and None."""
    if factor.dim() == 2:
        return factor, None
    symmetric = 0.5 * (factor + factor.mT)
    amount = FIRST_JITTER * mean_eigenvalue(factor)
    for _ in range(TRIES):
        try:
            values, vectors = torch.linalg.eigh(symmetric)
            if bool(torch.isfinite(vectors).all()):
                return values, vectors
        except torch.linalg.LinAlgError:
            pass
        warnings.warn(
            f"K-FAC: the eigendecomposition of a factor of {name} failed; its damping is raised by "
            f"{float(amount.max()):.1e}",
            RuntimeWarning,
            stacklevel=2,
        )
        symmetric = _plus(symmetric, amount)
        amount = 10.0 * amount
    raise FloatingPointError(f"K-FAC: a factor of {name} has no eigendecomposition, whatever its damping")


def by_cholesky(left: Tensor, right: Tensor, damping: float, name: str) -> Inverse:
    """(left + √λ/π)⁻¹ ⊗ (right + √λπ)⁻¹."""
    left, right = damped(left, right, damping)
    return {"left": _inverse(left, name), "right": _inverse(right, name), "scale": None, "damped": False}


def _inverse(factor: Tensor, name: str) -> Tensor:
    if factor.dim() == 2:
        return 1.0 / positive(factor.unsqueeze(1), 0.0).squeeze(1)
    return torch.cholesky_inverse(cholesky(factor, name))


def by_eigenvalues(left: Tensor, right: Tensor, name: str) -> Inverse:
    """(left ⊗ right + λ)⁻¹ exactly; λ is given when it is applied."""
    (below, q_left), (above, q_right) = eigenbasis(left, name), eigenbasis(right, name)
    scale = below.clamp_min(0.0).unsqueeze(-1) * above.clamp_min(0.0).unsqueeze(-2)
    return {"left": q_left, "right": q_right, "scale": scale, "damped": True}


def of_two(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], damping: float, name: str) -> Inverse:
    """Inverse of a sum of two Kronecker products, each with half the damping inside its factors.

    T with Tᵀ L₂ T = 1 and Tᵀ L₁ T = Λ, and S likewise for the right factors with M, diagonalise both products at once:
    the inverse is x ↦ T [(Tᵀ x S) / (ΛMᵀ + 1)] Sᵀ (as in Martens & Grosse 2015, appendix B).
    """
    l1, r1 = damped(*first, 0.5 * damping)
    l2, r2 = damped(*second, 0.5 * damping)
    (t, left_values), (s, right_values) = _together(l1, l2, name), _together(r1, r2, name)
    scale = left_values.unsqueeze(-1) * right_values.unsqueeze(-2) + 1.0
    return {"left": t, "right": s, "scale": scale, "damped": False}


def _together(a: Tensor, b: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """T with TᵀbT = 1 and TᵀaT = diag(values)."""
    if a.dim() == 2 and b.dim() == 2:
        b = positive(b.unsqueeze(1), 0.0).squeeze(1)
        return b.rsqrt(), a / b
    a, b = (torch.diag_embed(x) if x.dim() == 2 else x for x in (a, b))
    lower = cholesky(b, name)
    half = torch.linalg.solve_triangular(lower, a, upper=False)
    middle = torch.linalg.solve_triangular(lower, half.mT, upper=False)
    values, vectors = eigenbasis(middle, name)
    assert vectors is not None
    return torch.linalg.solve_triangular(lower.mT, vectors, upper=True), values.clamp_min(0.0)
