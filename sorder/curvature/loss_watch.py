"""Watches a closure for calls of torch's loss functions that are convex in the model's outputs.

A generalised Gauss–Newton matrix needs the outputs z and the loss as a convex function of z (Schraudolph 2002). Where
a closure returns the loss only, they are found by watching: F.cross_entropy(z, y) names its z.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from sorder.func.ambient import FirstCallMode
from sorder.func.second_order import WRONG_IN_EVERY_MODE
from sorder.ops.versions import version_of

# Losses convex in their first argument for any constant target that they allow. nll_loss and kl_div are
# linear in log-probabilities, so their curvature is that of the log_softmax before them.
CONVEX_LOSSES = (
    F.cross_entropy,
    F.mse_loss,
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
    F.huber_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
    F.multilabel_soft_margin_loss,
    F.poisson_nll_loss,
)
AFTER_LOG_SOFTMAX = (F.nll_loss, F.kl_div)
LOG_SOFTMAXES = (F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax)
SIGMOIDS = (F.sigmoid, torch.sigmoid, Tensor.sigmoid, torch.special.expit)
# Functions before which a model may be split into outputs and loss.
SPLITS = frozenset((*CONVEX_LOSSES, *AFTER_LOG_SOFTMAX, *LOG_SOFTMAXES, *SIGMOIDS))

_SCALE = {
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__), 1),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.__truediv__), -1),
}
_ADD = frozenset((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_))
_NEGATE = frozenset((torch.neg, Tensor.neg, Tensor.__neg__, torch.negative, Tensor.negative))
_SAME = frozenset((Tensor.to, Tensor.float, Tensor.double, torch.squeeze, Tensor.squeeze))
# Linear with nonnegative coefficients; what a loss with reduction="none" goes through on its way to a scalar.
_POSITIVE = frozenset(
    getattr(owner, name)
    for name in ("sum", "mean", "flatten", "reshape", "view", "__getitem__", "masked_select", "stack", "cat")
    for owner in (torch, Tensor)
    if hasattr(owner, name)
)
_RESHAPES = frozenset((torch.flatten, Tensor.flatten, torch.reshape, Tensor.reshape, Tensor.view))


@dataclass(frozen=True, eq=False)
class WatchedCall:
    """A loss function's call: ``function(outputs, **arguments)``.

    Attributes:
        function: member of ``torch.nn.functional``; ``nll_loss(log_softmax(z))`` counts as ``cross_entropy(z)``.
        outputs: z, the tensor in which the loss is convex.
        arguments: the other arguments by name (target, weight, reduction, …), or None where the loss is not
            ``function`` of ``outputs`` themselves, as after a reshape of log-probabilities.
        position: number of the call before which z was met, and the name of its argument there.
        version: of the outputs when z was met.
    """

    function: Callable[..., Tensor]
    outputs: Tensor
    arguments: dict[str, Any] | None
    position: tuple[int, str]
    version: int

    def check_unchanged(self) -> None:
        """ValueError if the outputs were written to since: closed forms read them."""
        if version_of(self.outputs) != self.version:
            raise ValueError(
                f"the closure changed the outputs of shape {tuple(self.outputs.shape)} in place after "
                f"{self.function.__name__} had read them, so that their curvature cannot be told; work on a copy, as "
                "in p = logits.detach().clone()"
            )


@dataclass(frozen=True, eq=False)
class LossSum:
    """Σ scale·call, plus a constant.

    Attributes:
        terms: (call, scale) pairs.
        exact: False where the scales tell signs only, because tensors were multiplied element by element or reduced
            on the way.
        version: version of the tensor at record time; a later in-place operation makes the record void.
    """

    terms: tuple[tuple[WatchedCall, float], ...]
    exact: bool = True
    version: int = 0

    def convex(self, sign: float) -> bool:
        """Whether ``sign`` times the sum is convex in the outputs."""
        return all(sign * scale >= 0.0 for _, scale in self.terms)


@dataclass(frozen=True, eq=False)
class _Source:
    """Where log-probabilities or probabilities came from."""

    outputs: Tensor
    position: tuple[int, str]
    dim: int | None
    version: int
    direct: bool = True


@dataclass
class _Tables:
    sums: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    log_softmax: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    sigmoid: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)


class LossWatch(FirstCallMode):
    """Context in which losses are recorded; :meth:`find` tells whether a scalar is a sum of them.

    ``on_generator`` is called with every ``torch.Generator`` that an operation is about to draw from. ``seen`` names
    the losses met, ``wrong`` an operation met whose backward pass PyTorch differentiates wrongly.

    Example:
        >>> z = torch.randn(4, 3, requires_grad=True)
        >>> with LossWatch() as watch:
        ...     loss = torch.nn.CrossEntropyLoss()(z, torch.tensor([0, 1, 2, 0])) / 2
        >>> watch.find(loss).terms[0][0].outputs is z
        True
    """

    def __init__(self, on_generator: Callable[[torch.Generator], None] | None = None) -> None:
        super().__init__()
        self._on_generator = on_generator
        self._tables = _Tables()
        self._calls = 0
        self.seen: list[str] = []
        self.wrong: str | None = None

    def find(self, root: Tensor) -> LossSum | None:
        """The sum of losses that ``root`` is, or None."""
        found = self._tables.sums.get(root)
        return found if found is not None and found.terms and found.version == root._version else None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._on_generator is not None and isinstance(kwargs.get("generator"), torch.Generator):
            self._on_generator(kwargs["generator"])
        if function in SPLITS:
            return self._split(function, args, kwargs)
        if function in WRONG_IN_EVERY_MODE:
            self.wrong = function.__name__
        tracked = self._combine(function, args, kwargs) if len(self._tables.sums) else None
        result = function(*args, **kwargs)
        if tracked is not None and isinstance(result, Tensor):
            self._tables.sums[result] = LossSum(tracked.terms, tracked.exact, result._version)
        if function in _RESHAPES and args:
            source = self._tables.log_softmax.get(args[0])
            if source is not None:
                self._tables.log_softmax[result] = replace(source, direct=False)
        return result

    def _split(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._calls
        self._calls += 1
        name, first, others = bind(function, args, kwargs)
        version = version_of(first)
        result = function(*args, **kwargs)
        if not result.requires_grad:
            return result
        if function in LOG_SOFTMAXES or function in SIGMOIDS:
            table = self._tables.log_softmax if function in LOG_SOFTMAXES else self._tables.sigmoid
            table[result] = _Source(first, (number, name), others.get("dim"), version)
            return result
        if any(isinstance(t, Tensor) and t.requires_grad for t in others.values()):
            # A target or weight that depends on the parameters: convex in the outputs only for a square loss,
            # which is as good a function of its second argument.
            if function is F.mse_loss and not first.requires_grad:
                swapped = {**others, "target": first}
                target = others["target"]
                watched = WatchedCall(function, target, swapped, (number, "target"), version_of(target))
                self._record(result, watched)
            return result
        call: WatchedCall | None = None
        if function in AFTER_LOG_SOFTMAX:
            source = self._tables.log_softmax.get(first)
            if source is not None:
                direct = function is F.nll_loss and source.direct and _over_classes(source)
                arguments = others if direct else None
                call = WatchedCall(F.cross_entropy, source.outputs, arguments, source.position, source.version)
        elif function is F.binary_cross_entropy and first in self._tables.sigmoid:
            source = self._tables.sigmoid[first]
            call = WatchedCall(
                F.binary_cross_entropy_with_logits, source.outputs, others, source.position, source.version
            )
        else:
            call = WatchedCall(function, first, others, (number, name), version)
        if call is not None:
            self._record(result, call)
            if function.__name__ not in self.seen:
                self.seen.append(function.__name__)
        return result

    def _record(self, result: Tensor, call: WatchedCall) -> None:
        self._tables.sums[result] = LossSum(((call, 1.0),), True, result._version)

    def _lookup(self, value: Any) -> LossSum | None:
        """The sum that ``value`` is; an empty one for constants; None for what else needs a gradient."""
        if not isinstance(value, Tensor):
            return LossSum(())
        found = self._tables.sums.get(value)
        if found is not None:
            return found if found.version == value._version else None
        return None if value.requires_grad else LossSum(())

    def _combine(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossSum | None:
        """The sum that ``function(*args)`` will be, if it is linear in recorded losses. Called before it."""
        if function in _SAME and args:
            return self._tracked(args[0])
        if function in _NEGATE:
            found = self._tracked(args[0])
            return None if found is None else _scaled(found, -1.0)
        if function in _POSITIVE and args:
            parts = [self._lookup(t) for t in tree_leaves(args[0])]
            if all(part is not None for part in parts) and any(part.terms for part in parts if part):
                return LossSum(tuple(term for part in parts if part for term in part.terms), exact=False)
            return None
        if len(args) < 2:
            return None
        left, right = self._lookup(args[0]), self._lookup(args[1])
        if left is None or right is None or not (left.terms or right.terms):
            return None
        if function in _ADD and float(kwargs.get("alpha", 1.0)) == 1.0:
            return LossSum(left.terms + right.terms, left.exact and right.exact)
        if function in _SCALE:
            if left.terms and right.terms:
                return None
            found, factor = (left, args[1]) if left.terms else (right, args[0])
            power = _SCALE[function]
            if power < 0 and not left.terms:
                return None
            return _times(found, factor, power)
        return None

    def _tracked(self, value: Any) -> LossSum | None:
        found = self._lookup(value)
        return found if found is not None and found.terms else None


def _scaled(found: LossSum, factor: float) -> LossSum:
    return LossSum(tuple((call, scale * factor) for call, scale in found.terms), found.exact)


def _times(found: LossSum, factor: Any, power: int) -> LossSum | None:
    if isinstance(factor, complex) or (isinstance(factor, Tensor) and factor.is_complex()):
        return None
    if isinstance(factor, Tensor) and factor.numel() != 1:
        sign = 1.0 if bool((factor >= 0).all()) else -1.0 if bool((factor <= 0).all()) else 0.0
        return None if sign == 0.0 else LossSum(_scaled(found, sign).terms, exact=False)
    try:
        value = float(factor)
    except (TypeError, ValueError):  # torch decides whether it can be multiplied
        return None
    if value == 0.0 and power < 0:
        return None
    return _scaled(found, value**power)


def _over_classes(source: _Source) -> bool:
    """Whether the softmax runs over the dimension that nll_loss takes for classes."""
    rank = source.outputs.dim()
    return source.dim is not None and source.dim % rank == (0 if rank == 1 else 1)


_SIGNATURES = {
    torch.log_softmax: inspect.signature(lambda input, dim, dtype=None: None),
    Tensor.log_softmax: inspect.signature(lambda input, dim, dtype=None: None),
    torch.special.log_softmax: inspect.signature(lambda input, dim, dtype=None: None),
    **dict.fromkeys(SIGMOIDS, inspect.signature(lambda input: None)),
}


def bind(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, Tensor, dict[str, Any]]:
    """Name and value of the first argument, and the other arguments by name, defaults filled in."""
    signature = _SIGNATURES.get(function) or inspect.signature(function)
    bound = signature.bind(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    bound.apply_defaults()
    (name, first), *others = bound.arguments.items()
    return name, first, dict(others)
