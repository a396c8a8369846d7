"""Bad arguments of ``sorder.attention`` are named, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

from sorder.ops.attention import attention
from sorder.ops.mask import Mask
from sorder.ops.varlen import attention_varlen


def heads(query: int, key: int, value: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    count = (query, key, key if value is None else value)
    return tuple(torch.randn(2, n, 5, 4) for n in count)  # type: ignore[return-value]


X = heads(4, 4)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a boolean for the mask": (lambda: attention(*X, True), TypeError, "attn_mask must be a tensor or None, got bool"),  # type: ignore[call-overload]
    "a mask of another length": (
        lambda: attention(*X, torch.ones(5, 6, dtype=torch.bool)),
        ValueError,
        r"attn_mask of shape \(5, 6\) does not broadcast to the scores, \(2, 4, 5, 5\)",
    ),
    "a mask longer than one row of scores": (
        lambda: attention(*(x[..., :1, :] for x in X), torch.ones(3, 1)),
        ValueError,
        r"attn_mask of shape \(3, 1\) does not broadcast to the scores, \(2, 4, 1, 1\)",
    ),
    "an integer mask": (
        lambda: attention(*X, torch.ones(5, 5, dtype=torch.long)),
        TypeError,
        r"attn_mask must be .* got torch.int64.*attn_mask.bool\(\)",
    ),
    "a mask on another device": (
        lambda: attention(*X, torch.ones(5, 5, device="meta")),
        ValueError,
        "attn_mask is on meta, the query is on cpu",
    ),
    "a structure for attn_mask": (lambda: attention(*X, Mask()), TypeError, "got Mask; pass it as mask="),  # type: ignore[call-overload]
    "a tensor for the structure": (
        lambda: attention(*X, mask=torch.ones(5, 5)),  # type: ignore[call-overload]
        TypeError,
        "mask must be a sorder.Mask or None, got Tensor; a tensor goes to attn_mask",
    ),
    "too much dropout": (
        lambda: attention(*X, dropout_p=1.1),
        ValueError,
        "dropout_p must be between 0 and 1, got 1.1",
    ),
    "no soft cap": (
        lambda: attention(*X, softcap=0.0),
        ValueError,
        "softcap must be positive .* got 0.0; None is no cap",
    ),
    "a learned soft cap": (
        lambda: attention(*X, softcap=torch.tensor(1.0)),  # type: ignore[call-overload]
        TypeError,
        "softcap must be a number or None, got torch.float32",
    ),
    "sinks of other heads": (
        lambda: attention(*X, sinks=torch.zeros(3)),
        ValueError,
        r"sinks must have shape \(heads,\); got \(3,\) for a query of 4 heads",
    ),
    "a number for the sinks": (
        lambda: attention(*X, sinks=0.0),  # type: ignore[call-overload]
        TypeError,
        "sinks must be a floating-point tensor .* got float",
    ),
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
    "groups that do not divide": (
        lambda: attention(*heads(4, 3), enable_gqa=True),
        ValueError,
        "enable_gqa=True: the 3 key heads and 3 value heads must divide the 4 query heads",
    ),
    "groups of no key head": (
        lambda: attention(*heads(4, 0), enable_gqa=True),
        ValueError,
        "enable_gqa=True: the 0 key heads and 0 value heads must divide the 4 query heads",
    ),
    "a causal bias of other lengths": (
        lambda: attention(*X, causal_lower_right(4, 6)),
        ValueError,
        "attn_mask is made for 4 queries and 6 keys; got 5 and 5",
    ),
    "heads that do not divide": (
        lambda: attention(*heads(4, 3)),
        ValueError,
        r"do not broadcast; .*\(2, 3, 5, 4\)$",
    ),
    "boundaries that are a list": (
        lambda: attention_varlen(*torch.ones(3, 5, 2, 4), [0, 5]),  # type: ignore[arg-type]
        TypeError,
        "cu_seqlens_q must be an integer tensor .* got list",
    ),
    "other value heads": (lambda: attention(*heads(4, 2, 4)), ValueError, r"do not broadcast; got .*\(2, 4, 5, 4\)$"),
}


MASKS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a window of one side": ({"window": 3}, TypeError, r"mask.window must be \(left, right\), .* got 3"),
    "flash-attention's window": ({"window": (-1, 0)}, ValueError, r"mask.window=\(-1, 0\): .* None is without limit"),
    "a prefix alone": ({"prefix": 3}, ValueError, "mask.prefix=3 .* needs causal=True"),
    "an alignment": ({"alignment": "right"}, TypeError, "mask.alignment must be .* got 'right'"),
    "a fraction": ({"key_stop": 2.5}, TypeError, "mask.key_stop must be None, an integer .* got 2.5"),
    "an integer for causal": ({"causal": 1}, TypeError, "mask.causal must be True or False, got 1"),
    "lengths per token": ({"key_stop": torch.ones(2, 4, 5).long()}, ValueError, r"mask.key_stop.* \(2, 4, 5\)"),
    "lengths of another batch": ({"key_stop": torch.ones(3).long()}, ValueError, r"mask.key_stop.* got shape \(3,\)"),
    "starts of another batch": ({"key_start": torch.ones(3).long()}, ValueError, r"mask.key_start.* got shape \(3,\)"),
    "offsets of another batch": ({"alignment": torch.ones(3).long()}, ValueError, r"mask.alignment.*shape \(3,\)"),
    "prefixes of another batch": (
        {"causal": True, "prefix": torch.ones(3).long()},
        ValueError,
        r"mask.prefix.* got shape \(3,\)",
    ),
    "ranges of another batch": ({"ranges": (torch.ones(5).int(), torch.ones(3, 4, 5).int())}, ValueError, "ranges"),
    "unsigned lengths": ({"key_stop": torch.ones(2).to(torch.uint64)}, TypeError, "mask.key_stop must be .*uint64"),
    "unsigned boundaries": (
        {"cu_seqlens": torch.tensor([0, 5]).to(torch.uint64)},
        TypeError,
        "mask.cu_seqlens must be .*uint64",
    ),
    "padding of another batch": ({"key_padding": torch.ones(3, 5) > 0}, ValueError, r"key_padding .* got \(3, 5\)"),
    "padding without tokens": ({"key_padding": torch.tensor(True)}, ValueError, r"key_padding .* got \(\)"),
    "ids without tokens": ({"documents": torch.tensor(1)}, ValueError, r"documents .* got \(\)"),
    "ids of another batch": ({"documents": torch.ones(3, 5).long()}, ValueError, r"documents .* got \(3, 5\)"),
    "a pair of ids of two batches": (
        {"documents": (torch.ones(2, 5).long(), torch.ones(3, 5).long())},
        ValueError,
        r"documents .* got \(3, 5\)",
    ),
    "additive padding": ({"key_padding": torch.zeros(2, 5)}, TypeError, "key_padding must be a boolean .*float32"),
    "short padding": ({"key_padding": torch.ones(2, 4) > 0}, ValueError, r"key_padding .* got \(2, 4\)"),
    "ids that are no integers": (
        {"documents": torch.ones(5)},
        TypeError,
        r"documents must be .* got a torch.float32 tensor of shape \(5,\)$",
    ),
    "a nested prefix": (
        {"causal": True, "prefix": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
        TypeError,
        "mask.prefix must be .* got a torch.float32 tensor, nested$",
    ),
    "ids of other tokens": ({"documents": torch.ones(4).long()}, ValueError, "each of the 5 query rows, got 4"),
    "both kinds of documents": (
        {"documents": torch.ones(5).long(), "cu_seqlens": torch.tensor([0, 5])},
        ValueError,
        "in two ways",
    ),
    "boundaries per batch": ({"cu_seqlens": torch.zeros(2, 3).long()}, ValueError, r"shape \(documents \+ 1,\)"),
    "boundaries that begin late": (
        {"cu_seqlens": torch.tensor([1, 5])},
        ValueError,
        "cu_seqlens .* must ascend from 0 to the number of query tokens, 5, at most; got a first boundary of 1",
    ),
    "boundaries that fall": (
        {"cu_seqlens": torch.tensor([0, 4, 2, 5])},
        ValueError,
        "cu_seqlens .* query tokens, 5, at most; got 2 behind 4",
    ),
    "boundaries beyond the keys": (
        {"cu_seqlens": (torch.tensor([0, 5]), torch.tensor([0, 6]).to(torch.uint32))},
        ValueError,
        "cu_seqlens_k.* key tokens, 5, at most; got a last boundary of 6",
    ),
    "half a pair of ranges": ({"ranges": torch.zeros(5).long()}, TypeError, "ranges must be a pair"),
    "slopes that are learned": ({"alibi": torch.ones(4, requires_grad=True)}, ValueError, "attn_mask = slopes"),
    "slopes of other heads": ({"alibi": torch.ones(3)}, ValueError, r"alibi of shape \(3,\) does not broadcast"),
    "another device": ({"alibi": torch.ones(4, device="meta")}, ValueError, r"mask.to\(query.device\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("case", MASKS)
def test_bad_fields_of_a_mask_are_named(case: str) -> None:
    fields, error, message = MASKS[case]
    with pytest.raises(error, match=message):
        attention(*X, mask=Mask(**fields))


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 7], None, "cu_seqlens_q.* query tokens, 5, at most; got a last boundary of 7"),
        ([0, 2, 4, 5], [0, 2, 1, 5], "cu_seqlens_k.* key tokens, 5, at most; got 1 behind 2"),
    ],
)
@pytest.mark.parametrize("how", ["eager", "inference mode", "vmap", "grad"])
def test_bad_boundaries_of_packed_documents_are_named(
    cu_q: list[int], cu_k: list[int] | None, message: str, how: str
) -> None:
    x, cu, key = torch.randn(5, 2, 4), torch.tensor(cu_q), None if cu_k is None else torch.tensor(cu_k)

    def call(x: Tensor) -> Tensor:
        return attention_varlen(x, x, x, cu, key).sum()

    with pytest.raises(ValueError, match=message):
        if how == "vmap":
            torch.func.vmap(call)(x[None])
        elif how == "grad":
            torch.func.grad(call)(x)
        else:
            with torch.inference_mode(how == "inference mode"):
                call(x)


def test_boundaries_that_cannot_be_looked_at_are_not() -> None:
    x, wrong = torch.randn(2, 5, 4), torch.tensor([[0, 3], [0, 2]])
    out = torch.func.vmap(lambda x, cu: attention(x, x, x, mask=Mask(cu_seqlens=cu)))(x, wrong)
    assert out[0, :3].all() and not out[0, 3:].any() and not out[1, 2:].any()
    with FakeTensorMode() as mode:
        fake, cu = mode.from_tensor(x), mode.from_tensor(wrong)[0]
        assert attention(fake, fake, fake, mask=Mask(cu_seqlens=cu)).shape == x.shape


def test_grouped_heads_without_the_option_get_a_hint_that_works() -> None:
    q, k, v = heads(4, 2)
    with pytest.raises(ValueError, match=r"4 query heads share 2 key heads: pass enable_gqa=True"):
        attention(q, k, v)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, enable_gqa=True), want)
