"""One K-FAC step: from loss, gradient and factors to new values of the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from sorder.curvature import CurvaturePoint
from sorder.kfac import kronecker
from sorder.linalg.pytree import dot, wide_dtype
from sorder.optim import damping as rules
from sorder.optim import kfac_model
from sorder.optim.kfac_model import KFACStep
from sorder.optim.reductions import Reduction
from sorder.optim.transaction import Transaction

if TYPE_CHECKING:
    from sorder.optim.kfac import KFAC

# Key of the optimizer's own state, beside the parameters', in the state dict.
GLOBAL = "kfac"
# Of the curvature along the first gradient: λ where it is not given.
FIRST_DAMPING = 0.1


class StepInProgress:
    """One step of ``optimizer``, once loss and gradient are known."""

    point: CurvaturePoint | None = None
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
        factors, along = optimizer._pending or (optimizer._factors(), None)
        updated = optimizer._pending is not None
        if not updated and optimizer.curvature_due:
            assert self.point is not None
            factors, updated = optimizer._measured(self.point, self.reduction), True
        self.damping = options["damping"] or self._first_damping(along)
        kfac = optimizer._kfac_options()
        if kfac.inverse != "ekfac" and (number % options["inverse_interval"] == 0 or None in factors.inverse):
            factors = kronecker.inverted(factors, kfac, self.damping)
        sign = -1.0 if options["maximize"] and options["step_rule"] == "kl" else 1.0
        gradient = [sign * g for g in self.gradient]
        direction = [-d for d in kronecker.solve(factors, gradient, self.damping)]
        rule = self._quadratic if options["step_rule"] == "quadratic" else self._kl
        record = rule(gradient, direction, number, updated)
        own = {"step": number + 1, "factors": kronecker.packed(factors), "numbers": optimizer._numbers()}
        self.state[GLOBAL] = mine | own
        return record

    def _first_damping(self, along: float | None) -> float:
        if along is None:
            assert self.point is not None
            along = self.optimizer._along(self.point, self.reduction)
        return FIRST_DAMPING * abs(along) or 1.0

    def _quadratic(self, gradient: list[Tensor], direction: list[Tensor], number: int, updated: bool) -> KFACStep:
        point, reduction, options = self.point, self.reduction, self.options
        assert point is not None

        def product(v: Sequence[Tensor]) -> list[Tensor]:
            return reduction.mean(point.product(v))

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
        predicted = factor * slope + 0.5 * factor**2 * quadratic
        point.release()
        new_loss, ratio, next_damping, accepted = math.nan, math.nan, self.damping, True
        self.transaction.write(step)
        adapt = options["damping_update"] == "levenberg-marquardt"
        if adapt and number % options["damping_interval"] == 0:
            new_loss = reduction.mean_scalar(point.value())
            noise = 30.0 * torch.finfo(point.loss.dtype).eps * max(abs(self.loss), abs(predicted))
            ratio = rules.reduction_ratio(new_loss - self.loss, predicted, noise)
            next_damping = rules.levenberg_marquardt(
                self.damping, ratio, options["damping_decrease"], options["damping_increase"]
            )
            accepted = math.isfinite(new_loss) and new_loss <= self.loss + noise
            if not accepted:
                self.transaction.write()
        for p, s in zip(self.params, found.step, strict=True):
            self.state[p] = {**self.state.get(p, {}), "last_step": s if accepted else torch.zeros_like(s)}
        if accepted:
            self._decay_weights()
        return self._record(
            found.learning_rate, found.momentum, norm, updated, new_loss, ratio, next_damping, accepted
        )  # fmt: skip

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
        return self._record(share, momentum, norm, updated, math.nan, math.nan, self.damping, True)

    def _decay_weights(self) -> None:
        """Decoupled weight decay, p ← (1 − lr·decay)·p (Loshchilov & Hutter 2019)."""
        for p, rate, decay in zip(self.params, self.rates, self.optimizer._of_each("weight_decay"), strict=True):
            if rate * decay:
                p.mul_(1.0 - rate * decay)

    def _record(
        self,
        learning_rate: float,
        momentum: float,
        norm: float,
        updated: bool,
        new_loss: float,
        ratio: float,
        next_damping: float,
        accepted: bool,
    ) -> KFACStep:
        sign = -1.0 if self.options["maximize"] and self.options["step_rule"] == "quadratic" else 1.0
        return KFACStep(
            loss=sign * self.loss,
            new_loss=sign * new_loss,
            gradient_norm=math.sqrt(dot(self.gradient, self.gradient).item()),
            learning_rate=learning_rate,
            momentum=momentum,
            products=0 if self.point is None else self.point.products,
            evaluations=0 if self.point is None else self.point.evaluations,
            reduction_ratio=ratio,
            damping=self.damping,
            next_damping=next_damping,
            step_norm=norm if accepted else 0.0,
            curvature_updated=updated,
            accepted=accepted,
        )
