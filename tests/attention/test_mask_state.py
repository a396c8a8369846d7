"""What a mask keeps between calls, and what its tensors may be: changes, copies and integer dtypes change no result."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sorder
from sorder.ops import ranges
from sorder.ops.mask import Mask
from sorder.ops.varlen import attention_varlen

from . import oracle

N = 6


def inputs() -> Tensor:
    return torch.randn(2, 3, N, 4, dtype=torch.float64)


def attend(q: Tensor, mask: Mask) -> Tensor:
    return sorder.attention(q, q, q, mask=mask)


def dense(q: Tensor, visible: Tensor, bias: Tensor | None = None) -> Tensor:
    return oracle.dense(q, q, q, visible=visible, bias=bias)[0]


def close(got: Tensor, want: Tensor, bound: float = 1e-13) -> None:
    assert oracle.relative_error(got, want) <= bound


def _saved(mask: Mask) -> Mask:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Mask], Mask]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "save": _saved,
    "to": lambda mask: mask.to("cpu"),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_remember_nothing(how: str) -> None:
    """Versions 0 and 1 are remembered; a copy's tensors come to version 1 with other values."""
    q, columns = inputs(), torch.arange(N)
    mask = Mask(key_stop=torch.tensor([5, 5]))
    attend(q, mask)
    mask.key_stop.fill_(2)  # type: ignore[union-attr]
    attend(q, mask)
    copied = COPIES[how](mask)
    assert mask._remembered
    assert not copied._remembered
    close(attend(q, copied), dense(q, columns < 2))
    copied.key_stop.fill_(4)  # type: ignore[union-attr]
    close(attend(q, copied), dense(q, columns < 4))
    assert copied._remembered is not mask._remembered


def test_slopes_that_become_parameters_are_refused_as_at_first() -> None:
    q, slopes = inputs(), torch.rand(3)
    mask = Mask(causal=True, alibi=slopes)
    attend(q, mask)
    slopes.requires_grad_()
    with pytest.raises(ValueError, match=r"mask.alibi is differentiated"):
        attend(q, mask)
    slopes.requires_grad_(False)
    attend(q, mask)


def test_a_list_for_the_window_may_change_afterwards() -> None:
    q, distance = inputs(), torch.arange(N) - torch.arange(N)[:, None]
    sides = [1, 0]
    mask = Mask(window=sides)  # type: ignore[arg-type]
    want = dense(q, (distance >= -1) & (distance <= 0))
    close(attend(q, mask), want)
    sides[0] = 3
    close(attend(q, mask), want)
    close(attend(q[:, :1], mask), want[:, :1])  # not remembered
    close(attend(q, Mask(window=sides)), dense(q, (distance >= -3) & (distance <= 0)))  # type: ignore[arg-type]


def test_packed_attention_notices_a_window_that_changes() -> None:
    q, cu = inputs()[0].transpose(0, 1), torch.tensor([0, N])
    sides = [1, 0]
    for left in (1, 3):
        sides[0] = left
        got = attention_varlen(q, q, q, cu, window=sides)  # type: ignore[call-overload]
        close(got, attention_varlen(q, q, q, cu.clone(), window=(left, 0)))
    with pytest.raises(TypeError, match="causal must be True or False, got 1"):
        attention_varlen(q, q, q, cu, causal=1)  # type: ignore[call-overload]


