"""Norms, activations, losses and dropout written out, for transforms under which PyTorch's fail or are silently wrong.

Through torch 2.13:

- the forward-mode rules of ``layer_norm``, ``batch_norm`` and ``instance_norm`` take the saved statistics for
  constants when they are themselves differentiated (reverse over forward): silently wrong;
- the batching rule of ``layer_norm``'s second derivative errs where the weight's tangent is mapped, as
  ``torch.func.hessian`` maps it: silently wrong;
- ``mse_loss`` and ``huber_loss`` raise in forward over reverse;
- ``silu``, ``mish``, ``hardsigmoid``, ``group_norm`` and ``soft_margin_loss`` raise there unless the backward pass is
  recorded, and ``glu`` in reverse over forward;
- norms give 16-bit outputs a float32 tangent (:mod:`sorder.func.wide_norms`);
- the second derivatives of some factorisations, and of ``weight_norm``, are wrong (:mod:`sorder.func.second_order`);
- on CUDA, a softmax that widens its 16-bit input (as ``cross_entropy`` does under autocast) gives its 16-bit gradient a
  float32 tangent, over which the next matrix product raises;
- on CUDA, the backward of dropout has no forward-mode rule (2.11);
- products with the Hessian of ``cross_entropy`` hold many float32 copies of 16-bit logits (right, but costly).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as _Reduction

from sorder.func.cross_entropy import cross_entropy, logsumexp, serves
from sorder.func.second_order import COMPOSED
from sorder.func.wide_norms import WIDE_NORMS, ForwardMode, batch_norm, instance_norm, wide

# Logits from which on the memory that the closed forms save is worth the host's time for them, some milliseconds.
LARGE = 1 << 20


class WrittenOut(ForwardMode):
    """Within this mode losses and softmaxes are compositions of simpler operations, right everywhere.

    The cross-entropy and the log-sum-exp of many logits are those of :mod:`sorder.func.cross_entropy`.

    It also is a :class:`sorder.func.wide_norms.ForwardMode`.

    Args:
        norms: whether layer, batch and instance norm are, too.
        dropout: whether dropout is, too. It then draws other random numbers than PyTorch's.
    """

    def __init__(self, norms: bool, dropout: bool = False) -> None:
        super().__init__()
        self._replacements = (
            WIDE_NORMS
            | COMPOSED
            | _LOSSES
            | _ACTIVATIONS
            | _SOFTMAXES
            | (_NORMS if norms else {})
            | (_DROPOUTS if dropout else {})
        )


def _normalize(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # of torch.layer_norm
) -> Tensor:
    if input.shape[input.dim() - len(normalized_shape) :] != tuple(normalized_shape):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)  # raises
    x, dtype = wide(input)
    out = _normalize(x, tuple(range(-len(normalized_shape), 0)), eps)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(dtype)


def _channel_norm(
    input: Tensor, dims: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    x, dtype = wide(input)
    return _per_channel(_normalize(x, dims, eps), weight, bias).to(dtype)


def _per_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``x · weight + bias``, a number for each channel (dimension 1)."""
    shape = (1, -1) + (1,) * (x.dim() - 2)
    if weight is not None:
        x = x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:  # the statistics are constants, and PyTorch's rule is right
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    _refuse_statistics("batch_norm", running_mean)
    return _channel_norm(input, (0, *range(2, input.dim())), weight, bias, eps)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    x, dtype = wide(input)
    batch, channels = input.shape[:2]
    if channels % num_groups:
        return F.group_norm(input, num_groups, weight, bias, eps)  # raises
    out = _normalize(x.reshape(batch, num_groups, x.shape[1:].numel() // num_groups), (2,), eps).reshape(input.shape)
    return _per_channel(out, weight, bias).to(dtype)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    _refuse_statistics("instance_norm", running_mean)
    return _channel_norm(input, tuple(range(2, input.dim())), weight, bias, eps)


def _refuse_statistics(name: str, running: Tensor | None) -> None:
    if running is not None:
        raise NotImplementedError(
            f"{name} in training mode with running statistics is not served by reverse-over-forward or under vmap, "
            "where PyTorch's rule is wrong; use mode='forward-over-reverse' or track_running_stats=False"
        )


def _reduce(
    loss: Tensor, size_average: bool | None, reduce: bool | None, reduction: str, count: Tensor | None = None
) -> Tensor:
    """``count``: what a mean divides by, if not the number of entries."""
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    if reduction == "mean":
        return loss.mean() if count is None else loss.sum() / count
    return loss.sum() if reduction == "sum" else loss


def _weighted(loss: Tensor, weight: Tensor | None, input: Tensor) -> Tensor:
    if weight is None:
        return loss
    if weight.shape != input.shape:
        raise ValueError(f"weight and input must have the same size, got {tuple(weight.shape)}, {tuple(input.shape)}")
    return loss * weight


def _mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    loss = _weighted((input - target).square(), weight, input)
    return _reduce(loss, size_average, reduce, reduction, None if weight is None else weight.sum())


def _huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    error = (input - target).abs()
    loss = torch.where(error <= delta, 0.5 * error.square(), delta * (error - 0.5 * delta))
    # Unlike mse_loss's, PyTorch's mean counts every entry once.
    return _reduce(_weighted(loss, weight, input), None, None, reduction)


def _soft_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    return _reduce(F.softplus(-target * input), size_average, reduce, reduction)


def _gated(gate: Any) -> Any:
    """x ↦ x · gate(x), evaluated in float32 at least, as PyTorch's fused activations do."""

    def activation(input: Tensor, inplace: bool = False) -> Tensor:
        x = (input.clone() if inplace else input).to(torch.promote_types(input.dtype, torch.float32))
        out = (x * gate(x)).to(input.dtype)
        return input.copy_(out) if inplace else out

    return activation


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    out = (input / 6 + 0.5).clamp(0, 1)
    return input.copy_(out) if inplace else out


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    if input.shape[dim] % 2:
        return F.glu(input, dim)  # raises
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def _softmax_of_wide_input(function: Any) -> Any:
    """``function`` with its 16-bit input widened beforehand where autocast or ``dtype`` would widen it inside."""

    @functools.wraps(function)
    def wrapped(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.is_cuda and input.dtype in (torch.float16, torch.bfloat16):
            dtype = kwargs.get("dtype") or (torch.float32 if torch.is_autocast_enabled("cuda") else input.dtype)
            input = input.to(dtype)
        return function(input, *args, **kwargs)

    return wrapped


_cross_entropy_of_wide_input = _softmax_of_wide_input(F.cross_entropy)


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    closed = input.numel() >= LARGE and serves(input, target, *args, **kwargs)
    return (cross_entropy if closed else _cross_entropy_of_wide_input)(input, target, *args, **kwargs)


def _logsumexp(input: Tensor, dim: Any, keepdim: bool = False, **kwargs: Any) -> Tensor:
    closed = input.numel() >= LARGE and not kwargs
    return (logsumexp if closed else torch.logsumexp)(input, dim, keepdim, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not (input.is_cuda and training and 0.0 < p < 1.0) or inplace:
        return F.dropout(input, p, training, inplace)
    return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)


_DROPOUTS = {F.dropout: _dropout, torch.dropout: _dropout}
_SOFTMAXES = {
    function: _softmax_of_wide_input(function)
    for function in (
        F.log_softmax, F.softmax, torch.log_softmax, torch.softmax, Tensor.log_softmax, Tensor.softmax,
    )
}  # fmt: skip
_LOSSES = {
    F.cross_entropy: _cross_entropy,
    F.mse_loss: _mse_loss,
    F.huber_loss: _huber_loss,
    F.soft_margin_loss: _soft_margin_loss,
    torch.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
}
_ACTIVATIONS = {
    F.silu: _gated(torch.sigmoid),
    torch._C._nn.silu: _gated(torch.sigmoid),
    F.mish: _gated(lambda x: torch.tanh(F.softplus(x))),
    torch._C._nn.mish: _gated(lambda x: torch.tanh(F.softplus(x))),
    F.hardsigmoid: _hardsigmoid,
    torch._C._nn.hardsigmoid: _hardsigmoid,
    F.glu: _glu,
    F.group_norm: _group_norm,
}
_NORMS = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}
