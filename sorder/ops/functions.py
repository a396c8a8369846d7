"""Four autograd Functions that call one another: attention closed under differentiation to second order.

    F --jvp--> J      F --backward--> B      B --jvp--> T      B --backward--> J, T      J --backward--> B, T
    T is linear in its tangents: with respect to them its jvp and backward are T and J again.

B's rules treat O and L as caches of (Q, K, V): the total derivative is in T, so no gradient flows to them. Absent
tangents and cotangents stay ``None`` all the way down, and their products are skipped. Every kernel launch inside a
rule goes through a Function's ``apply``, so that nested transforms never hand a kernel a wrapped tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function, forward_ad

from sorder.kernels.spec import AttentionSpec
from sorder.ops import maps

Optional = torch.Tensor | None

_LEAF = "torch::autograd::AccumulateGrad"
_THIRD_ORDER = (
    "sorder.attention has derivatives up to second order; this asks for a third. Take the highest one by finite "
    "differences of second-order products, or use materialised attention for this call "
    "(torch.nn.attention.sdpa_kernel(SDPBackend.MATH))."
)
_FORWARD_OVER_FORWARD = (
    "sorder.attention has no forward-over-forward derivative (jvp of jvp), and none of third order (jvp of an hvp). "
    "Second-order products are available as jvp of grad, grad of jvp, or grad of grad: for v'Hv use "
    "torch.func.jvp(torch.func.grad(f), (x,), (v,))."
)


def _wanted(ctx: Any) -> str:
    """The letters of q, k, v whose gradient the running backward pass uses: fewer than those that require one.

    A Gauss–Newton product by double backward, say, asks B for the gradient of dO alone, which J gives without T.
    """
    nodes = (node for node, _ in ctx.next_functions)
    return "".join(
        c
        for c, need, node in zip("qkv", ctx.needs_input_grad, nodes, strict=False)
        # To ask for a leaf may raise, which takes as long as a short kernel; leaves are hardly ever left out.
        if need and (node.name() == _LEAF or _runs(node))
    )


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for
        return True


def apply(function: type[Function], *args: Any) -> Any:
    """``function.apply``, or only its map where nothing can differentiate the call: first-order backward, inference."""
    nested = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return function.apply(*args) if nested or torch.is_grad_enabled() else function.forward(*args)


def _mapped(function: type[Function], info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    out = apply(function, *maps.moved_to_front(info.batch_size, in_dims, args))
    return out, tuple(None if x is None else 0 for x in out)


class Attention(Function):
    """F: (q, k, v, spec) → (o, lse)."""

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> Any:
        return maps.forward(q, k, v, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *qkv, ctx.spec = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*qkv, *output)
        ctx.save_for_forward(*qkv, *output)

    @staticmethod
    def backward(ctx: Any, do: Optional, dl: Optional) -> Any:
        if do is None and dl is None:
            return None, None, None, None
        grads = apply(AttentionBackward, *ctx.saved_tensors, do, dl, _wanted(ctx), ctx.spec)
        return *grads, None

    @staticmethod
    def jvp(ctx: Any, tq: Optional, tk: Optional, tv: Optional, _: None) -> Any:
        for name, x, t in zip(("query", "key", "value"), ctx.saved_tensors, (tq, tk, tv), strict=False):
            if t is not None and t.dtype != x.dtype:
                raise TypeError(f"the tangent of {name} must have its dtype {x.dtype}, got {t.dtype}")
        return apply(AttentionTangent, *ctx.saved_tensors, tq, tk, tv, ctx.spec)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(Attention, info, in_dims, args)


class AttentionTangent(Function):
    """J: (q, k, v, o, lse, q̇, k̇, v̇, spec) → (ȯ, l̇)."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return maps.tangent(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.spec = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, do: Optional, dl: Optional) -> Any:
        if do is None and dl is None:
            return (None,) * 9
        *caches, tq, tk, tv, to, tl = ctx.saved_tensors
        tangents_wanted = "".join(c for c, need in zip("qkv", ctx.needs_input_grad[5:8], strict=True) if need)
        of_tangents = apply(AttentionBackward, *caches, do, dl, tangents_wanted, ctx.spec)
        of_primals = apply(
            AttentionBackwardTangent, *caches, do, dl, tq, tk, tv, to, tl, None, None, _wanted(ctx), ctx.spec
        )
        return *of_primals, None, None, *of_tangents, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if any(t is not None for t in tangents[:3]):
            raise NotImplementedError(_FORWARD_OVER_FORWARD)
        return apply(AttentionTangent, *ctx.saved_tensors[:5], *tangents[5:8], ctx.spec)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(AttentionTangent, info, in_dims, args)


