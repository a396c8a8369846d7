"""Sophia: steps clipped coordinate by coordinate, after division by a running estimate of the curvature's diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sorder.curvature import CurvaturePoint
from sorder.curvature.diagonal import gauss_newton_bartlett
from sorder.func.random_state import RandomState
from sorder.linalg.pytree import wide_dtype
from sorder.optim import diagonal_update
from sorder.optim.diagonal_optimizer import DiagonalOptimizer, Estimator, check_common
from sorder.optim.diagonal_update import Rule, square_norm
from sorder.optim.reductions import Reduction
from sorder.optim.transaction import Transaction
from sorder.optim.validation import check_range


@dataclass(frozen=True)
class SophiaStep:
    """Record of one step of :class:`SophiaH` or :class:`SophiaG`.

    Attributes:
        step: its number, from 1. curvature_updated: whether an estimate entered the running mean.
        win_rate: share of coordinates that were not clipped, of those that took part. The paper keeps it between 0.1
            and 0.5 by the choice of gamma.
        curvature_norm: ‖h‖₂ of the running mean. update_norm: ‖lr·u‖₂, weight decay left out.
    """

    step: int
    curvature_updated: bool
    win_rate: float
    curvature_norm: float
    update_norm: float


class _Sophia(DiagonalOptimizer[SophiaStep]):
    """m ← β₁m + (1 − β₁)g, h ← β₂h + (1 − β₂)ĥ on update steps, p ← (1 − lr·decay)p − lr·clip(m / max(γh, ε), 1)."""

    OF_A_GROUP = (*DiagonalOptimizer.OF_A_GROUP, "gamma")

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_common(options)
        check_range(options, "gamma", 0.0, open_="low")

    def _average(self, group: dict[str, Any], h: list[Tensor], estimates: list[Tensor]) -> None:
        weight = 1.0 - group["betas"][1]
        torch._foreach_lerp_(h, [e.to(t.dtype) for e, t in zip(estimates, h, strict=True)], weight)

    def _rule(self, group: Mapping[str, Any], counts: Mapping[str, int]) -> Rule:
        lr, take = float(group["lr"]), 1.0 - float(group["betas"][0])
        return Rule(lr, 1.0 - lr * float(group["weight_decay"]), take, float(group["gamma"]), float(group["eps"]))

    def _record(self, taken: list[tuple[list[Tensor], Rule]]) -> SophiaStep:
        sums, total = [], 0
        for params, rule in taken:
            averages, h = self._averages(params)
            m = [a.to(wide_dtype(b.dtype)) for a, b in zip(averages, h, strict=True)]
            inside = torch.stack([(q.abs() < 1.0).sum() for q in diagonal_update.quotients(m, h, rule)]).sum()
            square = rule.lr**2 * square_norm(diagonal_update.directions(m, h, rule))
            sums.append(torch.stack([inside.to(square.dtype), square_norm(h), square]).cpu())
            total += sum(p.numel() for p in params)
        inside, curvature, update = torch.stack(sums).sum(0)
        share = float(inside) / max(1, total)
        return SophiaStep(self._number, self._updated, share, float(curvature**0.5), float(update**0.5))


class SophiaH(_Sophia):
    r"""Sophia with Hutchinson's estimate of the Hessian's diagonal.

    Liu, Li, Hall, Liang & Ma, *Sophia: A scalable stochastic second-order optimizer for language model pre-training*
    (2023, arXiv 2305.14342), algorithms 1 and 3. With g the gradient and ĥ = z∘Bz, B the Hessian and z random,

    - m ← β₁ m + (1 − β₁) g, without bias correction;
    - on update steps, the first and then every ``update_interval``-th: h ← β₂ h + (1 − β₂) ĥ;
    - p ← p − lr·weight_decay·p; then p ← p − lr·clip(m / max(γ h, ε), 1), coordinate by coordinate.

    So no coordinate moves by more than lr, and one of negative or no curvature moves by lr·sign(m).

    **Conventions.** ``lr``, ``gamma`` and ``weight_decay`` are the η, γ and λ above, with which the paper's later
    versions state algorithm 3.

    - Its first version clips at ρ: p ← p − η′·λ′·p − η′·clip(m / max(h, ε), ρ). That is ``lr`` = η′ρ, ``gamma`` = ρ,
      ``weight_decay`` = λ′/ρ.
    - The released code divides by rho·bs·h + 1e-15. Its ``lr`` and ``weight_decay`` are those of here, its ``rho``
      (0.04 by default, 0.05 for GPT-2 small) is ``gamma``, and its ``bs`` multiplies an h that is the square of a
      *mean* gradient of bs tokens: here h is the curvature itself, and nothing has to be told the batch size. Its
      loop takes the first estimate after ``update_interval`` steps, until when every step is lr·sign(m), and clips
      the norm of the sampled labels' gradient to 1; here, as in the paper, it comes before step 1, and is not clipped.

    **Choosing gamma and lr.** ``last_step.win_rate`` tells how γ does: the authors keep it in 0.1–0.5, highest at the
    beginning and stable afterwards. Larger γ, larger win rate. What fits is not the same everywhere:

    - |m| is mostly noise, which is less in a larger batch, as one over the root of its tokens; h is not less, and so
      the same win rate takes a smaller γ. The defaults are the authors', for half a million tokens a step; at 500
      tokens γ = 0.3 gave SophiaG 0.1–0.2 with β₂ = 0.95.
    - h begins at zero, is not corrected for that, and is at its level after ``update_interval``/(1 − β₂) steps: 1000
      by default. In a shorter run the win rate creeps up all the time; take a lower β₂, and a lower β₁, too: in 300
      steps of a small GPT (0.9, 0.95) was much better than (0.965, 0.95).
    - Where few coordinates win, a step is lr·sign(m), which is Lion's; a fifth of AdamW's rate is the usual one for
      that. In the range above the paper takes 0.8 of AdamW's rate, and the released code's advice is the same or
      slightly less, with twice the weight decay. Try rates between.

    Between updates ``loss.backward(); optimizer.step()`` is enough. On update steps (``curvature_due``) the Hessian
    comes from a closure: ``step(closure)``; or ``step(curvature_closure=...)`` for a part of the batch, with the
    gradient in ``.grad``; or ``update_curvature(closure)`` before ``step()``. A closure given on other steps is run
    for the gradient. A closure may run several times within a step and must see the same batch each time, so fetch the
    batch before it, not inside. With ``torch.amp.GradScaler`` call ``update_curvature`` with a closure for the
    unscaled loss, then ``scaler.step(optimizer)``: a step skipped for an overflow changes nothing.

    On a GPU a step between updates is two kernels over all parameters of a group: a search for gradients that are not
    finite, and the step, which obeys its finding (contiguous parameters of 16 or 32 bits; others, and other devices,
    take foreach operations). The host waits for the search alone.

    A step is a transaction: if a closure raises (KeyboardInterrupt included), or the loss, a gradient or an estimate
    is not finite, parameters, buffers, ``.grad``, state and random generators are as they were.

    Args:
        params: parameters or groups. Real floating-point; frozen ones are skipped. ``lr``, ``betas``, ``gamma``,
            ``eps``, ``weight_decay`` and ``state_dtype`` are of a group; the others are read from the first group, and
            another group may not be given other values of them.
        lr: η, the most that a coordinate moves. Default 1e-4.
        betas: β₁ and β₂. Default (0.965, 0.99).
        gamma: γ > 0; see above how to choose it. Default 0.01.
        eps: ε > 0, in units of curvature. Default 1e-12.
        weight_decay: decoupled. Default 0.1.
        update_interval: steps from one estimate to the next. Default 10.
        probes: Hessian–vector products per update. Default 1.
        distribution: "rademacher" (default) or "normal".
        estimator: "hutchinson" (default), "bekas", "exact" (as many products as parameters), or a callable (product,
            like, generator) ↦ diagonal as in :mod:`sorder.curvature.diagonal`.
        seed: of the probes, which are a function of it and of the number of the step. Default 0.
        maximize: maximise the loss. Default False.
        state_dtype: of m and h. Default None: the parameter's.
        attention: "exact" (default) routes ``F.scaled_dot_product_attention`` through :func:`sorder.attention` where
            closures run, as :func:`sorder.exact_attention` does; None leaves it.
        process_group: data-parallel ranks average the gradients and products of closures over it. Default None: the
            group of the DistributedDataParallel module that a closure calls, if it calls one.

    Attributes:
        last_step: :class:`SophiaStep` of the last step, or None. curvature_due: whether the next step updates h.

    Raises:
        ValueError: an option is out of range. TypeError: ``params`` is a module, or (by ``step``) what was given is no
            closure, or an update is due, and none was given.
        FloatingPointError: (by ``step``) something is not finite. Nothing has changed.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
        >>> optimizer = SophiaH(model.parameters(), lr=0.01, update_interval=2)
        >>> def closure():
        ...     return torch.nn.functional.cross_entropy(model(x), y)
        >>> updates = []
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     if optimizer.curvature_due:
        ...         optimizer.update_curvature(closure)
        ...     closure().backward()
        ...     optimizer.step()
        ...     updates.append(optimizer.last_step.curvature_updated)
        >>> updates
        [True, False, True, False]
    """

    KEY = "sophia_h"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.965, 0.99),
        gamma: float = 0.01,
        eps: float = 1e-12,
        weight_decay: float = 0.1,
        update_interval: int = 10,
        probes: int = 1,
        distribution: str = "rademacher",
        estimator: str | Estimator = "hutchinson",
        seed: int = 0,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        attention: str | None = "exact",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, locals(), process_group)


class SophiaG(_Sophia):
    r"""Sophia with the Gauss–Newton–Bartlett estimate: squared gradients of a loss with sampled labels.

    As :class:`SophiaH`, which see for the step, the conventions of lr, ρ and γ, and the ways to call it; Liu et al.
    2023, algorithms 2 and 3. The estimate is ĝ∘ĝ/N, ĝ the gradient of the summed loss of N rows whose labels were
    drawn from the model: in expectation the diagonal of the generalised Gauss–Newton matrix of the mean loss, and
    nonnegative. It costs a gradient and no second derivative.

    Its closure is not that of the loss: it returns ``gnb_loss(logits)``, a sum and its count of rows, so that no batch
    size has to be told, and the estimate is that of the whole batch however a sequence of closures splits it. A
    closure of one's own returns such a pair for any likelihood. Fetch the batch before the closures, not inside them:
    both are to see the same.

    ``optimizer.step(closure, curvature_closure=lambda: gnb_loss(model(x)))`` calls the second on update steps only;
    the other way is ``update_curvature(lambda: gnb_loss(model(x)))`` before ``step()``. Labels (and dropout in that
    closure) are a function of ``seed`` and the number of the step; random generators and buffers end up as before.

    Args:
        params, lr, betas, eps, weight_decay, update_interval, seed, state_dtype, attention, process_group: see
            :class:`SophiaH`.
        gamma: γ > 0. Default 0.05.
        maximize: maximise the loss of ``closure``; the curvature is positive either way. Default False.

    Attributes and errors: those of :class:`SophiaH`. ValueError: (by ``step`` and ``update_curvature``) the closure
    for the curvature returned something else than a sum and its count of rows.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 2)
        >>> x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
        >>> optimizer = SophiaG(model.parameters(), lr=0.01)
        >>> for _ in range(20):
        ...     loss = optimizer.step(
        ...         lambda: torch.nn.functional.cross_entropy(model(x), y),
        ...         curvature_closure=lambda: sorder.gnb_loss(model(x)),
        ...     )
        >>> optimizer.last_step.step, optimizer.last_step.curvature_updated
        (20, False)
    """

    KEY = "sophia_g"
    KIND = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.965, 0.99),
        gamma: float = 0.05,
        eps: float = 1e-12,
        weight_decay: float = 0.1,
        update_interval: int = 10,
        seed: int = 0,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        attention: str | None = "exact",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, locals(), process_group)

    def _estimate(
        self, point: CurvaturePoint, params: Sequence[Tensor], number: int, reduction: Reduction
    ) -> Sequence[Tensor]:
        counts = point.outputs if isinstance(point.outputs, list) else [point.outputs]
        rows = sum(int(c) for c in counts)
        if rows < 1:
            raise ValueError(f"curvature_closure must count at least one row, got {rows}")
        # A sum over the ranks from a mean: R·ĝ, and likewise R·N.
        mean_rows = reduction.mean_scalar(torch.tensor(float(rows), device=params[0].device))
        gradient = reduction.mean([g.to(torch.promote_types(g.dtype, torch.float32)) for g in point.gradient])
        return [d * reduction.size for d in gauss_newton_bartlett(gradient, mean_rows)]

    def _measure(self, closure: Any, params: list[Tensor], transaction: Transaction) -> list[tuple[Tensor, Tensor]]:
        counted = _counted(closure) if callable(closure) else [_counted(c) for c in closure]
        return super()._measure(counted, params, transaction)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        state = RandomState()
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        torch.manual_seed(self.param_groups[0]["seed"] + 7919 * self._number + 104729 * rank)
        try:
            yield
        finally:
            state.restore()

    def _own_randomness(self) -> AbstractContextManager[Any]:
        return self._seeded()

    def _how_to_update(self) -> str:
        return (
            f"step {self._number + 1} of SophiaG updates the curvature and needs a closure for it: "
            "optimizer.step(closure, curvature_closure=lambda: sorder.gnb_loss(model(x))), or "
            "optimizer.update_curvature(lambda: sorder.gnb_loss(model(x))) before optimizer.step(). "
            "optimizer.curvature_due tells when"
        )


def _counted(closure: Callable[[], Any]) -> Callable[[], Any]:
    """``closure``, checked to return the loss of sampled labels and its count of rows."""

    def checked() -> Any:
        result = closure()
        pair = isinstance(result, (tuple, list)) and len(result) == 2
        if not pair or not all(isinstance(r, Number) or _is_one_number(r) for r in result):
            raise ValueError(
                "curvature_closure (of update_curvature: closure) must return sorder.gnb_loss(logits), which is the "
                f"summed loss of rows with sampled labels, and their number, got {_described(result)}: wrap the "
                "logits, as in lambda: sorder.gnb_loss(model(x))"
            )
        return result

    return checked


def _is_one_number(x: Any) -> bool:
    """Of PyTorch's and NumPy's."""
    return hasattr(x, "shape") and math.prod(x.shape) == 1


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, (tuple, list)):
        return f"({', '.join(map(_described, result))})"
    return "None" if result is None else f"a {type(result).__name__}"
