"""Newton's method with conjugate gradients, for neural networks and other functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from sorder.curvature import CurvaturePoint
from sorder.curvature.evaluation import PlainClosure
from sorder.linalg import EisenstatWalker
from sorder.optim.attention_routing import routed_attention
from sorder.optim.last_step import NewtonCGStep
from sorder.optim.newton_step import NewtonStep
from sorder.optim.reductions import Reduction
from sorder.optim.transaction import Transaction
from sorder.optim.validation import (
    CUSTOM,
    check_factors,
    check_group,
    check_not_module,
    check_options,
    check_parameters,
    check_preconditioner,
    check_state_dict,
    check_step,
    new_group,
    not_nested,
)

Preconditioner = Callable[[Sequence[Tensor]], Sequence[Tensor]]
# Key of the optimizer's own state, beside the parameters', in the state dict.
GLOBAL = "newton_cg"


class NewtonCG(Optimizer):
    r"""Newton's method, its linear systems solved by conjugate gradients with exact curvature products.

    A step minimises the quadratic m(s) = gᵀs + ½ sᵀ(B + λI)s by conjugate gradients (CG), which need products Bv
    only, and moves the parameters by α·lr·s. B is the Hessian, or the generalised Gauss–Newton matrix (GGN), which is
    positive semidefinite. After Martens, *Deep learning via Hessian-free optimization* (ICML 2010), with Nocedal &
    Wright, *Numerical Optimization*, for the rest:

    - **λ** follows ρ, the change of the loss over the one predicted: times ``damping_decrease`` where ρ > 1/2, times
      ``damping_increase`` where ρ < 1/4 (Levenberg–Marquardt). A λ far too low, zero included, is then raised in one
      go, to a tenth of the λ for which λ‖s‖²/2 would have covered what the loss exceeded the quadratic by: at the
      length α‖s‖ that the line search came back to, or at the full step where there was no excess at that length (then
      to a tenth of ‖g‖/α‖s‖ at most, which alone would bound steps by that length). λ starts
      from the problem: a trial of the Cauchy step −t g, t = gᵀg/gᵀBg, shows by how much the loss exceeds m, and
      λ_c‖t g‖²/2 is to cover that. The excess grows with the step, and a damped step is no longer than ‖g‖/λ, which
      bounds λ by (λ_c gᵀBg/gᵀg)^½; it starts at a tenth of that: zero where there is no excess, as on a quadratic,
      which one step then solves.
    - **α** is 1 where the loss falls enough (Armijo), and backtracks otherwise. A step that does not lower the loss
      is rejected: the parameters stay, and λ grows.
    - **Negative curvature** (Hessian only) is followed: where CG meets a direction dᵀBd < 0, the step goes down along
      it by the Newton length for |dᵀBd|, and on, doubling, while the loss falls. At a gradient of zero a random probe
      looks for such a direction, so that a maximum or saddle is left.
    - **CG** starts from the last solution times ``warm_start`` (not for the Hessian), and stops at ``cg_iterations``
      or earlier. A limit of few iterations regularises like damping does and suits minibatches.

    All of it is invariant to a scaling of the loss. Loss, gradient, products and trials of a step see one function:
    dropout masks are replayed, batch norm's statistics move once. A step is a transaction: if a closure raises
    (KeyboardInterrupt included), or the loss, a gradient or a product is not finite, parameters, buffers, ``.grad``,
    state and random generators are as they were.

    The closure returns the loss or ``(loss, outputs)``; it may call ``zero_grad`` and ``backward`` itself, which then
    leaves the gradients of the starting point in ``.grad`` (of this optimizer's parameters only). It runs several
    times within a step and must see the same batch each time, so fetch the batch before it, not inside. It must not
    change ``.grad`` after ``backward``, as ``clip_grad_norm_`` and ``GradScaler.unscale_`` do: loss, gradient and
    curvature would be of different functions, and the step is refused. ``max_step_norm`` and the trust region bound
    steps instead.

    For float16 the closure may return ``scaler.scale(loss)`` of a ``torch.amp.GradScaler``: call
    ``optimizer.step(closure)`` itself then, since ``scaler.step`` and ``scaler.update()`` serve no closures. The loss
    returned and λ are scaled, too. Where the scaled loss or gradient overflows the step raises FloatingPointError and
    changes nothing; ``scaler.update(new_scale)`` sets a smaller scale.

    Args:
        params: parameters or groups. Real floating-point; frozen ones are skipped. Options other than ``lr`` and
            ``weight_decay`` concern all parameters, and are read from the first group at every step: change them
            there. Another group may not be given other values of them.
        lr: factor on a group's part of the step. Default 1. Where groups differ a step costs one product more.
        curvature: "hessian", "ggn", "fisher" (a GGN with labels sampled from the model) or "auto" (default): the GGN
            where the closure returns outputs, or where its loss is seen to be a result of torch's loss functions
            (``cross_entropy``, ``nll_loss``, ``mse_loss``, ``binary_cross_entropy_with_logits``, …), a nonnegative
            multiple or a sum of such; otherwise the Hessian. So a penalty written into the loss by hand, as
            ``cross_entropy(…) + c * sum(p.square().sum() for p in …)``, turns it to the Hessian, with one warning; use
            ``weight_decay``, or return ``(loss, outputs)``, for the GGN. See
            :class:`sorder.curvature.CurvaturePoint`. ``last_step`` says which was taken.
        damping: λ ≥ 0, in units of curvature. Default None: chosen at the first step, as above (0 for a trust
            region). The group holds the present value.
        damping_update: "levenberg-marquardt" (default), "constant", or "trust-region": instead of λ a radius ‖s‖ ≤ Δ
            bounds CG (Steihaug 1983), and follows ρ (Nocedal & Wright, algorithm 4.1).
        damping_decrease, damping_increase: factors of λ. Default 1/2 and 3/2.
        trust_radius: Δ, in units of the parameters; None (default): length of the first Cauchy step. The group holds
            the present value.
        max_step_norm: steps are shortened to this norm. Default None.
        line_search: "armijo" (default), or None: α = 1 or rejection. A trust region uses none.
        sufficient_decrease: share of the predicted decrease that a step must bring. Default 1e-4.
        max_trials: step lengths tried before a step is rejected. Default 10.
        cg_iterations: most CG iterations. Default 10.
        cg_stop: "relative-progress" (default; Martens 2010, section 4.4), "residual" (‖r‖ ≤ tolerance·‖g‖) or
            "eisenstat-walker" (the residual follows the gradient's decrease; tolerance unused).
        cg_tolerance: of the stopping rule. Default 5e-4.
        warm_start: in [0, 1]; 0 starts CG from zero. Default 0.95.
        preconditioner: None (default), "diagonal" (a running mean of Hutchinson's estimates of B's diagonal; one
            product a step), "squared-gradient" (a running mean of g∘g scaled to B; one product a step), both used as
            (|d| + λ)^``preconditioner_power``; or a callable r ↦ M⁻¹r on lists of tensors, one for each parameter,
            symmetric positive definite, such as :class:`sorder.KFACPreconditioner`. If it has
            ``check_params(params)``, that is called when the optimizer is made, to refuse others than its own. Before
            every solve its methods are called, where it has them: ``refresh(point, rank=…, mean=…)`` with the
            :class:`~sorder.curvature.CurvaturePoint` of B, this process's number and the mean of a list of tensors
            over the ranks; then ``update(product, damping)`` with v ↦ Bv and λ. :meth:`add_param_group` calls
            ``add_params(params, names)`` with those that require gradients. If it has ``state_dict`` and
            ``load_state_dict``, a step that fails restores it by them, and the optimizer's own state dict holds its;
            they may share tensors that are never changed in place.
        preconditioner_decay: of the running means. Default 0.9.
        preconditioner_power: default 3/4 (Martens 2010, section 4.7).
        weight_decay: decoupled: after an accepted step p ← (1 − lr·weight_decay)p. Default 0.
        maximize: maximise the loss. Default False.
        mode: "auto" (default), "reverse-over-reverse" or "forward-over-reverse": time against memory, see
            :class:`sorder.curvature.CurvaturePoint`.
        attention: "exact" (default) routes ``F.scaled_dot_product_attention`` through :func:`sorder.attention` inside
            ``step``, as :func:`sorder.exact_attention` does; None leaves it, and fused attention then has no
            curvature.
        seed: of probes and sampled labels, which are functions of it and of the number of the step. Default 0.
        process_group: data-parallel ranks take the same step, from loss, gradients and products averaged over the
            group, each rank having its share of the batch. Default None: the group of the DistributedDataParallel
            module that the closure calls, if it calls one; otherwise no communication.

    Attributes:
        last_step: :class:`NewtonCGStep` of the last step, or None.

    Raises:
        ValueError: an option is out of range, misspelled in a group, or differs from the first group's where it
            concerns all parameters; the message names it. ``lr``, ``damping``, ``trust_radius`` and
            ``weight_decay`` are at most 2.6e15 (2e123 where all parameters are float64). Parameters are on the meta
            device. The preconditioner is for other parameters.
            (By ``step``, too, and if the closure changes ``.grad`` after ``backward``, or returns a loss that is not a
            scalar, has no graph, or depends on none of the parameters.)
        TypeError: ``params`` is a module or a dict, or ``preconditioner`` a class. (By ``step``:) there is no closure,
            or what was given is none, or returns neither a loss nor ``(loss, outputs)``.
        RuntimeError: (by ``step``) it was called inside a closure of its own. Nothing has changed.
        FloatingPointError: (by ``step``) the loss, a gradient or a product is not finite. Nothing has changed.
            sorder.curvature.CurvatureError: (by ``step``) an operation lacks derivatives. Nothing has changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> y = torch.tensor([0, 1, 1, 0])
        >>> optimizer = sorder.NewtonCG(model.parameters())
        >>> for _ in range(20):
        ...     loss = optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> bool(loss < 0.1), optimizer.last_step.curvature
        (True, 'ggn')

        K-FAC in front of the exact products makes the first few CG iterations worth many (to a tight residual at
        larger λ it may need as many, or more):

        >>> optimizer = sorder.NewtonCG(model.parameters(), preconditioner=sorder.KFACPreconditioner(model))
        >>> loss = optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y))
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        *,
        curvature: str = "auto",
        damping: float | None = None,
        damping_update: str = "levenberg-marquardt",
        damping_decrease: float = 0.5,
        damping_increase: float = 1.5,
        trust_radius: float | None = None,
        max_step_norm: float | None = None,
        line_search: str | None = "armijo",
        sufficient_decrease: float = 1e-4,
        max_trials: int = 10,
        cg_iterations: int = 10,
        cg_stop: str = "relative-progress",
        cg_tolerance: float = 5e-4,
        warm_start: float = 0.95,
        preconditioner: str | Preconditioner | None = None,
        preconditioner_decay: float = 0.9,
        preconditioner_power: float = 0.75,
        weight_decay: float = 0.0,
        maximize: bool = False,
        mode: str = "auto",
        attention: str | None = "exact",
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_not_module(self, params)
        check_preconditioner(preconditioner)
        defaults = {
            "lr": lr,
            "curvature": curvature,
            "damping": damping,
            "damping_update": damping_update,
            "damping_decrease": damping_decrease,
            "damping_increase": damping_increase,
            "trust_radius": trust_radius,
            "max_step_norm": max_step_norm,
            "line_search": line_search,
            "sufficient_decrease": sufficient_decrease,
            "max_trials": max_trials,
            "cg_iterations": cg_iterations,
            "cg_stop": cg_stop,
            "cg_tolerance": cg_tolerance,
            "warm_start": warm_start,
            "preconditioner": CUSTOM if callable(preconditioner) else preconditioner,
            "preconditioner_decay": preconditioner_decay,
            "preconditioner_power": preconditioner_power,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "mode": mode,
            "attention": attention,
            "seed": seed,
        }
        check_options(defaults)
        self.last_step: NewtonCGStep | None = None
        self._preconditioner: Preconditioner | None = None
        self._process_group = process_group
        super().__init__(params, defaults)
        # Afterwards, since it knows of these groups, and is told of later ones.
        self._preconditioner = preconditioner if callable(preconditioner) else None
        check_params = getattr(preconditioner, "check_params", None)
        if check_params is not None:
            check_params([p for group in self.param_groups for p in group["params"]])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :meth:`torch.optim.Optimizer.add_param_group`. Its parameters join the next step."""
        check_group(self, param_group)
        super().add_param_group(param_group)
        with new_group(self) as group:
            check_options(group)
            if self.defaults["preconditioner"] != CUSTOM:
                check_preconditioner(group["preconditioner"])
            check_parameters(group["params"])
            check_factors(group, group["params"])
        join = getattr(self._preconditioner, "add_params", None)
        if join is not None:
            count = sum(len(g["params"]) for g in self.param_groups[:-1])
            names = group.get("param_names") or [f"parameter {count + i}" for i in range(len(group["params"]))]
            joining = [(p, name) for p, name in zip(group["params"], names, strict=True) if p.requires_grad]
            join([p for p, _ in joining], [name for _, name in joining])

    @torch.no_grad()
    @not_nested
    def step(self, closure: Any = None, *, curvature_closure: Any = None) -> Any:
        """Take one step.

        Args:
            closure: returns the loss, or ``(loss, outputs)``; or a sequence of such closures, whose losses are summed
                (micro-batches).
            curvature_closure: likewise, for B alone: a smaller batch makes CG cheap. Default: ``closure``.

        Returns:
            The loss before the step as ``closure`` returned it, without graph; the sum for a sequence.
        """
        if closure is None:
            raise TypeError(
                "NewtonCG.step needs a closure that evaluates the loss, as in "
                "optimizer.step(lambda: F.cross_entropy(model(x), y))"
            )
        check_step(self, closure, curvature_closure)
        closures = _plain(closure)
        curvature_closures = None if curvature_closure is None else _plain(curvature_closure)
        for group in self.param_groups:
            check_options(group)
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not params:
            raise ValueError("no parameter of the optimizer requires a gradient")
        for group in self.param_groups:
            check_factors(group, params)
        options = self.param_groups[0]
        mine = self._mine
        number = mine.get("step", 0)
        kind = options["curvature"]
        # Ranks draw labels of their own.
        rank = 0 if self._process_group is None else dist.get_rank()
        arguments = {
            "mode": options["mode"],
            "sign": -1.0 if options["maximize"] else 1.0,
            "seed": options["seed"] + 7919 * number + rank,
        }
        with (
            routed_attention(options["attention"]),
            _restored_on_failure(self._preconditioner),
            Transaction(params, self.state) as transaction,
        ):
            point = CurvaturePoint(closures, params, kind if curvature_closures is None else None, **arguments)
            model = transaction.add(point)
            if curvature_closures is not None:
                model = transaction.add(CurvaturePoint(curvature_closures, params, kind, **arguments))
            step = NewtonStep(
                options=options,
                params=params,
                rates=self._of_each("lr"),
                decays=self._of_each("weight_decay"),
                transaction=transaction,
                point=point,
                model=model,
                reduction=Reduction(self._process_group or point.process_group),
                state=self.state,
                number=number,
                forcing=EisenstatWalker(mine.get("eta", 0.5), mine.get("eta_gradient_norm")),
            )
            last_step = step.run(self._preconditioner)
            forcing = step.forcing
            mine |= {"step": number + 1, "eta": forcing.eta, "eta_gradient_norm": forcing.gradient_norm}
            cast(dict[Any, Any], self.state)[GLOBAL] = mine
        options["damping"], options["trust_radius"] = step.next_damping, step.next_radius
        self.last_step = last_step
        returned = point.returned
        return sum(returned[1:], returned[0]) if isinstance(returned, list) else returned

    def state_dict(self) -> dict[str, Any]:
        """The state; a preconditioner that has a state dict has it there under "preconditioner"."""
        save = getattr(self._preconditioner, "state_dict", None)
        return super().state_dict() | ({} if save is None else {"preconditioner": save()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the optimizer then continues as the one that saved it, options included.

        Raises:
            ValueError: it is not the state of a NewtonCG with groups and parameters like these. Nothing has changed.
        """
        check_state_dict(self, state_dict, GLOBAL, check_options)
        load = getattr(self._preconditioner, "load_state_dict", None)
        if load is not None and "preconditioner" in state_dict:
            load(state_dict["preconditioner"])
        super().load_state_dict(state_dict)
        # torch casts vectors to the parameter's dtype; those of 16-bit parameters are kept in float32.
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for number, p in zip(saved, (p for g in self.param_groups for p in g["params"]), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][name] = value.to(p.device)

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps options, state and groups only.
        own = {name: getattr(self, name) for name in ("last_step", "_preconditioner", "_process_group")}
        return super().__getstate__() | own

    @property
    def _mine(self) -> dict[str, Any]:
        """A copy of the optimizer's own state."""
        return dict(cast(dict[Any, Any], self.state).get(GLOBAL, {}))

    def _of_each(self, option: str) -> list[float]:
        return [float(group[option]) for group in self.param_groups for p in group["params"] if p.requires_grad]


@contextmanager
def _restored_on_failure(preconditioner: Any) -> Iterator[None]:
    """Context that, if left by an exception, puts a preconditioner with a state dict back."""
    save, load = (getattr(preconditioner, name, None) for name in ("state_dict", "load_state_dict"))
    if save is None or load is None:
        yield
        return
    before = save()
    try:
        yield
    except BaseException:
        load(before)
        raise


def _plain(closure: Any) -> Any:
    """The closure or closures, marked as functions whose ``.grad`` is the loss's."""
    return PlainClosure(closure) if callable(closure) else [PlainClosure(c) for c in closure]
