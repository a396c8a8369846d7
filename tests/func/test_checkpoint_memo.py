"""Checkpointed attention under forward over reverse: its value and its pullback are computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

import sorder
from sorder.func import checkpoint, hvp
from sorder.kernels import twin
from sorder.ops import memo
from tests.cases import counting

BLOCKS = 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each map is computed; attention of any size is remembered."""
    counted: Counter[str] = Counter()

    for name in ("forward", "tangent", "backward", "backward_tangent"):
        monkeypatch.setattr(twin, name, counting(counted, name, getattr(twin, name)))
    monkeypatch.setattr(memo, "_MIN_SCORES", 0)
    return counted


def block(W: Tensor, h: Tensor) -> Tensor:
    q, k, v = (h @ W).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return h + sorder.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).tanh()


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    W, t, h = (torch.randn(s, generator=g, dtype=torch.float64) for s in [(BLOCKS, 8, 24)] * 2 + [(2, 7, 8)])
    return (0.4 * W).to(dtype), t.to(dtype), h.to(dtype)


def loss(run: Callable[[Tensor, Tensor], Tensor], h: Tensor) -> Callable[[Tensor], Tensor]:
    def evaluate(Ws: Tensor) -> Tensor:
        x = h
        for W in Ws.unbind():
            x = run(W, x)
        return x.square().sum()

    return evaluate


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_and_pullbacks_are_computed_once(calls: Counter[str], dtype: torch.dtype) -> None:
    W, t, h = problem(dtype)
    expected = jvp(grad(loss(block, h)), (W,), (t,))
    calls.clear()
    result = jvp(grad(loss(checkpoint(block), h)), (W,), (t,))
    assert calls == {"forward": BLOCKS, "backward": BLOCKS, "tangent": 2 * BLOCKS, "backward_tangent": BLOCKS}
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_is_kept_without_forward_mode(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo.Memo, "keep", lambda *_: pytest.fail("a graph must keep only what went in"))
    W, _, h = problem()
    W.requires_grad_()
    (first,) = torch.autograd.grad(loss(checkpoint(block), h)(W), W, create_graph=True)
    torch.autograd.grad(first.sum(), W)
    vjp(grad(loss(checkpoint(block), h)), W.detach())[1](torch.ones_like(W))
    assert calls["forward"] > 2 * BLOCKS


def normed_block(W: Tensor, h: Tensor) -> Tensor:
    """The tangents' evaluation of a norm's pullback rounds otherwise than the plain one."""
    return torch.nn.functional.layer_norm(block(W, h), h.shape[-1:])


def by_transforms(f: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
    return jvp(grad(f), (x,), (t,))[1]


def by_hvp(f: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
    return hvp(f, (x,), (t,))[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_unrecorded_pullback_is_evaluated_once(calls: Counter[str], dtype: torch.dtype) -> None:
    W, t, h = problem(dtype)

    def counted(W: Tensor, h: Tensor) -> Tensor:
        calls["block"] += 1
        return normed_block(W, h)

    result = by_hvp(loss(checkpoint(counted), h), W, t)
    expected = {"block": 3, "forward": 1, "tangent": 2, "backward": 1, "backward_tangent": 1}
    assert calls == {name: count * BLOCKS for name, count in expected.items()}
    if dtype == torch.float64:
        torch.testing.assert_close(result, by_transforms(loss(normed_block, h), W, t))


@pytest.mark.parametrize(("product", "own"), [(by_hvp, 0), (by_transforms, 3)])
def test_a_block_is_forgotten_with_its_pullback(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch, product: Callable[..., Tensor], own: int
) -> None:
    """What is kept at each block's last product: one result of each block before it, and at most ``own`` of its own."""
    memos: list[memo.Memo] = []
    kept: list[int] = []
    init, last = memo.Memo.__init__, twin.backward_tangent

    def noted(self: memo.Memo) -> None:
        memos.append(self)
        init(self)

    def backward_tangent(*args: Any) -> Any:
        kept.append(sum(len(m._kept) for m in memos))
        return last(*args)

    monkeypatch.setattr(memo.Memo, "__init__", noted)
    monkeypatch.setattr(twin, "backward_tangent", backward_tangent)
    W, t, h = problem()
    product(loss(checkpoint(normed_block), h), W.repeat(2, 1, 1), t.repeat(2, 1, 1))
    assert len(memos) == len(kept) == 4
    assert all(before <= n <= before + own for before, n in zip((3, 2, 1, 0), kept, strict=True))
    assert not any(m._kept for m in memos)


def test_what_is_kept_cannot_be_written_to() -> None:
    kept, result = memo.Memo(), torch.ones(3)
    kept.keep(("F",), (result,))
    result.mul_(2.0)  # as a hook may do with a gradient
    for last in (False, True):
        found = kept.find(("F",), last)
        assert found is not None
        assert torch.equal(found[0], torch.ones(3))
        found[0].mul_(2.0)
    assert kept.find(("F",), False) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("size", [1, 5, 2**16, 2**16 + 3, 2**18])
def test_hashes_tell_tensors_apart(dtype: torch.dtype, size: int) -> None:
    x = torch.randint(0, 2, (size,)).to(dtype)
    flipped = x.clone()
    flipped[size // 2] = 1 - flipped[size // 2].to(torch.int) if dtype == torch.bool else flipped[size // 2] + 1
    others = [flipped]
    if size > 1 and dtype != torch.bool:
        signs = x.clone()
        signs[:2] *= -1  # two bits, at the top of two words
        others.append(signs)
    if size > 2**16:
        x[0], x[2**16] = 0, 1
        others.append(x.roll(2**16))  # rows change places
    for other in others:
        pairs = list(zip(memo._hashes(x), memo._hashes(other), strict=True))
        assert all(int(a) != int(b) for a, b in pairs)
    assert [int(a) for a in memo._hashes(x)] == [int(a) for a in memo._hashes(x.clone())]


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = sorder.attention(q, k, v), sorder.attention(q, k, v)
    second.mul_(2.0)
    return first.sin() * second.cos()


def beside_a_constant(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    moving = sorder.attention(q, k, v)
    constant = sorder.attention(q.detach(), k.detach(), v.detach())
    constant.mul_(2.0)
    return moving.sin() * constant.cos()


# Of twice, the backward pass needs what is written to.
@pytest.mark.parametrize(("function", "order"), [(twice, 1), (beside_a_constant, 1), (beside_a_constant, 2)])
def test_equal_results_do_not_share_memory(calls: Counter[str], function: Callable[..., Tensor], order: int) -> None:
    """A block may write to one of them."""
    primals, tangents = (tuple(torch.randn(3, 2, 5, 4, dtype=torch.float64).unbind()) for _ in range(2))

    def product(f: Callable[..., Tensor]) -> Any:
        if order == 1:
            return jvp(f, primals, tangents)
        return jvp(grad(lambda *x: f(*x).sum(), (0, 1, 2)), primals, tangents)

    torch.testing.assert_close(product(checkpoint(function)), product(function))
