"""A tensor map that keeps only its inputs, under any order and any mix of derivatives.

The derivative of a recomputed map is again a recomputed map: pulling back or pushing forward through ``m`` is the
map ``Vjp(m)`` or ``Jvp(m)``, which runs ``torch.func.vjp`` or ``torch.func.jvp`` over ``m`` when it is called. So
one ``autograd.Function`` is its own backward, its own jvp and its own vmap rule, and what a graph holds of it at any
order are tensors that went in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor
from torch._functorch import eager_transforms
from torch._functorch.utils import unwrap_dead_wrappers

from sorder.func.gradient import is_recorded
from sorder.ops.memo import Memo, remembering

Map = Callable[..., tuple[Tensor, ...]]


def recompute(function: Map, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``function(*tensors)``, saving only ``tensors`` for differentiation.

    ``function`` maps tensors to a tuple of tensors, is pure, and may be run again at any time.
    """
    return _Recompute.apply(function, *tensors)


@dataclass(frozen=True)
class _Vjp:
    """(cotangents of ``outputs``, inputs) ↦ cotangents of the inputs ``needed``."""

    function: Map
    needed: tuple[int, ...]
    outputs: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        cotangents, inputs = tensors[: len(self.outputs)], tensors[len(self.outputs) :]
        restricted = _restrict(self.function, inputs, self.needed, self.outputs)
        pull: Any = torch.func.vjp(restricted, *(inputs[i] for i in self.needed))[1]
        return pull(tuple(cotangents), retain_graph=False)


@dataclass(frozen=True)
class _Jvp:
    """(tangents of the inputs ``moving``, inputs) ↦ tangents of ``outputs``."""

    function: Map
    moving: tuple[int, ...]
    outputs: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        tangents, inputs = tensors[: len(self.moving)], tensors[len(self.moving) :]
        restricted = _restrict(self.function, inputs, self.moving, self.outputs)
        return _pushforward(restricted, [inputs[i] for i in self.moving], tangents)


@dataclass(frozen=True)
class _Vmap:
    function: Map
    in_dims: tuple[int | None, ...]
    batch_size: int
    randomness: str

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vmap(self.function, self.in_dims, randomness=self.randomness)(*tensors)


def _restrict(function: Map, inputs: Sequence[Tensor], moving: Sequence[int], outputs: Sequence[int]) -> Map:
    """``function`` of the inputs ``moving`` alone, giving ``outputs`` alone."""

    def restricted(*moved: Tensor) -> tuple[Tensor, ...]:
        arguments = list(inputs)
        for i, tensor in zip(moving, moved, strict=True):
            arguments[i] = tensor
        results = function(*arguments)
        return tuple(results[i] for i in outputs)

    return restricted


def _pushforward(function: Map, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if forward_ad._current_level < 0 or eager_transforms.JVP_NESTING > 0:
        return torch.func.jvp(function, tuple(primals), tuple(tangents))[1]
    # Inside a caller's own dual_level, which torch.func.jvp refuses to nest. A Function's jvp sees primals only, so
    # that the level is free to be used again here.
    with forward_ad._set_fwd_grad_enabled(True):
        duals = [forward_ad.make_dual(p.detach(), t) for p, t in zip(primals, tangents, strict=True)]
        unpacked = [forward_ad.unpack_dual(result) for result in function(*duals)]
    return tuple(torch.zeros_like(u.primal) if u.tangent is None else u.tangent for u in unpacked)


def _separate(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``outputs`` with copies of those that share memory with an input or with each other.

    autograd would ask for a tangent that is a view of the input's tangent, which a recomputation cannot give. Tensors
    of ``torch.autograd.grad(..., is_grads_batched=True)`` do not say what they share.
    """
    seen = {_address(tensor) for tensor in inputs} - {0}
    separate = []
    for output in outputs:
        shared = is_legacy_batchedtensor(output) or _address(output) in seen
        separate.append(output.clone() if shared else output)
        seen |= {_address(separate[-1])} - {0}
    return tuple(separate)


def _address(tensor: Tensor) -> int:
    # Forward AD's symbolic zeros have no storage to point at.
    return 0 if tensor._is_zerotensor() or is_legacy_batchedtensor(tensor) else tensor.untyped_storage().data_ptr()


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(function: Map, *inputs: Tensor) -> tuple[Tensor, ...]:
        with remembering(_memo(function)):
            return _separate(function(*inputs), inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.function = inputs[0]
        ctx.differentiable = tuple(i for i, o in enumerate(output) if _is_differentiable(o))
        ctx.mark_non_differentiable(*(o for o in output if not _is_differentiable(o)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients: list[Tensor | None] = [None] * (1 + len(inputs))
        outputs = tuple(i for i in ctx.differentiable if cotangents[i] is not None)
        needed = tuple(i for i, x in enumerate(inputs) if ctx.needs_input_grad[i + 1] and _is_differentiable(x))
        if outputs and needed:
            pullback = _Vjp(ctx.function, needed, outputs)
            arguments = unwrap_dead_wrappers((*(cotangents[i] for i in outputs), *inputs))
            memo = _memo(ctx.function)
            if memo is None or _may_be_recorded(arguments):
                pulled = _Recompute.apply(pullback, *arguments)
            else:  # values and tangents from one evaluation
                with remembering(memo, last=True):
                    pulled = pullback(*arguments)
            if memo is not None:
                memo.clear()
            for i, gradient in zip(needed, pulled, strict=True):
                gradients[i + 1] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        moving = tuple(i for i, t in enumerate(tangents) if t is not None)
        pushed: list[Tensor | None] = [None] * (max(ctx.differentiable, default=-1) + 1)
        results = _Recompute.apply(
            _Jvp(ctx.function, moving, ctx.differentiable), *(tangents[i] for i in moving), *inputs
        )
        for i, tangent in zip(ctx.differentiable, results, strict=True):
            pushed[i] = tangent
        return tuple(pushed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: Map, *inputs: Tensor) -> tuple[Any, Any]:
        mapped = _Vmap(function, tuple(in_dims[1:]), info.batch_size, info.randomness)
        outputs = _Recompute.apply(mapped, *inputs)
        return outputs, (0,) * len(outputs)


def _may_be_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether a graph of the running backward pass may be wanted, or ``vmap`` maps it."""
    kinds = [transform.key() for transform in get_interpreter_stack() or ()]
    levels = kinds.count(TransformType.Grad)
    if torch.is_grad_enabled() or levels > 1 or TransformType.Vmap in kinds:
        return True
    return levels == 1 and any(map(is_recorded, tensors))  # that no graph is wanted was said of the upper level only


def _memo(function: Any) -> Memo | None:
    """That of the map at the root, where forward mode will ask for its values again."""
    if forward_ad._current_level < 0 and eager_transforms.JVP_NESTING == 0:
        return None
    while isinstance(function, (_Vjp, _Jvp, _Vmap)):
        function = function.function
    return getattr(function, "memo", None)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
