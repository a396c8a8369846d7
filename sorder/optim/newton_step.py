"""One step of Newton-CG: from a point of the closure to new values of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sorder.curvature import CurvaturePoint
from sorder.linalg import EisenstatWalker, RelativeProgress, Residual, StoppingRule
from sorder.linalg.pytree import dot, wide_dtype
from sorder.optim import damping as rules
from sorder.optim import preconditioner as diagonals
from sorder.optim.direction import Direction, negative_curvature_probe, newton_direction
from sorder.optim.last_step import NewtonCGStep
from sorder.optim.line_search import LineSearchResult, armijo
from sorder.optim.reductions import Reduction
from sorder.optim.transaction import Transaction
from sorder.optim.validation import check_loss, culprit, largest_factor

Vector = Sequence[Tensor]
# Doublings of a step along negative curvature, whose length the quadratic does not tell.
EXPANSIONS = 20
# Share of the bound on λ that the first step takes. A gradient lies mostly along large curvature, where a damped step
# is far shorter than ‖g‖/λ; and a λ too low is mended in a step, one too high costs many.
FIRST_DAMPING = 0.1


@dataclass
class NewtonStep:
    """The parts of a step. ``point`` gives loss and gradient, ``model`` the curvature; they may be one.

    Attributes:
        rates, decays: learning rate and weight decay of each parameter. number: of steps taken before.
        next_damping, next_radius, forcing: for the next step, after :meth:`run`.
    """

    options: Mapping[str, Any]
    params: Sequence[Tensor]
    rates: Sequence[float]
    decays: Sequence[float]
    transaction: Transaction
    point: CurvaturePoint
    model: CurvaturePoint
    reduction: Reduction
    state: dict[Tensor, dict[str, Any]]
    number: int
    forcing: EisenstatWalker

    def run(self, custom: Any | None) -> NewtonCGStep:
        """Move the parameters, or leave them where the step is rejected; ``custom`` is a preconditioner."""
        options = self.options
        self._measure()
        trust = options["damping_update"] == "trust-region"
        if self.gradient_norm == 0.0:
            return self._leave_stationary_point()
        damping, radius = self._trust(trust)
        start = None if trust or self.model.kind == "hessian" else self._warm_start()
        direction = newton_direction(
            self.product,
            self.gradient,
            damping=damping,
            radius=radius,
            start=start,
            preconditioner=self._preconditioner(custom, damping),
            stopping=self._stopping(),
            iterations=options["cg_iterations"],
        )
        step, slope, quadratic = self._scaled(direction)
        # Trials write the parameters, and need the memory.
        self.point.release()
        self.model.release()
        predicted = slope + 0.5 * quadratic
        found = self._search(step, slope, predicted, direction, trust)
        ratio = rules.reduction_ratio(found.first - self.loss, predicted, self.noise)
        norm = _norm(step)
        raised = _raised(damping, found, self.loss, slope, quadratic, self.gradient_norm, norm, self.noise)
        self._update(ratio, raised, norm, direction, damping, radius)
        accepted = found.length > 0.0
        self.transaction.write(step if accepted else None, found.length)
        if accepted:
            self._decay_weights()
        for p, s in zip(self.params, direction.step, strict=True):
            self._remember(p, direction=s if accepted else None)
        return self._record(direction, found, ratio, damping, radius, quadratic, norm)

    def product(self, v: Vector) -> list[Tensor]:
        """Curvature times ``v``, averaged over the ranks."""
        return self.reduction.mean(self.model.product(v))

    def loss_at(self, step: Vector, length: float) -> float:
        """The loss (to be minimised) at ``length`` times ``step``; leaves the parameters there."""
        self.transaction.write(step, length)
        return self.reduction.mean_scalar(self.point.value())

    # ------------------------------------------------------------------ before the direction

    def _measure(self) -> None:
        self.loss = self.reduction.mean_scalar(self.point.loss)
        check_loss(self.loss, self.params)
        self.gradient = [g.to(wide_dtype(g.dtype)) for g in self.reduction.mean(self.point.gradient)]
        device = self.gradient[0].device
        norms = torch.stack([torch.linalg.vector_norm(g).to(device) for g in self.gradient]).tolist()
        for i, norm in enumerate(norms):
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"the gradient of parameter {i} (shape {tuple(self.params[i].shape)}) is not finite"
                    f"{culprit(self.params)}"
                )
        self.gradient_norm = math.sqrt(sum(n * n for n in norms))
        self.noise = self._rounding(self.loss)

    def _trust(self, trust: bool) -> tuple[float, float | None]:
        """Damping and radius of this step; on the first one chosen from the problem where not given."""
        damping, radius = self.options["damping"], self.options["trust_radius"]
        if trust:
            damping = damping or 0.0
            if radius is None:
                radius = self._cauchy()[0] * self.gradient_norm
            limit = self.options["max_step_norm"]
            return damping, radius if limit is None else min(radius, limit)
        return self._initial_damping() if damping is None else damping, None

    def _cauchy(self) -> tuple[float, float]:
        """Minimiser t of the quadratic along −g, and gᵀBg; its size counts where that is negative."""
        curved = dot(self.gradient, self.product(self.gradient)).item()
        if not math.isfinite(curved):
            raise FloatingPointError("the curvature product with the gradient is not finite")
        if curved == 0.0:
            scale = _norm(self.transaction.start)
            return 0.1 * max(scale, 1.0) / self.gradient_norm, 0.0
        return self.gradient_norm**2 / abs(curved), curved

    def _initial_damping(self) -> float:
        """A tenth of (λ_c gᵀBg/gᵀg)^½, λ_c having told the loss at the Cauchy step −t g, t = gᵀg/gᵀBg.

        The excess over the quadratic grows with the cube of a step, so that a step s needs λ = λ_c‖s‖/‖t g‖; and
        ‖s‖ ≤ ‖g‖/λ, which bounds λ by that root.
        """
        length, curved = self._cauchy()
        downhill = [-g for g in self.gradient]
        change = self.loss_at(downhill, length) - self.loss
        self.transaction.write()
        gg = self.gradient_norm**2
        predicted = -length * gg + 0.5 * length**2 * curved
        noise = self._rounding(self.loss, change, predicted)
        matching = rules.matching_damping(change, predicted, length**2 * gg, noise)
        # A trial that is not finite says that the quadratic is to be trusted nowhere near so far.
        bound = math.sqrt(matching / length) if math.isfinite(matching) else 100.0 / length
        return FIRST_DAMPING * bound

    def _rounding(self, *losses: float) -> float:
        """Difference of losses that rounding explains: a few tens of units in the last place, one in 16 bits."""
        eps = torch.finfo(self.point.loss.dtype).eps
        return min(30.0 * eps, max(eps, 1e-4)) * max(map(abs, losses))

    def _warm_start(self) -> list[Tensor] | None:
        """The last direction, shrunk (Martens 2010, section 4.5); parameters that are new start from zero."""
        decay = self.options["warm_start"]
        kept = [self.state[p].get("direction") for p in self.params]
        if decay == 0.0 or all(d is None for d in kept):
            return None
        return [torch.zeros_like(g) if d is None else decay * d for d, g in zip(kept, self.gradient, strict=True)]

    def _stopping(self) -> StoppingRule:
        tolerance = self.options["cg_tolerance"]
        if self.options["cg_stop"] == "relative-progress":
            return RelativeProgress(tolerance) if tolerance > 0.0 else Residual(0.0)
        if self.options["cg_stop"] == "residual":
            return Residual(tolerance)
        self.forcing = self.forcing.advance(self.gradient_norm)
        return self.forcing

    def _preconditioner(self, custom: Any | None, damping: float) -> Callable[[Vector], Vector] | None:
        kind = self.options["preconditioner"]
        if kind is None:
            return None
        if kind == "custom":
            if custom is None:
                raise RuntimeError("the preconditioner is a callable, which a state dict does not hold: pass it again")
            refresh = getattr(custom, "refresh", None)
            if refresh is not None:
                refresh(self.model, rank=self.reduction.rank, mean=self.reduction.mean)
            update = getattr(custom, "update", None)
            if update is not None:
                update(self.product, damping)
            return custom
        if kind == "diagonal":
            seed = self.options["seed"] + self.number
            new = diagonals.hutchinson_diagonal(self.product, self.gradient, seed)
        else:
            new = diagonals.squared_gradient_diagonal(self.product, self.gradient)
        decay = self.options["preconditioner_decay"]
        average = []
        for p, d in zip(self.params, new, strict=True):
            state = self.state[p]
            old, weight = state.get("diagonal", torch.zeros_like(d)), state.get("diagonal_weight", 0.0)
            mean, weight = decay * old + (1.0 - decay) * d, decay * weight + 1.0 - decay
            self._remember(p, diagonal=mean, diagonal_weight=weight)
            average.append(mean / weight)
        return diagonals.inverse_power(average, damping, self.options["preconditioner_power"])

    def _remember(self, p: Tensor, **values: Any) -> None:
        # A new dict, and new tensors: a state dict taken before stays what it was.
        self.state[p] = {**self.state[p], **values}

    # ------------------------------------------------------------------ from the direction to the record

    def _scaled(self, direction: Direction) -> tuple[list[Tensor], float, float]:
        """The direction times the learning rates, within ``max_step_norm``; its slope and quadratic form."""
        first, limit = self.rates[0], self.options["max_step_norm"]
        step = [r * s for r, s in zip(self.rates, direction.step, strict=True)]
        if all(r == first for r in self.rates):
            slope, quadratic = first * direction.slope, first**2 * direction.quadratic
        else:
            slope, quadratic = dot(step, self.gradient).item(), dot(step, self.product(step)).item()
            if slope > 0.0:
                # Rates that differ can turn the direction uphill; the gradient scaled by them is downhill.
                length = self._cauchy()[0]
                step = [-r * length * g for r, g in zip(self.rates, self.gradient, strict=True)]
                slope, quadratic = dot(step, self.gradient).item(), dot(step, self.product(step)).item()
        norm = _norm(step)
        if limit is not None and norm > limit:
            shrink = limit / norm
            step, slope, quadratic = [shrink * s for s in step], shrink * slope, shrink**2 * quadratic
        return step, slope, quadratic

    def _search(
        self, step: Vector, slope: float, predicted: float, direction: Direction, trust: bool
    ) -> LineSearchResult:
        options = self.options
        if options["line_search"] == "armijo" and not trust:
            return armijo(
                lambda t: self.loss_at(step, t),
                self.loss,
                slope,
                sufficient_decrease=options["sufficient_decrease"],
                max_trials=options["max_trials"],
                expansions=EXPANSIONS if direction.negative and options["max_step_norm"] is None else 0,
                noise=self.noise,
            )
        new = self.loss_at(step, 1.0)
        # A trust region asks for a share of the reduction promised; otherwise the loss just must not rise.
        bound = self.loss + self.noise + (options["sufficient_decrease"] * predicted if trust else 0.0)
        accepted = math.isfinite(new) and new <= bound
        return LineSearchResult(float(accepted), new if accepted else self.loss, new)

    def _update(
        self, ratio: float, raised: float, norm: float, direction: Direction, damping: float, radius: float | None
    ) -> None:
        options = self.options
        self.next_damping, self.next_radius = damping, radius
        if options["damping_update"] == "trust-region" and radius is not None:
            self.next_radius = rules.trust_radius(radius, ratio, norm, direction.on_boundary)
        elif options["damping_update"] == "levenberg-marquardt":
            self.next_damping = rules.levenberg_marquardt(
                damping, ratio, options["damping_decrease"], options["damping_increase"]
            )
            if ratio < 0.25:
                self.next_damping = max(self.next_damping, raised)
        # An option that the next step would refuse is of no use to it.
        limit = largest_factor(self.params)
        self.next_damping = min(self.next_damping, limit)
        self.next_radius = self.next_radius if self.next_radius is None else min(self.next_radius, limit)

    def _decay_weights(self) -> None:
        """Decoupled weight decay, p ← (1 − lr·decay)·p (Loshchilov & Hutter 2019)."""
        for p, rate, decay in zip(self.params, self.rates, self.decays, strict=True):
            if rate * decay:
                p.mul_(1.0 - rate * decay)

    def _record(
        self,
        direction: Direction,
        found: LineSearchResult,
        ratio: float,
        damping: float,
        radius: float | None,
        quadratic: float,
        norm: float,
    ) -> NewtonCGStep:
        sign = -1.0 if self.options["maximize"] else 1.0
        points = {id(self.point): self.point, id(self.model): self.model}.values()
        return NewtonCGStep(
            loss=sign * self.loss,
            new_loss=sign * found.loss,
            gradient_norm=self.gradient_norm,
            curvature=str(self.model.kind),
            cg_iterations=direction.iterations,
            cg_stop=direction.stop,
            products=sum(p.products for p in points),
            evaluations=sum(p.evaluations for p in points),
            reduction_ratio=ratio,
            damping=damping,
            next_damping=self.next_damping,
            trust_radius=math.inf if radius is None else radius,
            curvature_along_step=quadratic / norm**2 if norm > 0.0 else 0.0,
            step_length=found.length,
            step_norm=found.length * norm,
            accepted=found.length > 0.0,
        )

    def _leave_stationary_point(self) -> NewtonCGStep:
        """At gradient zero: down a direction of negative curvature, if the curvature has one."""
        damping, radius = self.options["damping"], self.options["trust_radius"]
        self.next_damping, self.next_radius = damping, radius
        seed = self.options["seed"] + self.number
        iterations = self.options["cg_iterations"]
        result, found = None, None
        if self.model.kind == "hessian":
            result, found = negative_curvature_probe(self.product, self.gradient, iterations, seed)
        self.point.release()
        self.model.release()
        search, norm, quadratic = LineSearchResult(0.0, self.loss, self.loss), 0.0, 0.0
        if found is not None and result is not None:
            # Nothing tells a length but the parameters' own; the search goes on from there by tenths and doubles.
            norm = 1e-2 * max(1.0, _norm(self.transaction.start))
            step = [r * norm * d for r, d in zip(self.rates, found, strict=True)]
            quadratic = (result.direction_curvature or 0.0) * norm**2
            search = armijo(lambda t: self.loss_at(step, t), self.loss, 0.0, expansions=EXPANSIONS, noise=-self.noise)
            self.transaction.write(step, search.length)
        stop = "zero_rhs" if result is None else result.reason.value
        iterations = 0 if result is None else result.iterations
        none = Direction([], 0.0, quadratic, True, iterations, stop, on_boundary=False)
        return self._record(none, search, 1.0, damping or 0.0, radius, quadratic, norm)


def _raised(
    damping: float,
    found: LineSearchResult,
    loss: float,
    slope: float,
    quadratic: float,
    gradient_norm: float,
    norm: float,
    noise: float,
) -> float:
    """λ after a bad step, by the loss where the search ended: at shorter steps the model errs less.

    Where it did not err at all there, which would leave a λ of zero at zero, by the loss at the full step. Rounding is
    not allowed for then, since ρ does not either; and ‖g‖/α‖s‖, with which no step is longer than that shorter one, is
    enough however large the loss was.
    """
    matching = rules.matching_where_it_ended(found, loss, slope, quadratic, norm, noise)
    shortened = found.length
    if matching == 0.0 and norm > 0.0:
        matching = rules.matching_damping(found.first - loss, slope + 0.5 * quadratic, norm**2, noise=0.0)
        matching, shortened = min(matching, gradient_norm / ((found.length or 1.0) * norm)), 1.0
    return rules.raised_damping(damping, matching, shortened, gradient_norm, norm)


def _norm(v: Vector) -> float:
    return math.sqrt(dot(v, v).item())
