"""Conjugate gradients on pytrees, with Steihaug's trust region and negative-curvature directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from sorder.linalg import pytree
from sorder.linalg.checks import check_number
from sorder.linalg.past_modes import past_modes
from sorder.linalg.pytree import Leaves
from sorder.linalg.stopping import Record, Residual, StoppingRule
from sorder.ops.versions import version_of

# Inside, rhs, x0 and every search direction are scaled by powers of two (exact) to norms near 2⁴, so that products may
# be computed in float16: entries of vectors of 10⁹ elements then round with relative errors below float16's own, and
# A p, or J p on the way to it, may be 4000 times larger. The norm is that of ``dot``, so that shards scale alike.
_LOG2_WORKING_NORM = 4


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
    pᵀA p ≤ tolerance·‖p‖·‖A p‖, and the iterates are the same when A or rhs is multiplied by a positive number, as
    long as A p and x stay within their dtype's range (in float64 ‖A p‖² and values m(x), too).

    Iterates and residuals of 16-bit leaves are kept in float32. Inner products are summed in float32 at least
    within a leaf and in float64 over leaves. The host reads the device once per iteration.

    Args:
        matvec: v ↦ A v, on pytrees like ``rhs``. Its argument is valid during the call only, is overwritten
            later and must not be written to.
        rhs: pytree of floating-point tensors; leaves may differ in dtype and device.
        x0: start, default zero. A nonzero start costs one product.
        preconditioner: r ↦ M⁻¹r for a symmetric positive definite M, on pytrees like ``rhs``; like ``matvec``.
        max_iterations: at most so many steps. Default 250.
        min_iterations: stopping rules are not asked before this many steps. Default 0.
        stopping: a rule, or several of which any may stop; None iterates up to ``max_iterations``.
            Default ``Residual(rtol=1e-5)``.
        trust_radius: bound on ‖x‖_M = (xᵀM x)^½, the Euclidean norm if there is no preconditioner. In M's norm
            the iterates grow monotonically (Steihaug, theorem 2.1), so that the first one outside shows that the
            rest are; in the Euclidean norm they need not. The theorem starts from zero: ``x0`` is refused.
        curvature_tolerance: default: the largest machine epsilon among the leaves' dtypes.
        dot: inner product of two lists of leaves, a 0-dimensional tensor; override it to reduce over shards. A
            squared norm is asked for with one list as both.

    Returns:
        A :class:`CGResult`.

    Raises:
        FloatingPointError: ``rhs``, a product or the preconditioner's result is not finite; the message names
            the iteration (the product with ``x0`` is iteration 0, the first step's is 1). Or the solution or
            the residual exceeds the range of its dtype.
        ValueError: an argument is out of range, a tree's structure or shape differs, ``matvec`` or
            ``preconditioner`` writes to its argument, or the preconditioner is not positive definite.
        TypeError: a leaf is not a dense floating-point tensor, or an argument is of another type.

    Example:
        >>> A = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> result = cg(lambda v: {"w": A @ v["w"]}, {"w": torch.tensor([1.0, 2.0])})
        >>> result.x["w"]
        tensor([0.0909, 0.6364])
        >>> result.products
        2
    """
    _check_functions(matvec, preconditioner, dot)
    _check_numbers(max_iterations, min_iterations, trust_radius, x0, curvature_tolerance)
    rules = _rules(stopping)
    with past_modes(tree_leaves((rhs, x0))) as under_modes:

        def theirs(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any) -> Any:
                with under_modes():
                    return function(*args)

            return called

        return _cg(
            theirs(matvec),
            rhs,
            x0,
            None if preconditioner is None else theirs(preconditioner),
            max_iterations,
            min_iterations,
            rules,
            trust_radius,
            curvature_tolerance,
            dot if dot is pytree.dot else theirs(dot),
        )


