"""What optimizers share that divide by a running estimate of the curvature's diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, SupportsFloat, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from sorder.curvature import CurvaturePoint, diagonal
from sorder.curvature.point import gradients_kept
from sorder.linalg.pytree import wide_dtype
from sorder.optim import diagonal_update, fused_step
from sorder.optim.attention_routing import routed_attention
from sorder.optim.diagonal_update import Rule
from sorder.optim.reductions import Reduction
from sorder.optim.transaction import Transaction
from sorder.optim.validation import (
    check_closure,
    check_group,
    check_integer,
    check_loss,
    check_maximize,
    check_not_module,
    check_parameters,
    check_range,
    check_state_dict,
    check_step,
    culprit,
    new_group,
    not_nested,
)

Estimator = Callable[[diagonal.Product, Sequence[Tensor], torch.Generator], Sequence[Tensor]]
ESTIMATORS = ("hutchinson", "bekas", "exact")
Record = TypeVar("Record")


class DiagonalOptimizer(Optimizer, Generic[Record]):
    """Base: when an estimate is due, where it and the gradient come from, and that a failure leaves no trace.

    A subclass says what its rule is: ``_average``, how estimates enter the running mean; ``_rule``, the numbers of a
    step; ``_record``, what a step did. Its attributes: ``KEY``, of the optimizer's own entry in its state, beside the
    parameters', which tells whose state it is; ``CURVATURE``, the name of the running mean in a parameter's state;
    ``KIND``, the curvature of the estimates, None where they come from gradients alone; ``OF_A_GROUP``, the options
    that groups have of their own.
    """

    KEY: str
    KIND: str | None = "hessian"
    CURVATURE = "hessian"
    OF_A_GROUP: tuple[str, ...] = ("lr", "betas", "eps", "weight_decay", "state_dtype")

    def __init__(self, params: Any, arguments: Mapping[str, Any], process_group: dist.ProcessGroup | None) -> None:
        """``arguments``: the subclass's ``locals()``, whose options become the defaults."""
        check_not_module(self, params)
        defaults = {k: v for k, v in arguments.items() if k not in ("self", "params", "process_group", "__class__")}
        self._check_options(defaults)
        self._pending: list[tuple[Tensor, Tensor]] | None = None
        self._updated = False
        self._process_group = process_group
        # Of the last step: parameters and the rules that they followed, from which the record is made when asked for.
        self._taken: list[tuple[list[Tensor], Rule]] = []
        self._last_step: Record | None = None
        self._fused: fused_step.FusedStep | None = None
        super().__init__(params, defaults)
        self._count(0, updated=False)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_common(options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`. The next step is an update step."""
        check_group(self, param_group, self.OF_A_GROUP)
        super().add_param_group(param_group)
        with new_group(self) as group:
            self._check_options(group)
            check_parameters(group["params"])

    @property
    def curvature_due(self) -> bool:
        """Whether the next step updates the curvature: steps 1, 1 + interval, …, and after parameters joined."""
        if self._number % self.param_groups[0]["update_interval"] == 0:
            return True
        for p in self._params:
            state = self.state.get(p, {})
            # One that had no gradient at the last update is not missed as long as it has none.
            if self.CURVATURE not in state and not (state.get("idle") and p.grad is None):
                return True
        return False

    @property
    def last_step(self) -> Record | None:
        """Record of the last step, or None. Computed when it is asked for, so that steps cost nothing."""
        if self._last_step is None and self._taken:
            self._last_step = self._record(self._taken)
        return self._last_step

    @torch.no_grad()
    @not_nested
    def update_curvature(self, closure: Any) -> None:
        """Estimate the curvature's diagonal, for the next step, whether or not an update is due by then.

        For loops that call ``backward`` themselves: gradient clipping, accumulation, ``GradScaler`` (the closure
        gives the *unscaled* loss). Parameters, ``.grad``, buffers and random generators stay as they are, and a step
        that is then skipped has changed nothing: the estimate enters the running mean with the step.

        Args:
            closure: what the class asks for, on the whole batch or on a part of it; or a sequence, summed.
        """
        check_closure(self, "update_curvature", "closure", closure)
        params = self._params
        if not params:
            raise ValueError("no parameter of the optimizer requires a gradient")
        with routed_attention(self.param_groups[0]["attention"]), Transaction(params, self.state) as transaction:
            self._pending = self._measure(closure, params, transaction)

    @torch.no_grad()
    @not_nested
    def step(self, closure: Any = None, *, curvature_closure: Any = None) -> Any:
        """Take one step.

        Args:
            closure: returns the loss or ``(loss, outputs)``, and may call ``zero_grad`` and ``backward`` itself; or a
                sequence of such closures, whose losses are summed (micro-batches). If it calls ``backward``, the step
                uses ``.grad``; otherwise it uses the loss's gradient, and leaves ``.grad`` alone. Default None: the
                step uses ``.grad``, and skips parameters without.
            curvature_closure: for the curvature alone, on update steps; not called on others. See the class.

        Returns:
            The loss as ``closure`` returned it, without graph; the sum for a sequence; None without a closure.

        Raises:
            TypeError: an update is due, and nothing was given to take the curvature from; or what was given is no
                closure. FloatingPointError: a loss,
                a gradient or an estimate is not finite. RuntimeError: it was called inside a closure of its own.
                Nothing has changed.
        """
        if closure is None and self._pending is None and self._take_fused():
            return None
        check_step(self, closure, curvature_closure)
        due = self.curvature_due
        params = self._params
        if not params:
            raise ValueError("no parameter of the optimizer requires a gradient")
        joint = due and self._pending is None and curvature_closure is None
        if joint and (closure is None or self.KIND is None):
            raise TypeError(self._how_to_update())
        if closure is None and (not due or self._pending is not None):
            # Nothing of the caller's runs, so that there is nothing to guard, and no copy of the parameters is made.
            gradients = [p.grad for p in params]
            check_finite(gradients, "gradient", params)
            self._finish(params, gradients, self._pending)
            return None
        returned = None
        with routed_attention(self.param_groups[0]["attention"]), Transaction(params, self.state) as transaction:
            estimates = self._pending
            if due and estimates is None and curvature_closure is not None:
                estimates = self._measure(curvature_closure, params, transaction)
            gradients = [p.grad for p in params]
            if closure is not None:
                point = transaction.add(CurvaturePoint(closure, params, self.KIND if joint else None))
                reduction = Reduction(self._process_group or point.process_group)
                gradients = gradients_of(params, gradients, point, reduction)
                loss = reduction.mean_scalar(point.loss)
                check_loss(loss, params)
                if joint:
                    estimates = self._checked(params, self._estimate(point, params, self._number, reduction))
                returned = point.returned if callable(closure) else sum(point.returned[1:], point.returned[0])
            check_finite(gradients, "gradient", params)
        self._finish(params, gradients, estimates)
        return returned

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the optimizer then continues as the one that saved it, options included."""
        check_state_dict(self, state_dict, self.KEY, self._check_options)
        super().load_state_dict(state_dict)
        # torch casts tensors to the parameter's dtype; the state has one of its own.
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for number, p in zip(saved, (p for g in self.param_groups for p in g["params"]), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][name] = value.to(p.device, copy=True)
        self._pending, self._updated, self._taken, self._last_step, self._fused = None, False, [], None, None

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps options, state and groups only. What is kept for the kernels belongs to this process.
        own = {name: getattr(self, name) for name in ("_pending", "_updated", "_process_group", "_taken", "_last_step")}
        return super().__getstate__() | own | {"_fused": None}

    # ------------------------------------------------------------------ for subclasses

    def _estimate(
        self, point: CurvaturePoint, params: Sequence[Tensor], number: int, reduction: Reduction
    ) -> Sequence[Tensor]:
        """The diagonal of the Hessian at ``point``, by the estimator that the options name."""
        options = self.param_groups[0]
        # Ranks share their probes: the mean of the products is the product of the mean.
        generator = torch.Generator(params[0].device).manual_seed(options["seed"] + 7919 * number)
        like = [p.detach().to(wide_dtype(p.dtype)) for p in params]

        def product(v: Sequence[Tensor]) -> list[Tensor]:
            return reduction.mean(point.product(v))

        name, count, distribution = options["estimator"], options["probes"], options["distribution"]
        if callable(name):
            found = name(product, like, generator)
        elif name == "exact":
            found = diagonal.exact(product, like)
        else:
            estimator = diagonal.hutchinson if name == "hutchinson" else diagonal.bekas
            found = estimator(product, like, generator, probes=count, distribution=distribution)
        return [-d for d in found] if options["maximize"] else found

    def _average(self, group: dict[str, Any], h: list[Tensor], estimates: list[Tensor]) -> None:
        """Have ``estimates`` enter the running means ``h``, in place."""
        raise NotImplementedError

    def _counts(self, state: Mapping[str, Any], updated: bool) -> dict[str, int]:
        """What a parameter's state counts, as it is after one more step, ``updated`` if that has an estimate."""
        return {}

    def _rule(self, group: Mapping[str, Any], counts: Mapping[str, int]) -> Rule:
        """The numbers of a step of parameters of a group, ``counts`` being theirs after it."""
        raise NotImplementedError

    def _record(self, taken: list[tuple[list[Tensor], Rule]]) -> Record:
        raise NotImplementedError

    def _averages(self, params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        states = [self.state[p] for p in params]
        return [s["exp_avg"] for s in states], [s[self.CURVATURE] for s in states]

    def _how_to_update(self) -> str:
        return (
            f"step {self._number + 1} of {type(self).__name__} updates the curvature and needs a closure that "
            "evaluates the loss: optimizer.step(closure), or optimizer.update_curvature(closure) before "
            "optimizer.step(). optimizer.curvature_due tells when"
        )

    @property
    def _number(self) -> int:
        """Steps taken."""
        return cast(dict[Any, Any], self.state).get(self.KEY, {}).get("step", 0)

    @property
    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    # ------------------------------------------------------------------ the parts of a step

    def _measure(self, closure: Any, params: list[Tensor], transaction: Transaction) -> list[tuple[Tensor, Tensor]]:
        """Estimates from a closure that is for the curvature alone: it leaves no trace."""
        with gradients_kept(params), self._own_randomness():
            for p in params:
                p.grad = None
            point = transaction.add(CurvaturePoint(closure, params, self.KIND))
            reduction = Reduction(self._process_group or point.process_group)
            estimates = self._checked(params, self._estimate(point, params, self._number, reduction))
            point.rollback()
        return estimates

    def _own_randomness(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _checked(self, params: Sequence[Tensor], estimates: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        for i, (p, d) in enumerate(zip(params, estimates, strict=True)):
            if d.shape != p.shape:
                raise ValueError(f"estimator: result {i} must have shape {tuple(p.shape)}, got {tuple(d.shape)}")
        check_finite(estimates, "curvature estimate", params)
        return list(zip(params, estimates, strict=True))

    def _finish(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        estimates: list[tuple[Tensor, Tensor]] | None,
    ) -> None:
        of = {id(p): g for p, g in zip(params, gradients, strict=True) if g is not None}
        curvature = {id(p): d for p, d in estimates or []}
        self._taken, self._last_step = [], None
        for group in self.param_groups:
            mine = [p for p in group["params"] if id(p) in of]
            fresh = [p for p in mine if id(p) in curvature]
            # One that first gets a gradient inside a closure, when no update is due, waits for its first estimate.
            known = [p for p in mine if id(p) not in curvature and self.CURVATURE in self.state[p]]
            for members in (*self._alike(fresh), *self._alike(known)):
                found = [of[id(p)].to_dense() if of[id(p)].is_sparse else of[id(p)] for p in members]
                if self.param_groups[0]["maximize"]:
                    found = list(torch._foreach_neg(found))
                new = [curvature[id(p)] for p in members] if id(members[0]) in curvature else None
                self._apply(group, members, found, new)
            if curvature:
                for p in group["params"]:
                    if p.requires_grad and id(p) not in of:
                        self.state[p].setdefault("idle", True)
        self._count(self._number + 1, updated=estimates is not None)

    def _apply(
        self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor], estimates: list[Tensor] | None
    ) -> None:
        """Change parameters of one dtype, device and counts, and their state, in place."""
        for p in params:
            for name in ("exp_avg", self.CURVATURE):
                if name not in self.state[p]:
                    self.state[p][name] = torch.zeros_like(p, dtype=group["state_dtype"] or p.dtype)
        m, h = self._averages(params)
        if estimates is not None:
            self._average(group, h, estimates)
        counts = self._counts(self.state[params[0]], updated=estimates is not None)
        for p in params:
            self.state[p].update(counts)
        rule = self._rule(group, counts)
        if not fused_step.update(params, gradients, m, h, rule):
            diagonal_update.update(params, gradients, m, h, rule)
        self._taken.append((params, rule))

    def _take_fused(self) -> bool:
        """Take a whole step from ``.grad`` between updates, in one launch.

        False where that cannot be, or where a gradient is not finite; then nothing has changed.
        """
        if self._number % self.param_groups[0]["update_interval"] == 0:
            return False
        self._fused = fused_step.fused_step(self, self._fused)
        taken = None if self._fused is None else self._fused.take(self)
        if taken is None:
            self._fused = None
            return False
        self._taken, self._last_step = taken, None
        self._count(self._number + 1, updated=False)
        return True

    def _alike(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        """Lists of one dtype and device, as foreach kernels want them, and of the same counts."""
        lists: dict[Any, list[Tensor]] = {}
        for p in params:
            counts = self._counts(self.state[p], updated=False)
            lists.setdefault((p.dtype, p.device, *counts.values()), []).append(p)
        return list(lists.values())

    def _count(self, number: int, updated: bool) -> None:
        self._updated, self._pending = updated, None
        cast(dict[Any, Any], self.state)[self.KEY] = {"step": number}


def gradients_of(
    params: list[Tensor], before: Sequence[Tensor | None], point: CurvaturePoint, reduction: Reduction
) -> list[Tensor | None]:
    """``.grad`` where the closure called backward, which makes new tensors; else those of the loss."""
    if any(p.grad is not None and p.grad is not b for p, b in zip(params, before, strict=True)):
        present = [p.grad for p in params if p.grad is not None]
        mean = iter(reduction.mean(present))
        return [None if p.grad is None else next(mean) for p in params]
    return list(reduction.mean(point.gradient))


def check_finite(tensors: Sequence[Tensor | None], what: str, params: Sequence[Tensor]) -> None:
    """FloatingPointError that names the first of ``tensors``, of ``params``, not finite; one synchronisation."""
    some = [(i, t) for i, t in enumerate(tensors) if t is not None and t.numel()]
    if not some:
        return
    values = [t.coalesce().values() if t.is_sparse else t for _, t in some]
    largest = [t.to(values[0].device, torch.float32) for t in torch._foreach_norm(values, math.inf)]
    flags = torch.stack(largest).isfinite()
    if not bool(flags.all()):
        i, t = some[int(flags.logical_not().nonzero()[0])]
        raise FloatingPointError(f"the {what} of parameter {i} (shape {tuple(t.shape)}) is not finite{culprit(params)}")


def check_common(options: Mapping[str, Any]) -> None:
    """Check the options that the diagonal family shares."""
    check_range(options, "lr", 0.0)
    check_range(options, "weight_decay", 0.0)
    check_range(options, "eps", 0.0, open_="low")
    betas = options["betas"]
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not pair or not all(isinstance(b, SupportsFloat) and 0.0 <= float(b) < 1.0 for b in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    for name in ("update_interval", "probes"):
        if name in options:
            check_integer(options, name, 1)
    check_integer(options, "seed")
    check_maximize(options)
    if options["attention"] not in ("exact", None):
        raise ValueError(f"attention must be 'exact' or None, got {options['attention']!r}")
    dtype = options["state_dtype"]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"state_dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    if "estimator" in options:
        if options["distribution"] not in diagonal.DISTRIBUTIONS:
            allowed = ", ".join(map(repr, diagonal.DISTRIBUTIONS))
            raise ValueError(f"distribution must be one of {allowed}, got {options['distribution']!r}")
        if options["estimator"] not in ESTIMATORS and not callable(options["estimator"]):
            allowed = ", ".join(map(repr, ESTIMATORS))
            raise ValueError(f"estimator must be one of {allowed} or a callable, got {options['estimator']!r}")
