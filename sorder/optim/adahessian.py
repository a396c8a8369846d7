"""AdaHessian: Adam with the curvature's diagonal, averaged over blocks, in the place of the gradient's square."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sorder.linalg.pytree import wide_dtype
from sorder.optim.diagonal_optimizer import DiagonalOptimizer, Estimator, check_common, check_range

BLOCK_AVERAGES = ("signed", "absolute")


@dataclass(frozen=True)
class AdaHessianStep:
    """Record of one step of :class:`AdaHessian`.

    Attributes:
        step: its number, from 1. curvature_updated: whether an estimate entered the running mean.
        curvature_norm: ‖v̂^½‖₂, v̂ the running mean of squares, corrected for bias. update_norm: ‖lr·u‖₂, weight decay
            left out.
    """

    step: int
    curvature_updated: bool
    curvature_norm: float
    update_norm: float


def spatial_average(diagonal: Tensor, block_size: int) -> Tensor:
    """Mean of ``diagonal`` over each block, in its place (Yao et al. 2020, eq. 10 and figure 2).

    A block is a kernel's spatial extent for weights of convolutions (three dimensions or more), and ``block_size``
    neighbouring entries of a row for matrices; the last one of a row may be shorter. Vectors stay as they are.

    Example:
        >>> spatial_average(torch.tensor([[1.0, 3.0, 5.0]]), 2)
        tensor([[2., 2., 5.]])
    """
    if diagonal.dim() >= 3:
        return diagonal.mean(tuple(range(2, diagonal.dim())), keepdim=True).expand_as(diagonal)
    if diagonal.dim() == 2 and block_size > 1:
        return torch.cat([b.mean(-1, keepdim=True).expand_as(b) for b in diagonal.split(block_size, -1)], -1)
    return diagonal


class AdaHessian(DiagonalOptimizer):
    r"""AdaHessian (Yao et al., *ADAHESSIAN: An adaptive second order optimizer for machine learning*, 2020).

    With g the gradient and D = z∘Bz, B the Hessian and z random, averaged over blocks (:func:`spatial_average`), after
    arXiv 2006.00719, algorithm 1:

    - m ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) D∘D, the latter on update steps only, both corrected for bias;
    - p ← p − lr·(m̂ / (v̂^(k/2) + ε) + weight_decay·p), k the Hessian power.

    **Conventions.** The paper averages D over a block with its sign (eq. 10); all released code averages |D|, which is
    larger where signs differ: ``block_average`` says which. In blocks of one the two are the same rule. Released
    blocks: the authors' ``image_classification`` optimizer has those of here with ``block_size`` 1, but for weights of
    three dimensions (Conv1d), where it, and torch-optimizer's ``Adahessian`` after it, use what they computed for the
    parameter before; the one in ``transformer`` cuts a flattened matrix, which is ``block_size`` wherever that divides
    the rows, and the one in ``instruction`` by default takes whole rows: ``block_size`` of a row's length.
    torch-optimizer's ``hessian_power`` is 0.5 by default, the authors' and ours 1.

    **Speed.** A step is a dozen foreach operations, on a GPU too; with estimates at every step it is small beside the
    Hessian–vector product.

    It is called as :class:`sorder.optim.SophiaH` is; with ``update_interval`` 1 (the default) every step needs a
    closure. A step is a transaction in the same way.

    Args:
        params, probes, distribution, estimator, seed, maximize, state_dtype, attention, process_group: see
            :class:`sorder.optim.SophiaH`.
        lr: default 0.15. betas: β₁ and β₂. Default (0.9, 0.999). eps: ε > 0. Default 1e-4.
        weight_decay: decoupled. Default 0. hessian_power: k in [0, 1]. Default 1.
        block_size: length of blocks in rows of matrices, of a group. Default 1; the paper's transformers have 32.
        block_average: "signed" (default; the paper) or "absolute" (released code): mean of D or of |D|. Of a group.
        update_interval: steps from one estimate to the next. Default 1.

    Attributes:
        last_step: :class:`AdaHessianStep` of the last step, or None. curvature_due: whether the next step updates v.

    Raises:
        ValueError: an option is out of range. TypeError: (by ``step``) an update is due, and no closure was given.
        FloatingPointError: (by ``step``) something is not finite. Nothing has changed.

    Example:
        >>> x = torch.tensor([3.0, -2.0], requires_grad=True)
        >>> optimizer = AdaHessian([x], lr=1.0)
        >>> loss = optimizer.step(lambda: (x**2).sum())
        >>> x.detach().abs().max() < 1e-3
        tensor(True)
    """

    CURVATURE = "exp_hessian_diag_sq"

    def __init__(
        self,
        params: Any,
        lr: float = 0.15,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        hessian_power: float = 1.0,
        block_size: int = 1,
        block_average: str = "signed",
        update_interval: int = 1,
        probes: int = 1,
        distribution: str = "rademacher",
        estimator: str | Estimator = "hutchinson",
        seed: int = 0,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        attention: str | None = "exact",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "hessian_power": hessian_power,
            "block_size": block_size,
            "block_average": block_average,
            "update_interval": update_interval,
            "probes": probes,
            "distribution": distribution,
            "estimator": estimator,
            "seed": seed,
            "maximize": maximize,
            "state_dtype": state_dtype,
            "attention": attention,
        }
        self._taken: list[tuple[list[Tensor], dict[str, Any]]] = []
        self._last_step: AdaHessianStep | None = None
        super().__init__(params, defaults, process_group)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_common(options)
        check_range(options, "hessian_power", 0.0, 1.0)
        if options["block_size"] != int(options["block_size"]) or options["block_size"] < 1:
            raise ValueError(f"block_size must be an integer of at least 1, got {options['block_size']!r}")
        if options["block_average"] not in BLOCK_AVERAGES:
            raise ValueError(f"block_average must be 'signed' or 'absolute', got {options['block_average']!r}")

    @property
    def last_step(self) -> AdaHessianStep | None:
        """:class:`AdaHessianStep` of the last step, or None. Computed when it is asked for."""
        if self._last_step is None and self._taken:
            curvature = update = 0.0
            for params, options in self._taken:
                u, root = self._direction(params, options)
                curvature += _square(root)
                update += options["lr"] ** 2 * _square(u)
            self._last_step = AdaHessianStep(self._number, self._updated, math.sqrt(curvature), math.sqrt(update))
        return self._last_step

    def _finish(self, *args: Any, **kwargs: Any) -> None:
        self._taken, self._last_step = [], None
        super()._finish(*args, **kwargs)

    def _apply(
        self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor], estimates: list[Tensor] | None
    ) -> None:
        (beta1, beta2) = group["betas"]
        options = {"lr": float(group["lr"])} | {n: group[n] for n in ("betas", "eps", "hessian_power")}
        for p in params:
            state = self.state[p]
            for name in ("exp_avg", self.CURVATURE):
                if name not in state:
                    state[name] = torch.zeros_like(p, dtype=group["state_dtype"] or p.dtype)
            # Of each parameter: one may have joined later, and v counts updates, not steps.
            state["steps"] = state.get("steps", 0) + 1
            state["updates"] = state.get("updates", 0) + (estimates is not None)
        m, v = ([self.state[p][name] for p in params] for name in ("exp_avg", self.CURVATURE))
        torch._foreach_lerp_(m, [g.to(t.dtype) for g, t in zip(gradients, m, strict=True)], 1.0 - beta1)
        if estimates is not None:
            signed = group["block_average"] == "signed"
            d = [spatial_average(e if signed else e.abs(), group["block_size"]) for e in estimates]
            d = [e.to(t.dtype) for e, t in zip(d, v, strict=True)]
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, d, d, value=1.0 - beta2)
        u, _ = self._direction(params, options)
        if options["lr"] * group["weight_decay"]:
            torch._foreach_mul_(params, 1.0 - options["lr"] * group["weight_decay"])
        torch._foreach_add_(params, u, alpha=-options["lr"])
        self._taken.append((params, options))

    def _direction(self, params: list[Tensor], options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """m̂ / (v̂^(k/2) + ε), and v̂^½."""
        (beta1, beta2), states = options["betas"], [self.state[p] for p in params]
        root = list(torch._foreach_sqrt([state[self.CURVATURE] for state in states]))
        torch._foreach_div_(root, [math.sqrt(1.0 - beta2 ** state["updates"]) for state in states])
        power = options["hessian_power"]
        below = list(torch._foreach_add(root if power == 1.0 else torch._foreach_pow(root, power), options["eps"]))
        u = list(torch._foreach_div([state["exp_avg"] for state in states], below))
        torch._foreach_div_(u, [1.0 - beta1 ** state["steps"] for state in states])
        return u, root

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the optimizer then continues as the one that saved it, options included."""
        super().load_state_dict(state_dict)
        self._taken, self._last_step = [], None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_taken": self._taken, "_last_step": self._last_step}


def _square(tensors: list[Tensor]) -> float:
    return sum(float(n) ** 2 for n in torch._foreach_norm([t.to(wide_dtype(t.dtype)) for t in tensors]))
