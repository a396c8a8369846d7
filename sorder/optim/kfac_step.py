"""One K-FAC step: from loss, gradient and factors to new values of the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from sorder.curvature import CurvaturePoint
from sorder.kfac import kronecker
from sorder.kfac.inverses import LEAST_DAMPING
from sorder.linalg.pytree import dot, wide_dtype
from sorder.optim import damping as rules
from sorder.optim import kfac_model
from sorder.optim.kfac_model import KFACStep
from sorder.optim.line_search import armijo
from sorder.optim.reductions import Reduction
from sorder.optim.transaction import Transaction
from sorder.optim.validation import largest_factor

if TYPE_CHECKING:
    from sorder.optim.kfac import KFAC

# Key of the optimizer's own state, beside the parameters', in the state dict.
GLOBAL = "kfac"
# Of the curvature along the first gradient: λ where it is not given.
FIRST_DAMPING = 0.1


@dataclass(frozen=True)
class Trial:
    """What the loss said of a step: the length taken (0 for none), the loss there, ρ, and the next λ."""

    length: float
    loss: float
    ratio: float
    damping: float


class StepInProgress:
    """One step of ``optimizer``, once loss and gradient are known: those of ``point``; ``model`` has the curvature."""

    point: CurvaturePoint | None = None
    model: CurvaturePoint | None = None
    reduction: Reduction
    gradient: Sequence[Tensor]
    loss: float = math.nan

    def __init__(self, optimizer: KFAC, params: Sequence[Tensor], transaction: Transaction) -> None:
        self.optimizer, self.params, self.transaction = optimizer, params, transaction
        self.options = optimizer.param_groups[0]
        self.rates = optimizer._of_each("lr")
        self.state = cast(dict[Any, Any], optimizer.state)

    def run(self) -> KFACStep:
        """Measure factors where due, move the parameters, and write the state."""
        optimizer, options, mine = self.optimizer, self.options, self.optimizer._mine
        number = mine.get("step", 0)
        self.gradient = [g.to(wide_dtype(g.dtype)) for g in self.gradient]
        self.gradient_norm = math.sqrt(dot(self.gradient, self.gradient).item())
        factors, along = optimizer._pending or (optimizer._factors(), None)
        updated = optimizer._pending is not None
        if not updated and optimizer.curvature_due:
            assert self.model is not None
            factors, updated = optimizer._measured(self.model, self.reduction), True
        self.damping = options["damping"] or self._first_damping(along)
        kfac = optimizer._kfac_options()
        damping = kronecker.factor_damping(factors, kfac, self.damping)
        # A λ that the factors would not see any more need not fall further, and to zero in the end.
        self.least = LEAST_DAMPING * kronecker.mean_eigenvalue(factors)
        if kfac.inverse != "ekfac" and (number % options["inverse_interval"] == 0 or None in factors.inverse):
            factors = kronecker.inverted(factors, kfac, damping)
        sign = -1.0 if options["maximize"] and options["step_rule"] == "kl" else 1.0
        gradient = [sign * g for g in self.gradient]
        direction = [-d for d in kronecker.solve(factors, gradient, damping)]
        rule = self._quadratic if options["step_rule"] == "quadratic" else self._kl
        record = rule(gradient, direction, number, updated)
        own = {"step": number + 1, "factors": kronecker.packed(factors), "numbers": optimizer._numbers()}
        self.state[GLOBAL] = mine | own
        return record

    def _first_damping(self, along: float | None) -> float:
        if along is None:
            assert self.model is not None
            along = self.optimizer._along(self.model, self.reduction)
        return FIRST_DAMPING * abs(along) or 1.0

    def _quadratic(self, gradient: list[Tensor], direction: list[Tensor], number: int, updated: bool) -> KFACStep:
        model, options = self.model, self.options
        assert model is not None

        def product(v: Sequence[Tensor]) -> list[Tensor]:
            return self.reduction.mean(model.product(v))

        kept = [self.state.get(p, {}).get("last_step") for p in self.params]
        last: list[Tensor] | None = None
        if options["momentum"] and any(k is not None for k in kept):
            last = [torch.zeros_like(g) if k is None else k for k, g in zip(kept, gradient, strict=True)]
        found = kfac_model.quadratic_step(product, gradient, direction, last, self.damping)
        step = [r * s for r, s in zip(self.rates, found.step, strict=True)]
        first = self.rates[0]
        if all(r == first for r in self.rates):
            slope, quadratic = first * found.slope, first**2 * found.quadratic
        else:
            slope, quadratic = dot(step, gradient).item(), dot(step, product(step)).item()
        step, norm, factor = kfac_model.shortened(step, options["max_step_norm"])
        # Trials write the parameters, and need the memory.
        self._release()
        trial = Trial(1.0, math.nan, math.nan, self.damping)
        if options["damping_update"] == "levenberg-marquardt" and number % options["damping_interval"] == 0:
            trial = self._tried(step, factor * slope, factor**2 * quadratic, norm)
        accepted = trial.length > 0.0
        self.transaction.write(step if accepted else None, trial.length)
        for p, s in zip(self.params, found.step, strict=True):
            self.state[p] = {**self.state.get(p, {}), "last_step": trial.length * s}
        if accepted:
            self._decay_weights()
        return self._record(found.learning_rate, found.momentum, norm, updated, trial)

    def _release(self) -> None:
        assert self.point is not None and self.model is not None
        self.point.release()
        if self.model is not self.point:
            self.model.rollback()  # buffers move with the loss's batch alone

    def _tried(self, step: list[Tensor], slope: float, quadratic: float, norm: float) -> Trial:
        """A length of ``step`` that lowers the loss enough, and the λ that the loss at length 1 asks for."""
        point, options = self.point, self.options
        assert point is not None

        def loss_at(length: float) -> float:
            self.transaction.write(step, length)
            return self.reduction.mean_scalar(point.value())

        eps = torch.finfo(point.loss.dtype).eps
        noise = min(30.0 * eps, max(eps, 1e-4)) * abs(self.loss)
        search = armijo(loss_at, self.loss, min(slope, 0.0), noise=noise)
        ratio = rules.reduction_ratio(search.first - self.loss, slope + 0.5 * quadratic, noise)
        damping = rules.levenberg_marquardt(
            self.damping, ratio, options["damping_decrease"], options["damping_increase"]
        )
        if ratio < 0.25:
            matching = rules.matching_where_it_ended(search, self.loss, slope, quadratic, norm, noise)
            raised = rules.raised_damping(self.damping, matching, search.length, self.gradient_norm, norm)
            damping = max(damping, raised)
        return Trial(search.length, search.loss, ratio, max(self.least, min(damping, largest_factor(self.params))))

    def _kl(self, gradient: list[Tensor], direction: list[Tensor], number: int, updated: bool) -> KFACStep:
        options = self.options
        share = kfac_model.divergence_bound(gradient, [-d for d in direction], self.rates, options["kl_bound"])
        momentum = options["momentum"]
        buffers = []
        for p, d in zip(self.params, direction, strict=True):
            old = self.state.get(p, {}).get("momentum")
            buffers.append(share * d if old is None else share * d + momentum * old)
            self.state[p] = {**self.state.get(p, {}), "momentum": buffers[-1]}
        step = [r * m for r, m in zip(self.rates, buffers, strict=True)]
        step, norm, _ = kfac_model.shortened(step, options["max_step_norm"])
        self.transaction.write(step)
        self._decay_weights()
        if self.point is not None:
            self._release()
        return self._record(share, momentum, norm, updated, Trial(1.0, math.nan, math.nan, self.damping))

    def _decay_weights(self) -> None:
        """Decoupled weight decay, p ← (1 − lr·decay)·p (Loshchilov & Hutter 2019)."""
        for p, rate, decay in zip(self.params, self.rates, self.optimizer._of_each("weight_decay"), strict=True):
            if rate * decay:
                p.mul_(1.0 - rate * decay)

    def _record(self, learning_rate: float, momentum: float, norm: float, updated: bool, trial: Trial) -> KFACStep:
        sign = -1.0 if self.options["maximize"] and self.options["step_rule"] == "quadratic" else 1.0
        points = {id(p): p for p in (self.point, self.model) if p is not None}.values()
        return KFACStep(
            loss=sign * self.loss,
            new_loss=sign * trial.loss,
            gradient_norm=self.gradient_norm,
            learning_rate=learning_rate,
            momentum=momentum,
            products=sum(p.products for p in points),
            evaluations=sum(p.evaluations for p in points),
            reduction_ratio=trial.ratio,
            damping=self.damping,
            next_damping=trial.damping,
            step_length=trial.length,
            step_norm=trial.length * norm,
            curvature_updated=updated,
            accepted=trial.length > 0.0,
        )
