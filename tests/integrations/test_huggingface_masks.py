"""Mask descriptions show what transformers' own boolean masks show."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sorder
from sorder.integrations import huggingface_masks
from sorder.integrations.huggingface_masks import mask
from sorder.ops.mask import Mask

hf = pytest.importorskip("transformers.masking_utils")
if "q_length" not in inspect.signature(hf.sdpa_mask).parameters:
    pytest.skip("another version's mask interface", allow_module_level=True)

B = 2
PADDING = {
    "none": None,
    "all real": torch.ones(B, 12, dtype=torch.bool),
    "left": torch.tensor([[0] * 3 + [1] * 9, [0] + [1] * 11]).bool(),
    "right": torch.tensor([[1] * 12, [1] * 7 + [0] * 5]).bool(),
    "nothing real": torch.tensor([[1] * 12, [0] * 12]).bool(),
    "holes": torch.tensor([[1, 1, 0, 1] * 3, [1] * 12]).bool(),
    "short": torch.tensor([[1] * 9, [0] * 2 + [1] * 7]).bool(),
}
IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 3 + [2] * 7])
POSITIONS = torch.cat([torch.arange(5), torch.arange(7), torch.arange(2), torch.arange(3), torch.arange(7)]).view(2, 12)


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    remapped = hf.remap_positions_for_packed_sequence(function, POSITIONS)
    return hf.and_masks(remapped, hf.packed_sequence_mask_function(IDS))


def prefix(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j <= i) | (j < 4)


def dilated(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j) % 2 == 0


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function(3),
    "wide window": hf.sliding_window_causal_mask_function(40),
    "two-sided window": hf.sliding_window_bidirectional_mask_function(2),
    "chunks": hf.chunked_causal_mask_function(5, torch.tensor([3, 1])),
    "a user's prefix": prefix,
    "a user's dilation": dilated,
    "a union": hf.or_masks(hf.causal_mask_function, prefix),
    "two paddings": hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(PADDING["right"])),
}
if hasattr(hf, "remap_positions_for_packed_sequence"):  # absent in some versions
    FUNCTIONS["packed"] = packed(hf.causal_mask_function)
    FUNCTIONS["packed window"] = packed(hf.sliding_window_causal_mask_function(3))
DESCRIBED = set(FUNCTIONS) - {"a user's dilation"}
# (Nq, Nk, position of the first query, of the first key)
SIZES = {"whole": (12, 12, 0, 0), "cached": (3, 12, 9, 0), "one": (1, 12, 11, 0), "static": (4, 12, 2, 0),
         "sliding": (2, 7, 10, 5)}  # fmt: skip


def dense(found: Mask | Tensor | None, n_q: int, n_k: int) -> Tensor:
    """What attention shows: a key's weight is positive."""
    query, key, value = torch.zeros(B, 1, n_q, 1), torch.zeros(B, 1, n_k, 1), torch.eye(n_k).expand(B, 1, n_k, n_k)
    if isinstance(found, Tensor):
        return found.expand(B, 1, n_q, n_k)
    causal = found is None and n_q > 1
    return sorder.attention(query, key, value, is_causal=causal, mask=found) > 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_shows_the_same(name: str, padding: str, size: str) -> None:
    n_q, n_k, q_offset, kv_offset = SIZES[size]
    if size != "whole" and name.startswith("packed"):
        pytest.skip("transformers packs whole sequences only")
    options = dict(
        batch_size=B, q_length=n_q, kv_length=n_k, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=FUNCTIONS[name], attention_mask=PADDING[padding], allow_is_bidirectional_skip=False,
    )  # fmt: skip
    want = hf.sdpa_mask(**options, allow_is_causal_skip=False).expand(B, 1, n_q, n_k)
    skips = {False, hf.causal_mask_function is FUNCTIONS[name]}
    for skip in skips:
        found = mask(**options, allow_is_causal_skip=skip)
        assert torch.equal(dense(found, n_q, n_k), want)
        if name in DESCRIBED and padding != "holes":
            assert not isinstance(found, Tensor)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["causal", "bidirectional", "window", "wide window"])
def test_nothing_is_described_where_sdpa_needs_no_mask(name: str, size: str) -> None:
    n_q, n_k, q_offset, kv_offset = SIZES[size]
    options = dict(
        batch_size=B, q_length=n_q, kv_length=n_k, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=FUNCTIONS[name], attention_mask=PADDING["all real"],
        allow_is_causal_skip=name != "bidirectional", allow_is_bidirectional_skip=name == "bidirectional",
        local_size={"window": 3, "wide window": 40}.get(name),
    )  # fmt: skip
    if hf.sdpa_mask(**options) is None:
        found = mask(**options)
        if name == "bidirectional" or n_q == 1:
            assert found is None
        else:  # said all the same, to models whose attention is not ours
            assert isinstance(found, Mask) and found.causal and found.alignment == 0 and found.window is None


def test_what_another_version_means_otherwise_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory whose sample differs is not recognised; the mask is right all the same."""

    def exclusive(sliding_window: int) -> Callable[..., Any]:
        def inner_mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return j >= i - sliding_window

        return inner_mask

    monkeypatch.setattr(hf, "sliding_window_overlay", exclusive)
    huggingface_masks._kinds.cache_clear()
    try:
        found = mask(batch_size=B, q_length=6, kv_length=6, mask_function=exclusive(2))
        i, j = torch.arange(6)[:, None], torch.arange(6)
        assert torch.equal(dense(found, 6, 6), (j >= i - 2).expand(B, 1, 6, 6))
        assert isinstance(found, Mask) and found.window is None
    finally:
        huggingface_masks._kinds.cache_clear()


def test_a_prepared_mask_is_kept() -> None:
    found = mask(batch_size=B, q_length=6, kv_length=6, mask_function=FUNCTIONS["window"])
    assert mask(batch_size=B, q_length=6, kv_length=6, attention_mask=found) is found
