"""K-FAC: natural-gradient steps by Kronecker-factored curvature, their length from exact products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from sorder.curvature import CurvaturePoint
from sorder.curvature.checks import MODES
from sorder.curvature.evaluation import PlainClosure
from sorder.curvature.point import gradients_kept
from sorder.curvature.split import NoOutputsError
from sorder.kfac import kronecker
from sorder.kfac.estimate import NEEDS_LABELS
from sorder.kfac.kronecker import Factors, Options
from sorder.kfac.preconditioner import check_loss_scale, warn_of_fallbacks
from sorder.kfac.preconditioner import check_options as check_kfac_options
from sorder.kfac.report import report
from sorder.optim import kfac_model
from sorder.optim.attention_routing import routed_attention
from sorder.optim.diagonal_optimizer import check_finite, gradients_of
from sorder.optim.kfac_model import KFACStep
from sorder.optim.kfac_step import GLOBAL, StepInProgress
from sorder.optim.reductions import Reduction
from sorder.optim.transaction import Transaction
from sorder.optim.validation import (
    check_closure,
    check_group,
    check_integer,
    check_loss,
    check_maximize,
    check_not_dict,
    check_parameters,
    check_range,
    check_state_dict,
    check_step,
    new_group,
    not_nested,
)

RULES = ("quadratic", "kl")
UPDATES = ("levenberg-marquardt", "constant")


class KFAC(Optimizer):
    r"""K-FAC (Martens & Grosse, *Optimizing neural networks with Kronecker-factored approximate curvature*, 2015).

    The direction is Δ = −(K + λ)⁻¹g, with K the Kronecker-factored approximation of the Gauss–Newton matrix (GGN) that
    :class:`sorder.KFACPreconditioner` describes. By ``step_rule`` the step is

    - "quadratic" (arXiv:1503.05671, sections 6.4 to 7): s = αΔ + μδ with δ the step before; α and μ minimise the exact
      model gᵀs + ½ sᵀ(B + λ)s, B the GGN itself, by two exact products. The loss is evaluated at the step, which is
      shortened until the loss falls enough (Armijo), and taken back where it never does; λ follows ρ, the change of
      the loss over the one that the model predicted: times ``damping_decrease`` where ρ > 1/2, times
      ``damping_increase`` or more where ρ < 1/4 (Levenberg–Marquardt). Needs a closure at every step. The paper
      looks at the loss every fifth step only (``damping_interval=5``, factors (19/20)^±5), which saves forward passes;
      at the start of a transformer, where the model is trusted far too much, the steps between can do great harm.
    - "kl" (Ba, Grosse & Martens, *Distributed second-order optimization using Kronecker-factored approximations*,
      2017): momentum on νΔ, with ν ≤ 1 such that lr²·ν²·Δᵀ(K + λ)Δ ≤ ``kl_bound``: no products, a constant λ.
      Between updates of the factors, ``loss.backward(); optimizer.step()`` suffices, and ``GradScaler``, clipping and
      accumulation work as with any optimizer; :meth:`update_curvature` measures the factors, on the unscaled loss.

    A step is a transaction: if a closure raises, or a loss, a gradient or a product is not finite, parameters, buffers,
    ``.grad``, state and random generators are as they were. Batch norm's statistics move once.

    A closure runs several times within a step and must see the same batch each time, so fetch the batch before it, not
    inside.

    Args:
        params: a module, parameters, (name, parameter) pairs, or groups. Options other than ``lr`` and
            ``weight_decay`` are read from the first group; another group may not be given other values of them.
        lr: factor of a group's part of the step. Default 1.
        step_rule: "quadratic" (default) or "kl".
        damping: λ > 0, in units of curvature. Default None: a tenth of the curvature along the first gradient. The
            group holds the present value.
        damping_update: "levenberg-marquardt" (default) or "constant", which takes every step without a look at the
            new loss; "kl" leaves λ constant, too.
        damping_interval: steps from one evaluation of the new loss to the next. Default 1.
        damping_decrease, damping_increase: factors of λ. Default 1/2 and 3/2.
        momentum: of "kl", in [0, 1). For "quadratic" 0 turns δ off, at one product less. Default 0.9.
        kl_bound: of "kl"; None for no bound. Default 1e-3.
        max_step_norm: steps are shortened to this norm. Default None.
        weight_decay: decoupled: p ← (1 − lr·weight_decay)p. Default 0.
        estimator, samples, approximation, inverse, decay, max_size, least_damping, factor_dtype, inverse_dtype: of the
            curvature; see :class:`sorder.KFACPreconditioner`, but for the default of least_damping, 0.
        factor_interval, inverse_interval: steps from one update of the factors, and of the inverses, to the next.
            Default 1 and 1.
        maximize: maximise the loss. Default False.
        mode: of exact products, see :class:`sorder.curvature.CurvaturePoint`.
        attention: "exact" (default) routes ``F.scaled_dot_product_attention`` through :func:`sorder.attention` inside
            ``step``; None leaves it.
        seed: of sampled labels, which are functions of it and of the number of the update. Default 0.
        process_group: data-parallel ranks average losses, gradients, factors and products over it. Default None: that
            of the DistributedDataParallel module that the closure calls, if there is one.

    Attributes:
        last_step: :class:`KFACStep` of the last step, or None. curvature_due: whether the next step measures factors.

    Raises:
        ValueError: an option is out of range, or (by ``step``) the loss is not one that defines a distribution of
            labels. Parameters are on the meta device. TypeError: (by ``step``) a closure is needed, and none was given.
        RuntimeError: (by ``step``) it was called inside a closure of its own. Nothing has changed.
        FloatingPointError: (by ``step``) something is not finite. Nothing has changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> y = torch.tensor([0, 1, 1, 0])
        >>> optimizer = sorder.KFAC(model, estimator="type-2")
        >>> for _ in range(60):
        ...     loss = optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> bool(loss < 0.1)
        True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        *,
        step_rule: str = "quadratic",
        damping: float | None = None,
        damping_update: str = "levenberg-marquardt",
        damping_interval: int = 1,
        damping_decrease: float = 0.5,
        damping_increase: float = 1.5,
        momentum: float = 0.9,
        kl_bound: float | None = 1e-3,
        max_step_norm: float | None = None,
        weight_decay: float = 0.0,
        estimator: str = "mc",
        samples: int = 1,
        approximation: str = "expand",
        inverse: str = "cholesky",
        decay: float = 0.95,
        factor_interval: int = 1,
        inverse_interval: int = 1,
        max_size: int = 8192,
        least_damping: float = 0.0,
        factor_dtype: torch.dtype | None = None,
        inverse_dtype: torch.dtype | None = None,
        maximize: bool = False,
        mode: str = "auto",
        attention: str | None = "exact",
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_not_dict(self, params)
        defaults = {k: v for k, v in locals().items() if k not in ("self", "params", "process_group", "__class__")}
        self._check_options(defaults)
        self.last_step: KFACStep | None = None
        self._pending: tuple[Factors, float | None] | None = None
        self._process_group = process_group
        super().__init__(params.named_parameters() if isinstance(params, nn.Module) else params, defaults)

    @staticmethod
    def _check_options(options: Mapping[str, Any]) -> None:
        check_kfac_options(options)
        for name, allowed in (
            ("step_rule", RULES), ("damping_update", UPDATES), ("mode", MODES), ("attention", ("exact", None)),
        ):  # fmt: skip
            if options[name] not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {options[name]!r}")
        for name in ("lr", "weight_decay"):
            check_range(options, name, 0.0)
        for name in ("damping", "kl_bound", "max_step_norm"):
            if options[name] is not None:
                check_range(options, name, 0.0, open_="low")
        check_range(options, "damping_decrease", 0.0, 1.0, open_="low")
        check_range(options, "damping_increase", 1.0)
        check_range(options, "momentum", 0.0, 1.0, open_="high")
        check_integer(options, "damping_interval", 1)
        check_maximize(options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`. The next step measures the factors."""
        check_group(self, param_group)
        super().add_param_group(param_group)
        with new_group(self) as group:
            self._check_options(group)
            check_parameters(group["params"])

    @property
    def curvature_due(self) -> bool:
        """Whether the next step measures factors: steps 1, 1 + interval, …, and after parameters joined."""
        return self._number % self.param_groups[0]["factor_interval"] == 0 or not self._factors().updates

    @torch.no_grad()
    @not_nested
    def update_curvature(self, closure: Any, *, loss_scale: float = 1.0) -> None:
        """Measure the factors for the next step, whether or not an update is due by then.

        Parameters, ``.grad``, buffers and random generators stay as they are, and the factors enter the running means
        with the step: one that is then skipped has changed nothing.

        Args:
            closure: returns the loss, on the whole batch or a part of it; or a sequence, summed.
            loss_scale: what the loss is multiplied by, such as ``scaler.get_scale()``. Default 1.
        """
        check_closure(self, "update_curvature", "closure", closure)
        check_loss_scale(loss_scale)
        params, options = self._trainable(), self.param_groups[0]
        kind = "ggn" if options["damping"] is None else None
        with routed_attention(options["attention"]), Transaction(params, self.state) as transaction:
            point = transaction.add(self._apart(closure, params, kind))
            reduction = Reduction(self._process_group or point.process_group)
            factors = self._measured(point, reduction, loss_scale)
            along = None if kind is None else self._along(point, reduction) / loss_scale
            point.rollback()
        self._pending = factors, along

    @torch.no_grad()
    @not_nested
    def step(self, closure: Any = None, *, curvature_closure: Any = None) -> Any:
        """Take one step.

        Args:
            closure: returns the loss or ``(loss, outputs)``, and may call ``zero_grad`` and ``backward`` itself; or a
                sequence of such closures, whose losses are summed (micro-batches). With ``step_rule="kl"`` it may be
                left out after ``backward`` where no update is due.
            curvature_closure: likewise, for factors and products alone, such as the loss of a part of the batch; its
                run leaves no trace. Default: ``closure``.

        Returns:
            The loss before the step as ``closure`` returned it, without graph; the sum for a sequence; None without a
            closure.
        """
        options, params = self.param_groups[0], self._trainable()
        exact = options["step_rule"] == "quadratic"
        measure = self._pending is None and self.curvature_due
        if closure is None and (exact or measure):
            raise TypeError(
                "KFAC.step needs a closure that evaluates the loss, as in optimizer.step(lambda: "
                "F.cross_entropy(model(x), y))" + ("" if exact else ", or update_curvature(closure) before: an update "
                "of the factors is due. optimizer.curvature_due tells when")
            )  # fmt: skip
        check_step(self, closure, curvature_closure)
        if exact:
            closure = PlainClosure(closure) if callable(closure) else [PlainClosure(c) for c in closure]
        before = [p.grad for p in params]
        with routed_attention(options["attention"]), Transaction(params, self.state) as transaction:
            step = StepInProgress(self, params, transaction)
            returned = None
            if closure is None:
                step.reduction = Reduction(self._process_group)
                step.gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            else:
                kind = "ggn" if exact or (measure and options["damping"] is None) else None
                apart = curvature_closure is not None and (exact or measure)
                point = self._point(closure, params, None if apart else kind)
                step.point = step.model = transaction.add(point)
                if apart:
                    step.model = transaction.add(self._apart(curvature_closure, params, kind))
                step.reduction = Reduction(self._process_group or point.process_group)
                step.loss = step.reduction.mean_scalar(point.loss)
                check_loss(step.loss, params)
                found = step.reduction.mean(point.gradient)
                if not exact:
                    own = gradients_of(params, before, point, step.reduction)
                    found = [torch.zeros_like(p) if g is None else g for p, g in zip(params, own, strict=True)]
                step.gradient = found
                returned = sum(point.returned[1:], point.returned[0]) if not callable(closure) else point.returned
            check_finite(step.gradient, "gradient", params)
            record = step.run()
        options["damping"], self.last_step, self._pending = record.next_damping, record, None
        return returned

    def report(self) -> str:
        """A table: every parameter, its block with the sizes of its factors, and why.

        The sizes read outputs ⊗ inputs, as a weight's rows and columns do: "K-FAC 2 ⊗ 4" is G of 2 × 2 and A of 4 × 4
        in A ⊗ G. A bias is one more input. "dense 8 × 8" is a block without inputs: a norm's scale and bias, or a bias
        alone.
        """
        names = [n for g in self.param_groups for n, p in zip(_names(g), g["params"], strict=True) if p.requires_grad]
        return report(self._factors(), self._trainable(), names, self._kfac_options())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the optimizer then continues as the one that saved it, options included."""
        check_state_dict(self, state_dict, GLOBAL, self._check_options)
        super().load_state_dict(state_dict)
        # torch casts vectors to the parameter's dtype; those of 16-bit parameters are kept in float32.
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for number, p in zip(saved, (p for g in self.param_groups for p in g["params"]), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][name] = value.to(p.device)
        self._pending = None

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps options, state and groups only.
        own = {name: getattr(self, name) for name in ("last_step", "_pending", "_process_group")}
        return super().__getstate__() | own

    # ------------------------------------------------------------------ parts

    def _trainable(self) -> list[Tensor]:
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not params:
            raise ValueError("no parameter of the optimizer requires a gradient")
        return params

    def _of_each(self, option: str) -> list[float]:
        return [float(group[option]) for group in self.param_groups for p in group["params"] if p.requires_grad]

    @property
    def _mine(self) -> dict[str, Any]:
        """A copy of the optimizer's own state."""
        return dict(cast(dict[Any, Any], self.state).get(GLOBAL, {}))

    @property
    def _number(self) -> int:
        return self._mine.get("step", 0)

    def _numbers(self) -> list[int]:
        """Which of all parameters require gradients; the factors' numbers count these."""
        every = (p for group in self.param_groups for p in group["params"])
        return [i for i, p in enumerate(every) if p.requires_grad]

    def _factors(self) -> Factors:
        """The running factors; none where they were measured for fewer, or other, parameters."""
        mine = self._mine
        if "factors" not in mine or mine["numbers"] != self._numbers():
            return Factors()
        return kronecker.unpacked(mine["factors"], [p.device for p in self._trainable()])

    def _kfac_options(self) -> Options:
        group = self.param_groups[0]
        return Options(**{name: group[name] for name in Options.__dataclass_fields__})

    def _point(self, closure: Any, params: list[Tensor], kind: str | None) -> CurvaturePoint:
        # The other rule reads ``.grad``, which closures fill with the loss's own gradient, and turns that around.
        options = self.param_groups[0]
        turned = options["maximize"] and options["step_rule"] == "quadratic"
        try:
            return CurvaturePoint(closure, params, kind, mode=options["mode"], sign=-1.0 if turned else 1.0)
        except NoOutputsError:  # which advises to return them; the factors would refuse that, too
            raise ValueError(NEEDS_LABELS) from None

    def _apart(self, closure: Any, params: list[Tensor], kind: str | None) -> CurvaturePoint:
        """The point of a closure for the curvature alone, which leaves ``.grad`` as it was."""
        with gradients_kept(params):
            for p in params:
                p.grad = None
            return self._point(closure, params, kind)

    def _measured(self, point: CurvaturePoint, reduction: Reduction, loss_scale: float = 1.0) -> Factors:
        factors = kronecker.updated(
            self._factors(),
            point,
            self._kfac_options(),
            new_bases=self._number % self.param_groups[0]["inverse_interval"] == 0,
            loss_scale=loss_scale,
            rank=reduction.rank,
            mean=reduction.mean,
        )
        names = [n for g in self.param_groups for n, p in zip(_names(g), g["params"], strict=True) if p.requires_grad]
        warn_of_fallbacks(factors, names)
        return factors

    @staticmethod
    def _along(point: CurvaturePoint, reduction: Reduction) -> float:
        gradient = reduction.mean(point.gradient)
        return kfac_model.curvature_along(lambda v: reduction.mean(point.product(v)), gradient)


def _names(group: Mapping[str, Any]) -> list[str]:
    return group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