CHANGED: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = {
    "key_padding": (lambda: torch.tensor([[True, False, True, True, False, True]] * 2), Tensor.logical_not_),
    "alibi": (lambda: torch.tensor([0.5, 0.25, 2.0]), lambda x: x.mul_(-3)),
    "key_stop": (lambda: torch.tensor([2, 5]), lambda x: x.add_(1)),
    "documents": (lambda: torch.tensor([0, 1, 0, 1, 1, 0]), lambda x: x.copy_(x.flip(0))),
    "cu_seqlens": (lambda: torch.tensor([0, 2, N]), lambda x: x.copy_(torch.tensor([0, 5, N]))),
    "ranges": (lambda: torch.tensor([3] * N, dtype=torch.int32), lambda x: x.zero_()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("field", CHANGED)
def test_a_tensor_that_changes_before_the_backward_pass_changes_no_derivative(field: str, dtype: torch.dtype) -> None:
    """To second order: what counts is what the tensor held when attention was called, by the next call what it holds.

    Slopes come in the dtype that the maps take, which could be handed on without a copy.
    """
    make, change = CHANGED[field]
    q = inputs().to(dtype).requires_grad_()

    def derivatives(between: Callable[[Tensor], Any] | None) -> tuple[Tensor, Tensor]:
        x = make().to(dtype) if field == "alibi" else make()
        mask = Mask(**{field: (torch.zeros_like(x), x) if field == "ranges" else x})
        output = attend(q, mask)
        if between is not None:
            between(x)
        (first,) = torch.autograd.grad(output.sin().sum(), q, create_graph=True)
        if between is not None:
            between(x)
        (second,) = torch.autograd.grad(first.sin().sum(), q)
        if between is not None:
            between(x)
            assert not torch.equal(attend(q, mask), output)
        return first, second

    for got, want in zip(derivatives(change), derivatives(None), strict=True):
        assert torch.equal(got, want)


SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32]


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
def test_integers_of_every_dtype(dtype: torch.dtype) -> None:
    q = inputs()
    rows, columns = torch.arange(N)[:, None], torch.arange(N)

    def integers(*x: int) -> Tensor:
        return torch.tensor(x).to(dtype)

    per_batch = torch.tensor([2, 5])[:, None, None, None]
    ids = torch.tensor([4, 4, 1, 1, 1, 7])
    same = ids[:, None] == ids
    cases: list[tuple[dict[str, Any], Tensor]] = [
        ({"key_stop": integers(2, 5)}, columns < per_batch),
        ({"key_start": integers(2, 5)}, columns >= per_batch),
        ({"causal": True, "prefix": integers(2, 5)}, (columns <= rows) | (columns < per_batch)),
        ({"causal": True, "alignment": integers(2, 5)}, columns <= rows + per_batch),
        (
            {"window": (1, 0), "alignment": integers(2, 5)},
            (columns - rows - per_batch).clamp(-1, 0).eq(columns - rows - per_batch),
        ),
        ({"documents": integers(*ids.tolist())}, same),
        ({"documents": (ids, integers(*ids.tolist()))}, same),
        ({"cu_seqlens": integers(0, 2, 5, 6)}, same),
        (
            {"ranges": (integers(0, 1, 2, 3, 4, 5), integers(2, 3, 4, 5, 6, 6))},
            (columns >= rows) & (columns < rows + 2),
        ),
    ]
    for fields, visible in cases:
        close(attend(q, Mask(**fields)), dense(q, visible))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_short_integers_do_not_limit_the_length(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row and key numbers beyond what the dtype holds (as boundaries, where the host does not look)."""
    monkeypatch.setattr(ranges, "is_readable", lambda x: False)
    n = 300
    q = torch.randn(1, n, 4, dtype=torch.float64)
    rows, columns = torch.arange(n)[:, None], torch.arange(n)
    end = 120
    value = torch.tensor([end]).to(dtype)
    packed = (rows < end) & (columns < end)
    for mask, visible in (
        (Mask(cu_seqlens=torch.tensor([0, end]).to(dtype)), packed),
        (Mask(causal=True, key_start=value), (columns <= rows) & (columns >= end)),
        (Mask(ranges=(torch.zeros(1, dtype=dtype), value)), columns < end),
        (Mask(causal=True, alignment=value), columns <= rows + end),
    ):
        close(attend(q, mask), dense(q, visible))


def test_ids_of_any_strides_raise_no_warning() -> None:
    ids = torch.tensor([[0, 0], [0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]).T
    q = torch.randn(2, N, 8, dtype=torch.float64)
    assert not ids.is_contiguous()
    torch.set_warn_always(True)  # rather than once a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = sorder.attention(q, q, q, mask=Mask(documents=ids))
            one = sorder.attention(q, q, q, mask=Mask(documents=(ids, ids[:1])))
    finally:
        torch.set_warn_always(False)
    close(got, sorder.attention(q, q, q, ids[:, :, None] == ids[:, None, :]))
    close(one, sorder.attention(q, q, q, ids[:, :, None] == ids[:1, None, :]))


def test_ids_that_only_their_highest_bit_tells_apart() -> None:
    q = inputs()
    ids = torch.tensor([0, 0, 2**15, 2**15, 2**15, 2**15])
    close(attend(q, Mask(documents=ids.to(torch.uint16))), dense(q, ids[:, None] == ids))


def test_sides_as_long_as_integers_go() -> None:
    q = inputs()
    close(attend(q, Mask(window=(2**63 - 1, 2**63 - 1), key_stop=2**63 - 1)), dense(q, torch.ones(N, N) > 0))


@pytest.mark.parametrize("causal", [False, True])
def test_boundaries_of_no_document(causal: bool) -> None:
    q = inputs().requires_grad_()
    output = attend(q, Mask(causal=causal, cu_seqlens=torch.tensor([0])))
    assert not output.any()
    assert not torch.autograd.grad(output.sum(), q)[0].any()
    packed = q.detach()[0].transpose(0, 1)
    output, lse = attention_varlen(packed, packed, packed, torch.tensor([0]), causal=causal, return_lse=True)
    assert not output.any()
    assert (lse == -torch.inf).all()


def test_slopes_behind_an_offset_lose_the_digits_that_are_documented() -> None:
    n, slope = 100_000, 0.5
    q, k, v = (torch.randn(1, m, 8) for m in (1, n, n))
    bias = slope * (torch.arange(n) - (n - 1)).float()[None]
    want = oracle.dense(*(x.double() for x in (q, k, v)), bias=bias.double())[0]
    mask = Mask(causal=True, alignment="bottom_right", alibi=torch.tensor([slope]))
    close(sorder.attention(q, k, v, mask=mask), want, 1e-7 * slope * n)
    close(sorder.attention(q.double(), k.double(), v.double(), mask=mask), want, 1e-10)
    close(sorder.attention(q, k, v, bias), want, 1e-6)
