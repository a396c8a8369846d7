"""What a Newton-CG step did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NewtonCGStep:
    """Record of one step, in the units of the loss and the parameters; see :class:`sorder.NewtonCG`.

    Attributes:
        loss: loss before the step (averaged over ranks, summed over micro-batches; its sign as the closure gives it).
        new_loss: loss of the same function after the step; equal to ``loss`` where the step was rejected. Decoupled
            weight decay comes after it.
        gradient_norm: ‖g‖₂.
        curvature: "hessian", "ggn" or "fisher": what B was.
        cg_iterations: steps of conjugate gradients.
        cg_stop: why they ended: the rule that the option ``cg_stop`` names, "relative-progress", "residual" or
            "eisenstat-walker" ("residual" under any of them where rounding allows no better one); otherwise
            "max_iterations", "boundary", "negative_curvature", "zero_rhs", or "converged" where the residual vanished.
        products: curvature products, all told.
        evaluations: runs of the closure, the first one included.
        reduction_ratio: ρ, the loss's change over the one that the quadratic g·s + ½ sᵀBs predicted, for the full
            step (α = 1), before the line search shortened it: so it may be negative beside ``accepted=True``, and −∞
            where the quadratic predicted no decrease or the loss there was not finite.
        damping: λ used in this step. next_damping: λ that the next one will use.
        trust_radius: Δ used in this step, infinite without a trust region.
        curvature_along_step: sᵀBs / sᵀs.
        step_length: α of the line search; the parameters moved by α·s. 0 where the step was rejected.
        step_norm: ‖α s‖₂.
        accepted: whether the parameters moved.
    """

    loss: float
    new_loss: float
    gradient_norm: float
    curvature: str
    cg_iterations: int
    cg_stop: str
    products: int
    evaluations: int
    reduction_ratio: float
    damping: float
    next_damping: float
    trust_radius: float
    curvature_along_step: float
    step_length: float
    step_norm: float
    accepted: bool
