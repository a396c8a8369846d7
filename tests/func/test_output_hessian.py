"""Closed-form output Hessians against dense ones, their estimates' expectation, precision and memory."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from sorder.func import bce_with_logits_hvp, cross_entropy_hvp, ggnvp, hvp, mse_hvp, output_hessian
from sorder.func.output_hessian import (
    bce_with_logits_fvp,
    cross_entropy_fvp,
    mse_fvp,
    sample_bce_with_logits_targets,
    sample_cross_entropy_targets,
    sample_mse_targets,
)
from tests.cases import relative_error

C = 5
SHAPES = ((C,), (4, C), (3, C, 2), (2, C, 2, 3))


def rows_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return () if len(shape) == 1 else shape[:1] + shape[2:]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("block", [1 << 22, 7])
def test_cross_entropy(shape: tuple[int, ...], kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_hessian, "_BLOCK_ELEMENTS", block)
    z, u = torch.randn(shape).double(), torch.randn(shape).double()
    if kind == "indices":
        target = torch.randint(0, C, rows_of(shape))
        if target.dim():
            target.view(-1)[0] = -7
    else:
        target = torch.randn(shape).double().softmax(0 if len(shape) == 1 else 1)
    weights = (None, torch.rand(C).double() + 0.1)
    for weight, reduction, smoothing in product(weights, ("mean", "sum"), (0.0, 0.3)):
        options: dict[str, Any] = dict(weight=weight, ignore_index=-7, reduction=reduction, label_smoothing=smoothing)
        dense = torch.func.hessian(lambda z, o=options: F.cross_entropy(z, target, **o))(z)
        want = (dense.reshape(z.numel(), -1) @ u.flatten()).view(shape)
        got = cross_entropy_hvp(z, target, u, **options)
        assert relative_error(got, want) < 1e-13
        mapped = torch.func.vmap(lambda u, o=options: cross_entropy_hvp(z, target, u, **o))(torch.stack([u, 2 * u]))
        assert relative_error(mapped[1], 2 * got) < 1e-13


def test_cross_entropy_estimate_has_the_product_for_expectation_exactly() -> None:
    z, u = torch.randn(2, C).double(), torch.randn(2, C).double()
    target, weight = torch.tensor([1, -100]), torch.rand(C).double()
    for options in ({}, {"weight": weight, "label_smoothing": 0.2, "reduction": "sum"}):
        mean = torch.zeros_like(z)
        for c in range(C):
            labels = torch.tensor([c, -100])
            p = z.softmax(1)[0, c]
            mean += p * cross_entropy_fvp(z, target, u, labels, **options)
        assert relative_error(mean, cross_entropy_hvp(z, target, u, **options)) < 1e-13


def test_mse_and_its_estimate() -> None:
    x, y, u = (torch.randn(6, 2).double() for _ in range(3))
    weight = torch.rand(6, 2).double()
    for options in ({}, {"reduction": "sum"}, {"weight": weight}, {"weight": weight, "reduction": "sum"}):
        dense = torch.func.hessian(lambda x, o=options: F.mse_loss(x, y, **o))(x).reshape(12, 12)
        want = (dense @ u.flatten()).view_as(u)
        assert relative_error(mse_hvp(x, y, u, **options), want) < 1e-13
        generator = torch.Generator().manual_seed(0)
        draws = torch.stack([mse_fvp(x, y, u, sample_mse_targets(x, generator), **options) for _ in range(2000)])
        assert relative_error(draws.mean(0), want) < 0.1
    # A target that broadcasts the input counts its elements as often as the loss does.
    column = torch.randn(6, 1).double()
    with pytest.warns(UserWarning, match="target size"):
        dense = torch.func.hessian(lambda c: F.mse_loss(c, y))(column).reshape(6, 6)
    assert relative_error(mse_hvp(column, y, u[:, :1]), dense @ u[:, :1]) < 1e-13


def test_bce_and_its_estimate() -> None:
    z, u = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    target = torch.rand(4, 3).double()
    weight, pos_weight = torch.rand(4, 1).double(), torch.tensor([0.5, 1.0, 3.0]).double()
    for options in ({}, {"reduction": "sum"}, {"weight": weight, "pos_weight": pos_weight}):
        loss = lambda z, o=options: F.binary_cross_entropy_with_logits(z, target, **o)  # noqa: E731
        want = (torch.func.hessian(loss)(z).reshape(12, 12) @ u.flatten()).view_as(u)
        assert relative_error(bce_with_logits_hvp(z, target, u, **options), want) < 1e-13
        generator = torch.Generator().manual_seed(0)
        draws = [
            bce_with_logits_fvp(z, target, u, sample_bce_with_logits_targets(z, generator), **options)
            for _ in range(2000)
        ]
        assert relative_error(torch.stack(draws).mean(0), want) < 0.1


def test_sampled_labels_follow_the_softmax_and_keep_ignored_rows() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).log_softmax(0).expand(20000, 3)
    target = torch.zeros(20000, dtype=torch.int64)
    target[:100] = -100
    labels = sample_cross_entropy_targets(logits, target, torch.Generator().manual_seed(0))
    assert bool((labels[:100] == -100).all())
    frequency = torch.bincount(labels[100:], minlength=3) / 19900
    assert float((frequency - logits[0].exp()).abs().max()) < 0.015  # four standard deviations
    again = sample_cross_entropy_targets(logits, target, torch.Generator().manual_seed(0))
    assert torch.equal(labels, again)
    image = sample_cross_entropy_targets(torch.randn(2, 3, 4, 5), torch.zeros(2, 3, 4, 5))
    assert image.shape == (2, 4, 5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float16, 4e-4), (torch.float32, 3e-7)])
def test_low_precision_logits_lose_only_the_rounding_of_the_result(dtype: torch.dtype, bound: float) -> None:
    z, u = (4 * torch.randn(64, 500)).to(dtype), torch.randn(64, 500).to(dtype)
    y = torch.randint(0, 500, (64,))
    # The mean's 1/N would push float16 entries below its normal range, whatever computes them.
    got = cross_entropy_hvp(z, y, u, reduction="sum")
    assert got.dtype == dtype
    assert relative_error(got, cross_entropy_hvp(z.double(), y, u.double(), reduction="sum")) < bound
    binary = bce_with_logits_hvp(z, (z > 0).to(dtype), u, reduction="sum")
    want = bce_with_logits_hvp(z.double(), (z > 0).double(), u.double(), reduction="sum")
    assert relative_error(binary, want) < bound


class LargestTensors(TorchDispatchMode):
    """The most storages of at least ``limit`` bytes, among those that operations return, alive at once."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.alive: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, Tensor) and t.untyped_storage().nbytes() >= self.limit:
                storage = t.untyped_storage()
                self.alive[storage.data_ptr()] = torch.multiprocessing.reductions.StorageWeakRef(storage)
        self.alive = {k: ref for k, ref in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, len(self.alive))
        return out


