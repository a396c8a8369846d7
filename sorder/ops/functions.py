"""Four autograd Functions that call one another: attention closed under differentiation to second order.

    F --jvp--> J      F --backward--> B      B --jvp--> T      B --backward--> J, T      J --backward--> B, T
    T is linear in its tangents: with respect to them its jvp and backward are T and J again.

B's rules treat O and L as caches of (Q, K, V, bias): the total derivative is in T, so no gradient flows to them. Absent
tangents and cotangents stay ``None`` all the way down, and their products are skipped. Every kernel launch inside a
rule goes through a Function's ``apply``, so that nested transforms never hand a kernel a wrapped tensor. The tensors
of a Visibility are constants: one tuple, which autograd does not look into, or ``None``.

T needs the row sums of dO∘Ȯ more accurately than 16 bits of Ȯ give them. So J has a third output, what rounding Ȯ lost,
and forward AD carries it from F to B as the tangent of a third output of F, ``low``, whose own values nobody reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import forward_ad

from sorder.kernels import backward_and_tangent, forward_and_tangent
from sorder.kernels.mask import Visibility
from sorder.ops import maps
from sorder.ops.batching import batched, has_legacy_dim, legacy_rule, over_legacy_dim
from sorder.ops.levels import PLAIN, LeveledFunction
from sorder.ops.versions import version_of

Optional = torch.Tensor | None

_LEAF = "torch::autograd::AccumulateGrad"
_THIRD_ORDER = (
    "sorder.attention has derivatives up to second order; this asks for a third. Take the highest one by finite "
    "differences of second-order products, or call torch.nn.functional.scaled_dot_product_attention itself, outside of "
    "sorder.exact_attention() or within exact_attention(False), under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)
_FORWARD_OVER_FORWARD = (
    "sorder.attention has no forward-over-forward derivative (jvp of jvp), and none of third order (jvp of an hvp). "
    "Second-order products are available as jvp of grad, grad of jvp, or grad of grad: for v'Hv use "
    "torch.func.jvp(torch.func.grad(f), (x,), (v,))."
)

_TRACED = (
    "a traced graph with sorder's attention cannot be differentiated by torch.func; differentiate the function that it "
    "was traced from, or use torch.autograd"
)


def _wanted(ctx: Any) -> str:
    """The letters of q, k, v, bias whose gradient the running backward pass uses: fewer than those that require one.

    A Gauss–Newton product by double backward, say, asks B for the gradient of dO alone, which J gives without T.
    """
    nodes = (node for node, _ in ctx.next_functions)
    return "".join(
        c
        for c, need, node in zip("qkvb", ctx.needs_input_grad, nodes, strict=False)
        # To ask for a leaf may raise, which takes as long as a short kernel; leaves are hardly ever left out.
        if need and (node.name() == _LEAF or _runs(node))
    )


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for
        return True


def apply(function: type[LeveledFunction], *args: Any) -> Any:
    """``function.apply``, or only its map where nothing can differentiate the call: first-order backward, inference."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    if forward_ad._current_level < 0 and not torch.is_grad_enabled():
        return function.forward(*args)
    if has_legacy_dim(args):  # a graph on tensors that hide a dimension would not reach those inside
        return over_legacy_dim(lambda *a: apply(function, *a), args, loop=args[-1].dropout > 0)
    return function.apply(*args)


def attend(*args: Any) -> Any:
    """F's (o, lse) at (q, k, v, bias, vis, spec). A compiler sees the operator, which it does not enter."""
    if torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        return torch.ops.sorder.attention_forward(*maps.flat(args[:4], *args[4:]))
    if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
        return _eagerly(*args)
    return apply(Attention, *args)[:2]


@torch._disable_dynamo
def _eagerly(*args: Any) -> Any:
    """Under torch.func, compiled operators would lose their second derivatives: a graph break.

    Behind a graph break the compiler would begin anew, with the rules of the Functions below, and with the same loss.
    """
    return apply(Attention, *args)[:2]