class AttentionBackward(Function):
    """B: (q, k, v, o, lse, do, dl, wanted, spec) → (dq, dk, dv)."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return maps.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.wanted, ctx.spec = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, tq: Optional, tk: Optional, tv: Optional) -> Any:
        if tq is None and tk is None and tv is None:
            return (None,) * 9
        *caches, do, dl = ctx.saved_tensors
        to, tl = apply(AttentionTangent, *caches, tq, tk, tv, ctx.spec)
        of_primals = apply(
            AttentionBackwardTangent,
            *caches,
            do,
            dl,
            tq,
            tk,
            tv,
            to,
            tl,
            None,
            None,
            _wanted(ctx),
            ctx.spec,
        )
        return *of_primals, None, None, None if do is None else to, None if dl is None else tl, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _tangent_of_backward(ctx, *tangents[:7])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(AttentionBackward, info, in_dims, args)


class AttentionBackwardTangent(Function):
    """T: (q, k, v, o, lse, do, dl, q̇, k̇, v̇, ȯ, l̇, dȯ, dl̇, wanted, spec) → (dq̇, dk̇, dv̇).

    T is linear in its tangents, and symmetric, so that the derivative of a product Hv with respect to v is T again.
    What a derivative with respect to the first seven would be is third order.
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        return maps.backward_tangent(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.wanted, ctx.spec = inputs
        ctx.set_materialize_grads(False)
        ctx.present = [i for i, x in enumerate(tensors) if x is not None]
        ctx.save_for_backward(*tensors[:7])
        ctx.save_for_forward(*tensors[:7])

    @staticmethod
    def backward(ctx: Any, tq: Optional, tk: Optional, tv: Optional) -> Any:
        gradients: list[Optional] = [None] * 16
        if tq is None and tk is None and tv is None:
            return tuple(gradients)
        nodes = zip(ctx.present, ctx.next_functions, strict=True)
        needed = {i for i, (node, _) in nodes if ctx.needs_input_grad[i] and _runs(node)}
        if any(i < 7 for i in needed):
            raise NotImplementedError(_THIRD_ORDER)
        *caches, do, dl = ctx.saved_tensors
        to, tl = apply(AttentionTangent, *caches, tq, tk, tv, ctx.spec)
        wanted = "".join(c for c, i in zip("qkv", (7, 8, 9), strict=True) if i in needed)
        gradients[7:10] = apply(
            AttentionBackwardTangent, *caches, do, dl, tq, tk, tv, to, tl, None, None, wanted, ctx.spec
        )
        gradients[12] = to if 12 in needed else None
        gradients[13] = tl if 13 in needed else None
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if any(t is not None for t in tangents[:7]):
            raise NotImplementedError(_THIRD_ORDER)
        return _tangent_of_backward(ctx, *tangents[7:14])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(AttentionBackwardTangent, info, in_dims, args)


def _tangent_of_backward(
    ctx: Any, tq: Optional, tk: Optional, tv: Optional, to: Optional, tl: Optional, tdo: Optional, tdl: Optional
) -> Any:
    """B's tangent at the saved (q, k, v, o, lse, do, dl)."""
    *caches, do, dl = ctx.saved_tensors
    if tq is None and tk is None and tv is None:  # B is linear in (dO, dL)
        return apply(AttentionBackward, *caches, tdo, tdl, ctx.wanted, ctx.spec)
    if to is None or tl is None:  # the caches' tangents did not come along
        to, tl = apply(AttentionTangent, *caches, tq, tk, tv, ctx.spec)
    return apply(AttentionBackwardTangent, *caches, do, dl, tq, tk, tv, to, tl, tdo, tdl, ctx.wanted, ctx.spec)


def _differentiable(function: type[Function], operator: Any) -> Any:
    """The operator's autograd: calls that a graph tracer recorded (torch.export, linearize) go through the Function."""

    def call(*args: Any) -> Any:
        *tensors, scale, causal, precision = args
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
            outputs = function.apply(*tensors, AttentionSpec(scale, causal, precision))
            return outputs if function in (Attention, AttentionTangent) else [x for x in outputs if x is not None]
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return call


for _function, _name in (
    (Attention, "forward"),
    (AttentionTangent, "tangent"),
    (AttentionBackward, "backward"),
    (AttentionBackwardTangent, "backward_tangent"),
):
    _operator = getattr(torch.ops.sorder, f"attention_{_name}")
    maps.library.impl(f"attention_{_name}", _differentiable(_function, _operator), "Autograd")
