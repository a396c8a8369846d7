"""Masks, biases, grouped heads and dropout of SDPA, nn.MultiheadAttention and nn.TransformerEncoder are routed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from sorder.ops import routing
from sorder.ops.attention import attention
from sorder.ops.routing import exact_attention

from .test_routing import close, second_order, tensors


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What reached the operator. Nothing may fall back."""
    seen: list[dict[str, Any]] = []

    def watch(*args: Any, **options: Any) -> Tensor:
        output = attention(*args, **options)
        seen.append({"attn_mask": args[3] if len(args) > 3 else None, **options})
        return output

    monkeypatch.setattr(routing, "attention", watch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="exact_attention")
        yield seen


def check(f: Callable[..., Tensor], *x: Tensor) -> None:
    """Value, gradient and Hessian product under routing against materialised attention."""
    directions, everywhere = tuple(torch.randn_like(a) for a in x), tuple(range(len(x)))

    def all_orders() -> list[Tensor]:
        gradient, product = jvp(grad(f, everywhere), x, directions)
        return [f(*x), *gradient, *product]

    with sdpa_kernel(SDPBackend.MATH):
        expected = all_orders()
    with exact_attention(strict=True):
        found = all_orders()
    for a, b in zip(found, expected, strict=True):
        assert close(a, b)


# ---------------------------------------------------------------------- plain calls

B, H, N, M, D = 2, 4, 6, 7, 4


def _boolean(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6
    if shape[-2] > 1:
        mask[..., 2, :] = False  # a row that sees nothing
    return mask


MASKS: dict[str, Tensor] = {
    "boolean": _boolean(N, M),
    "boolean, per head": _boolean(H, N, M),
    "boolean, per batch": _boolean(B, 1, N, M),
    "key padding": _boolean(B, 1, 1, M),
    "additive": torch.zeros(N, M).double().masked_fill(~_boolean(N, M), -torch.inf) + torch.eye(N, M),
    "additive, float32's least": torch.zeros(N, M).masked_fill(~_boolean(N, M) | ~_boolean(1, M), -3.4e38).double(),
    "per query": torch.linspace(-1, 1, N).double()[:, None],
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(calls: list[dict[str, Any]], mask: str) -> None:
    if "least" in mask:  # a row that hides all by large numbers: materialised attention averages it, we give zeros
        MASKS[mask][..., 0] = 0.0
    q, k, v = (torch.randn(B, H, n, D).double() for n in (N, M, M))
    weight = torch.randn(B, H, N, D).double()
    check(lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, MASKS[mask]) * weight).sin().sum(), q, k, v)
    assert len(calls) == 2 and calls[0]["attn_mask"] is MASKS[mask]


@pytest.mark.parametrize("shape", [(B, H, N, M), (H, N, M), (N, M), (1, M), (B, 1, 1, M)])
def test_a_bias_gets_its_derivatives(calls: list[dict[str, Any]], shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(B, H, n, D).double() for n in (N, M, M))
    weight, bias = torch.randn(B, H, N, D).double(), torch.randn(shape).double()
    check(lambda q, b: (F.scaled_dot_product_attention(q, k, v, b) * weight).sin().sum(), q, bias)
    assert len(calls) == 2


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": MASKS["boolean, per batch"]}], ids=["dense", "causal", "mask"]
)
def test_grouped_heads(calls: list[dict[str, Any]], key_heads: int, options: dict[str, Any]) -> None:
    q, weight = torch.randn(2, B, H, N, D).double()
    k, v = torch.randn(2, B, key_heads, M, D).double()

    def f(*x: Tensor) -> Tensor:
        return (F.scaled_dot_product_attention(*x, **options, enable_gqa=True) * weight).sin().sum()

    check(f, q, k, v)
    assert len(calls) == 2


def test_dropout() -> None:
    p, n = 0.25, 64
    q, k = torch.randn(2, 4, 2, n, 8).double()
    eye = torch.eye(n).double().expand(4, 2, n, n)
    with exact_attention(strict=True):
        weights = F.scaled_dot_product_attention(q, k, eye)
        torch.manual_seed(1)
        dropped = F.scaled_dot_product_attention(q, k, eye, dropout_p=p)
        torch.manual_seed(1)
        again = F.scaled_dot_product_attention(q, k, eye, dropout_p=p)
    assert torch.equal(dropped, again)
    kept = dropped != 0
    assert close(dropped[kept], weights[kept] / (1 - p))
    assert abs((~kept).double().mean().item() - p) < 5 * (p * (1 - p) / kept.numel()) ** 0.5


# ---------------------------------------------------------------------- modules

PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
LEFT = PADDING.flip(1)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
WINDOW = (torch.arange(6)[:, None] - torch.arange(6)).abs() > 2


def _mha(query_length: int | None = None, **options: Any) -> Callable[[Tensor], Tensor]:
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)

    def call(x: Tensor) -> Tensor:
        return module(x[:, :query_length], x, x, need_weights=False, **options)[0]

    return call


