"""Cross-entropy and log-sum-exp with derivatives in closed form, evaluated a block of rows at a time.

Of logits in bfloat16 PyTorch's cross-entropy holds float32 copies, and of their tangents, too: in a Hessian-vector
product, forward over reverse, twelve of them, which is twenty-four times the logits. Here logits, their tangent, their
gradient and its tangent are all that is ever whole, each in the dtype of the logits; between them all is float32
(float64 for float64), for a block of rows at once.

A row's loss is ℓ = own·(L − x_y) + k·Σ_c w_c·(L − x_c) with L = log Σ exp x: target y of weight own, label smoothing k.
With p = softmax(x) and m = own + k·Σw, the derivatives are those of m·L, but for terms linear in x (Schraudolph, *Fast
curvature matrix-vector products*, 2002). Four autograd Functions call one another:

    value ℓ        its tangent    ℓ̇ = m·pᵀẋ − own·ẋ_y − k·wᵀẋ
    gradient       x̄ = g·(m·p − own·e_y − k·w)
    its tangent    x̄̇ = g·m·p∘(ẋ − pᵀẋ) + ġ·(m·p − own·e_y − k·w)

    value --jvp--> tangent               value --backward--> gradient
    gradient --jvp--> gradient's tangent      gradient --backward--> gradient's tangent, tangent
    tangent --backward--> gradient, gradient's tangent

Forward over forward, and third order, are compositions of plain operations, for which whole float32 copies are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import _reduction as _Reduction

# A block has at most two float32 copies, 64 MiB together, and rows enough to occupy a GPU.
BLOCK_BYTES = 1 << 25

# (index y, own, k, w) of every row: None throughout for a log-sum-exp, and the last two without label smoothing.
Targets = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_NO_TARGETS: Targets = (None, None, None, None)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of class indices, differentiable any number of times, in every mode and under ``vmap``.

    Arguments, result and its dtype are those of ``F.cross_entropy``, for the cases of :func:`serves`.

    Example:
        >>> cross_entropy(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([1, -100]))
        tensor(0.6931)
    """
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    x = input.movedim(_class_dim(input), -1)
    wide = _wide(input)
    seen = target != ignore_index
    index = torch.where(seen, target, 0)
    own = seen.to(wide) if weight is None else torch.where(seen, weight.to(wide)[index], 0.0)
    divisor = own.sum() if reduction == "mean" else None
    smooth = per_class = None
    if label_smoothing > 0.0:
        smooth = seen.to(wide) * (label_smoothing / x.shape[-1])
        classes = x.shape[-1]
        per_class = torch.ones(classes, dtype=wide, device=x.device) if weight is None else weight.to(wide)
        own = own * (1.0 - label_smoothing)
    loss = _Value.apply(x, index, own, smooth, per_class)
    if reduction != "none":
        loss = loss.sum()
    if divisor is not None:
        # Without rows that count, the mean is nan, and its derivatives zero.
        counts = divisor != 0
        loss = torch.where(counts, loss / torch.where(counts, divisor, 1.0), torch.nan)
    return loss.to(_loss_dtype(input, ("cpu", "cuda")))


