"""The public operator ``sorder.attention``: arguments, broadcasting, autocast and precision."""

from __future__ import annotations

from typing import Literal, SupportsFloat, overload

import torch

from sorder.kernels.spec import AttentionSpec, Precision
from sorder.ops.functions import Attention, apply

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_WIDTH = 256
_REPEAT = "repeat the key and value heads with repeat_interleave(query.shape[-3] // key.shape[-3], -3)"


class NotServedError(NotImplementedError):
    """A feature that is not supported yet: ``reason``, and what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy}.")
        self.reason = reason


@overload
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    *, return_lse: Literal[False] = False, precision: Precision | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    *, return_lse: Literal[True], precision: Precision | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@torch._disable_dynamo  # a compiled model runs attention eagerly, between its graphs
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    *, return_lse: bool = False, precision: Precision | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Exact softmax attention with exact derivatives up to second order, in memory linear in the sequence length.

    ``softmax(scale · query keyᵀ) value``, as :func:`torch.nn.functional.scaled_dot_product_attention` defines it, so
    that switching is a rename. Second-order products (``torch.func.jvp(torch.func.grad(f), …)``, ``grad`` of ``jvp``,
    ``grad`` of ``grad``, ``create_graph=True``, ``torch.func.linearize``, ``vmap`` of all these) never hold an Nq × Nk
    matrix. A third derivative raises. On CUDA, first-order passes run on PyTorch's fused kernels where these accept
    the input.

    Args:
        query: (..., Nq, d), floating point; any leading dimensions (batch, heads, …) and strides. A unit stride along
            d saves a copy.
        key: (..., Nk, d), of the same dtype; leading dimensions broadcast against the query's.
        value: (..., Nk, dv), of the same dtype; dv may differ from d. Widths up to 256.
        attn_mask: not supported yet; must be ``None``.
        dropout_p: not supported yet; must be 0.
        is_causal: query i sees the keys 0 … i (top-left alignment, PyTorch's; also for Nq ≠ Nk).
        scale: factor of the scores; default 1/√d.
        enable_gqa: not supported yet; must be ``False``. Repeat the key and value heads instead.
        return_lse: also return the row log-sum-exp of the scores, natural logarithm, differentiable like the output.
        precision: products of float32 inputs: ``"ieee"`` (float32-accurate, by three TF32 products) or ``"tf32"``
            (one, operands rounded to nearest). Default: what ``torch.backends.cuda.matmul.fp32_precision`` or
            :func:`torch.set_float32_matmul_precision` say, "ieee" unless changed. 16-bit inputs accumulate in float32.

    Returns:
        (..., Nq, dv) in the inputs' dtype (the autocast dtype under autocast); with ``return_lse`` also (..., Nq) in
        float32, or float64 for float64 inputs.

    Raises:
        TypeError: an input is not a dense floating tensor, or dtypes differ; an option is of another type.
        ValueError: shapes or devices do not fit, a width exceeds 256, or there is no key.
        NotImplementedError: a feature not supported yet, a third derivative, or ``jvp`` of ``jvp``.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
        >>> f = lambda q: sorder.attention(q, k, v, is_causal=True).square().sum()
        >>> gradient, hessian_product = torch.func.jvp(torch.func.grad(f), (q,), (torch.ones_like(q),))
        >>> hessian_product.shape
        torch.Size([1, 2, 10, 8])

    Sources: FlashAttention-2 (Dao 2023, arXiv:2307.08691) for the first order; the tangent of its backward is derived
    in ``sorder/kernels/backward_tangent.py``.
    """
    if attn_mask is not None:
        if not isinstance(attn_mask, torch.Tensor):
            raise TypeError(f"attn_mask must be a tensor or None, got {type(attn_mask).__name__}")
        raise NotServedError(
            f"attn_mask of shape {tuple(attn_mask.shape)}: masks (padding, bias) are not supported yet",
            "Use is_causal=True for a causal mask, pack sequences without padding, or take materialised attention "
            "(torch.nn.attention.sdpa_kernel(SDPBackend.MATH))",
        )
    if not _is_number(dropout_p):
        raise TypeError(f"dropout_p must be a number, got {dropout_p!r}")
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    if dropout_p != 0.0:
        raise NotServedError(
            f"dropout_p={dropout_p}: attention dropout is not supported yet", "The nearest that works is dropout_p=0.0"
        )
    if enable_gqa:
        raise NotServedError(
            "enable_gqa=True: grouped heads are not supported yet", f"{_REPEAT[0].upper()}{_REPEAT[1:]}"
        )
    query, key, value = _autocast(query, key, value)
    _check(query, key, value)
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        lead = _broadcast(query, key, value)
        query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    if isinstance(scale, torch.Tensor):
        raise TypeError("scale must be a number or None, got a tensor, whose gradient would be lost; scale the query")
    if scale is not None and not _is_number(scale):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    spec = AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=is_causal,
        precision=_float32_precision() if precision is None else _checked_precision(precision),
    )
    output, lse = apply(Attention, query, key, value, spec)
    if not return_lse:
        return output
    return output, lse.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts as autocast casts SDPA's inputs: floating ones, but not float64, to the autocast dtype."""
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _is_number(value: object) -> bool:
    return isinstance(value, SupportsFloat) and not isinstance(value, bool | torch.Tensor)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; they must share one of "
            "float16, bfloat16, float32, float64"
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value are on {query.device}, {key.device}, {value.device}; they must share a device"
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(
            f"each input must have at least two dimensions (..., N, width); got {_shapes(query, key, value)}"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same width; got {_shapes(query, key, value)}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have the same length; got {_shapes(query, key, value)}")
    if key.shape[-2] == 0:
        raise ValueError(f"there must be at least one key; got {_shapes(query, key, value)}")
    if not 1 <= query.shape[-1] <= _MAX_WIDTH or not 1 <= value.shape[-1] <= _MAX_WIDTH:
        raise ValueError(f"widths must be between 1 and {_MAX_WIDTH}; got {_shapes(query, key, value)}")


def _broadcast(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Size:
    try:
        return torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"leading dimensions do not broadcast; got {_shapes(query, key, value)}{_grouped_hint(query, key, value)}"
        ) from None


def _shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _grouped_hint(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """What to do where the heads are those of grouped-query attention."""
    if min(query.dim(), key.dim(), value.dim()) < 3:
        return ""
    heads = query.shape[-3]
    if key.shape[-3] != value.shape[-3] or not 1 < key.shape[-3] < heads or heads % key.shape[-3]:
        return ""
    return (
        f". {heads} query heads share {key.shape[-3]} key heads, which scaled_dot_product_attention takes with "
        f"enable_gqa=True; that is not supported yet: {_REPEAT}"
    )


def _float32_precision() -> Precision:
    """PyTorch's setting for float32 products; "none" there means unset, which is IEEE."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _checked_precision(precision: str) -> Precision:
    if precision not in ("ieee", "tf32"):
        raise ValueError(f'precision must be "ieee", "tf32" or None, got {precision!r}')
    return precision  # type: ignore[return-value]