def _encoder(train: bool, **options: Any) -> Callable[[Tensor], Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    module = nn.TransformerEncoder(layer, 2).train(train)
    return lambda x: module(x, **options)


MODULES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "mha, padding": lambda: _mha(key_padding_mask=PADDING),
    "mha, left padding": lambda: _mha(key_padding_mask=LEFT),
    "mha, additive padding": lambda: _mha(key_padding_mask=torch.zeros(2, 6).double().masked_fill(PADDING, -torch.inf)),
    "mha, weights for padding": lambda: _mha(key_padding_mask=torch.zeros(2, 6).double().masked_fill(PADDING, -1.5)),
    "mha, causal and padding": lambda: _mha(attn_mask=CAUSAL, key_padding_mask=PADDING.double() * -1e9),
    "mha, causal hint and padding": lambda: _mha(attn_mask=CAUSAL < 0, key_padding_mask=PADDING, is_causal=True),
    "mha, window": lambda: _mha(attn_mask=WINDOW),
    "mha, window and padding": lambda: _mha(attn_mask=WINDOW, key_padding_mask=PADDING),
    "mha, mask per head": lambda: _mha(attn_mask=torch.randn(4, 6, 6).double()),
    "mha, cross": lambda: _mha(4, key_padding_mask=PADDING),
    "encoder, train": lambda: _encoder(True, src_key_padding_mask=PADDING),
    "encoder, eval": lambda: _encoder(False, src_key_padding_mask=PADDING),
    "encoder, causal, eval": lambda: _encoder(False, mask=CAUSAL < 0, is_causal=True, src_key_padding_mask=PADDING),
}
NEVER_COMBINED = {"mha, causal hint and padding", "mha, padding", "mha, additive padding", "encoder, causal, eval"}


@pytest.mark.parametrize("case", MODULES)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_modules(calls: list[dict[str, Any]], case: str) -> None:
    model = MODULES[case]()
    x = torch.randn(2, 6, 8).double()
    weight = torch.randn_like(model(x))
    check(lambda x: (model(x) * weight).sum(), x)
    assert len(calls) == (4 if "encoder" in case else 2)
    if case in NEVER_COMBINED:
        for call in calls:
            assert call["attn_mask"] is None and call["is_causal"] is ("causal" in case)
            assert call["mask"].key_stop.tolist() == [6, 4] and call["mask"].key_padding is None


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_of_unbatched_and_batch_second(calls: list[dict[str, Any]], batch_first: bool) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn(6, 8).double()
    check(lambda x: module(x, x, x, key_padding_mask=PADDING[1], need_weights=False)[0].sin().sum(), x)
    x = torch.randn(2, 6, 8).double() if batch_first else torch.randn(6, 2, 8).double()
    check(lambda x: module(x, x, x, key_padding_mask=PADDING, need_weights=False)[0].sin().sum(), x)
    assert len(calls) == 4 and all(call["mask"].key_stop is not None for call in calls)


@pytest.mark.parametrize("case", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8, "vdim": 5}], ids=str)
def test_appended_keys_and_other_widths(calls: list[dict[str, Any]], case: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **case)
    weight = torch.randn(2, 6, 8).double()
    value = torch.randn(2, 6, case.get("vdim", 8)).double()

    def f(x: Tensor) -> Tensor:
        y, _ = module(x, x, value, key_padding_mask=PADDING, attn_mask=CAUSAL < 0, need_weights=False)
        return (y * weight).sum()

    check(f, weight.cos())
    assert len(calls) == 2


def test_weights_asked_for_are_those_of_pytorch(calls: list[dict[str, Any]]) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 8).double()
    expected = module(x, x, x, key_padding_mask=PADDING)
    with exact_attention(strict=True):
        found = module(x, x, x, key_padding_mask=PADDING)
    assert not calls and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_the_same_sequence_padded_to_two_lengths(causal: bool) -> None:
    """Output, gradient and Hessian product agree on the real part."""
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, v, weight = torch.randn(3, 1, 5, 8).double()

    def found(length: int) -> tuple[Tensor, ...]:
        def f(x: Tensor) -> Tensor:
            padded = torch.cat([x, 1e3 * torch.ones(1, length - 5, 8).double()], 1)
            hidden = torch.arange(length)[None] >= 5
            mask = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None
            return (module(padded, src_mask=mask, src_key_padding_mask=hidden, is_causal=causal)[:, :5] * weight).sum()

        with exact_attention(strict=True):
            return second_order(f, x, v)

    for a, b in zip(found(7), found(64), strict=True):
        assert close(a, b)


def test_materialised_attention_keeps_the_padding(calls: list[dict[str, Any]]) -> None:
    """Heads wider than the kernels take."""
    module = nn.MultiheadAttention(260, 1, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 260).double()
    for options in ({}, {"attn_mask": CAUSAL < 0, "is_causal": True}, {"attn_mask": CAUSAL}, {"attn_mask": WINDOW}):
        if options.get("attn_mask") is not None and options["attn_mask"].dtype != torch.bool:
            options["key_padding_mask"] = torch.zeros(2, 6).double().masked_fill(PADDING, -torch.inf)
        options.setdefault("key_padding_mask", PADDING)
        expected = module(x, x, x, need_weights=False, **options)[0]
        with exact_attention(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert close(module(x, x, x, need_weights=False, **options)[0], expected)
    assert not calls


def test_eval_mode_with_dropout_and_no_gradient(calls: list[dict[str, Any]]) -> None:
    """The fused inference path, which would nest the padded sequences."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x = torch.randn(2, 6, 8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = module(x, src_key_padding_mask=PADDING)
        assert not calls
        with exact_attention(strict=True):
            found = module(x, src_key_padding_mask=PADDING)
    assert len(calls) == 2
    assert close(found[~PADDING], expected[~PADDING], 1e-5)


def test_a_substituted_bias_as_the_mask(calls: list[dict[str, Any]]) -> None:
    q, k, v = tensors(1, 2, 5, 4)
    bias = torch.zeros(5, 5).double()
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    check(lambda b: F.scaled_dot_product_attention(q, k, v, causal + b).square().sum(), bias)
    assert calls[0]["attn_mask"] is not None  # under the derivative; as a constant, it is the causal mask
    assert calls[1]["attn_mask"] is None and calls[1]["is_causal"]