def serves(input: Any, target: Any, weight: Any = None, *legacy: Any, **kwargs: Any) -> bool:
    """Whether :func:`cross_entropy` takes these arguments of ``F.cross_entropy``.

    It takes class indices of int64 and constant weights, outside traced graphs. Of arguments that do not fit PyTorch
    is to tell.
    """
    if not (_is_plain(input) and input.dim() and _is_plain(target) and target.dtype == torch.int64):
        return False
    dim = _class_dim(input)
    shape = input.shape[:dim] + input.shape[dim + 1 :]
    names = ("size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    options = dict(zip(names, legacy, strict=False)) | kwargs
    smoothing = options.get("label_smoothing", 0.0)
    return (
        input.is_floating_point()
        and target.shape == shape
        and (weight is None or (_is_constant(weight) and weight.shape == input.shape[dim : dim + 1]))
        and options.get("reduction", "mean") in ("none", "mean", "sum")
        and 0.0 <= smoothing <= 1.0
        and not _is_traced()
    )


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """``torch.logsumexp`` over one dimension, differentiable as :func:`cross_entropy` is; over several, PyTorch's.

    Example:
        >>> logsumexp(torch.zeros(2, 3), 1)
        tensor([1.0986, 1.0986])
    """
    single = isinstance(dim, int) or len(dim) == 1
    if not (single and _is_plain(input) and input.is_floating_point() and input.dim()) or _is_traced():
        return torch.logsumexp(input, dim, keepdim)
    dim = dim if isinstance(dim, int) else dim[0]
    out = _Value.apply(input.movedim(dim, -1), *_NO_TARGETS).to(_loss_dtype(input, ("cuda",)))
    return out.unsqueeze(dim) if keepdim else out


def _is_traced() -> bool:
    """Whether a graph is recorded: by a compiler, which looks into no Function, or by a tracer.

    ``torch.func.linearize`` takes a traced graph apart and loses what is written in place.
    """
    tracer = torch._C._TorchDispatchModeKey.PROXY
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(tracer) is not None


def _is_plain(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided


def _is_constant(weight: Any) -> bool:
    if not _is_plain(weight) or weight.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(weight):
        return False
    return forward_ad._current_level < 0 or forward_ad.unpack_dual(weight).tangent is None


def _class_dim(logits: Tensor) -> int:
    return 0 if logits.dim() == 1 else 1


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _loss_dtype(input: Tensor, widening: tuple[str, ...]) -> torch.dtype:
    """Of PyTorch's result, which autocast widens on the device types ``widening``."""
    kind = input.device.type
    return _wide(input) if kind in widening and torch.is_autocast_enabled(kind) else input.dtype


# The Functions. Rows of x are its last dimension; g and ġ are shaped like x without it, and wide.


def _apply(function: type[Function], *args: Any) -> Tensor:
    """``function.apply``, or only its map where nothing can differentiate the call."""
    nested = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    result: Tensor = function.apply(*args) if nested or torch.is_grad_enabled() else function.forward(*args)
    return result


def _sum(*terms: Tensor | None) -> Tensor | None:
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


class _Rowwise(Function):
    """What the four have in common: all arguments are saved, and a mapped axis is one more dimension of rows."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Any) -> Any:
        def in_front(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None:
                return None
            return x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        *mapped, per_class = args
        return _apply(cls, *map(in_front, mapped, in_dims[:-1]), per_class), 0


class _Value(_Rowwise):
    """(x, targets) ↦ ℓ."""

    @staticmethod
    def forward(x: Tensor, *targets: Any) -> Tensor:
        return _value(x, targets)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        x, *targets = ctx.saved_tensors
        return None if g is None else _apply(_Gradient, x, g, *targets), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: None) -> Any:
        x, *targets = ctx.saved_tensors
        return _apply(_Tangent, x, dx, *targets)


class _Tangent(_Rowwise):
    """(x, ẋ, targets) ↦ ℓ̇."""

    @staticmethod
    def forward(x: Tensor, dx: Tensor, *targets: Any) -> Tensor:
        return _tangent(x, dx, targets)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return (None,) * 6
        x, dx, *targets = ctx.saved_tensors
        of_x, of_dx = ctx.needs_input_grad[:2]
        return (
            _apply(_GradientTangent, x, g, dx, None, *targets) if of_x else None,
            _apply(_Gradient, x, g, *targets) if of_dx else None,
            *_NO_TARGETS,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, ddx: Tensor | None, *_: None) -> Any:
        x, first, *targets = ctx.saved_tensors
        return _sum(
            None if dx is None else _covariance(x, first, dx, targets),
            None if ddx is None else _apply(_Tangent, x, ddx, *targets),
        )


class _Gradient(_Rowwise):
    """(x, g, targets) ↦ x̄."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, *targets: Any) -> Tensor:
        return _gradient(x, g, targets)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        if cotangent is None:
            return (None,) * 6
        x, g, *targets = ctx.saved_tensors
        of_x, of_g = ctx.needs_input_grad[:2]
        return (
            _apply(_GradientTangent, x, g, cotangent, None, *targets) if of_x else None,
            _apply(_Tangent, x, cotangent, *targets) if of_g else None,
            *_NO_TARGETS,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dg: Tensor | None, *_: None) -> Any:
        x, g, *targets = ctx.saved_tensors
        if dx is None:
            return _apply(_Gradient, x, dg, *targets)
        return _apply(_GradientTangent, x, g, dx, dg, *targets)


class _GradientTangent(_Rowwise):
    """(x, g, ẋ, ġ or None, targets) ↦ x̄̇. With respect to (ẋ, ġ) it is linear, and symmetric in ẋ."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, dx: Tensor, dg: Tensor | None, *targets: Any) -> Tensor:
        return _gradient_tangent(x, g, dx, dg, targets)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        if cotangent is None:
            return (None,) * 8
        x, g, dx, dg, *targets = ctx.saved_tensors
        of_x, of_g, of_dx, of_dg = ctx.needs_input_grad[:4]
        by_g = None if not of_x else _third(x, g, dx, cotangent, targets)
        by_dg = None if not of_x or dg is None else _apply(_GradientTangent, x, dg, cotangent, None, *targets)
        return (
            _sum(by_g, by_dg),
            _covariance(x, dx, cotangent, targets) if of_g else None,
            _apply(_GradientTangent, x, g, cotangent, None, *targets) if of_dx else None,
            _apply(_Tangent, x, cotangent, *targets) if of_dg else None,
            *_NO_TARGETS,
        )

    @staticmethod
    def jvp(ctx: Any, tx: Tensor | None, tg: Tensor | None, tdx: Tensor | None, tdg: Tensor | None, *_: None) -> Any:
        x, g, dx, dg, *targets = ctx.saved_tensors
        return _sum(
            None if tx is None else _third(x, g, dx, tx, targets),
            None if tx is None or dg is None else _apply(_GradientTangent, x, dg, tx, None, *targets),
            None if tg is None else _apply(_GradientTangent, x, tg, dx, None, *targets),
            None if tdx is None else _apply(_GradientTangent, x, g, tdx, None, *targets),
            None if tdg is None else _apply(_Gradient, x, tdg, *targets),
        )


# Beyond first order in x̄: plain operations, on the whole.


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1, dtype=_wide(x))


def _deviation(p: Tensor, u: Tensor) -> Tensor:
    return u - (p * u).sum(-1, keepdim=True)


def _covariance(x: Tensor, u: Tensor, v: Tensor, targets: Any) -> Tensor:
    """m·Cov(u, v) under p, of every row: the second derivative of ℓ along u and v."""
    p = _softmax(x)
    covariance = (p * _deviation(p, u) * _deviation(p, v)).sum(-1)
    mass = _mass(targets)
    return covariance if mass is None else covariance * mass


def _third(x: Tensor, g: Tensor, u: Tensor, v: Tensor, targets: Any) -> Tensor:
    """The third derivative of g·ℓ along u and v, shaped like ``x``."""
    p = _softmax(x)
    third = p * _deviation(p, _deviation(p, u) * _deviation(p, v))
    return (third * _scale(g, targets).unsqueeze(-1)).to(x.dtype)


# The maps, on plain tensors without graph.


def _mass(targets: Any) -> Tensor | None:
    """m of every row, None for ones."""
    _, own, smooth, per_class = targets
    return own if smooth is None else own + smooth * per_class.sum()


def _scale(g: Tensor, targets: Any) -> Tensor:
    mass = _mass(targets)
    return g if mass is None else g * mass


def _blocks(x: Tensor) -> Iterator[tuple[slice, ...]]:
    """Indices of blocks of rows of ``x``."""
    elements = BLOCK_BYTES // _wide(x).itemsize
    *steps, classes = (max(1, n) for n in x.shape)
    for i, rows in enumerate(steps):
        size = prod(steps) * classes
        if size > elements:
            steps[i] = max(1, rows * elements // size)
    ranges = (range(0, n, step) for n, step in zip(x.shape, steps, strict=False))
    for corner in itertools.product(*ranges):
        yield tuple(slice(a, a + step) for a, step in zip(corner, steps, strict=True))


def _dense(t: Tensor) -> Tensor:
    """``t``, where forward mode gives a symbolic zero, as zeros."""
    return t.new_zeros(()).expand(t.shape) if t._is_zerotensor() else t


def _value(x: Tensor, targets: Any) -> Tensor:
    index, own, smooth, per_class = targets
    out = x.new_empty(x.shape[:-1], dtype=_wide(x))
    for block in _blocks(x):
        if index is None:
            torch.logsumexp(x[block].to(out.dtype), -1, out=out[block])
            continue
        log_p = torch.log_softmax(x[block], -1, dtype=out.dtype)
        # A row of weight zero counts nothing, even where its loss is infinite.
        loss = _weighted(log_p.gather(-1, index[block].unsqueeze(-1)).squeeze(-1), own[block])
        if smooth is not None:
            loss += _weighted(log_p.mul_(per_class).sum(-1), smooth[block])
        out[block] = loss
    return out


def _weighted(log_p: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight == 0, 0.0, -log_p * weight)


def _tangent(x: Tensor, dx: Tensor, targets: Any) -> Tensor:
    index, own, smooth, per_class = targets
    dx, mass = _dense(dx), _mass(targets)
    out = x.new_empty(x.shape[:-1], dtype=_wide(x))
    for block in _blocks(x):
        p, u = _softmax(x[block]), dx[block]
        tangent = p.mul_(u).sum(-1)
        if mass is not None:
            tangent *= mass[block]
            tangent -= own[block] * u.gather(-1, index[block].unsqueeze(-1)).squeeze(-1)
        if smooth is not None:
            tangent -= smooth[block] * torch.mul(u, per_class, out=p).sum(-1)
        out[block] = tangent
    return out


def _gradient(x: Tensor, g: Tensor, targets: Any) -> Tensor:
    g, scale = _dense(g), _scale(_dense(g), targets)
    out = torch.empty_like(x)
    for block in _blocks(x):
        p = _softmax(x[block]).mul_(scale[block].unsqueeze(-1))
        out[block] = _minus_targets(p, g[block], block, targets)
    return out


def _gradient_tangent(x: Tensor, g: Tensor, dx: Tensor, dg: Tensor | None, targets: Any) -> Tensor:
    scale, dx = _scale(_dense(g), targets), _dense(dx)
    dg = None if dg is None or dg._is_zerotensor() else dg
    d_scale = None if dg is None else _scale(dg, targets)
    out = torch.empty_like(x)
    for block in _blocks(x):
        p, u, rows = _softmax(x[block]), dx[block], scale[block].unsqueeze(-1)
        temporary = p * u
        shift = rows * temporary.sum(-1, keepdim=True)
        if d_scale is not None:
            shift -= d_scale[block].unsqueeze(-1)
        torch.mul(u, rows, out=temporary).sub_(shift)
        if dg is None:
            torch.mul(p, temporary, out=out[block])
        else:
            out[block] = _minus_targets(p.mul_(temporary), dg[block], block, targets)
    return out


def _minus_targets(p: Tensor, g: Tensor, block: tuple[slice, ...], targets: Any) -> Tensor:
    """``p``, in place, less g·(own·e_y + k·w) in every row."""
    index, own, smooth, per_class = targets
    if index is not None:
        p.scatter_add_(-1, index[block].unsqueeze(-1), (-g * own[block]).unsqueeze(-1))
    if smooth is not None:
        p.addcmul_((g * smooth[block]).unsqueeze(-1), per_class, value=-1.0)
    return p
