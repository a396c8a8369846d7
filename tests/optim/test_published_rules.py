"""Side by side with what was published: the same trajectories, given the same probes, labels and schedule.

The references are written from arXiv 2305.14342 and 2006.00719 and from the authors' code, read at
github.com/Liuhong99/Sophia a7e1572 and github.com/amirgholami/adahessian 23eeab0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.curvature import CurvaturePoint, diagonal
from sorder.optim import AdaHessian, SophiaG, SophiaH
from tests.cases import relative_error
from tests.optim.problem import closure_of, data, model, values


def hutchinson(net: nn.Module, seed: int, step: int) -> list[Tensor]:
    """The estimate that a SophiaH of this seed draws at a step."""
    params = list(net.parameters())
    generator = torch.Generator().manual_seed(seed + 7919 * step)
    with CurvaturePoint(closure_of(net), params, "hessian") as point:
        return diagonal.hutchinson(point.product, params, generator)


def test_sophia_h_is_algorithm_3_in_its_first_version() -> None:
    """θ ← θ − ηλθ − η·clip(m / max(h, ε), ρ): γ is ρ, the rate ηρ, and the decay, which is times the rate, λ/ρ."""
    eta, rho, decay = 0.05, 0.4, 0.04
    net, other = model(), model()
    optimizer = SophiaH(
        net.parameters(), lr=eta * rho, gamma=rho, weight_decay=decay / rho, update_interval=3, seed=7, eps=1e-12 * rho
    )
    m, h = ([torch.zeros_like(p) for p in other.parameters()] for _ in range(2))
    clipped = []
    for number in range(10):
        if number % 3 == 0:  # steps 1, 4, …: t mod k = 1
            h = [0.99 * a + 0.01 * d for a, d in zip(h, hutchinson(other, 7, number), strict=True)]
        gradients = torch.autograd.grad(closure_of(other)(), list(other.parameters()))
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(other.parameters(), gradients, strict=True)):
                m[i] = 0.965 * m[i] + 0.035 * g
                p -= eta * decay * p
                quotient = m[i] / h[i].clamp(min=1e-12)
                clipped += [quotient.abs() >= rho]
                p -= eta * quotient.clamp(-rho, rho)
        optimizer.step(closure_of(net))
        assert relative_error(values(net), values(other)) < 1e-12
    share = torch.cat([c.flatten() for c in clipped]).double().mean()
    assert 0.1 < share < 0.95, "both branches of the clip were met"


def test_sophia_g_is_the_released_code() -> None:
    """sophia.py, lines 56 and 185–200; train_sophiag.py, lines 372–421: h of the mean loss, times bs in the step.

    Its loop takes the first estimate after step k, ours before step 1, which the schedule here does for both.
    """
    lr, rho, decay = 0.02, 30.0, 0.1
    x, y = data()
    net, other = model(), model()
    optimizer = SophiaG(net.parameters(), lr=lr, gamma=rho, weight_decay=decay, update_interval=4)
    m, h = ([torch.zeros_like(p) for p in other.parameters()] for _ in range(2))
    inside = []
    for number in range(12):
        labels = torch.randint(0, 3, y.shape, generator=torch.Generator().manual_seed(number))
        if number % 4 == 0:
            sampled = torch.autograd.grad(F.cross_entropy(other(x), labels), list(other.parameters()))
            h = [0.99 * a + 0.01 * g * g for a, g in zip(h, sampled, strict=True)]
        gradients = torch.autograd.grad(F.cross_entropy(other(x), y), list(other.parameters()))
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(other.parameters(), gradients, strict=True)):
                p *= 1 - lr * decay
                m[i] = 0.965 * m[i] + 0.035 * g
                share = (m[i].abs() / (rho * len(y) * h[i] + 1e-15)).clamp(max=1.0)
                inside += [share < 1.0]
                p -= lr * m[i].sign() * share
        optimizer.step(
            lambda: F.cross_entropy(net(x), y),
            curvature_closure=lambda labels=labels: (F.cross_entropy(net(x), labels, reduction="sum"), len(y)),
        )
        assert relative_error(values(net), values(other)) < 1e-12
    assert 0.1 < torch.cat([c.flatten() for c in inside]).double().mean() < 0.95


def drawn_globally(product: Callable[..., Any], like: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Hutchinson's estimate with probes as the authors draw them."""
    probe = [2 * torch.randint_like(t, high=2) - 1 for t in like]
    return [z * b for z, b in zip(probe, product(probe), strict=True)]


