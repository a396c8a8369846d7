"""The public operator ``sorder.attention``: arguments, broadcasting, autocast and precision."""

from __future__ import annotations

from typing import Any, Literal, SupportsFloat, overload

import torch
from torch import Tensor

from sorder.kernels.mask import NOTHING, Visibility
from sorder.kernels.spec import AttentionSpec, Precision
from sorder.ops import nested
from sorder.ops.functions import attend
from sorder.ops.mask import Mask, Structure

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_WIDTH = 256


class NotServedError(NotImplementedError):
    """A feature that is not supported: ``reason``, and what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy}.")
        self.reason = reason


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, mask: Mask | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, return_lse: Literal[False] = False,
    precision: Precision | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, mask: Mask | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, return_lse: Literal[True],
    precision: Precision | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, mask: Mask | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, return_lse: bool = False,
    precision: Precision | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact softmax attention with exact derivatives up to second order, in memory linear in the sequence length.

    ``dropout(softmax(scale · query keyᵀ + bias)) value``, as :func:`torch.nn.functional.scaled_dot_product_attention`
    defines it, so that switching is a rename. Second-order products (``torch.func.jvp(torch.func.grad(f), …)``,
    ``grad`` of ``jvp``, ``grad`` of ``grad``, ``create_graph=True``, ``torch.func.linearize``, ``vmap`` of all these)
    never hold an Nq × Nk matrix of their own. A third derivative raises. On CUDA, first-order passes of dense and
    causal attention run on PyTorch's fused kernels where these accept the input. These and, in second-order products,
    the kernels for Hopper GPUs (16 bits, from 2²⁸ scores on) add up in no determined order, so the last bits of two
    runs may differ; ``torch.use_deterministic_algorithms(True)`` makes all of them reproducible, and a second backward
    longer: two sweeps for one.

    Everything that hides keys applies together: ``attn_mask``, ``mask``, ``is_causal``. A query that sees no key gives
    zeros, in the output and in every derivative, and a log-sum-exp of −∞.

    Args:
        query: (..., Hq, Nq, d), floating point; any leading dimensions (batch, heads, …, or none) and strides. A unit
            stride along d saves a copy: heads may be transposed views of (..., N, H, d), slices of a fused projection.
            Or all three are jagged nested tensors (B, H, Nᵢ, d), to first order and without masks.
        key: (..., Hk, Nk, d), of the same dtype; leading dimensions broadcast against the query's.
        value: (..., Hk, Nk, dv), of the same dtype; dv may differ from d. Widths up to 256.
        attn_mask: broadcastable to (..., Hq, Nq, Nk): boolean, True where a key is seen, or floating point of any
            dtype, added to the scaled scores; or a ``torch.nn.attention.bias.CausalBias``. An additive mask gets first
            and second derivatives, of its own shape and dtype. −∞, or any value up to −10⁶ (such as the least number of
            any dtype but float16), hides a key. A mask with structure is faster as ``mask``, which lets tiles be
            skipped.
        dropout_p: probability of dropping an entry of the softmax; the others are divided by 1 − p. Every derivative
            of a call sees the mask of its forward pass (but what ``torch.func.linearize`` returns draws anew, as with
            F.dropout), whose seed is drawn from the device's default generator
            (:func:`torch.manual_seed`). Like SDPA, and unlike modules, it does not ask for a training mode. ``vmap``
            needs ``randomness="same"`` or ``"different"``, and loops.
        is_causal: query i sees the keys 0 … i (top-left alignment, PyTorch's; also for Nq ≠ Nk, where flash-attention
            aligns bottom-right: ``mask=sorder.Mask(causal=True, alignment="bottom_right")``).
        scale: factor of the scores; default 1/√d.
        enable_gqa: grouped-query attention: Hk divides Hq, and query head h uses key head h // (Hq / Hk). Keys and
            values are not repeated in memory (unless their own numbers of heads differ). A single key head broadcasts
            without it.
        mask: :class:`sorder.Mask`: windows, padding, packed documents, prefixes, alignments, ALiBi.
        softcap: κ > 0 bounds the scaled scores as κ · tanh(scores / κ), before masks and biases (Gemma 2, Gemma Team
            2024, arXiv:2408.00118).
        sinks: (Hq,), any floating dtype: a logit per head that takes part in the softmax but has no value, as in
            gpt-oss and StreamingLLM (Xiao et al. 2023, arXiv:2309.17453). Differentiable.
        return_lse: also return the row log-sum-exp of the scores (and sink), natural logarithm, differentiable like the
            output.
        precision: products of float32 inputs: ``"ieee"`` (float32-accurate, by three TF32 products) or ``"tf32"``
            (one, operands rounded to nearest). Default: what ``torch.backends.cuda.matmul.fp32_precision`` or
            :func:`torch.set_float32_matmul_precision` say, "ieee" unless changed. 16-bit inputs accumulate in float32.

    Returns:
        (..., Hq, Nq, dv) in the inputs' dtype (the autocast dtype under autocast), with the memory layout of the query
        where dv = d; with ``return_lse`` also (..., Hq, Nq) in float32, or float64 for float64 inputs.

    Raises:
        TypeError: an input is not a dense floating tensor, or dtypes differ; an option is of another type.
        ValueError: shapes or devices do not fit, a width exceeds 256, there is no key, or an option is out of range.
        NotImplementedError: a third derivative, or ``jvp`` of ``jvp``.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
        >>> f = lambda q: sorder.attention(q, k, v, is_causal=True).square().sum()
        >>> gradient, hessian_product = torch.func.jvp(torch.func.grad(f), (q,), (torch.ones_like(q),))
        >>> hessian_product.shape
        torch.Size([1, 2, 10, 8])

    Sources: FlashAttention-2 (Dao 2023, arXiv:2307.08691) for the first order; the tangent of its backward is derived
    in ``sorder/kernels/backward_tangent.py``.
    """
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    if isinstance(query, Tensor) and query.is_nested:
        whole = query
        (query, key, value), mask = nested.packed(query, key, value, is_causal, (attn_mask, mask))
        output, lse = attention(
            query, key, value, None, dropout_p, False, scale, enable_gqa, mask=mask, softcap=softcap, sinks=sinks,
            return_lse=True, precision=precision,
        )  # fmt: skip
        output = nested.unpacked(output, whole)
        return (output, nested.unpacked(lse, whole, -1)) if return_lse else output
    query, key, value = _autocast(query, key, value)
    _check(query, key, value)
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        query, key, value = _aligned(query, key, value, enable_gqa)
    bias = vis = lse_shift = None
    if is_causal_bias(attn_mask):
        attn_mask, mask, is_causal = _with_causal_bias(query, key, attn_mask, mask, is_causal)
    if attn_mask is not None:
        query, key, value, bias, vis = _with_mask(query, key, value, attn_mask)
    if mask is not None:
        is_causal, vis, lse_shift = _with_structure(query, key, mask, is_causal, vis)
    if dropout_p != 0.0:
        value, vis, dropout_p = _with_dropout(query, value, vis, dropout_p)
    if isinstance(scale, Tensor):
        raise TypeError("scale must be a number or None, got a tensor, whose gradient would be lost; scale the query")
    if scale is not None and not _is_number(scale):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    spec = AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=is_causal,
        precision=_float32_precision() if precision is None else _checked_precision(precision),
        softcap=None if softcap is None else _checked_softcap(softcap),
        dropout=dropout_p,
    )
    output, lse = attend(query, key, value, bias, vis, spec)
    if lse_shift is not None:
        lse = lse + lse_shift
    if sinks is not None:
        output, lse = _with_sinks(output, lse, sinks)
    if not return_lse:
        return output
    return output, lse.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast casts SDPA's inputs: floating ones, but not float64, to the autocast dtype."""
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
    device = tensors[0].device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _has_autocast(device: str) -> bool:  # Dynamo cannot trace the question (torch 2.11)
    return torch.amp.is_autocast_available(device)


