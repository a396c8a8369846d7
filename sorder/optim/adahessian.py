"""AdaHessian: Adam with the curvature's diagonal, averaged over blocks, in the place of the gradient's square."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sorder.optim.diagonal_optimizer import DiagonalOptimizer, Estimator, check_common, check_range


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

    The blocks' mean is of D with its sign, as in the paper; the released code takes the mean of |D|, which is larger
    where signs differ. Without blocks the two are one. torch-optimizer's ``Adahessian`` takes the mean of |D| for
    weights of four dimensions, and for three (Conv1d) whatever it computed for the parameter before.

    It is called as :class:`sorder.optim.SophiaH` is; with ``update_interval`` 1 (the default) every step needs a
    closure. A step is a transaction in the same way.

    Args:
        params, probes, distribution, estimator, seed, maximize, state_dtype, attention, process_group: see
            :class:`sorder.optim.SophiaH`.
        lr: default 0.15. betas: β₁ and β₂. Default (0.9, 0.999). eps: ε > 0. Default 1e-4.
        weight_decay: decoupled. Default 0. hessian_power: k in [0, 1]. Default 1.
        block_size: length of blocks in rows of matrices, of a group. Default 1; the paper's transformers have 32.
        update_interval: steps from one estimate to the next. Default 1.

    Attributes:
        curvature_due: whether the next step updates v.

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "hessian_power": hessian_power,
            "block_size": block_size,
            "update_interval": update_interval,
            "probes": probes,
            "distribution": distribution,
            "estimator": estimator,
            "seed": seed,
            "maximize": maximize,
            "state_dtype": state_dtype,
            "attention": attention,
        }
        super().__init__(params, defaults, process_group)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_common(options)
        check_range(options, "hessian_power", 0.0, 1.0)
        if options["block_size"] != int(options["block_size"]) or options["block_size"] < 1:
            raise ValueError(f"block_size must be an integer of at least 1, got {options['block_size']!r}")

    def _apply(
        self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor], estimates: list[Tensor] | None
    ) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            for name in ("exp_avg", self.CURVATURE):
                if name not in state:
                    state[name] = torch.zeros_like(p, dtype=group["state_dtype"] or p.dtype)
            # Of each parameter: one may have joined later, and v counts updates, not steps.
            state["steps"] = state.get("steps", 0) + 1
            state["updates"] = state.get("updates", 0) + (estimates is not None)
        m, v = ([state[name] for state in states] for name in ("exp_avg", self.CURVATURE))
        torch._foreach_lerp_(m, [g.to(t.dtype) for g, t in zip(gradients, m, strict=True)], 1.0 - beta1)
        if estimates is not None:
            d = [spatial_average(e, group["block_size"]).to(t.dtype) for e, t in zip(estimates, v, strict=True)]
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, d, d, value=1.0 - beta2)
        below = list(torch._foreach_sqrt(v))
        torch._foreach_div_(below, [math.sqrt(1.0 - beta2 ** state["updates"]) for state in states])
        if group["hessian_power"] != 1.0:
            torch._foreach_pow_(below, group["hessian_power"])
        torch._foreach_add_(below, group["eps"])
        u = list(torch._foreach_div(m, below))
        torch._foreach_mul_(u, [-lr / (1.0 - beta1 ** state["steps"]) for state in states])
        if lr * group["weight_decay"]:
            torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        torch._foreach_add_(params, u)
