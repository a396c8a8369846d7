"""Masks, biases, grouped heads, soft cap, sinks and dropout of the public operator under every transform, against
dense attention under the same transform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import sorder
from sorder.ops.mask import Mask

from . import oracle
from .conftest import SETTINGS
from .transforms import PRODUCTS, Tensors, forward_over_reverse, loss_of

B, HQ, HK, NQ, NK = 2, 4, 2, 11, 13
rows, keys = torch.arange(NQ)[:, None], torch.arange(NK)


@dataclass(frozen=True)
class Feature:
    """Options of ``sorder.attention`` and of the oracle that mean the same.

    ``learned`` is the tensor, and the names of its argument in both, that is differentiated beside q, k and v.
    """

    options: dict[str, Any] = field(default_factory=dict)
    dense: dict[str, Any] = field(default_factory=dict)
    learned: tuple[str, str, tuple[int, ...]] | None = None


def _per_batch(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None, None, None]


BLIND = torch.ones(NQ, NK, dtype=torch.bool).index_fill(0, torch.tensor([2, 7]), False)
HOLES = (3 * rows + 5 * keys) % 4 > rows % 3
PADDING = torch.tensor([[True] * NK, [False, False] + [True] * (NK - 6) + [False] * 4])
IDS_Q, IDS_K = torch.tensor([0] * 4 + [1] * 3 + [2] * 4), torch.tensor([0] * 5 + [1] * 6 + [2] * 2)
SCATTERED_Q, SCATTERED_K = torch.arange(NQ) % 3, torch.arange(NK) % 3
SAME_DOCUMENT = IDS_Q[:, None] == IDS_K
Q0, K0 = torch.tensor([0, 4, 7, 11]), torch.tensor([0, 5, 11, 13])
# Key position of a row where a document's last query sees its last key, and where its first sees the first.
LENGTHS = Q0.diff()
DOCUMENT_END = (rows[:, 0] + (K0 - Q0)[1:].repeat_interleave(LENGTHS))[:, None]
DOCUMENT_START = (rows[:, 0] + (K0 - Q0)[:-1].repeat_interleave(LENGTHS))[:, None]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
ALIBI = SLOPES.double()[:, None, None] * (keys - rows)

FEATURES = {
    "grouped heads": Feature({}, {}),
    "boolean mask": Feature({"attn_mask": HOLES}, {"visible": HOLES}),
    "boolean mask, blind rows": Feature({"attn_mask": BLIND[None, None]}, {"visible": BLIND}),
    "boolean mask and causal": Feature({"attn_mask": HOLES, "is_causal": True}, {"visible": HOLES, "causal": True}),
    "boolean padding": Feature({"attn_mask": PADDING[:, None, None]}, {"visible": PADDING[:, None, None]}),
    "bias": Feature(learned=("attn_mask", "bias", (B, HQ, NQ, NK))),
    "bias over heads": Feature({"is_causal": True}, {"causal": True}, ("attn_mask", "bias", (HQ, 1, 1))),
    "bias table": Feature(learned=("attn_mask", "bias", (HQ, NQ, NK))),
    "bias over keys": Feature({"softcap": 1.0}, {"softcap": 1.0}, ("attn_mask", "bias", (NK,))),
    "bias over batch and rows": Feature(learned=("attn_mask", "bias", (B, 1, NQ, 1))),
    "additive mask": Feature(
        {"attn_mask": torch.zeros(NQ, NK).masked_fill(~(HOLES & BLIND), -torch.inf)}, {"visible": HOLES & BLIND}
    ),
    "additive mask, finite": Feature(
        {"attn_mask": (~(HOLES & BLIND)).float() * torch.finfo(torch.float32).min}, {"visible": HOLES & BLIND}
    ),
    "window": Feature({"mask": Mask(causal=True, window=(3, 0))}, {"visible": (keys <= rows) & (keys >= rows - 3)}),
    "two-sided window": Feature({"mask": Mask(window=(2, 4))}, {"visible": (keys <= rows + 4) & (keys >= rows - 2)}),
    "bottom-right": Feature({"mask": Mask(causal=True, alignment="bottom_right")}, {"visible": keys <= rows + NK - NQ}),
    "bottom-right and causal": Feature(
        {"mask": Mask(causal=True, alignment="bottom_right", window=(4, None)), "is_causal": True},
        {"visible": (keys <= rows) & (keys >= rows + NK - NQ - 4)},
    ),
    "offset, blind rows": Feature({"mask": Mask(causal=True, alignment=-3)}, {"visible": keys <= rows - 3}),
    "offset per batch": Feature(
        {"mask": Mask(causal=True, alignment=torch.tensor([0, 2]))}, {"visible": keys <= rows + _per_batch(0, 2)}
    ),
    "prefix": Feature(
        {"mask": Mask(causal=True, prefix=torch.tensor([2, 6]))},
        {"visible": (keys <= rows) | (keys < _per_batch(2, 6))},
    ),
    "lengths": Feature(
        {"mask": Mask(causal=True, key_start=torch.tensor([0, 4]), key_stop=torch.tensor([9, 10]))},
        {"visible": (keys <= rows) & (keys >= _per_batch(0, 4)) & (keys < _per_batch(9, 10))},
    ),
    "an empty sequence": Feature({"mask": Mask(key_stop=torch.tensor([5, 0]))}, {"visible": keys < _per_batch(5, 0)}),
    "key padding": Feature({"mask": Mask(key_padding=PADDING)}, {"visible": PADDING[:, None, None]}),
    "documents": Feature({"mask": Mask(documents=(IDS_Q, IDS_K))}, {"visible": SAME_DOCUMENT}),
    "documents, causal from the start": Feature(
        {"mask": Mask(causal=True, cu_seqlens=(Q0, K0))}, {"visible": SAME_DOCUMENT & (keys <= DOCUMENT_START)}
    ),
    "documents, causal to the end": Feature(
        {"mask": Mask(causal=True, alignment="bottom_right", window=(1, None), documents=(IDS_Q, IDS_K))},
        {"visible": SAME_DOCUMENT & (keys <= DOCUMENT_END) & (keys >= DOCUMENT_END - 1)},
    ),
    "scattered documents": Feature(
        {"mask": Mask(causal=True, documents=(SCATTERED_Q, SCATTERED_K))},
        {"visible": (SCATTERED_Q[:, None] == SCATTERED_K) & (keys <= rows)},
    ),
    "ranges": Feature(
        {"mask": Mask(ranges=(torch.arange(NQ) % 5, 14 - 3 * torch.arange(NQ) % 11))},
        {"visible": (keys >= rows % 5) & (keys < 14 - 3 * rows % 11)},
    ),
    "ALiBi": Feature({"mask": Mask(causal=True, alibi=SLOPES)}, {"causal": True, "bias": ALIBI}),
    "ALiBi, bottom-right": Feature(
        {"mask": Mask(causal=True, alignment="bottom_right", alibi=SLOPES)},
        {"visible": keys <= rows + 2, "bias": ALIBI - 2 * SLOPES.double()[:, None, None]},
    ),
    "soft cap": Feature({"softcap": 0.8, "is_causal": True}, {"softcap": 0.8, "causal": True}),
    "sinks": Feature(learned=("sinks", "sinks", (HQ,))),
    "sinks, blind rows": Feature({"attn_mask": BLIND}, {"visible": BLIND}, ("sinks", "sinks", (HQ,))),
    "everything": Feature(
        {"mask": Mask(causal=True, window=(5, 0), alibi=SLOPES, key_start=2), "softcap": 1.5, "sinks": SLOPES},
        {"visible": (keys <= rows) & (keys >= rows - 5) & (keys >= 2), "softcap": 1.5, "sinks": SLOPES.double()},
        ("attn_mask", "bias", (1, HQ, 1, NK)),
    ),
}  # fmt: skip


def problem(feature: Feature, device: str, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    sizes = [(B, HQ, NQ, 8), (B, HK, NK, 8), (B, HK, NK, 6), *((feature.learned[2],) if feature.learned else ())]
    x, t = (tuple(torch.randn(*s).to(device, dtype) for s in sizes) for _ in range(2))
    return x, t


def moved(x: Any, device: str) -> Any:
    if isinstance(x, dict):
        return {name: moved(value, device) for name, value in x.items()}
    return x.to(device) if isinstance(x, Tensor | Mask) else x


def operator(feature: Feature, device: str) -> Callable[..., Any]:
    options = moved(feature.options, device)

    def attention(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Any:
        extra = {feature.learned[0]: learned[0]} if feature.learned else {}
        return sorder.attention(q, k, v, enable_gqa=True, return_lse=True, **options, **extra)

    return attention


def dense(feature: Feature, device: str) -> Callable[..., Any]:
    options = moved(feature.dense, device)

    def attention(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Any:
        extra = {feature.learned[1]: learned[0]} if feature.learned else {}
        if "bias" in extra and options.get("visible") is not None and "mask" in feature.options:
            extra["bias"] = extra["bias"] + (ALIBI.to(device) if feature.options["mask"].alibi is not None else 0)
        return oracle.dense(q, k, v, **{**options, **extra})

    return attention


def compare(feature: Feature, transform: Callable[..., Any], device: str, dtype: torch.dtype, bound: float) -> None:
    x, t = problem(feature, device, dtype)
    got = transform(loss_of(operator(feature, device)), x, t)
    want = transform(loss_of(dense(feature, device)), *(tuple(a.double() for a in y) for y in (x, t)))
    for name, a, b in zip(("q", "k", "v", "learned"), got, want, strict=False):
        assert oracle.relative_error(a, b) <= bound, name


# Pairwise: each feature with a first product and another one.
PAIRS = [(name, PRODUCTS[(i + j) % len(PRODUCTS)]) for i, name in enumerate(FEATURES) for j in (0, 1 + i // 8 % 7)]


@pytest.mark.parametrize(("name", "transform"), PAIRS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_equals_dense_in_float64(name: str, transform: Callable[..., Any]) -> None:
    compare(FEATURES[name], transform, "cpu", torch.float64, 1e-12)


# All on a GPU; in the interpreter, what goes through every kernel.
INTERPRETED = ("bias over batch and rows", "sinks, blind rows", "everything")
ON_KERNELS = [
    pytest.param(name, *p.values, id=f"{p.id}-{name}", marks=p.marks)
    for p in SETTINGS
    for name in FEATURES
    if "cuda" in str(p.id) or (p.id == "interpreter" and name in INTERPRETED)
]


@pytest.mark.parametrize(("name", "setting"), ON_KERNELS, indirect=["setting"])
def test_equals_dense_on_kernels(name: str, setting: tuple[str, torch.dtype, float]) -> None:
    device, dtype, bound = setting
    compare(FEATURES[name], forward_over_reverse, device, dtype, bound)


@pytest.mark.parametrize("name", FEATURES)
def test_value_equals_dense(name: str) -> None:
    feature = FEATURES[name]
    x, _ = problem(feature, "cpu", torch.float64)
    for got, want in zip(operator(feature, "cpu")(*x), dense(feature, "cpu")(*x), strict=True):
        assert oracle.relative_error(got, want) <= 1e-14