def _is_number(value: object) -> bool:
    return isinstance(value, SupportsFloat) and not isinstance(value, bool | Tensor)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
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


def _aligned(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Leading dimensions made equal by expansion, but for the heads (dimension −3) of grouped keys and values."""
    tensors = tuple(x[(None,) * (max(y.dim() for y in (query, key, value)) - x.dim())] for x in (query, key, value))
    heads = [x.shape[-3] for x in tensors]
    if enable_gqa and any(heads[0] % n if n else heads[0] for n in heads[1:]):
        raise ValueError(
            f"enable_gqa=True: the {heads[1]} key heads and {heads[2]} value heads must divide the {heads[0]} query "
            f"heads; got {_shapes(query, key, value)}"
        )
    grouped = enable_gqa or heads[1] == heads[2] == 1
    try:
        if not grouped:
            lead = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors))
            return tuple(x.expand(*lead, *x.shape[-2:]) for x in tensors)  # type: ignore[return-value]
        outer = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        raise ValueError(
            f"leading dimensions do not broadcast; got {_shapes(query, key, value)}"
            f"{'' if enable_gqa else _grouped_hint(query, key, value)}"
        ) from None
    query, key, value = (x.expand(*outer, *x.shape[-3:]) for x in tensors)
    return query, *_same_heads(key, value, heads[0])


def _same_heads(key: Tensor, value: Tensor, query_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values with one number of heads, those with fewer repeated (in memory, unless they have only one)."""
    heads = max(key.shape[-3], value.shape[-3])
    if heads % min(key.shape[-3], value.shape[-3]):
        heads = query_heads

    def repeated(x: Tensor) -> Tensor:
        if x.shape[-3] == 1:
            return x.expand(*x.shape[:-3], heads, *x.shape[-2:])
        return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)

    return repeated(key), repeated(value)


