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
from sorder.optim import diagonal_update
from sorder.optim.diagonal_optimizer import DiagonalOptimizer, Estimator, check_common
from sorder.optim.diagonal_update import Rule, square_norm
from sorder.optim.validation import check_integer, check_range

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


class AdaHessian(DiagonalOptimizer[AdaHessianStep]):
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

    It is called as :class:`sorder.optim.SophiaH` is; with ``update_interval`` 1 (the default) every step needs a
    closure, which may run several times within the step and must see the same batch each time, so fetch the batch
    before it, not inside. A step is a transaction in the same way, and on a GPU the same kernels take it.

    Args:
        params, probes, distribution, estimator, seed, maximize, state_dtype, attention, process_group: see
            :class:`sorder.optim.SophiaH`.
        lr: default 0.15. betas: β₁ and β₂. Default (0.9, 0.999). eps: ε > 0. Default 1e-4.
        weight_decay: decoupled. Default 0. hessian_power: k in [0, 1], of a group. Default 1.
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

    KEY = "adahessian"
    CURVATURE = "exp_hessian_diag_sq"
    OF_A_GROUP = (*DiagonalOptimizer.OF_A_GROUP, "hessian_power", "block_size", "block_average")

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
        super().__init__(params, locals(), process_group)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_common(options)
        check_range(options, "hessian_power", 0.0, 1.0)
        check_integer(options, "block_size", 1)
        if options["block_average"] not in BLOCK_AVERAGES:
            raise ValueError(f"block_average must be 'signed' or 'absolute', got {options['block_average']!r}")

    def _average(self, group: dict[str, Any], h: list[Tensor], estimates: list[Tensor]) -> None:
        signed, beta2 = group["block_average"] == "signed", group["betas"][1]
        blocks = [spatial_average(e if signed else e.abs(), group["block_size"]) for e in estimates]
        blocks = [e.to(t.dtype) for e, t in zip(blocks, h, strict=True)]
        torch._foreach_mul_(h, beta2)
        torch._foreach_addcmul_(h, blocks, blocks, value=1.0 - beta2)

    def _counts(self, state: Mapping[str, Any], updated: bool) -> dict[str, int]:
        # Of each parameter: one may have joined later, and v counts updates, not steps.
        return {"steps": state.get("steps", 0) + 1, "updates": state.get("updates", 0) + updated}

    def _rule(self, group: Mapping[str, Any], counts: Mapping[str, int]) -> Rule:
        (beta1, beta2), lr = map(float, group["betas"]), float(group["lr"])
        return Rule(
            lr / (1.0 - beta1 ** counts["steps"]),
            1.0 - lr * float(group["weight_decay"]),
            1.0 - beta1,
            1.0 / math.sqrt(1.0 - beta2 ** counts["updates"]),
            float(group["eps"]),
            float(group["hessian_power"]),
        )

    def _record(self, taken: list[tuple[list[Tensor], Rule]]) -> AdaHessianStep:
        curvature = update = 0.0
        for params, rule in taken:
            averages, v = self._averages(params)
            m = [a.to(wide_dtype(b.dtype)) for a, b in zip(averages, v, strict=True)]
            curvature += rule.scale**2 * float(sum(t.sum(dtype=wide_dtype(t.dtype)) for t in v))
            update += rule.lr**2 * float(square_norm(diagonal_update.directions(m, v, rule)))
        return AdaHessianStep(self._number, self._updated, math.sqrt(curvature), math.sqrt(update))
