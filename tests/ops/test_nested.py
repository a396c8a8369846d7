"""Jagged nested tensors: values and gradients of the sequences one by one, by the operator and by routed SDPA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sorder
from sorder.ops.routing import exact_attention

from .test_routing import close

LENGTHS, KEYS = (3, 5, 1), (4, 2, 6)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)])


def nested(values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """(N₁ + …, H, d) as (B, H, Nᵢ, d)."""
    return torch.nested.nested_tensor_from_jagged(values, offsets(lengths)).transpose(1, 2)


def routed(*args: Any, **options: Any) -> Tensor:
    with exact_attention(strict=True):
        return F.scaled_dot_product_attention(*args, **options)


def one_by_one(x: tuple[Tensor, ...], lengths: tuple[tuple[int, ...], ...], **options: Any) -> Tensor:
    parts = zip(*(values.split(sizes) for values, sizes in zip(x, lengths, strict=True)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*(p.transpose(0, 1) for p in part), **options).transpose(0, 1)
                      for part in parts])  # fmt: skip


@pytest.mark.parametrize("attention", [sorder.attention, routed])
@pytest.mark.parametrize("keys", [LENGTHS, KEYS])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
def test_equals_the_sequences_one_by_one(
    attention: Callable[..., Tensor], keys: tuple[int, ...], options: dict[str, Any]
) -> None:
    lengths = (LENGTHS, keys, keys)
    heads = (4, 2, 2) if "enable_gqa" in options else (4, 4, 4)
    x = tuple(torch.randn(sum(n), h, 8).double().requires_grad_() for n, h in zip(lengths, heads, strict=True))
    query, key, value = (nested(*pair) for pair in zip(x, lengths, strict=True))
    output = attention(query, key, value, **options)
    want = one_by_one(x, lengths, **options)
    assert output.shape == query.shape and output.layout == torch.jagged
    together = output.transpose(1, 2)
    assert together.is_contiguous() and (together + query.transpose(1, 2)).shape == together.shape
    assert close(together.values(), want)
    got = torch.autograd.grad(together.values().sin().sum(), x)
    for a, b in zip(got, torch.autograd.grad(want.sin().sum(), x), strict=True):
        assert close(a, b)


def test_log_sum_exp() -> None:
    x = torch.randn(9, 2, 8).double()
    query = nested(x, LENGTHS)
    _, lse = sorder.attention(query, query, query, return_lse=True)
    want = torch.cat([(p.transpose(0, 1) @ p.permute(1, 2, 0) / 8**0.5).logsumexp(-1).T for p in x.split(LENGTHS)])
    assert lse.shape == query.shape[:-1]
    assert close(lse.transpose(1, 2).values(), want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refusals_name_the_argument() -> None:
    x = torch.randn(9, 2, 8)
    query, key = nested(x, LENGTHS), nested(torch.randn(12, 2, 8), KEYS)
    strided = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])
    cases: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((query, x, x), {}, TypeError, "key must be nested like the others"),
        ((strided, strided, strided), {}, TypeError, "only layout=torch.jagged"),
        ((query, key, query), {}, ValueError, "key and value must have the same lengths"),
        ((query, query, query), {"attn_mask": x}, TypeError, "attn_mask and mask must be None for nested"),
        ((query.transpose(1, 2),) * 3, {}, TypeError, "ragged in its second to last"),
    ]
    for tensors, options, error, message in cases:
        with pytest.raises(error, match=message):
            sorder.attention(*tensors, **options)
        with exact_attention(), pytest.raises(NotImplementedError, match=message):
            F.scaled_dot_product_attention(*tensors, **options)


def test_a_buffer_may_be_longer_than_its_sequences() -> None:
    values, offsets = torch.randn(10, 2, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 7])

    def of(values: Tensor) -> Tensor:
        q = torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)
        return sorder.attention(q, q, q, is_causal=True).transpose(1, 2).values()[:7]

    got, want = of(values), of(values[:7])
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)
    grads = (torch.autograd.grad(out.square().sum(), values)[0] for out in (got, want))
    torch.testing.assert_close(*grads, rtol=0.0, atol=0.0)