class Convolutions(nn.Module):
    """Weights of one, two and four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolve = nn.Conv2d(1, 3, 2).double()
        self.head = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convolve(F.pad(x, (0, 2)).view(-1, 1, 2, 3)).tanh().flatten(1))


def peer_step(reference: Any, net: nn.Module) -> None:
    reference.zero_grad()
    with warnings.catch_warnings():
        # Its loop needs create_graph=True, of which torch warns.
        warnings.simplefilter("ignore", UserWarning)
        closure_of(net)().backward(create_graph=True)
    reference.step()


@pytest.mark.parametrize("make", [model, Convolutions], ids=["matrices", "convolutions"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "hessian_power": 0.5}], ids=["plain", "decay and power"])
def test_adahessian_is_torch_optimizers(make: Callable[[], nn.Module], options: dict[str, float]) -> None:
    """It averages |D|, over kernels of two dimensions; its default power is 0.5, not the paper's 1."""
    peer = pytest.importorskip("torch_optimizer")
    net, other = make(), make()
    optimizer = AdaHessian(net.parameters(), lr=0.05, estimator=drawn_globally, block_average="absolute", **options)
    reference = peer.Adahessian(other.parameters(), lr=0.05, **({"hessian_power": 1.0} | options))
    for number in range(12):
        torch.manual_seed(number)
        optimizer.step(closure_of(net))
        torch.manual_seed(number)
        peer_step(reference, other)
        assert relative_error(values(net), values(other)) < 1e-12
    assert relative_error(values(net), values(make())) > 0.05


def test_torch_optimizers_conv1d_takes_the_parameter_before() -> None:
    """Where it is wrong, as is the code that it follows (image_classification/optim_adahessian.py, lines 97–108)."""
    peer = pytest.importorskip("torch_optimizer")
    a = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    kernel = torch.ones(2, 3, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.arange(1.0, 19.0, dtype=torch.float64).view(2, 3, 3)
    reference = peer.Adahessian([a, kernel])
    for p, curvature in ((a, torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64)), (kernel, scale)):
        p.grad = None
        loss = (0.5 * curvature * p**2).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            loss.backward(create_graph=True)
    reference.step()
    name = "exp_hessian_diag_sq"
    of_a = torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64).square().expand(2, 3, 3)
    torch.testing.assert_close(reference.state[kernel][name], 0.001 * of_a)

    ours = AdaHessian([kernel.detach().requires_grad_()])
    (own,) = ours.param_groups[0]["params"]
    ours.step(lambda: (0.5 * scale * own**2).sum())
    torch.testing.assert_close(ours.state[own][name], 0.001 * scale.mean(-1, keepdim=True).square().expand(2, 3, 3))


@pytest.mark.parametrize("average", ["signed", "absolute"])
def test_adahessian_is_algorithm_1(average: str) -> None:
    """With blocks of rows; the paper's mean is signed (eq. 10), the authors' code takes the mean of |D|.

    transformer/fairseq/optim/adahessian.py, lines 130–145 and 195–215.
    """
    lr, decay, power, block = 0.05, 0.1, 0.75, 2
    net, other = model(), model()
    optimizer = AdaHessian(
        net.parameters(),
        lr=lr,
        weight_decay=decay,
        hessian_power=power,
        block_size=block,
        block_average=average,
        seed=7,
    )
    m, v = ([torch.zeros_like(p) for p in other.parameters()] for _ in range(2))
    for number in range(8):
        estimates = hutchinson(other, 7, number)
        gradients = torch.autograd.grad(closure_of(other)(), list(other.parameters()))
        with torch.no_grad():
            for i, (p, g, d) in enumerate(zip(other.parameters(), gradients, estimates, strict=True)):
                d = d.abs() if average == "absolute" else d
                if d.dim() == 2:
                    d = d.view(-1, block).mean(1).repeat_interleave(block).view(d.shape)
                m[i] = 0.9 * m[i] + 0.1 * g
                v[i] = 0.999 * v[i] + 0.001 * d * d
                root = (v[i] / (1 - 0.999 ** (number + 1))).sqrt()
                p -= lr * (m[i] / (1 - 0.9 ** (number + 1)) / (root**power + 1e-4) + decay * p)
        optimizer.step(closure_of(net))
        assert relative_error(values(net), values(other)) < 1e-12