def is_causal_bias(attn_mask: Any) -> bool:
    """Whether it is a ``torch.nn.attention.bias.CausalBias``: a tensor whose memory holds nothing."""
    return type(attn_mask).__module__ == "torch.nn.attention.bias"  # to import which loads the compiler


def _with_causal_bias(
    query: Tensor, key: Tensor, attn_mask: Any, mask: Mask | None, is_causal: bool
) -> tuple[Tensor | None, Mask | None, bool]:
    """(attn_mask, mask, is_causal) that say the same."""
    n_q, n_k = query.shape[-2], key.shape[-2]
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (n_q, n_k):
        raise ValueError(
            f"attn_mask is made for {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys; got {n_q} and {n_k}"
        )
    if attn_mask.variant.name == "UPPER_LEFT" or n_q == n_k:
        return None, mask, True
    if mask is None:
        return None, Mask(causal=True, alignment="bottom_right"), is_causal
    return torch.ones(n_q, n_k, dtype=torch.bool, device=query.device).tril(n_k - n_q), mask, is_causal


def _with_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Visibility | None]:
    """Inputs with the mask's leading dimensions, and the mask as a bias or as what is shown."""
    if not isinstance(attn_mask, Tensor):
        hint = "; pass it as mask=" if isinstance(attn_mask, Mask) else ""
        raise TypeError(f"attn_mask must be a tensor or None, got {type(attn_mask).__name__}{hint}")
    if attn_mask.layout != torch.strided or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise TypeError(
            f"attn_mask must be a dense boolean or floating-point tensor, got {attn_mask.dtype}, {attn_mask.layout}"
            "; attn_mask.bool() makes one in which nonzero is visible"
        )
    if attn_mask.device != query.device:
        raise ValueError(
            f"attn_mask is on {attn_mask.device}, the query is on {query.device}; they must share a device"
        )
    scores = (*query.shape[:-1], key.shape[-2])
    try:
        full = torch.broadcast_shapes(scores, attn_mask.shape)
    except RuntimeError:
        full = torch.Size()
    if full[-2:] != scores[-2:]:
        raise ValueError(f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to the scores, {scores}")
    if full[:-2] != query.shape[:-2]:
        query, key, value = _over_leading(query, key, value, full[:-2])
    attn_mask = attn_mask[(None,) * (len(full) - attn_mask.dim())]
    if attn_mask.dtype == torch.bool:
        return query, key, value, None, Visibility(shown=attn_mask.expand(full))
    return query, key, value, attn_mask, None


def _over_leading(query: Tensor, key: Tensor, value: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs expanded to leading dimensions that only the mask has; the heads of keys and values stay as they are."""
    key, value = (x if x.dim() > 2 else x[None] for x in (key, value))
    return query.expand(*lead, *query.shape[-2:]), *(x.expand(*lead[:-1], *x.shape[-3:]) for x in (key, value))  # type: ignore[return-value]


def _with_structure(query: Tensor, key: Tensor, mask: Mask, is_causal: bool, vis: Visibility | None) -> Structure:
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a sorder.Mask or None, got {type(mask).__name__}; a tensor goes to attn_mask")
    wide = query.dtype == torch.float64
    found = mask.structure(query.shape[:-2], query.shape[-2], key.shape[-2], query.device, is_causal, wide)
    if vis is None or vis.shown is None or found.visibility is None:
        return found._replace(visibility=found.visibility or vis)
    structure = found.visibility
    shown = vis.shown if structure.shown is None else vis.shown & structure.shown
    return found._replace(visibility=structure._replace(shown=shown))


def _with_dropout(
    query: Tensor, value: Tensor, vis: Visibility | None, dropout_p: float
) -> tuple[Tensor, Visibility | None, float]:
    if not _is_number(dropout_p):
        raise TypeError(f"dropout_p must be a number, got {dropout_p!r}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    if dropout_p == 1.0:  # all is dropped, and what is left, nothing, is not divided by zero
        return value.masked_fill(torch.ones((), dtype=torch.bool, device=value.device), 0.0), vis, 0.0
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=query.device)
    return value, (vis or NOTHING)._replace(seed=seed), float(dropout_p)


def _with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds to the softmax's denominator: O·σ(L − sink), log(exp L + exp sink)."""
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        raise TypeError(f"sinks must be a floating-point tensor (heads,) or None, got {_type(sinks)}")
    if sinks.device != output.device:
        raise ValueError(f"sinks are on {sinks.device}, the query is on {output.device}; they must share a device")
    if sinks.shape != lse.shape[-2:-1]:
        heads = "no heads" if lse.dim() < 2 else f"{lse.shape[-2]} heads"
        raise ValueError(f"sinks must have shape (heads,); got {tuple(sinks.shape)} for a query of {heads}")
    sink = sinks.to(lse.dtype)[:, None]
    absent, blind = sink == -torch.inf, lse == -torch.inf
    # Where one is −∞ the other is the result; finite numbers stand in for both, so that derivatives exist.
    finite_sink, finite_lse = sink.masked_fill(absent, 0.0), lse.masked_fill(blind, 0.0)
    share = torch.sigmoid(finite_lse - finite_sink).masked_fill(absent, 1.0).masked_fill(blind, 0.0)
    if output.dtype != torch.float64:
        share = share.float()
    both = torch.where(blind, sink, torch.logaddexp(finite_lse, finite_sink))
    return (output * share[..., None]).to(output.dtype), torch.where(absent, lse, both)


def _type(x: Any) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def _checked_softcap(softcap: float) -> float:
    if not _is_number(softcap):
        raise TypeError(f"softcap must be a number or None, got {_type(softcap)}")
    if not 0 < softcap < float("inf"):
        raise ValueError(f"softcap must be positive and finite, got {softcap}; None is no cap")
    return float(softcap)


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _grouped_hint(query: Tensor, key: Tensor, value: Tensor) -> str:
    """What to do where the heads are those of grouped-query attention."""
    if min(query.dim(), key.dim(), value.dim()) < 3:
        return ""
    heads = query.shape[-3]
    if key.shape[-3] != value.shape[-3] or not 1 < key.shape[-3] < heads or heads % key.shape[-3]:
        return ""
    return f". {heads} query heads share {key.shape[-3]} key heads: pass enable_gqa=True"


def _float32_precision() -> Precision:
    """PyTorch's setting for float32 products; "none" there means unset, which is IEEE."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# What torch.compiler.assume_constant_result sets; that loads the compiler, which takes seconds.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]
_float32_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _checked_precision(precision: str) -> Precision:
    if precision not in ("ieee", "tf32"):
        raise ValueError(f'precision must be "ieee", "tf32" or None, got {precision!r}')
    return precision  # type: ignore[return-value]
