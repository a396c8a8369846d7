"""Sinks at the ends of their range, and masks that change between the forward pass and a derivative."""

from __future__ import annotations

import pytest
import torch

import sorder

from . import oracle

INFINITY = float("inf")


def with_sinks(q: torch.Tensor, sinks: torch.Tensor, shown: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the scores and one more without a value; a row that sees neither gives zeros."""
    scores = (q @ q.mT * q.shape[-1] ** -0.5).masked_fill(~shown, -INFINITY)
    scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.masked_fill(lse == -INFINITY, 0.0)[..., None])
    return p[..., :-1] @ q, lse


@pytest.mark.parametrize("sink", [-INFINITY, torch.finfo(torch.float32).min, -1e9, 0.3, 50.0])
@pytest.mark.parametrize("blind", [False, True])
def test_any_sink(sink: float, blind: bool) -> None:
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    sinks = torch.tensor([sink, 0.5], dtype=torch.float64)
    shown = torch.ones(5, 5, dtype=torch.bool)
    shown[0] = not blind
    got = sorder.attention(q, q, q, shown, sinks=sinks, return_lse=True)
    for a, b in zip(got, with_sinks(q, sinks, shown), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    def loss(sinks: torch.Tensor) -> torch.Tensor:
        return sorder.attention(q, q, q, shown, sinks=sinks).sin().sum()

    gradient, product = torch.func.jvp(torch.func.grad(loss), (sinks,), (torch.ones_like(sinks),))
    assert gradient.isfinite().all() and product.isfinite().all()
    if sink < -1e8:
        assert gradient[0] == 0 and product[0] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sink_far_below_leaves_half_precision_as_it_is(dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, 5, 4).to(dtype)
    for sink in (-INFINITY, -6e4, torch.finfo(dtype).min):
        got = sorder.attention(q, q, q, sinks=torch.tensor([sink, sink], dtype=dtype), return_lse=True)
        for a, b in zip(got, sorder.attention(q, q, q, return_lse=True), strict=True):
            assert oracle.relative_error(a, b) < 1e-6


@pytest.mark.parametrize("order", [1, 2])
def test_a_mask_changed_in_place_before_a_derivative_is_an_error(order: int) -> None:
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    shown = torch.ones(5, 5, dtype=torch.bool)
    value = sorder.attention(q, q, q, shown).sin().sum()
    if order == 2:
        (gradient,) = torch.autograd.grad(value, q, create_graph=True)
        value = gradient.square().sum()
    shown.tril_()
    with pytest.raises(RuntimeError, match="modified in place"):
        torch.autograd.grad(value, q)
