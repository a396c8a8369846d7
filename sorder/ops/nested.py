"""Attention of jagged nested tensors: their documents packed one behind the other, told apart by ``cu_seqlens``.

Nested tensors have first derivatives only: PyTorch differentiates none of their operations twice. For second-order
products give :func:`sorder.attention_varlen` the packed values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sorder.ops.mask import Mask


def packed(query: Any, key: Any, value: Any, causal: bool, masks: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], Mask]:
    """Dense tensors (H, N₁ + … + N_B, d), views of the nested ones (B, H, Nᵢ, d), and the mask of their documents.

    Raises:
        TypeError: one is not nested, not jagged, has gaps, or is not ragged in its second to last dimension; there is a
            mask besides.
        ValueError: key and value, or query and key, do not go together.
    """
    if any(mask is not None for mask in masks):
        raise TypeError("attn_mask and mask must be None for nested tensors; is_causal is supported")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_nested:
            raise TypeError(f"{name} must be nested like the others; got a dense tensor")
        if x.layout != torch.jagged:
            raise TypeError(
                f"{name} is a nested tensor of layout {x.layout}; only layout=torch.jagged is supported "
                "(torch.nested.nested_tensor(..., layout=torch.jagged))"
            )
        if x.lengths() is not None:
            raise TypeError(f"{name} is a nested tensor with gaps (lengths); call .contiguous() on it first")
        if x.dim() < 3 or x._ragged_idx != x.dim() - 2:
            raise TypeError(f"{name} must be ragged in its second to last dimension, (B, …, N, width); got {x.shape}")
    if key.offsets() is not value.offsets() and not torch.equal(key.offsets(), value.offsets()):
        raise ValueError("key and value must have the same lengths")
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must hold as many sequences; got {query.shape[0]} and {key.shape[0]}")
    cu_q, cu_k = query.offsets(), key.offsets()
    mask = Mask(causal=causal, cu_seqlens=cu_q if cu_q is cu_k else (cu_q, cu_k))
    return (query.values(), key.values(), value.values()), mask


def unpacked(output: Tensor, query: Any, dim: int = -2) -> Tensor:
    """A dense tensor with N₁ + … + N_B rows along ``dim`` as a nested one of the query's lengths."""
    nested = torch.nested.nested_tensor_from_jagged(output.movedim(dim, 0), query.offsets())
    return nested.movedim(1, dim) if output.dim() > -dim else nested
