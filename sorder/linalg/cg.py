"""Conjugate gradients on pytrees, with Steihaug's trust region and negative-curvature directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from sorder.linalg import pytree
from sorder.linalg.pytree import Leaves
from sorder.linalg.stopping import Record, Residual, StoppingRule

# Inside, rhs is scaled by a power of two (exact) to a norm near 2¹²: entries of vectors from one to 10⁹
# elements are then normal numbers in float16, and the square of A·p stays in float32's range for ‖A‖ between
# 1e-15 and 1e15.
_LOG2_WORKING_NORM = 12


class StopReason(str, Enum):
    """Why :func:`cg` stopped."""

    ZERO_RHS = "zero_rhs"
    """The right-hand side is zero, and so is the solution."""
    CONVERGED = "converged"
    """A stopping rule fired (``CGResult.rule``), or the residual vanished."""
    MAX_ITERATIONS = "max_iterations"
    BOUNDARY = "boundary"
    """The next iterate would leave the trust region; ``x`` lies on its boundary."""
    NEGATIVE_CURVATURE = "negative_curvature"
    """The search direction has nonpositive curvature; ``x`` is on the boundary if there is a trust region."""


@dataclass(frozen=True)
class CGResult:
    """Outcome of :func:`cg`. Trees have the structure, shapes, dtypes and devices of ``rhs``.

    Attributes:
        x: the last iterate.
        residual: rhs − A x by the recursion; hence A x = rhs − residual costs no product.
        reason: why the iteration stopped.
        rule: the stopping rule that fired, if one did.
        iterations: steps taken (a direction of nonpositive curvature that was not followed is none).
        products: products with A, the one for ``x0`` included.
        value: m(x) = ½ xᵀA x − rhsᵀx. ``-value`` is the reduction that the quadratic model predicts.
        quadratic: xᵀA x.
        residual_norm: ‖residual‖₂.
        rhs_norm: ‖rhs‖₂.
        direction: the search direction p of nonpositive curvature, or None. In the first iteration, without a
            preconditioner, it is the residual at the start. pᵀresidual > 0, and from a zero start also
            pᵀrhs > 0: with rhs = −gradient it is a descent direction.
        direction_curvature: pᵀA p / pᵀp of ``direction``.
        record: values, residual norms and curvatures of every iteration.
    """

    x: Any
    residual: Any
    reason: StopReason
    rule: StoppingRule | None
    iterations: int
    products: int
    value: float
    quadratic: float
    residual_norm: float
    rhs_norm: float
    direction: Any | None
    direction_curvature: float | None
    record: Record


def cg(
    matvec: Callable[[Any], Any],
    rhs: Any,
    *,
    x0: Any | None = None,
    preconditioner: Callable[[Any], Any] | None = None,
    max_iterations: int = 250,
    min_iterations: int = 0,
    stopping: StoppingRule | Sequence[StoppingRule] | None = Residual(),  # noqa: B008 (immutable)
    trust_radius: float | None = None,
    curvature_tolerance: float | None = None,
    dot: Callable[[Leaves, Leaves], Tensor] = pytree.dot,
) -> CGResult:
    """Solve A x = rhs for a symmetric A, that is minimise m(x) = ½ xᵀA x − rhsᵀx, by conjugate gradients.

    Hestenes & Stiefel 1952, with the preconditioner of Nocedal & Wright, *Numerical Optimization*, algorithm
    5.3, and the two exits of Steihaug, *The conjugate gradient method and trust regions*, SIAM J. Numer. Anal.
    20 (1983): the trust region's boundary, and a direction of nonpositive curvature. The test of curvature,
    pᵀA p ≤ tolerance·‖p‖·‖A p‖, and the iterates are the same when A or rhs is multiplied by a positive number.

    Iterates and residuals of 16-bit leaves are kept in float32. Inner products are summed in float32 at least
    within a leaf and in float64 over leaves. The host reads the device once per iteration.

    Args:
        matvec: v ↦ A v, on pytrees like ``rhs``. Its argument is valid during the call only, and overwritten
            later.
        rhs: pytree of floating-point tensors; leaves may differ in dtype and device.
        x0: start, default zero. A nonzero start costs one product.
        preconditioner: r ↦ M⁻¹r for a symmetric positive definite M, on pytrees like ``rhs``.
        max_iterations: at most so many steps. Default 250.
        min_iterations: stopping rules are not asked before this many steps. Default 0.
        stopping: a rule, or several of which any may stop; None iterates up to ``max_iterations``.
            Default ``Residual(rtol=1e-5)``.
        trust_radius: bound on ‖x‖_M = (xᵀM x)^½, the Euclidean norm if there is no preconditioner. In M's norm
            the iterates grow monotonically (Steihaug, theorem 2.1), so that the first one outside shows that the
            rest are; in the Euclidean norm they need not. The theorem starts from zero: ``x0`` is refused.
        curvature_tolerance: default: the largest machine epsilon among the leaves' dtypes.
        dot: inner product of two lists of leaves, a 0-dimensional tensor; override it to reduce over shards.

    Returns:
        A :class:`CGResult`.

    Raises:
        FloatingPointError: ``rhs``, a product or the preconditioner's result is not finite; the message names
            the iteration (the product with ``x0`` is iteration 0, the first step's is 1).
        ValueError: an argument is out of range, a tree's structure or shape differs, or the preconditioner is
            not positive definite.
        TypeError: a leaf is not a floating-point tensor.

    Example:
        >>> A = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> result = cg(lambda v: {"w": A @ v["w"]}, {"w": torch.tensor([1.0, 2.0])})
        >>> result.x["w"]
        tensor([0.0909, 0.6364])
        >>> result.products
        2
    """
    _check_arguments(max_iterations, min_iterations, trust_radius, x0, curvature_tolerance)
    rules = () if stopping is None else (stopping,) if callable(stopping) else tuple(stopping)
    b, spec = pytree.flatten_vector(rhs, "rhs")
    dtypes = [leaf.dtype for leaf in b]
    if curvature_tolerance is None:
        curvature_tolerance = max(torch.finfo(dtype).eps for dtype in dtypes)

    def tree(leaves: Leaves) -> Any:
        return tree_unflatten([v.to(dtype) for v, dtype in zip(leaves, dtypes, strict=True)], spec)

    def apply(function: Callable[[Any], Any], name: str, leaves: Leaves) -> list[Tensor]:
        return pytree.flatten_like(function(tree(leaves)), name, b, spec)

    rhs_norm = math.sqrt(dot(b, b).item())
    if not math.isfinite(rhs_norm):
        raise FloatingPointError("cg: the right-hand side is not finite")
    r = [leaf.to(pytree.wide_dtype(leaf.dtype), copy=True) for leaf in b]
    x = [torch.zeros_like(leaf) for leaf in r]
    record = Record([0.0], [rhs_norm], [], rhs_norm)
    direction: list[Tensor] | None = None
    direction_curvature: float | None = None
    rule: StoppingRule | None = None
    products = 0

    def result(reason: StopReason, scale: float) -> CGResult:
        # In scaled units, where nothing underflows: xᵀA x = xᵀ(rhs − residual).
        quadratic = (dot(x, b) / scale - dot(x, r)).item() * scale**2 if products else 0.0
        for leaf in (*x, *r):
            leaf.mul_(scale)
        return CGResult(
            x=tree(x),
            residual=tree(r),
            reason=reason,
            rule=rule,
            iterations=record.iterations,
            products=products,
            value=record.values[-1],
            quadratic=quadratic,
            residual_norm=record.residual_norms[-1],
            rhs_norm=rhs_norm,
            direction=None if direction is None else tree([leaf * scale for leaf in direction]),
            direction_curvature=direction_curvature,
            record=record,
        )

    if rhs_norm == 0.0:
        return result(StopReason.ZERO_RHS, 1.0)
    scale = 2.0 ** (round(math.log2(rhs_norm)) - _LOG2_WORKING_NORM)
    for leaf in r:
        leaf.mul_(1.0 / scale)
    value = 0.0
    if x0 is not None:
        for leaf, start in zip(x, pytree.flatten_like(x0, "x0", b, spec), strict=True):
            leaf.copy_(start).mul_(1.0 / scale)
        product = apply(matvec, "the result of matvec", x)
        products = 1
        bx = dot(r, x)
        pytree.axpy_(r, -1.0, product)
        value, norm2 = torch.stack([-0.5 * (bx + dot(r, x)), dot(r, r)]).tolist()
        if not math.isfinite(norm2):
            raise FloatingPointError("cg: the product with x0 (iteration 0) is not finite")
        record.values[0] = value * scale**2
        record.residual_norms[0] = math.sqrt(norm2) * scale

    z = r if preconditioner is None else apply(preconditioner, "the result of preconditioner", r)
    rz = dot(r, z).item()
    # p has the dtype of rhs, so that A is multiplied with p itself and not with a rounding of it.
    p = [leaf.to(dtype, copy=True) for leaf, dtype in zip(z, dtypes, strict=True)]
    radius2 = None if trust_radius is None else (trust_radius / scale) ** 2
    # xᵀM x, xᵀM p and pᵀM p by recursion, without M (Conn, Gould & Toint, Trust-Region Methods, 7.5.5).
    xx, xp, pp_m = 0.0, 0.0, rz

    while True:
        i = record.iterations
        if record.residual_norms[-1] == 0.0:
            return result(StopReason.CONVERGED, scale)
        if i >= min_iterations:
            rule = next((rule for rule in rules if rule(record)), None)
            if rule is not None:
                return result(StopReason.CONVERGED, scale)
        if i >= max_iterations:
            return result(StopReason.MAX_ITERATIONS, scale)
        _check_preconditioner(rz, i)

        product = apply(matvec, "the result of matvec", p)
        products += 1
        pap, pp, apap, rp = dot(p, product), dot(p, p), dot(product, product), dot(r, p)
        positive = pap > curvature_tolerance * pp.sqrt() * apap.sqrt()
        # rᵀp equals rᵀz in exact arithmetic; rᵀp makes the step the minimiser along p also after rounding.
        step = torch.where(positive, rp / pap, torch.zeros_like(pap))
        inside = positive
        if radius2 is not None:
            boundary = _positive_root(pp_m, xp, radius2 - xx)
            inside = positive & (step < boundary)
            step = torch.where(inside, step, torch.full_like(step, boundary))
        pytree.axpy_(x, step, p)
        pytree.axpy_(r, -step, product)
        z = r if preconditioner is None else apply(preconditioner, "the result of preconditioner", r)
        change = step * (0.5 * step * pap - rp)
        # The one read of the iteration.
        scalars = [pap, pp, apap, positive, inside, step, change, dot(r, r), dot(r, z)]
        pap_, pp_, apap_, positive_, inside_, step_, change_, norm2, rz_next = _to_host(scalars)
        if not math.isfinite(apap_) or not math.isfinite(pap_):
            raise FloatingPointError(f"cg: the product of A in iteration {i + 1} is not finite")

        record.curvatures.append(pap_ / pp_)
        if not positive_:
            direction, direction_curvature = p, pap_ / pp_
        if step_ != 0.0:
            value += change_
            record.values.append(value * scale**2)
            record.residual_norms.append(math.sqrt(norm2) * scale)
        if not inside_:
            return result(StopReason.BOUNDARY if positive_ else StopReason.NEGATIVE_CURVATURE, scale)

        beta = rz_next / rz
        xx += step_ * (2.0 * xp + step_ * pp_m)
        xp = beta * (xp + step_ * pp_m)
        pp_m = rz_next + beta**2 * pp_m
        rz = rz_next
        pytree.xpby_(p, z, beta)


def _to_host(scalars: Sequence[Tensor]) -> list[float]:
    """Values of 0-dimensional tensors of one device in a single transfer."""
    return torch.stack([s.to(scalars[0].dtype) for s in scalars]).tolist()


def _positive_root(a: float, b: float, c: float) -> float:
    """The root t ≥ 0 of a t² + 2 b t = c for a > 0, b ≥ 0, c ≥ 0, in the form without cancellation."""
    c = max(c, 0.0)
    return c / (b + math.sqrt(b * b + a * c)) if c else 0.0


def _check_preconditioner(rz: float, iteration: int) -> None:
    if not math.isfinite(rz):
        raise FloatingPointError(f"cg: the preconditioner's result in iteration {iteration} is not finite")
    if rz <= 0.0:
        raise ValueError(f"preconditioner must be positive definite, but rᵀM⁻¹r ≤ 0 in iteration {iteration}")


def _check_arguments(
    max_iterations: int,
    min_iterations: int,
    trust_radius: float | None,
    x0: Any | None,
    curvature_tolerance: float | None,
) -> None:
    if max_iterations < 0:
        raise ValueError(f"max_iterations must be at least 0, got {max_iterations}")
    if not 0 <= min_iterations <= max_iterations:
        raise ValueError(f"min_iterations must lie in [0, {max_iterations}], got {min_iterations}")
    if trust_radius is not None and not (trust_radius > 0.0 and math.isfinite(trust_radius)):
        raise ValueError(f"trust_radius must be positive and finite, got {trust_radius}")
    if trust_radius is not None and x0 is not None:
        raise ValueError("x0 must be None with a trust_radius: Steihaug's method starts from zero")
    if curvature_tolerance is not None and not 0.0 <= curvature_tolerance < 1.0:
        raise ValueError(f"curvature_tolerance must lie in [0, 1), got {curvature_tolerance}")
