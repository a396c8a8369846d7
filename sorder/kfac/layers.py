"""Which calls of torch functions are layers whose curvature has Kronecker structure, and their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """How a call's tensors divide into samples and positions.

    Attributes:
        sequence_first: (length, batch) inside ``F.multi_head_attention_forward``, where the batch comes second;
            otherwise None, and the first dimension of a tensor counts the samples.
    """

    sequence_first: tuple[int, int] | None = None

    def split(self, x: Tensor) -> Tensor:
        """(…, features) as (samples, positions, 1, features)."""
        if x.dim() == 1:
            x = x[None]
        if self.sequence_first is not None:
            length, batch = self.sequence_first
            if x.dim() == 2 and x.shape[0] == length * batch:
                x = x.unflatten(0, (length, batch))
            if x.dim() == 3:
                x = x.transpose(0, 1)
        return x.reshape(x.shape[0], prod(x.shape[1:-1]), 1, x.shape[-1])


@dataclass(frozen=True)
class Layer:
    """One call of a layer.

    Attributes:
        kind: for reports, and of the block.
        weight, bias: the tensors given for parameters, or None.
        inputs: () ↦ what multiplies the weight, (samples, positions, groups, n); token numbers (samples, positions) for
            an embedding; None where the parameters enter linearly, each entry by itself.
        outputs: derivative with respect to the call's result ↦ that with respect to the product of weight and input,
            (samples, positions, groups, m).
        transposed: the weight is (n, m). groups: of a convolution. vectors: the parameters of a stack.
    """

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    inputs: Callable[[], Tensor] | None
    outputs: Callable[[Tensor], Tensor]
    transposed: bool = False
    groups: int = 1
    vectors: tuple[Tensor, ...] = ()


def match_layer(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Rows) -> Layer | None:
    """The layer that ``function(*args, **kwargs)`` is, or None.

    Tensors should be detached: the layer keeps them.
    """
    known = _LAYERS.get(function)
    if known is None:
        return None
    names, build = known
    return build(dict(zip(names, args, strict=False)) | kwargs, rows)


def _linear(bound: dict[str, Any], rows: Rows) -> Layer:
    x = bound["input"]
    return Layer("linear", bound["weight"], bound.get("bias"), lambda: rows.split(x), rows.split)


def _addmm(bound: dict[str, Any], rows: Rows) -> Layer | None:
    """bias + x W, as Hugging Face's ``Conv1D`` has it."""
    if bound.get("beta", 1) != 1 or bound.get("alpha", 1) != 1:
        return None
    return _times(bound["mat1"], bound["mat2"], bound["input"], rows)


def _matmul(bound: dict[str, Any], rows: Rows) -> Layer | None:
    return _times(bound["input"], bound["other"], None, rows)


def _mm(bound: dict[str, Any], rows: Rows) -> Layer | None:
    return _times(bound["input"], bound["mat2"], None, rows)