def _cg(
    matvec: Callable[[Any], Any],
    rhs: Any,
    x0: Any | None,
    preconditioner: Callable[[Any], Any] | None,
    max_iterations: int,
    min_iterations: int,
    rules: Sequence[StoppingRule],
    trust_radius: float | None,
    curvature_tolerance: float | None,
    dot: Callable[[Leaves, Leaves], Tensor],
) -> CGResult:
    b, spec = pytree.flatten_vector(rhs, "rhs")
    start = None if x0 is None else pytree.flatten_like(x0, "x0", b, spec)
    dtypes = [leaf.dtype for leaf in b]
    if curvature_tolerance is None:
        curvature_tolerance = max(torch.finfo(dtype).eps for dtype in dtypes)

    def tree(leaves: Leaves) -> Any:
        return tree_unflatten([v.detach().to(dtype) for v, dtype in zip(leaves, dtypes, strict=True)], spec)

    def apply(function: Callable[[Any], Any], name: str, leaves: Leaves) -> list[Tensor]:
        # A tensor counts what is written to it, except in inference mode, where a copy is handed over.
        given = [leaf.clone() if leaf.is_inference() else leaf for leaf in leaves]
        before = list(map(version_of, leaves))
        out = pytree.flatten_like(function(tree(given)), f"the result of {name}", b, spec)
        if any(n != version_of(leaf) for n, leaf in zip(before, leaves, strict=True)):
            raise ValueError(f"{name} must not write to its argument")
        return out

    def residual_products(r: Leaves, z: Leaves) -> list[Tensor]:
        rr = dot(r, r)
        return [rr, rr, rr] if z is r else [rr, dot(r, z), dot(z, z)]

    mantissa, exponent = pytree.norm(b, dot)
    rhs_norm = _ldexp(mantissa, exponent)
    if not math.isfinite(rhs_norm):
        raise FloatingPointError("cg: the right-hand side is not finite, or its norm exceeds float64")
    # r and x are in units of 2^exponent.
    exponent -= _LOG2_WORKING_NORM
    r = [leaf.to(pytree.wide_dtype(leaf.dtype), copy=True) for leaf in b]
    x = [torch.zeros_like(leaf) for leaf in r]
    value = 0.0
    record = Record([0.0], [rhs_norm], [], rhs_norm)
    direction: list[Tensor] | None = None
    direction_curvature: float | None = None
    rule: StoppingRule | None = None
    products = 0

    def result(reason: StopReason) -> CGResult:
        xr = dot(x, r)  # in scaled units, where nothing underflows
        for leaves in (x, r):
            pytree.ldexp_(leaves, exponent)
        solution, residual = tree(x), tree(r)
        xr_, *largest = _to_host([xr, *pytree.largest(tree_leaves((solution, residual)))])
        for i, entry in enumerate(largest):
            if not math.isfinite(entry):
                what, leaf = ("solution", "residual")[i // len(b)], i % len(b)
                raise FloatingPointError(f"cg: leaf {leaf} of the {what} exceeds the range of {dtypes[leaf]}")
        return CGResult(
            x=solution,
            residual=residual,
            reason=reason,
            rule=rule,
            iterations=record.iterations,
            products=products,
            value=record.values[-1],
            # m = −(xᵀrhs + xᵀr)/2 and xᵀA x = xᵀrhs − xᵀr.
            quadratic=_ldexp(-2.0 * (value + xr_), 2 * exponent) if products else 0.0,
            residual_norm=record.residual_norms[-1],
            rhs_norm=rhs_norm,
            direction=None if direction is None else tree(direction),
            direction_curvature=direction_curvature,
            record=record,
        )

    if rhs_norm == 0.0:
        return result(StopReason.ZERO_RHS)
    pytree.ldexp_(r, -exponent)
    if start is not None:
        mantissa, start_exponent = pytree.norm(start, dot)
        if not math.isfinite(mantissa):
            raise FloatingPointError("cg: x0 is not finite")
        # In its own units for the product: ‖x0‖/‖rhs‖ may be of any size.
        for leaf, own in zip(x, start, strict=True):
            leaf.copy_(own)
        own_exponent = start_exponent - _LOG2_WORKING_NORM if mantissa else exponent
        pytree.ldexp_(x, -own_exponent)
        product = apply(matvec, "matvec", x)
        products = 1
        pytree.ldexp_(x, own_exponent - exponent)
        bx = dot(r, x)
        pytree.axpy_(r, _ldexp(-1.0, own_exponent - exponent), product)
        value, finite = _to_host([-0.5 * (bx + dot(r, x)), dot(r, r)])
        if not math.isfinite(finite):
            raise FloatingPointError("cg: the product with x0 (iteration 0) is not finite")
        record.values[0] = _ldexp(value, 2 * exponent)

    z = r if preconditioner is None else apply(preconditioner, "preconditioner", r)
    rr, rz, zz = _to_host(residual_products(r, z))
    record.residual_norms[0] = _ldexp(math.sqrt(rr), exponent)
    # p is the search direction times 2^shift, and has the dtype of rhs, so that A is multiplied with p itself and
    # not with a rounding of it.
    shift = _LOG2_WORKING_NORM - math.frexp(math.sqrt(zz))[1] if math.isfinite(zz) else 0
    p = [(leaf.to(v.dtype) * 2.0**shift).to(dtype) for leaf, v, dtype in zip(z, r, dtypes, strict=True)]
    radius = None if trust_radius is None else _ldexp(trust_radius, -exponent)
    # xᵀM x/radius², xᵀM p/radius and pᵀM p by recursion, without M (Conn, Gould & Toint, Trust-Region Methods, 7.5.5).
    xx, xp, pp_m = 0.0, 0.0, _ldexp(rz, 2 * shift)

    while True:
        i = record.iterations
        if rr == 0.0:
            return result(StopReason.CONVERGED)
        if i >= min_iterations:
            rule = next((rule for rule in rules if rule(record)), None)
            if rule is not None:
                return result(StopReason.CONVERGED)
        if i >= max_iterations:
            return result(StopReason.MAX_ITERATIONS)
        _check_preconditioner(rz, i)

        product = apply(matvec, "matvec", p)
        products += 1
        pap, pp, apap, rp = dot(p, product), dot(p, p), dot(product, product), dot(r, p)
        positive = pap > curvature_tolerance * pp.sqrt() * apap.sqrt()
        # rᵀp equals rᵀz in exact arithmetic; rᵀp makes the step the minimiser along p also after rounding.
        step = torch.where(positive, rp / pap, torch.zeros_like(pap))
        inside = positive
        if radius is not None:
            boundary = radius * _positive_root(pp_m, xp, 1.0 - xx)
            inside = positive & (step < boundary)
            step = torch.where(inside, step, torch.full_like(step, boundary))
        pytree.axpy_(x, step, p)
        pytree.axpy_(r, -step, product)
        z = r if preconditioner is None else apply(preconditioner, "preconditioner", r)
        change = step * (0.5 * step * pap - rp)
        # The one read of the iteration.
        scalars = [pap, pp, apap, positive, inside, step, change, *residual_products(r, z)]
        pap_, pp_, apap_, positive_, inside_, step_, change_, rr, rz_next, zz = _to_host(scalars)
        if not math.isfinite(apap_) or not math.isfinite(pap_):
            raise FloatingPointError(f"cg: the product of A in iteration {i + 1} is not finite")

        record.curvatures.append(pap_ / pp_)
        if not positive_:
            direction = [leaf.to(v.dtype, copy=True) for leaf, v in zip(p, r, strict=True)]
            pytree.ldexp_(direction, exponent - shift)
            direction_curvature = pap_ / pp_
        if step_ != 0.0:
            value += change_
            record.values.append(_ldexp(value, 2 * exponent))
            record.residual_norms.append(_ldexp(math.sqrt(rr), exponent))
        if not inside_:
            return result(StopReason.BOUNDARY if positive_ else StopReason.NEGATIVE_CURVATURE)

        # The next direction is z + β 2^-shift p, of about this norm (without M exactly, z being orthogonal to p).
        beta = rz_next / rz * 2.0**-shift
        shift = (
            _LOG2_WORKING_NORM - math.frexp(math.hypot(math.sqrt(zz), beta * math.sqrt(pp_)))[1]
            if math.isfinite(zz)
            else 0
        )
        beta *= 2.0**shift
        if radius is not None:
            along = step_ / radius
            xx += along * (2.0 * xp + along * pp_m)
            xp = beta * (xp + along * pp_m)
            pp_m = _ldexp(rz_next, 2 * shift) + beta**2 * pp_m
        rz = rz_next
        pytree.axpby_(p, 2.0**shift, z, beta)


def _to_host(scalars: Sequence[Tensor]) -> list[float]:
    """Values of 0-dimensional tensors of one device in a single transfer."""
    return torch.stack([s.to(scalars[0].dtype) for s in scalars]).tolist()


def _ldexp(value: float, exponent: int) -> float:
    """value·2^exponent, infinite where that overflows."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


def _positive_root(a: float, b: float, c: float) -> float:
    """The root t ≥ 0 of a t² + 2 b t = c for a > 0, b ≥ 0, c ≥ 0, in the form without cancellation."""
    c = max(c, 0.0)
    return c / (b + math.sqrt(b * b + a * c)) if c else 0.0


def _check_preconditioner(rz: float, iteration: int) -> None:
    if not math.isfinite(rz):
        raise FloatingPointError(f"cg: the preconditioner's result in iteration {iteration} is not finite")
    if rz <= 0.0:
        raise ValueError(f"preconditioner must be positive definite, but rᵀM⁻¹r ≤ 0 in iteration {iteration}")


def _check_functions(matvec: Any, preconditioner: Any, dot: Any) -> None:
    for name, function in (("matvec", matvec), ("preconditioner", preconditioner), ("dot", dot)):
        if not callable(function) and not (name == "preconditioner" and function is None):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")


def _rules(stopping: Any) -> tuple[StoppingRule, ...]:
    several = isinstance(stopping, Sequence) and not isinstance(stopping, str)
    rules = () if stopping is None else tuple(stopping) if several else (stopping,)
    for rule in rules:
        if not callable(rule) or isinstance(rule, type):
            raise TypeError(f"stopping must be a rule such as Residual(rtol=1e-5), several or None, got {rule!r}")
    return rules


def _check_numbers(
    max_iterations: int,
    min_iterations: int,
    trust_radius: float | None,
    x0: Any | None,
    curvature_tolerance: float | None,
) -> None:
    check_number("max_iterations", max_iterations, "be at least 0", lambda n: n >= 0, integer=True)
    bounds = f"lie in [0, max_iterations = {max_iterations}]"
    check_number("min_iterations", min_iterations, bounds, lambda n: 0 <= n <= max_iterations, integer=True)
    if trust_radius is not None:
        check_number("trust_radius", trust_radius, "be positive and finite", lambda t: 0.0 < t < math.inf)
    if trust_radius is not None and x0 is not None:
        raise ValueError("x0 must be None with a trust_radius: Steihaug's method starts from zero")
    if curvature_tolerance is not None:
        check_number("curvature_tolerance", curvature_tolerance, "lie in [0, 1)", lambda t: 0.0 <= t < 1.0)
