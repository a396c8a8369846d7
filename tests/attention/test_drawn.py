"""Problems that hypothesis draws: any features together, against dense attention in float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jvp

import sorder
from sorder.ops.mask import Mask

from . import oracle

optional_side = st.none() | st.integers(0, 8)


@given(
    n_q=st.integers(1, 20), n_k=st.integers(1, 20), d=st.integers(1, 9), dv=st.integers(1, 9), batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2), group=st.integers(1, 3), causal=st.booleans(),
    alignment=st.sampled_from(["top_left", "bottom_right"]) | st.integers(-6, 6),
    window=st.none() | st.tuples(optional_side, optional_side), documents=st.booleans(), padded=st.booleans(),
    bias_dims=st.none() | st.tuples(*[st.booleans()] * 4), holes=st.booleans(), alibi=st.booleans(),
    softcap=st.none() | st.floats(0.1, 5), sinks=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_second_order_of_drawn_features(
    n_q: int, n_k: int, d: int, dv: int, batch: int, kv_heads: int, group: int, causal: bool, alignment: Any,
    window: Any, documents: bool, padded: bool, bias_dims: Any, holes: bool, alibi: bool, softcap: float | None,
    sinks: bool, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    heads = kv_heads * group
    rows, keys = torch.arange(n_q)[:, None], torch.arange(n_k)
    fields: dict[str, Any] = {"causal": causal, "alignment": alignment, "window": window}
    visible = torch.ones(batch, 1, n_q, n_k, dtype=torch.bool)
    position = rows + (alignment if isinstance(alignment, int) else (n_k - n_q) * (alignment == "bottom_right"))
    if documents:
        ids_q, ids_k = (torch.randint(0, 3, (batch, n)).sort(-1)[0] for n in (n_q, n_k))
        fields["documents"] = (ids_q, ids_k)
        same = (ids_q[:, None, :, None] == ids_k[:, None, None]).int()
        visible &= same.bool()
        own = (ids_q[:, None, :, None] == ids_q[:, None, None]).int()
        if alignment == "top_left":
            position = rows + same.argmax(-1, keepdim=True) - own.argmax(-1, keepdim=True)
        elif alignment == "bottom_right":
            position = rows + n_k - same.flip(-1).argmax(-1, keepdim=True) - n_q + own.flip(-1).argmax(-1, keepdim=True)
    if causal:
        visible &= keys <= position
    left, right = window or (None, None)
    if left is not None:
        visible &= keys >= position - left
    if right is not None:
        visible &= keys <= position + right
    if padded:
        fields["key_start"], fields["key_stop"] = torch.randint(0, 4, (batch,)), torch.randint(0, n_k + 1, (batch,))
        per_batch = [x[:, None, None, None] for x in (fields["key_start"], fields["key_stop"])]
        visible &= (keys >= per_batch[0]) & (keys < per_batch[1])
    if holes:
        fields["key_padding"] = torch.rand(batch, n_k) > 0.3
        visible &= fields["key_padding"][:, None, None]
    sizes = [(batch, heads, n_q, d), (batch, kv_heads, n_k, d), (batch, kv_heads, n_k, dv)]
    slopes = torch.rand(heads)
    distance = torch.zeros(())
    if alibi:
        fields["alibi"] = slopes
        distance = slopes.double()[:, None, None] * (keys - position)
        distance = distance.masked_fill(~visible, 0.0)  # a row without document has no position
    if bias_dims is not None:
        sizes.append(tuple(n if full else 1 for n, full in zip((batch, heads, n_q, n_k), bias_dims, strict=True)))
    x, t = ([torch.randn(*s, dtype=torch.float64) for s in sizes] for _ in range(2))
    sink = torch.randn(heads, dtype=torch.float64) if sinks else None

    def loss(o: Tensor, lse: Tensor) -> Tensor:
        return o.sin().sum() + torch.where(lse.isfinite(), lse, 0.0).cos().sum()

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        mask = Mask(**fields)
        return loss(
            *sorder.attention(q, k, v, bias, mask=mask, enable_gqa=True, softcap=softcap, sinks=sink, return_lse=True)
        )

    def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        added = distance if bias is None else bias + distance
        return loss(*oracle.dense(q, k, v, bias=added, visible=visible, softcap=softcap, sinks=sink))

    argnums = tuple(range(len(x)))
    for got, want in zip(*(jvp(grad(f, argnums), tuple(x), tuple(t))[1] for f in (ours, dense)), strict=True):
        assert (got - want).norm() <= 1e-11 * (want.norm() + 1)
