"""Estimates of the curvature's diagonal have the right expectation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sorder.curvature import CurvaturePoint
from sorder.curvature.diagonal import bekas, empirical, exact, gauss_newton_bartlett, hutchinson
from tests.cases import dense_ggn, dense_hessian, flatten, make_problem, relative_error

SIZES = (3, 4)
LIKE = [torch.zeros(n, dtype=torch.float64) for n in SIZES]


def symmetric(seed: int = 0) -> Tensor:
    a = torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return a + a.T


def product_with(b: Tensor) -> Callable[..., list[Tensor]]:
    return lambda v: list((b @ torch.cat(list(v))).split(SIZES))


def assert_mean(samples: Tensor, want: Tensor) -> None:
    """Within 5 standard errors everywhere, and those are small enough to tell."""
    error = samples.std(0) / len(samples) ** 0.5
    assert error.max() < 0.1 * want.abs().max()
    assert ((samples.mean(0) - want).abs() <= 5 * error + 1e-12).all()


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        (hutchinson, {}),
        (hutchinson, {"distribution": "normal"}),
        (hutchinson, {"probes": 3}),
        (bekas, {"probes": 6}),
        (bekas, {"probes": 2, "distribution": "rademacher"}),
    ],
    ids=["rademacher", "normal", "three probes", "bekas", "bekas rademacher"],
)
def test_the_expectation_is_the_diagonal(estimator: Callable[..., list[Tensor]], options: dict[str, object]) -> None:
    b = symmetric()
    generator = torch.Generator().manual_seed(1)
    samples = torch.stack([torch.cat(estimator(product_with(b), LIKE, generator, **options)) for _ in range(2000)])
    assert_mean(samples, b.diagonal())
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - b.sum(1)).abs() > 5 * error).any(), "the diagonal, not the row sums"


@pytest.mark.parametrize("estimator", [hutchinson, bekas])
def test_a_diagonal_matrix_is_exact(estimator: Callable[..., list[Tensor]]) -> None:
    d = symmetric()[0]
    generator = torch.Generator().manual_seed(1)
    assert relative_error(estimator(product_with(d.diag()), LIKE, generator), d) < 1e-14


def test_probes_are_a_function_of_the_generator() -> None:
    b = symmetric()
    first, again, other = (
        torch.cat(hutchinson(product_with(b), LIKE, torch.Generator().manual_seed(s))) for s in (3, 3, 4)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_exact_is_the_diagonal_of_the_hessian(name: str) -> None:
    problem = make_problem(name)
    params = list(problem.module.parameters())
    with CurvaturePoint(lambda: problem.loss_fn(problem.module(problem.inputs)), params, "hessian") as point:
        found = exact(point.product, params)
        want = dense_hessian(problem).diagonal()
        assert relative_error(found, want) < 1e-10
        assert relative_error([g.square() for g in point.gradient], want) > 0.1, "not the squared gradient"


def test_the_expectation_of_gnb_is_the_diagonal_of_the_ggn() -> None:
    problem = make_problem("mlp")
    params = list(problem.module.parameters())
    logits = problem.module(problem.inputs)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(1500):
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        gradient = torch.autograd.grad(loss, params, retain_graph=True)
        samples.append(flatten(gauss_newton_bartlett(gradient, len(logits))))
    want = dense_ggn(problem).diagonal()
    assert_mean(torch.stack(samples), want)
    gradient = torch.autograd.grad(problem.loss_fn(logits), params)
    assert relative_error([g.square() for g in gradient], want) > 0.1, "not the squared gradient"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"probes": 0}, "probes must be at least 1, got 0"), ({"distribution": "uniform"}, "'rademacher', 'normal', got")],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    for estimator in (hutchinson, bekas):
        with pytest.raises(ValueError, match=message):
            estimator(product_with(symmetric()), LIKE, torch.Generator(), **options)


def test_empirical_is_the_mean_of_rows_squared_gradients() -> None:
    problem = make_problem("mlp")
    params = list(problem.module.parameters())
    losses = problem.module(problem.inputs).logsumexp(-1)
    each = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    want = torch.stack([flatten(g) for g in each]).square().mean(0)
    assert relative_error(empirical(each), want) < 1e-13


@pytest.mark.parametrize(("rows", "batches"), [(1, 5), (4, 2), (4, 3)])
def test_the_expectation_of_empirical_does_not_depend_on_the_batches(rows: int, batches: int) -> None:
    """Rows drawn from a population; the square of a batch's gradient times its rows has another mean."""
    generator = torch.Generator().manual_seed(0)
    population = torch.randn(20, 7, dtype=torch.float64, generator=generator) + 1.0
    want = population.square().mean(0)
    samples, naive = [], []
    for _ in range(3000):
        drawn = population[torch.randint(20, (batches, rows), generator=generator)].mean(1)
        samples.append(torch.cat(empirical([list(g.split(SIZES)) for g in drawn], rows)))
        naive.append(rows * drawn[0].square())
    assert_mean(torch.stack(samples), want)
    if rows > 1:
        assert relative_error(torch.stack(naive).mean(0), want) > 0.5


@pytest.mark.parametrize(("gradients", "rows"), [([], 1), ([[torch.ones(2)]], 3), ([[torch.ones(2)]], 0)])
def test_empirical_needs_two_batches_of_several_rows(gradients: list[list[Tensor]], rows: int) -> None:
    with pytest.raises(ValueError, match="gradients must be one or more"):
        empirical(gradients, rows)