def test_a_large_vocabulary_costs_no_more_than_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_hessian, "_BLOCK_ELEMENTS", 1 << 18)
    rows, width, vocabulary = 64, 8, 50_000
    w = 0.1 * torch.randn(width, vocabulary)
    x, y = torch.randn(rows, width), torch.randint(0, vocabulary, (rows,))
    limit = rows * vocabulary * 4
    loss = lambda out: F.cross_entropy(out, y)  # noqa: E731

    with LargestTensors(limit) as gradient:
        torch.func.grad(lambda w: loss(x @ w))(w)
    with LargestTensors(limit) as product_peak:
        got = ggnvp(lambda w: x @ w, loss, (w,), (w,))
    with LargestTensors(limit) as double_backward:
        hvp(loss, (x @ w,), (x @ w,), mode="reverse-over-reverse")
    want = ggnvp(lambda w: x @ w, lambda out: 1.0 * loss(out), (w,), (w,))
    assert relative_error(got, want) < 1e-5
    # Outputs, their tangent and their cotangent, where the gradient has logits, log-softmax and cotangent; and for
    # a moment one more, in PyTorch's forward-mode rule of a matrix product.
    assert product_peak.peak <= gradient.peak + 1
    assert product_peak.peak < double_backward.peak


def test_blocks_bound_the_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    z, u = torch.randn(1, 100, 640), torch.randn(1, 100, 640)
    y = torch.randint(0, 100, (1, 640))
    monkeypatch.setattr(output_hessian, "_BLOCK_ELEMENTS", 1000)
    with LargestTensors(2 * 1000 * 4) as watch:
        cross_entropy_hvp(z, y, u)
    assert watch.peak == 3  # logits and tangent, of which blocks are views, and the result


def test_bad_arguments_are_named() -> None:
    z, y = torch.randn(3, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tangent must have shape \(3, 4\), got \(3,\)"):
        cross_entropy_hvp(z, y, z[:, 0])
    with pytest.raises(ValueError, match=r"target must have shape \(3,\)"):
        cross_entropy_hvp(z, y[:2], z)
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', got 'none'"):
        cross_entropy_hvp(z, y, z, reduction="none")
    with pytest.raises(ValueError, match="target must have shape"):
        bce_with_logits_hvp(z, y, z)
