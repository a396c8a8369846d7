"""A diagonal optimizer's steps between updates on a GPU: what the kernels need to know, kept from step to step.

Such a step takes about a millisecond, and the host prepares the next one while it runs. So it finds out no more than
whether the tensors are still the ones that it knows.
"""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if importlib.util.find_spec("triton") is not None:
    from sorder.kernels import diagonal_step as kernels
else:
    kernels = None  # type: ignore[assignment]
if TYPE_CHECKING:
    from sorder.kernels.diagonal_step import Batch, Flag
    from sorder.optim.diagonal_optimizer import DiagonalOptimizer
    from sorder.optim.diagonal_update import Rule

_PLAIN = (Tensor, torch.nn.Parameter)


class FusedStep:
    """The launches of one optimizer. :func:`fused_step` makes it where it can, and asks :meth:`is_current` later.

    It takes contiguous float32, float16 and bfloat16 tensors on one GPU; of subclasses of Tensor, Parameter alone.
    Between updates the parameters that take part are those with a gradient.
    """

    def __init__(self, optimizer: DiagonalOptimizer[Any], active: list[Tensor]) -> None:
        self.flag: Flag = kernels.Flag(active[0].device)
        self._params = _all(optimizer)
        self._active = active
        self._states = _states(optimizer)
        members: dict[tuple[Any, ...], list[Tensor]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p.requires_grad and p.grad is not None:
                    state = optimizer.state[p]
                    counts = tuple(optimizer._counts(state, updated=False).values())
                    key = (number, p.dtype, p.grad.dtype, state["exp_avg"].dtype, *counts)
                    members.setdefault(key, []).append(p)
        self._parts = [_Part(optimizer, key[0], key[2], params) for key, params in members.items()]

    def is_current(self, optimizer: DiagonalOptimizer[Any], active: list[Tensor]) -> bool:
        """Whether parameters, states and which of them have gradients are still the same."""
        return (
            _same(active, self._active)
            and _same(_all(optimizer), self._params)
            and _same(_states(optimizer), self._states)
            and all(part.is_current(optimizer) for part in self._parts)
        )

    def take(self, optimizer: DiagonalOptimizer[Any]) -> list[tuple[list[Tensor], Rule]] | None:
        """Take the step: parameters and the rule that they followed; None, and nothing has changed, if it cannot."""
        launches, taken, counted = [], [], []
        for part in self._parts:
            gradients: list[Any] = [p.grad for p in part.batch.params]
            if {(type(g), g.dtype, g.layout) for g in gradients} != {(Tensor, part.dtype, torch.strided)}:
                return None
            counts = optimizer._counts(part.states[0], updated=False)
            rule = optimizer._rule(optimizer.param_groups[part.group], counts)
            part.batch.set_gradients(gradients)
            launches.append((part.batch, rule._asdict()))
            taken.append((part.batch.params, rule))
            counted.append((part.states, counts))
        if not kernels.fused_step(launches, self.flag, optimizer.param_groups[0]["maximize"]):
            return None
        for states, counts in counted:
            for state in states if counts else ():
                state.update(counts)
        return taken


class _Part:
    """Parameters of one group, of the same dtypes and counts: one launch."""

    def __init__(self, optimizer: DiagonalOptimizer[Any], group: int, dtype: torch.dtype, params: list[Tensor]) -> None:
        self.group, self.dtype = group, dtype
        self.states = [optimizer.state[p] for p in params]
        self.batch: Batch = kernels.Batch(params, *_averages(optimizer, self.states))

    def is_current(self, optimizer: DiagonalOptimizer[Any]) -> bool:
        m, h = _averages(optimizer, self.states)
        if not (_same(m, self.batch.m) and _same(h, self.batch.h) and self.batch.in_place):
            return False
        counts = optimizer._counts(self.states[0], updated=False)
        return not counts or all(optimizer._counts(state, updated=False) == counts for state in self.states)


def fused_step(optimizer: DiagonalOptimizer[Any], kept: FusedStep | None) -> FusedStep | None:
    """``kept``, or what takes its place; None where the kernels do not serve, or an estimate is due."""
    active = [p for p in _all(optimizer) if p.requires_grad and p.grad is not None]
    if kernels is None or not active or not _on_gpu(active[0]):
        return None
    if kept is not None and kept.is_current(optimizer, active):
        return kept
    if optimizer.curvature_due or not all(optimizer.CURVATURE in optimizer.state.get(p, {}) for p in active):
        return None
    m, h = _averages(optimizer, [optimizer.state[p] for p in active])
    fits = all(serves(p, p.grad, a, b) for p, a, b in zip(active, m, h, strict=True))
    return FusedStep(optimizer, active) if fits and len({p.get_device() for p in active}) == 1 else None


def serves(p: Tensor, g: Tensor | None, m: Tensor, h: Tensor) -> bool:
    """Whether the kernels take these tensors."""
    return (
        type(p) in _PLAIN
        and type(g) is Tensor
        and g.layout is torch.strided
        and m.dtype is h.dtype
        and all(t.dtype in kernels.TYPES for t in (p, g, m))
        and p.is_contiguous() and m.is_contiguous() and h.is_contiguous()
        and p.get_device() == g.get_device() == m.get_device() == h.get_device()
    )  # fmt: skip


def update(params: list[Tensor], gradients: list[Tensor], m: list[Tensor], h: list[Tensor], rule: Rule) -> bool:
    """:func:`sorder.optim.diagonal_update.update` in one launch; False, and nothing has happened, where it cannot be.

    ``params`` are of one dtype and device, and the gradients are known to be finite.
    """
    if kernels is None or not _on_gpu(params[0]):
        return False
    fours = list(zip(params, gradients, m, h, strict=True))
    alike = len({(g.dtype, a.dtype) for _, g, a, _ in fours}) == 1
    if not (alike and all(serves(*four) for four in fours)):
        return False
    batch = kernels.Batch(params, m, h)
    batch.set_gradients(gradients)
    with torch.cuda.device_of(params[0]):
        batch.step(kernels.Flag(batch.device), **rule._asdict())
    return True


def _all(optimizer: DiagonalOptimizer[Any]) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _states(optimizer: DiagonalOptimizer[Any]) -> list[dict[str, Any]]:
    return [state for state in optimizer.state.values() if optimizer.CURVATURE in state]


def _averages(optimizer: DiagonalOptimizer[Any], states: list[dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    return [s["exp_avg"] for s in states], [s[optimizer.CURVATURE] for s in states]


def _same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether these are the same objects, in the same order."""
    a, b = list(a), list(b)
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _on_gpu(p: Tensor) -> bool:
    return p.is_cuda
