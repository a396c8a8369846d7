"""AdaHessian: the rule, its blocks, and a peer's trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.optim import AdaHessian
from sorder.optim.adahessian import spatial_average
from tests.optim.problem import closure_of, model, values


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 2, 3), (2, 1, 2, 2, 2)])
def test_the_block_of_a_convolution_is_its_kernel(shape: tuple[int, ...]) -> None:
    d = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = spatial_average(d, block_size=5)
    assert found.shape == d.shape
    for i in range(shape[0]):
        for j in range(shape[1]):
            torch.testing.assert_close(found[i, j], torch.full_like(d[i, j], float(d[i, j].mean())))


def test_the_block_of_a_matrix_is_a_piece_of_a_row() -> None:
    d = torch.tensor([[1.0, 3.0, -2.0, 4.0, 7.0], [0.0, 2.0, 2.0, 2.0, -1.0]])
    want = torch.tensor([[2.0, 2.0, 1.0, 1.0, 7.0], [1.0, 1.0, 2.0, 2.0, -1.0]])
    assert torch.equal(spatial_average(d, 2), want)
    assert torch.equal(spatial_average(d, 1), d)
    assert torch.equal(spatial_average(d[0], 2), d[0])


def test_convolutions_take_their_kernels_mean() -> None:
    """One and two dimensions, the exact diagonal: v after one step is (1 − β₂) times its squared mean."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Unflatten(2, (2, 3)), nn.Conv2d(3, 2, 2)).double()
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    found: dict[str, Tensor] = {}

    def keep(product: Callable[..., Any], like: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
        probe = [torch.ones_like(t) for t in like]
        estimates = [z * b for z, b in zip(probe, product(probe), strict=True)]
        found.update(zip([n for n, _ in net.named_parameters()], estimates, strict=True))
        return estimates

    optimizer = AdaHessian(net.parameters(), estimator=keep)
    optimizer.step(lambda: F.mse_loss(net(x), torch.ones_like(net(x))))
    for name, p in net.named_parameters():
        d = found[name]
        if p.dim() > 1:
            d = d.flatten(2).mean(-1).view(*d.shape[:2], *(1 for _ in d.shape[2:])).expand_as(d)
        torch.testing.assert_close(optimizer.state[p]["exp_hessian_diag_sq"], 0.001 * d**2)


def test_a_quadratic_of_diagonal_curvature_is_solved_in_one_step() -> None:
    x = torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True)
    AdaHessian([x], lr=1.0, eps=1e-12).step(lambda: (torch.tensor([0.5, 50.0]) * x**2).sum())
    assert x.abs().max() < 1e-9


def test_the_record_of_a_step() -> None:
    net = model()
    optimizer = AdaHessian(net.parameters(), lr=0.05, weight_decay=0.0, update_interval=2)
    assert optimizer.last_step is None
    for number in range(4):
        before = values(net)
        optimizer.step(closure_of(net))
        record = optimizer.last_step
        assert (record.step, record.curvature_updated) == (number + 1, number % 2 == 0)
        assert record.update_norm == pytest.approx(float((values(net) - before).norm()), rel=1e-9)
        states = [optimizer.state[p] for p in net.parameters()]
        v = [s["exp_hessian_diag_sq"] / (1 - 0.999 ** s["updates"]) for s in states]
        assert record.curvature_norm == pytest.approx(float(sum(t.sum() for t in v)) ** 0.5, rel=1e-9)


def test_delayed_updates() -> None:
    net = model()
    optimizer = AdaHessian(net.parameters(), update_interval=3)
    due = []
    for _ in range(7):
        due.append(optimizer.curvature_due)
        optimizer.zero_grad()
        if optimizer.curvature_due:
            optimizer.update_curvature(closure_of(net))
        closure_of(net)().backward()
        optimizer.step()
    assert due == [True, False, False, True, False, False, True]
    assert optimizer.state[net[0].weight]["updates"] == 3


def test_a_parameter_that_gets_a_gradient_later_waits_for_its_estimate() -> None:
    x, y = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = AdaHessian([x, y], lr=0.1, update_interval=4)
    both = False

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (x**2).sum() + ((y**2).sum() if both else 0.0)
        loss.backward()
        return loss

    moved = []
    for number in range(6):
        both = number >= 2
        before = y.detach().clone()
        optimizer.step(closure)
        moved.append(not torch.equal(y, before))
    assert moved == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"hessian_power": 1.5}, r"hessian_power must lie in \[0.0, 1.0\], got 1.5"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"block_average": "mean"}, "block_average must be 'signed' or 'absolute', got 'mean'"),
    ],
)
def test_options_are_checked(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaHessian(model().parameters(), **option)