def _mapped(
    function: type[LeveledFunction], info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    out = batched(lambda *a: apply(function, *a), info.batch_size, in_dims, args, loop=args[-1].dropout > 0)
    return out, tuple(None if x is None else 0 for x in out)


def _keep(ctx: Any, vis: Visibility | None) -> None:
    """Notes what is visible, and in which version: autograd watches differentiable inputs only."""
    ctx.vis = vis
    ctx.versions = None if vis is None else _versions(vis)


def _versions(vis: Visibility) -> list[int | None]:
    return [None if x is None else version_of(x) for x in vis]


def _caches(ctx: Any, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    """(q, k, v, bias, vis, o, lse, …) of the saved tensors."""
    if ctx.vis is not None and ctx.versions != _versions(ctx.vis):
        raise RuntimeError(
            "the attn_mask of a call of sorder.attention was modified in place between its forward pass and a "
            "derivative of it; give the call a clone"
        )
    return *saved[:4], ctx.vis, *saved[4:]


class Attention(LeveledFunction):
    """F: (q, k, v, bias, vis, spec) → (o, lse, low or None)."""

    @staticmethod
    def forward(*args: Any) -> Any:
        o, lse = maps.forward(*args)
        carries = forward_ad._current_level >= 0 and o.dtype.itemsize == 2
        return o, lse, torch.empty_like(o) if carries else None

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, bias, vis, ctx.spec = inputs
        _keep(ctx, vis)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, *output)
        ctx.save_for_forward(q, k, v, bias, *output)

    @staticmethod
    def backward(ctx: Any, do: Optional, dl: Optional, _: None) -> Any:
        if do is None and dl is None:
            return (None,) * 6
        grads = apply(AttentionBackward, *_caches(ctx, ctx.saved_tensors), do, dl, _wanted(ctx), ctx.spec)
        return *grads, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        names = ("query", "key", "value", "attn_mask")
        for name, x, t in zip(names, ctx.saved_tensors, tangents, strict=False):
            if t is not None and t.dtype != x.dtype:
                raise TypeError(f"the tangent of {name} must have its dtype {x.dtype}, got {t.dtype}")
            if t is not None and t.device != x.device:
                raise ValueError(f"the tangent of {name} must be on its device {x.device}, got {t.device}")
        to, tl, to_low = apply(AttentionTangent, *_caches(ctx, ctx.saved_tensors[:6]), *tangents[:4], ctx.spec)
        return to, tl, None if ctx.saved_tensors[6] is None else to_low

    @staticmethod
    def may_join(inputs: tuple[Any, ...]) -> bool:
        return forward_and_tangent.serves(*inputs)

    @staticmethod
    def joint(inputs: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        """F and J at once, where one sweep does both."""
        q, k, v, bias, vis, spec = inputs
        tq, tk, tv, tbias = tangents[:4]
        if any(t is not None and t.dtype != q.dtype for t in (tq, tk, tv)):  # jvp says what is wrong
            return None
        found = maps.forward_and_tangent(q, k, v, bias, vis, tq, tk, tv, tbias, spec)
        if found is None:
            return None
        o, lse, *of_tangents = found
        return (o, lse, torch.empty_like(o)), tuple(of_tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(Attention, info, in_dims, args)


class AttentionTangent(LeveledFunction):
    """J: (q, k, v, bias, vis, o, lse, q̇, k̇, v̇, biaṡ, spec) → (ȯ, l̇, what rounding ȯ lost or None)."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return maps.tangent(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *inputs4, vis = inputs[:5]
        _keep(ctx, vis)
        ctx.spec = inputs[-1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs4, *inputs[5:11], *output)
        ctx.save_for_forward(*inputs4, *inputs[5:7])

    @staticmethod
    def backward(ctx: Any, do: Optional, dl: Optional, _: None) -> Any:
        if do is None and dl is None:
            return (None,) * 12
        saved = ctx.saved_tensors
        caches = _caches(ctx, saved[:6])
        tangents_wanted = "".join(c for c, need in zip("qkvb", ctx.needs_input_grad[7:11], strict=True) if need)
        of_tangents = apply(AttentionBackward, *caches, None, do, dl, tangents_wanted, ctx.spec)
        of_primals = apply(AttentionBackwardTangent, *caches, do, dl, *saved[6:], None, None, _wanted(ctx), ctx.spec)
        return *of_primals, None, None, None, *of_tangents, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if any(t is not None for t in tangents[:4]):
            raise NotImplementedError(_FORWARD_OVER_FORWARD)
        return apply(AttentionTangent, *_caches(ctx, ctx.saved_tensors[:6]), *tangents[7:11], ctx.spec)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(AttentionTangent, info, in_dims, args)


class AttentionBackward(LeveledFunction):
    """B: (q, k, v, bias, vis, o, lse, low, do, dl, wanted, spec) → (dq, dk, dv, dbias)."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return maps.backward(*args[:7], *args[8:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *first, vis, o, lse, _, do, dl, ctx.wanted, ctx.spec = inputs
        _keep(ctx, vis)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*first, o, lse, do, dl)
        ctx.save_for_forward(*first, o, lse, do, dl)

    @staticmethod
    def backward(ctx: Any, *tangents: Optional) -> Any:
        if all(t is None for t in tangents):
            return (None,) * 12
        *saved, do, dl = ctx.saved_tensors
        caches = _caches(ctx, tuple(saved))
        to, tl, to_low = apply(AttentionTangent, *caches, *tangents, ctx.spec)
        of_primals = apply(
            AttentionBackwardTangent, *caches, do, dl, *tangents, to, tl, to_low, None, None, _wanted(ctx), ctx.spec
        )
        of_cotangents = (None if do is None else to, None if dl is None else tl)
        return *of_primals, None, None, None, None, *of_cotangents, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _tangent_of_backward(ctx, *tangents[:4], *tangents[5:10])

    @staticmethod
    def may_join(inputs: tuple[Any, ...]) -> bool:
        q, k, v, bias, vis, *_, spec = inputs
        return backward_and_tangent.serves(q, k, v, bias, vis, spec)

    @staticmethod
    def joint(inputs: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        """B and T at once, where one sweep does both."""
        q, k, v, bias, vis, o, lse, _, do, dl, wanted, spec = inputs
        tq, tk, tv, tbias, _, to, tl, to_low, tdo, tdl = tangents[:10]
        if any(x is not None and x.dtype != q.dtype for x in (do, tq, tk, tv, to, to_low, tdo)):  # jvp decides
            return None
        return maps.backward_and_tangent(
            q, k, v, bias, vis, o, lse, do, dl, tq, tk, tv, tbias, to, tl, to_low, tdo, tdl, wanted, spec
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(AttentionBackward, info, in_dims, args)


class AttentionBackwardTangent(LeveledFunction):
    """T: (q, k, v, bias, vis, o, lse, do, dl, q̇, k̇, v̇, biaṡ, ȯ, l̇, low, dȯ, dl̇, wanted, spec) → (dq̇, dk̇, dv̇, dbiaṡ).

    ``low`` is what rounding ȯ lost, or ``None``. T is linear in its tangents, and symmetric, so that the derivative of
    a product Hv with respect to v is T again. With respect to what comes before them it would be of third order.
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        return maps.backward_tangent(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *first, vis, o, lse, do, dl = inputs[:9]
        _keep(ctx, vis)
        ctx.wanted, ctx.spec = inputs[-2:]
        ctx.set_materialize_grads(False)
        ctx.present = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*first, o, lse, do, dl)
        ctx.save_for_forward(*first, o, lse, do, dl)

    @staticmethod
    def backward(ctx: Any, *tangents: Optional) -> Any:
        gradients: list[Optional] = [None] * 20
        if all(t is None for t in tangents):
            return tuple(gradients)
        nodes = zip(ctx.present, ctx.next_functions, strict=True)
        needed = {i for i, (node, _) in nodes if ctx.needs_input_grad[i] and _runs(node)}
        if any(i < 9 for i in needed):
            raise NotImplementedError(_THIRD_ORDER)
        *saved, do, dl = ctx.saved_tensors
        caches = _caches(ctx, tuple(saved))
        to, tl, to_low = apply(AttentionTangent, *caches, *tangents, ctx.spec)
        wanted = "".join(c for c, i in zip("qkvb", range(9, 13), strict=True) if i in needed)
        gradients[9:13] = apply(
            AttentionBackwardTangent, *caches, do, dl, *tangents, to, tl, to_low, None, None, wanted, ctx.spec
        )
        gradients[16] = to if 16 in needed else None
        gradients[17] = tl if 17 in needed else None
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if any(t is not None for t in tangents[:9]):
            raise NotImplementedError(_THIRD_ORDER)
        return _tangent_of_backward(ctx, *tangents[9:18])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(AttentionBackwardTangent, info, in_dims, args)


def _tangent_of_backward(ctx: Any, *tangents: Optional) -> Any:
    """B's tangent at the saved (q, k, v, bias, o, lse, do, dl).

    In the order (q̇, k̇, v̇, biaṡ, ȯ, l̇, low, dȯ, dl̇), as T takes them.
    """
    *inputs, to, tl, to_low, tdo, tdl = tangents
    *saved, do, dl = ctx.saved_tensors
    caches = _caches(ctx, tuple(saved))
    if all(t is None for t in inputs):  # B is linear in (dO, dL)
        return apply(AttentionBackward, *caches, None, tdo, tdl, ctx.wanted, ctx.spec)
    if to is None or tl is None:  # the caches' tangents did not come along
        to, tl, to_low = apply(AttentionTangent, *caches, *inputs, ctx.spec)
    return apply(AttentionBackwardTangent, *caches, do, dl, *inputs, to, tl, to_low, tdo, tdl, ctx.wanted, ctx.spec)


# The operators by themselves, as graph tracers (torch.export, linearize) record them: their autograd goes through the
# Functions, their vmap is that of the maps. An operator's arguments are flat: four tensors, the five of a Visibility,
# the map's own, and five of the spec.


def _is_dual(x: Any) -> bool:
    """Whether it has a tangent; compiled code enters a level without Python's ``forward_ad`` knowing of it."""
    return type(x) in PLAIN and not x.is_inference() and torch._VF._unpack_dual(x, level=0).tangent is not None


def _differentiable(function: type[LeveledFunction], operator: Any) -> Any:
    def call(*args: Any) -> Any:
        recorded = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        if recorded or forward_ad._current_level >= 0 or any(map(_is_dual, args)):
            if torch._C._are_functorch_transforms_active():
                raise NotImplementedError(_TRACED)
            inputs = maps.parsed(args)
            if function is AttentionBackward:
                inputs = (*inputs[:7], None, *inputs[7:])
            outputs = function.apply(*inputs)
            return outputs[:2] if function is Attention else [x for x in outputs if x is not None]
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return call


def _drops(args: tuple[Any, ...]) -> bool:
    return args[-2] > 0


def _vmap_rule(operator: Any) -> Any:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        outputs = batched(operator, info.batch_size, in_dims, args, _drops(args))
        return outputs, type(outputs)([0] * len(outputs))

    return rule


for _function, _name in (
    (Attention, "forward"),
    (AttentionTangent, "tangent"),
    (AttentionBackward, "backward"),
    (AttentionBackwardTangent, "backward_tangent"),
):
    _operator = getattr(torch.ops.sorder, f"attention_{_name}")
    maps.library.impl(f"attention_{_name}", _differentiable(_function, _operator), "Autograd")
    torch.library.register_vmap(f"sorder::attention_{_name}", _vmap_rule(_operator), lib=maps.library)
    maps.library.impl(f"attention_{_name}", legacy_rule(_operator, _drops), "Batched")
