"""``sorder.attention_varlen``: packed documents in flash-attention's layout, (total, heads, width)."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from sorder.kernels.spec import Precision
from sorder.ops.attention import attention
from sorder.ops.mask import Mask

_latest: tuple[tuple[Any, ...], Mask] | None = None
"""What the last mask was made of, and the mask: the layers of a model mostly ask for the same."""


@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    scale: float | None = None, dropout_p: float = 0.0, alibi: Tensor | None = None, sinks: Tensor | None = None,
    enable_gqa: bool = True, return_lse: Literal[False] = False, precision: Precision | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    scale: float | None = None, dropout_p: float = 0.0, alibi: Tensor | None = None, sinks: Tensor | None = None,
    enable_gqa: bool = True, return_lse: Literal[True], precision: Precision | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    scale: float | None = None, dropout_p: float = 0.0, alibi: Tensor | None = None, sinks: Tensor | None = None,
    enable_gqa: bool = True, return_lse: bool = False, precision: Precision | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention within documents that lie one after the other in memory, exact to second order.

    The documents cost the sum of the squares of their lengths. Nothing is copied or padded, and on a GPU the
    host reads nothing.

    Args:
        query: (total queries, Hq, d), floating point.
        key: (total keys, Hk, d), of the same dtype; Hk divides Hq.
        value: (total keys, Hk, dv), of the same dtype.
        cu_seqlens_q: integers (D + 1,), ascending from 0: document n has the queries cu[n] … cu[n + 1] − 1. Rows
            behind the last boundary see nothing and give zeros. On the CPU others are refused; on a GPU, where the host
            never looks, and under a transform or a compiler, what wrong boundaries give is undefined.
        cu_seqlens_k: likewise for the keys; default: ``cu_seqlens_q``.
        causal: the last query of a document sees its last key, the one before it one fewer (bottom-right alignment,
            as in flash-attention; PyTorch's ``is_causal`` is top-left. They agree for equal lengths).
        window: (left, right) of keys around a query's position; ``None`` for a side without limit.
        enable_gqa: False refuses 1 < Hk < Hq; a single key head serves all queries either way. Default True, as in
            flash-attention.
        softcap, scale, dropout_p, sinks, return_lse, precision: see :func:`sorder.attention`.
        alibi: slopes (Hq,), see :class:`sorder.Mask`.

    Returns:
        (total queries, Hq, dv); with ``return_lse`` also (Hq, total queries), as flash-attention has it.

    Raises:
        TypeError, ValueError: as :func:`sorder.attention`, and for inputs that do not have three dimensions, or on the
            CPU boundaries that do not ascend from 0 or pass the number of tokens.

    Example:
        >>> q, k, v = (torch.randn(7, 2, 8) for _ in range(3))
        >>> sorder.attention_varlen(q, k, v, torch.tensor([0, 4, 7]), causal=True).shape
        torch.Size([7, 2, 8])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must have shape (total tokens, heads, width), got {got}")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, Tensor) and not (cu is None and name == "cu_seqlens_k"):
            raise TypeError(f"{name} must be an integer tensor (documents + 1,), got {type(cu).__name__}")
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    mask = _mask(cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, causal, window, alibi)
    output, lse = attention(
        query, key, value, mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa, softcap=softcap,
        sinks=sinks, return_lse=True, precision=precision,
    )  # fmt: skip
    output = output.transpose(0, 1)
    return (output, lse) if return_lse else output


def _mask(cu_q: Tensor, cu_k: Tensor, causal: bool, window: Any, alibi: Tensor | None) -> Mask:
    global _latest
    mask = Mask(causal, "bottom_right", window, cu_seqlens=(cu_q, cu_k), alibi=alibi)
    if torch.compiler.is_compiling():  # a tracer would compare once, and keep what is remembered as a constant
        return mask
    parts = (cu_q, cu_k, alibi, causal)
    found = _latest
    if found and all(x is y for x, y in zip(found[0], parts, strict=True)) and found[1].window == mask.window:
        return found[1]
    _latest = (parts, mask)
    return mask
