"""Bad arguments of ``sorder.attention`` are named, with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sorder.ops.attention import attention


def heads(query: int, key: int, value: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    count = (query, key, key if value is None else value)
    return tuple(torch.randn(2, n, 5, 4) for n in count)  # type: ignore[return-value]


X = heads(4, 4)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a boolean for the mask": (lambda: attention(*X, True), TypeError, "attn_mask must be a tensor or None, got bool"),  # type: ignore[call-overload]
    "a mask": (
        lambda: attention(*X, torch.ones(5, 5, dtype=torch.bool)),
        NotImplementedError,
        r"attn_mask of shape \(5, 5\): masks .* not supported yet\. Use is_causal=True",
    ),
    "dropout": (lambda: attention(*X, dropout_p=0.1), NotImplementedError, "dropout_p=0.1: .* dropout_p=0.0"),
    "a name for the scale": (lambda: attention(*X, scale="auto"), TypeError, "scale must be a number or None, got str"),  # type: ignore[call-overload]
    "a word for is_causal": (lambda: attention(*X, is_causal="no"), TypeError, "is_causal must be True .* got 'no'"),  # type: ignore[call-overload]
    "a tensor for is_causal": (
        lambda: attention(*X, is_causal=torch.tensor([True, False])),  # type: ignore[call-overload]
        TypeError,
        "is_causal must be True or False, got tensor",
    ),
    "a boolean for the scale": (
        lambda: attention(*X, scale=True),
        TypeError,
        "scale must be a number or None, got bool",
    ),
    "a word for dropout": (lambda: attention(*X, dropout_p="0"), TypeError, "dropout_p must be a number, got '0'"),  # type: ignore[call-overload]
    "a sparse query": (
        lambda: attention(X[0].to_sparse(), X[1], X[2]),
        TypeError,
        "query must be a dense tensor, got layout torch.sparse_coo",
    ),
    "grouped heads by name": (
        lambda: attention(*heads(4, 2), enable_gqa=True),
        NotImplementedError,
        "enable_gqa=True: .* not supported yet. Repeat .* repeat_interleave",
    ),
    "heads that do not divide": (
        lambda: attention(*heads(4, 3)),
        ValueError,
        r"do not broadcast; .*\(2, 3, 5, 4\)$",
    ),
    "other value heads": (lambda: attention(*heads(4, 2, 4)), ValueError, r"do not broadcast; got .*\(2, 4, 5, 4\)$"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_grouped_heads_without_the_option_get_a_hint_that_works() -> None:
    q, k, v = heads(4, 2)
    with pytest.raises(ValueError, match=r"4 query heads share 2 key heads.*enable_gqa=True") as caught:
        attention(q, k, v)
    hint = re.search(r"repeat_interleave\((.*), (-3)\)", str(caught.value))
    assert hint is not None
    count = eval(hint[1], {"query": q, "key": k})
    k_, v_ = (x.repeat_interleave(count, int(hint[2])) for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attention(q, k_, v_), want)
