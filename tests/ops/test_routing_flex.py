"""flex_attention is routed: block masks exactly, score functions as materialised attention."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor
from torch.func import grad, jvp
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.nn.attention.flex_attention import flex_attention as imported_earlier

from sorder.ops import flex, routing
from sorder.ops.attention import attention
from sorder.ops.mask import Mask
from sorder.ops.routing import exact_attention

from .test_routing import close

B, H, N, D = 2, 3, 40, 4
NAMES = ("flex_attention_hop", "_validate_device", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG")
BEFORE = {name: getattr(flex_module, name) for name in NAMES}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = []

    def watch(*args: Any, **options: Any) -> Any:
        output = attention(*args, **options)
        seen.append({"attn_mask": args[3], **options})
        return output

    monkeypatch.setattr(flex, "attention", watch)
    monkeypatch.setattr(routing, "_warned", set())
    yield seen
    exact_attention.disable()
    gc.collect()  # contexts that a traceback still holds
    assert {name: getattr(flex_module, name) for name in NAMES} == BEFORE


DOCUMENT = torch.tensor([0] * 10 + [1] * 25 + [2] * 5)
OFFSET = torch.tensor([3, 11])


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


MASKS: dict[str, tuple[Callable[..., Tensor], int | None, int | None, bool]] = {
    # function, B, H of create_block_mask, and whether every row sees one interval
    "causal": (causal, None, None, True),
    "window": (lambda b, h, i, j: (i - j).abs() <= 5, None, None, True),
    "documents": (lambda b, h, i, j: (DOCUMENT[i] == DOCUMENT[j]) & (j <= i), None, None, True),
    "per batch": (lambda b, h, i, j: j <= i + OFFSET[b], B, None, True),
    "per head": (lambda b, h, i, j: i - j < 4 + 3 * h, None, H, True),
    "dilated": (lambda b, h, i, j: (i - j) % 3 == 0, None, None, False),
    "rows that see nothing": (lambda b, h, i, j: (j < i) & (i > 4), None, None, True),
}


def block_mask(name: str, block: int = 16, n_q: int = N, n_k: int = N) -> BlockMask:
    function, b, h, _ = MASKS[name]
    return create_block_mask(function, b, h, n_q, n_k, device="cpu", BLOCK_SIZE=block)


def materialised(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~shown, -torch.inf)
    empty = ~shown.any(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


def second_order(f: Callable[..., Tensor], x: tuple[Tensor, ...], weight: Tensor) -> list[Tensor]:
    def loss(*x: Tensor) -> Tensor:
        return (f(*x) * weight).sin().sum()

    gradient, product = jvp(grad(loss, (0, 1, 2)), x, tuple(a.cos() for a in x))
    return [f(*x), *gradient, *product]


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("name", MASKS)
def test_block_masks(calls: list[dict[str, Any]], name: str, block: int) -> None:
    x = tuple(torch.randn(3, B, H, N, D).double())
    weight = torch.randn(B, H, N, D).double()
    function, _, _, intervals = MASKS[name]
    shown = create_mask(function, B, H, N, N, device="cpu")
    with exact_attention(strict=True):
        mask = block_mask(name, block)
        found = second_order(lambda *x: imported_earlier(*x, block_mask=mask), x, weight)
    for a, b in zip(found, second_order(lambda *x: materialised(*x, shown), x, weight), strict=True):
        assert close(a, b)
    assert len(calls) == 2
    assert all(isinstance(call["mask"], Mask) is intervals for call in calls)


def test_lists_of_blocks_without_a_function() -> None:
    """BlockMask.from_kv_blocks: what the lists leave out is hidden, whatever the function says."""
    indices = torch.tensor([[[[0, 1, 2], [2, 0, 1], [1, 0, 2]]]])
    mask = BlockMask.from_kv_blocks(torch.tensor([[[1, 2, 1]]]), indices, BLOCK_SIZE=16, seq_lengths=(40, 40))
    shown = torch.zeros(40, 40, dtype=torch.bool)
    for rows, keys in ((0, 0), (1, 2), (1, 0), (2, 1)):
        shown[16 * rows : 16 * rows + 16, 16 * keys : 16 * keys + 16] = True
    q, k, v = torch.randn(3, 1, 2, 40, D).double()
    with exact_attention(strict=True):
        assert close(imported_earlier(q, k, v, block_mask=mask), materialised(q, k, v, shown))


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
def test_without_a_mask(calls: list[dict[str, Any]], options: dict[str, Any]) -> None:
    heads = 1 if options.get("enable_gqa") else H
    q, (k, v) = torch.randn(B, H, 7, D).double(), torch.randn(2, B, heads, N, D).double()
    expected = materialised(q * options.get("scale", 0.5) * 2, k, v, torch.ones(7, N, dtype=torch.bool))
    with exact_attention(strict=True):
        assert close(flex_module.flex_attention(q, k, v, **options), expected)
    assert calls[0]["mask"] is None and calls[0]["attn_mask"] is None


def test_log_sum_exp() -> None:
    q, k, v = torch.randn(3, B, H, N, D).double()
    shown = create_mask(causal, B, H, N, N, device="cpu")
    want = (q @ k.mT / 2).masked_fill(~shown, -torch.inf).logsumexp(-1)
    with exact_attention(strict=True):
        mask = block_mask("causal")
        _, aux = imported_earlier(q, k, v, block_mask=mask, return_aux=flex_module.AuxRequest(lse=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, lse = imported_earlier(q, k, v, block_mask=mask, return_lse=True)
    assert close(aux.lse, want) and close(lse, want)


def test_a_score_function_is_materialised_with_a_warning(calls: list[dict[str, Any]]) -> None:
    slopes = torch.rand(H).double()

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 3 * torch.tanh(score / 3) + slopes[h] * (j - i)

    x = tuple(torch.randn(3, B, H, N, D).double())
    weight = torch.randn(B, H, N, D).double()
    shown = create_mask(causal, B, H, N, N, device="cpu")
    i, j = torch.arange(N)[:, None], torch.arange(N)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = 3 * torch.tanh(q @ k.mT / 6) + slopes[:, None, None] * (j - i)
        return scores.masked_fill(~shown, -torch.inf).softmax(-1) @ v

    mask = block_mask("causal")

    def call(*x: Tensor) -> Tensor:
        return imported_earlier(*x, score_mod=alibi, block_mask=mask)

    with warnings.catch_warnings(record=True) as caught, exact_attention():
        warnings.simplefilter("always")
        found = second_order(call, x, weight)
        found = second_order(call, x, weight)
    (warning,) = [w for w in caught if "exact_attention" in str(w.message)]
    assert warning.filename == __file__ and "score_mod" in str(warning.message)
    assert "call of flex_attention (query (2, 3, 40, 4)" in str(warning.message)
    for a, b in zip(found, second_order(dense, x, weight), strict=True):
        assert close(a, b)
    with exact_attention(strict=True), pytest.raises(NotImplementedError, match=r"strict=True.*score_mod.*softcap="):
        call(*x)
    assert not calls


def test_off_outside_and_for_other_threads(calls: list[dict[str, Any]]) -> None:
    q, k, v = torch.randn(3, 1, 1, 16, D)
    mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
    found: list[Tensor] = []

    def call() -> None:
        found.append(imported_earlier(q, k, v, block_mask=mask))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call()
        with exact_attention():
            call()
            assert len(calls) == 1
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            with exact_attention(False):
                call()
            with pytest.raises(NotImplementedError, match="backward on CPU"), exact_attention(False):
                imported_earlier(q.clone().requires_grad_(), k, v, block_mask=mask)
        call()
        assert len(calls) == 1
        exact_attention.enable()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(calls) == 2 and len(found) == 6
    assert all(close(x, found[0], 1e-6) for x in found)


def test_a_compiled_function_runs_eagerly_in_a_product(calls: list[dict[str, Any]]) -> None:
    import sorder

    compiled = torch.compile(imported_earlier, backend="aot_eager")
    mask = block_mask("window")
    x = torch.randn(1, 1, N, D).double().requires_grad_()
    v = torch.randn_like(x)
    shown = create_mask(MASKS["window"][0], 1, 1, N, N, device="cpu")

    def loss(f: Callable[[Tensor], Tensor]) -> Tensor:
        return f(x).sin().sum()

    with (
        sorder.exact_attention(),
        sorder.curvature.CurvaturePoint(
            lambda: loss(lambda x: compiled(x, x.sin(), x, block_mask=mask)), [x], "hessian"
        ) as point,
    ):
        (product,) = point.product([v])
    expected = jvp(grad(lambda x: materialised(x, x.sin(), x, shown).sin().sum()), (x.detach(),), (v,))[1]
    assert close(product, expected)
    assert calls