def _times(x: Any, weight: Any, bias: Any, rows: Rows) -> Layer | None:
    """x W with the weight on the right; a weight that is a transposed view counts as the weight of a linear layer."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    if bias is not None and (not isinstance(bias, Tensor) or bias.dim() != 1):
        return None
    return Layer("linear", weight, bias, lambda: rows.split(x), rows.split, transposed=True)


def _convolution(dimensions: int) -> Callable[[dict[str, Any], Rows], Layer]:
    def build(bound: dict[str, Any], _: Rows) -> Layer:
        x, weight, groups = bound["input"], bound["weight"], int(bound.get("groups", 1))
        kernel = weight.shape[2:]
        options = [_tuple(bound.get(name, default), dimensions) for name, default in (("stride", 1), ("dilation", 1))]

        def inputs() -> Tensor:
            stride, dilation = options
            padding = _padding(bound.get("padding", 0), kernel, dilation)
            return _unfold(x, kernel, stride, dilation, padding, groups)

        def outputs(g: Tensor) -> Tensor:
            g = g if g.dim() == dimensions + 2 else g[None]
            return g.flatten(2).transpose(1, 2).unflatten(-1, (groups, -1))

        return Layer(f"conv{dimensions}d", weight, bound.get("bias"), inputs, outputs, groups=groups)

    return build


def _tuple(value: Any, count: int) -> tuple[int, ...]:
    found = (value,) if isinstance(value, int) else tuple(value)
    return found * count if len(found) == 1 else found


def _padding(value: Any, kernel: torch.Size, dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    if value == "valid":
        return [(0, 0)] * len(kernel)
    if value == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(t // 2, t - t // 2) for t in totals]
    return [(p, p) for p in _tuple(value, len(kernel))]


def _unfold(
    x: Tensor,
    kernel: torch.Size,
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: list[tuple[int, int]],
    groups: int,
) -> Tensor:
    """Patches (samples, positions, groups, channels/groups · kernel) that a convolution multiplies by its weight."""
    count = len(kernel)
    if x.dim() == count + 1:
        x = x[None]
    x = F.pad(x, [width for pair in reversed(padding) for width in pair])
    for i in range(count):
        x = x.unfold(2 + i, dilation[i] * (kernel[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    samples, channels = x.shape[:2]
    positions = prod(x.shape[2 : 2 + count])
    # (samples, channels, positions…, kernel…) with the channels cut into groups.
    x = x.reshape(samples, groups, channels // groups, positions, prod(kernel))
    return x.permute(0, 3, 1, 2, 4).flatten(3)


def _embedding(bound: dict[str, Any], _: Rows) -> Layer | None:
    if bound.get("max_norm") is not None or bound.get("scale_grad_by_freq"):
        return None
    tokens, padding, size = bound["input"], bound.get("padding_idx"), bound["weight"].shape[0]
    tokens = tokens[None] if tokens.dim() == 0 else tokens

    def inputs() -> Tensor:
        ids = tokens.flatten(1) if tokens.dim() > 1 else tokens[:, None]
        # Padding has no gradient: it is a row beyond the last.
        return ids if padding is None else torch.where(ids == padding % size, size, ids)

    def outputs(g: Tensor) -> Tensor:
        return g.reshape(tokens.shape[0], -1, 1, g.shape[-1])

    return Layer("embedding", bound["weight"], None, inputs, outputs)


def _norm(normalise: Callable[[dict[str, Any]], Tensor], channels_second: bool) -> Callable[..., Layer | None]:
    """γ∘x̂ + β: the derivatives g∘x̂ and g are those with respect to γ and β, position by position."""

    def build(bound: dict[str, Any], rows: Rows) -> Layer | None:
        weight, bias = bound.get("weight"), bound.get("bias")
        vectors = tuple(v for v in (weight, bias) if v is not None)
        if not vectors:
            return None

        def split(x: Tensor) -> Tensor:
            if channels_second:
                return x.reshape(*x.shape[:2], -1).transpose(1, 2).unsqueeze(2)
            return rows.split(x.flatten(x.dim() - vectors[0].dim()))

        def outputs(g: Tensor) -> Tensor:
            parts = [split(g * normalise(bound).to(g.dtype))] if weight is not None else []
            return torch.cat(parts + ([split(g)] if bias is not None else []), -1)

        return Layer("norm", None, None, None, outputs, vectors=vectors)

    return build


def _plain_layer_norm(b: dict[str, Any]) -> Tensor:
    return F.layer_norm(b["input"], b["normalized_shape"], None, None, b.get("eps", 1e-5))


def _plain_rms_norm(b: dict[str, Any]) -> Tensor:
    return F.rms_norm(b["input"], b["normalized_shape"], None, b.get("eps"))


def _plain_group_norm(b: dict[str, Any]) -> Tensor:
    return F.group_norm(b["input"], b["num_groups"], None, None, b.get("eps", 1e-5))


def _plain_batch_norm(b: dict[str, Any]) -> Tensor:
    if b.get("training"):
        # Without the running statistics, which must not move again.
        return F.batch_norm(b["input"], None, None, training=True, eps=b.get("eps", 1e-5))
    return F.batch_norm(b["input"], b["running_mean"], b["running_var"], eps=b.get("eps", 1e-5))


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_LAYERS: dict[Any, tuple[tuple[str, ...], Callable[[dict[str, Any], Rows], Layer | None]]] = {
    F.linear: (("input", "weight", "bias"), _linear),
    torch.addmm: (("input", "mat1", "mat2"), _addmm),
    torch.matmul: (("input", "other"), _matmul),
    torch.mm: (("input", "mat2"), _mm),
    Tensor.matmul: (("input", "other"), _matmul),
    Tensor.__matmul__: (("input", "other"), _matmul),
    Tensor.mm: (("input", "mat2"), _mm),
    F.conv1d: (_CONVOLUTION, _convolution(1)),
    F.conv2d: (_CONVOLUTION, _convolution(2)),
    F.conv3d: (_CONVOLUTION, _convolution(3)),
    F.embedding: (
        ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        _embedding,
    ),
    F.layer_norm: (("input", "normalized_shape", "weight", "bias", "eps"), _norm(_plain_layer_norm, False)),
    torch.layer_norm: (("input", "normalized_shape", "weight", "bias", "eps"), _norm(_plain_layer_norm, False)),
    F.rms_norm: (("input", "normalized_shape", "weight", "eps"), _norm(_plain_rms_norm, False)),
    F.group_norm: (("input", "num_groups", "weight", "bias", "eps"), _norm(_plain_group_norm, True)),
    F.batch_norm: (
        ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
        _norm(_plain_batch_norm, True),
    ),
}
