"""Heads behind tokens, packed documents and padding: the same numbers however the problem lies in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sorder
from sorder.kernels import twin
from sorder.ops.mask import Mask
from sorder.ops.varlen import attention_varlen

from . import oracle


def product(f: Callable[..., Tensor], *x: Tensor) -> tuple[Tensor, ...]:
    return jvp(grad(lambda *x: f(*x).sin().sum(), argnums=tuple(range(len(x)))), x, x)[1]


def close(got: Any, want: Any, bound: float = 1e-12) -> None:
    for a, b in zip(got, want, strict=True):
        assert oracle.relative_error(a, b) <= bound


class Given(TorchDispatchMode):
    """Strides of the query that the operator below autograd is given, and whether anything was copied before."""

    strides: tuple[int, ...] = ()
    copied = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            self.strides = args[0].stride()
        elif not self.strides:
            inputs = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
            out = func(*args, **(kwargs or {}))
            outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.copied |= any(x.untyped_storage().data_ptr() not in inputs for x in outputs)
            return out
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["heads behind tokens", "fused projection"])
def test_views_are_not_copied(kind: str) -> None:
    if kind == "fused projection":
        parts = torch.randn(2, 7, 3, 4, 8, dtype=torch.float64).unbind(2)
    else:
        parts = tuple(torch.randn(2, 7, 4, 8, dtype=torch.float64) for _ in range(3))
    with torch.no_grad(), Given() as given:
        q, k, v = (x.transpose(1, 2) for x in parts)
        out = sorder.attention(q, k, v, is_causal=True)
    assert given.strides == q.stride()
    assert not given.copied
    assert out.transpose(1, 2).is_contiguous()  # ready for the output projection
    assert oracle.relative_error(out, oracle.dense(q, k, v, True)[0]) <= 1e-14


Q0, K0 = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 3, 5, 11])
PACKED = (torch.randn(10, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": (2, 0)}, {"softcap": 1.5}], ids=str
)
def test_packed_documents_are_separate_problems(options: dict[str, Any]) -> None:
    """Queries and keys of other lengths, a document without queries, and tokens behind the last document."""
    x = tuple(a.double() for a in PACKED)

    def separately(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = Mask(options.get("causal", False), "bottom_right", options.get("window"))
        rows = torch.zeros_like(q)
        for d in range(3):
            at = [slice(int(c[d]), int(c[d + 1])) for c in (Q0, K0, K0)]
            part = [y[s].transpose(0, 1) for y, s in zip((q, k, v), at, strict=True)]
            out = sorder.attention(*part, mask=mask, enable_gqa=True, softcap=options.get("softcap"))
            rows = rows.index_add(0, torch.arange(10)[at[0]], out.transpose(0, 1))
        return rows

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_varlen(q, k, v, Q0, K0, **options)

    out, lse = attention_varlen(*x, Q0, K0, return_lse=True, **options)
    close([out], [separately(*x)], 1e-14)
    assert out.shape == x[0].shape
    assert out.is_contiguous()
    assert lse.shape == (4, 10)
    assert not out[9].any()
    close(product(packed, *x), product(separately, *x))


def test_packed_self_attention_is_the_mask_of_ids() -> None:
    ids = torch.tensor([5, 5, 5, 2, 2, 9, 9, 9, 9])
    q = torch.randn(9, 2, 8, dtype=torch.float64)
    got = attention_varlen(q, q, q, torch.tensor([0, 3, 5, 9], dtype=torch.int32), causal=True)
    heads = q.transpose(0, 1)
    want = sorder.attention(heads, heads, heads, mask=Mask(causal=True, documents=ids))
    close([got.transpose(0, 1)], [want], 1e-14)


@pytest.mark.parametrize("bad", ["query", "key", "value"])
def test_packed_inputs_have_three_dimensions(bad: str) -> None:
    x = {name: a[None] if name == bad else a for name, a in zip(("query", "key", "value"), PACKED, strict=True)}
    with pytest.raises(ValueError, match=f"{bad} must have shape"):
        attention_varlen(**x, cu_seqlens_q=Q0, cu_seqlens_k=K0)


@pytest.mark.parametrize("how", ["boolean mask", "additive mask", "key_padding", "lengths", "left lengths"])
def test_padding_changes_nothing(how: str) -> None:
    """A sequence padded to two lengths: output, gradient and product agree where it is, and are zero elsewhere."""
    real = 6
    base, direction = torch.randn(2, real, 3 * 8, dtype=torch.float64)

    def attend(n: int) -> Callable[[Tensor], Tensor]:
        left = how == "left lengths"
        keep = torch.arange(n) >= n - real if left else torch.arange(n) < real
        options = {
            "boolean mask": {"attn_mask": keep[None, None, None]},
            "additive mask": {"attn_mask": torch.zeros(1, 1, 1, n).masked_fill(~keep, torch.finfo(torch.float32).min)},
            "key_padding": {"mask": Mask(key_padding=keep[None])},
            "lengths": {"mask": Mask(key_stop=torch.tensor([real]))},
            "left lengths": {"mask": Mask(causal=True, key_start=torch.tensor([n - real]))},
        }[how]

        def f(x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(0, 1)[None] for y in x.chunk(3, -1))
            out = sorder.attention(q, k, v, **options)[0].transpose(0, 1).flatten(1)
            return torch.where(keep[:, None], out, 0.0)

        return f

    def padded(x: Tensor, n: int) -> Tensor:
        filler = torch.full((n - real, x.shape[-1]), 3.0, dtype=x.dtype)
        return torch.cat([filler, x] if how == "left lengths" else [x, filler])

    def of_real(x: Tensor) -> Tensor:
        return x[-real:] if how == "left lengths" else x[:real]

    found = []
    for n in (7, 19):
        f, x, t = attend(n), padded(base, n), padded(direction, n)
        gradient, hessian_product = jvp(grad(lambda x, f=f: f(x).sin().sum()), (x,), (t,))
        for y in (gradient, hessian_product):
            assert not torch.cat([y[:-real], y[:0]] if how == "left lengths" else [y[real:]]).any()
        found.append([of_real(y) for y in (f(x), gradient, hessian_product)])
    close(*found)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_rows_that_see_nothing_ignore_their_cotangents(garbage: float) -> None:
    """Zeros are selected: a NaN that a loss makes of a zero row, as a normalisation does, stays in that row."""
    q, k, v = (torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    shown = torch.ones(5, 5, dtype=torch.bool).index_fill(0, torch.tensor([1]), False)
    out, lse = sorder.attention(q, k, v, shown, return_lse=True)
    assert not out[:, 1].any()
    assert (lse[:, 1] == -torch.inf).all()

    def derivatives(cotangent: float) -> tuple[Any, Any]:
        cotangents = [torch.ones_like(x).index_fill(1, torch.tensor([1]), cotangent) for x in (out, lse)]
        outputs = sorder.attention(q, k, v, shown, return_lse=True)
        first = torch.autograd.grad(outputs, (q, k, v), cotangents, create_graph=True)
        return first, torch.autograd.grad(sum(g.sin().sum() for g in first), (q, k, v))

    for got, want in zip(derivatives(garbage), derivatives(1.0), strict=True):
        close(got, want, 1e-14)


def test_a_mask_remembers_its_ranges_and_notices_changes() -> None:
    lengths = torch.tensor([2, 5])
    mask = Mask(causal=True, key_stop=lengths)
    q = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    structure = [mask.structure(q.shape[:-2], 5, 5, q.device) for _ in range(2)]
    assert structure[0] is structure[1]
    before = sorder.attention(q, q, q, mask=mask)
    lengths[0] = 4
    after = sorder.attention(q, q, q, mask=mask)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])
    grad(lambda q: sorder.attention(q, q, q, mask=mask).sum())(q[:, :, :4])  # made inside a transform, used after it
    close([sorder.attention(q[:, :, :4], q[:, :, :4], q[:, :, :4], mask=mask)], [after[:, :, :4]], 1e-14)
    for n in range(1, 20):
        sorder.attention(q[:, :, :1], q[:, :, :1], q[:, :, :1], mask=Mask(key_stop=n))
        mask.structure(q.shape[:-2], n, n, q.device)
    assert len(mask._remembered) <= 8


def test_documents_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    original = Tensor.__bool__
    monkeypatch.setattr(Tensor, "__bool__", lambda x: (looks.append(1), original(x))[1])
    q = torch.randn(1, 6, 4)
    by_id, by_boundary = Mask(documents=torch.tensor([0, 0, 1, 1, 1, 1])), Mask(cu_seqlens=torch.tensor([0, 2, 6]))
    outputs = [sorder.attention(q, q, q, mask=mask) for mask in (by_id, by_id, by_boundary)]
    assert len(looks) == 1
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}], ids=str)
def test_memory_is_linear(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor that the twin makes at N = 1024 approaches N × N elements, or repeats a key head."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes = [x.untyped_storage().nbytes() // 4 for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.elements = max(self.elements, *sizes, 0)
            return out

    q, k = torch.randn(8, 1024, 2), torch.randn(1, 1024, 16)
    monkeypatch.setattr(twin, "_TILE_ELEMENTS", 2**16)
    with Largest() as largest:
        product(lambda k: sorder.attention(q.repeat(1, 1, 8), k, k, enable_gqa=True, **options), k)
    assert 8 * 1024 * 16 <= largest.elements <= 2 * 8 * 1024 * 16 < 1024**2


def test_windows_cost_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that the twin computes, over all tiles: in proportion to the window, and to the squares of documents."""
    monkeypatch.setattr(twin, "_TILE_ELEMENTS", 16 * 1024)
    computed = []
    original = twin._Tile.__init__

    def counting(tile: Any, scores: Any, r: slice, c: slice) -> None:
        computed.append((r.stop - r.start) * (c.stop - c.start))
        original(tile, scores, r, c)

    monkeypatch.setattr(twin._Tile, "__init__", counting)
    q = torch.randn(1, 1024, 4)

    def scores(mask: Mask) -> int:
        computed.clear()
        sorder.attention(q, q, q, mask=mask)
        return sum(computed)

    assert scores(Mask(causal=True, window=(63, 0))) <= 1024 * (64 + 16)
    assert scores(Mask(causal=True)) <= 1024 * (512 + 16)
    assert scores(Mask(cu_seqlens=torch.tensor([0, 256, 768, 1024]))) <= 2 * 256**2 + 512**2
    assert scores(Mask(key_stop=torch.tensor([0]))) == 0
