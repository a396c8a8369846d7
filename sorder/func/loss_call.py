"""Recognises a loss function that ends in one of torch's losses with a closed-form output Hessian."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as _Reduction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from sorder.func import output_hessian as oh


@dataclass(frozen=True)
class LossCall:
    """A call of ``F.cross_entropy``, ``F.nll_loss``, ``F.mse_loss`` or ``F.binary_cross_entropy_with_logits``.

    Attributes:
        name: which, as named in ``torch.nn.functional``.
        input: logits or predictions.
        target: what they are compared with.
        options: the keyword arguments that the closed forms take, where they were given.
    """

    name: str
    input: Tensor
    target: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def hvp(self, tangent: Tensor) -> Tensor:
        """Hessian of the loss in ``input`` times ``tangent``, in closed form."""
        return _CLOSED_FORMS[self.name].hvp(self.input, self.target, tangent, **self.options)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn from the distribution that the loss is the −log likelihood of."""
        return _CLOSED_FORMS[self.name].sample(self, generator)

    def fvp(self, tangent: Tensor, labels: Tensor) -> Tensor:
        """Estimate of :meth:`hvp` from the outer product of the gradients at ``labels``."""
        return _CLOSED_FORMS[self.name].fvp(self.input, self.target, tangent, labels, **self.options)


def match_loss_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LossCall | None:
    """The :class:`LossCall` that ``func(*args, **kwargs)`` is, or None if it has no closed form here.

    A loss without reduction has none: what follows it decides what its rows count.
    """
    form = next((form for form in _CLOSED_FORMS.values() if form.function is func), None)
    if form is None:
        return None
    bound = dict(zip(form.parameters, args, strict=False)) | dict(kwargs)
    size_average, reduce = bound.pop("size_average", None), bound.pop("reduce", None)
    if size_average is not None or reduce is not None:
        bound["reduction"] = _Reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    if bound.get("reduction", "mean") not in ("mean", "sum"):
        return None
    input, target = bound.pop("input"), bound.pop("target")
    return LossCall(form.function.__name__, input, target, {k: v for k, v in bound.items() if v is not None})


def find_loss_call(loss_fn: Callable[[Any], Any], outputs: Any) -> LossCall | None:
    """The call whose result ``loss_fn(outputs)`` returns unchanged, if only views and casts lie before it.

    Neither the loss nor its gradient is computed: the call is answered by a placeholder. None if ``outputs`` meet any
    other operation, if anything is done to the call's result, or if it is not one of those above.
    """
    watch = _LossWatch(outputs)
    try:
        with watch:
            result = loss_fn(outputs)
    except Exception:  # a check on the loss's value may stumble over the placeholder
        return None
    return watch.call if watch.is_clean and watch.call is not None and result is watch.placeholder else None


@dataclass(frozen=True)
class _ClosedForm:
    function: Callable[..., Tensor]
    parameters: tuple[str, ...]
    hvp: Callable[..., Tensor]
    fvp: Callable[..., Tensor]
    sample: Callable[[LossCall, torch.Generator | None], Tensor]


def _sample_classes(call: LossCall, generator: torch.Generator | None) -> Tensor:
    ignore_index = call.options.get("ignore_index", -100)
    return oh.sample_cross_entropy_targets(call.input, call.target, generator, ignore_index=ignore_index)


_LEGACY = ("size_average", "ignore_index", "reduce", "reduction")
_CLOSED_FORMS = {
    form.function.__name__: form
    for form in (
        _ClosedForm(
            F.cross_entropy,
            ("input", "target", "weight", *_LEGACY, "label_smoothing"),
            oh.cross_entropy_hvp,
            oh.cross_entropy_fvp,
            _sample_classes,
        ),
        _ClosedForm(
            F.nll_loss,
            ("input", "target", "weight", *_LEGACY),
            oh.cross_entropy_hvp,
            oh.cross_entropy_fvp,
            _sample_classes,
        ),
        _ClosedForm(
            F.mse_loss,
            ("input", "target", "size_average", "reduce", "reduction", "weight"),
            oh.mse_hvp,
            oh.mse_fvp,
            lambda call, generator: oh.sample_mse_targets(call.input, generator),
        ),
        _ClosedForm(
            F.binary_cross_entropy_with_logits,
            ("input", "target", "weight", "size_average", "reduce", "reduction", "pos_weight"),
            oh.bce_with_logits_hvp,
            oh.bce_with_logits_fvp,
            lambda call, generator: oh.sample_bce_with_logits_targets(call.input, generator),
        ),
    )
}

_VIEW_NAMES = [
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "transpose",
    "permute",
    "movedim",
    "moveaxis",
    "swapaxes",
    "swapdims",
    "squeeze",
    "unsqueeze",
    "narrow",
    "select",
    "contiguous",
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "type_as",
    "t",
    "__getitem__",
    "index_select",
    "view_as",
    "reshape_as",
    "chunk",
    "split",
    "unbind",
    "masked_select",
]
# Linear in the outputs, so that no curvature is lost between them and the loss.
_LINEAR = {getattr(owner, name) for owner in (Tensor, torch) for name in _VIEW_NAMES if hasattr(owner, name)} | {
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")
}
_METADATA = {
    getattr(Tensor, name)
    for name in ["size", "dim", "ndimension", "numel", "stride", "is_contiguous", "is_floating_point"]
} | {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")}


class _LossWatch(TorchFunctionMode):
    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._derived = {id(t): t for t in tree_iter(outputs) if isinstance(t, Tensor)}
        self.call: LossCall | None = None
        self.placeholder: Tensor | None = None
        self.is_clean = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        if any(t is self.placeholder for t in tensors):
            self.is_clean = False
        derived = [t for t in tensors if id(t) in self._derived]
        if not derived:
            return func(*args, **kwargs)
        call = match_loss_call(func, args, kwargs)
        if call is not None and self.call is None and len(derived) == 1 and derived[0] is call.input:
            self.call = call
            self.placeholder = torch.zeros((), dtype=call.input.dtype, device=call.input.device)
            return self.placeholder
        result = func(*args, **kwargs)
        if func in _LINEAR:
            self._derived.update((id(t), t) for t in tree_iter(result) if isinstance(t, Tensor))
        elif func not in _METADATA:
            self.is_clean = False
        return result
