"""K-FAC against the exact Gauss–Newton matrix, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.kfac import KFACPreconditioner
from sorder.kfac.kronecker import dense_block
from tests.cases import Problem, dense_ggn, make_problem, relative_error
from tests.kfac.blocks import block_of, estimated


@pytest.fixture(autouse=True)
def _double() -> object:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def deep_linear(sharing: str) -> Problem:
    """Deep linear networks with square loss, for which K-FAC is exact ("KFAC from scratch", arXiv:2507.05127)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    if sharing == "none":
        y = torch.randn(7, 2)
        return Problem(net, torch.randn(7, 3), lambda out: F.mse_loss(out, y))
    if sharing == "expand":
        y = torch.randn(7, 4, 2)
        return Problem(net, torch.randn(7, 4, 3), lambda out: F.mse_loss(out, y))
    y = torch.randn(7, 2)
    return Problem(net, torch.randn(7, 4, 3), lambda out: F.mse_loss(out.mean(1), y))


def fitted(problem: Problem, **options: object) -> KFACPreconditioner:
    kfac = KFACPreconditioner(problem.module, **options)  # type: ignore[arg-type]
    kfac.update_factors(lambda: problem.loss_fn(problem.module(problem.inputs)))
    return kfac


@pytest.mark.parametrize(
    ("sharing", "approximation"), [("none", "expand"), ("none", "reduce"), ("expand", "expand"), ("reduce", "reduce")]
)
def test_type_2_is_exact_on_deep_linear_networks(sharing: str, approximation: str) -> None:
    problem = deep_linear(sharing)
    kfac = fitted(problem, estimator="type-2", approximation=approximation)
    dense = dense_ggn(problem)
    assert len(kfac.factors.blocks) == 3
    for number, block in enumerate(estimated(kfac)):
        assert relative_error(block, block_of(dense, kfac, number)) < 1e-13


def test_the_other_approximation_is_not_exact() -> None:
    problem = deep_linear("reduce")
    kfac = fitted(problem, estimator="type-2", approximation="expand")
    assert relative_error(estimated(kfac)[0], block_of(dense_ggn(problem), kfac, 0)) > 0.1


@pytest.mark.parametrize(("sharing", "approximation"), [("none", "expand"), ("expand", "expand"), ("reduce", "reduce")])
def test_sampled_labels_give_it_in_expectation(sharing: str, approximation: str) -> None:
    problem = deep_linear(sharing)
    dense = dense_ggn(problem)
    draws: list[list[Tensor]] = []
    for seed in range(400):
        draws.append(estimated(fitted(problem, estimator="mc", approximation=approximation, seed=seed)))
    for number, blocks in enumerate(zip(*draws, strict=True)):
        stack = torch.stack(blocks)
        want = block_of(dense, kfac_of(problem), number)
        standard = stack.std(0) / len(stack) ** 0.5
        assert ((stack.mean(0) - want).abs() <= 5.0 * standard + 1e-12).all()
        assert standard.norm() < 0.15 * want.norm()


def kfac_of(problem: Problem) -> KFACPreconditioner:
    return fitted(problem, estimator="type-2")


def test_the_empirical_fisher_is_exact_for_labels_of_the_model() -> None:
    """With labels drawn from the model itself the empirical estimate is the GGN in expectation."""
    problem = deep_linear("none")
    dense, kfac = dense_ggn(problem), kfac_of(problem)
    outputs = problem.module(problem.inputs).detach()
    draws = []
    for seed in range(400):
        y = outputs + torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed)) * 0.5**0.5
        sampled = Problem(problem.module, problem.inputs, lambda out, y=y: F.mse_loss(out, y))
        draws.append(estimated(fitted(sampled, estimator="empirical")))
    for number, blocks in enumerate(zip(*draws, strict=True)):
        stack = torch.stack(blocks)
        standard = stack.std(0) / len(stack) ** 0.5
        assert ((stack.mean(0) - block_of(dense, kfac, number)).abs() <= 5.0 * standard + 1e-12).all()


@pytest.mark.parametrize("name", ["mlp", "conv2d", "regression", "multilabel"])
def test_ekfac_is_no_further_from_the_ggn_than_kfac(name: str) -> None:
    problem = make_problem(name)
    dense = dense_ggn(problem)
    for approximation in ("expand", "reduce"):
        plain = fitted(problem, estimator="type-2", approximation=approximation, inverse="eigen")
        corrected = fitted(problem, estimator="type-2", approximation=approximation, inverse="ekfac")
        gain = 0.0
        for number in range(len(plain.factors.blocks)):
            want = block_of(dense, plain, number)
            errors = [(dense_block(k.factors, number) - want).norm() for k in (plain, corrected)]
            assert errors[1] <= errors[0] * (1.0 + 1e-9) + 1e-12
            gain += float(errors[0] - errors[1])
        assert gain > 1e-6


class OneLayer(nn.Module):
    """A layer whose output is the model's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).flatten(1)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.LayerNorm(4), (6, 4)),
        (lambda: nn.RMSNorm(4), (6, 4)),
        (lambda: nn.GroupNorm(2, 4), (6, 4, 3)),
        (lambda: nn.BatchNorm1d(4), (6, 4)),
        (lambda: nn.LayerNorm((4, 3)), (6, 4, 3)),
    ],
    ids=["layer norm", "rms norm", "group norm", "batch norm", "layer norm of two dimensions"],
)
def test_a_norms_block_is_the_exact_one(layer: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """ "reduce" sums over positions, so that scale and bias have their exact block."""
    torch.manual_seed(0)
    net, x = OneLayer(layer()), torch.randn(shape)
    y = torch.randn(net(x).shape)
    problem = Problem(net, x, lambda out: F.mse_loss(out, y))
    kfac = fitted(problem, estimator="type-2", approximation="reduce")
    assert relative_error(estimated(kfac)[0], block_of(dense_ggn(problem), kfac, 0)) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "groups": 2, "padding": 1},
        {"kernel_size": 2, "dilation": 2, "stride": 2},
        {"kernel_size": 3, "padding": "same", "dilation": 2, "groups": 4},
        {"kernel_size": 2, "padding": 1, "padding_mode": "circular", "bias": False},
    ],
    ids=["groups", "dilation and stride", "same and depthwise", "circular"],
)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_have_the_patches_of_the_convolution(dimensions: int, options: dict[str, object]) -> None:
    """The patches times the weight are the layer's result, and the gradient is Σ g aᵀ."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    torch.manual_seed(0)
    layer = kind(4, 4, **options)  # type: ignore[arg-type]
    x = torch.randn(2, 4, *[5] * dimensions)
    kfac = KFACPreconditioner(layer)
    seen = []

    def closure() -> Tensor:
        return F.mse_loss(layer(x).flatten(1), torch.zeros(2, layer(x).flatten(1).shape[1]))

    from sorder.kfac.capture import Capture
    from sorder.kfac.layout import Registry

    params = list(layer.parameters())
    with Capture(params, Registry()) as capture:
        out = layer(x)
    v = torch.randn_like(out)
    capture.sweep([(out, v)], lambda use, g, first: seen.append((use, g)), lambda i, g: None)
    ((use, g),) = seen
    a = use.layer.inputs()
    if use.bias is not None:
        a = F.pad(a, (0, 1), value=use.bias)
    matrices = use.block.gather(params, torch.float64)
    product = torch.einsum("bmn,spbn->spbm", matrices, a).flatten(2).transpose(1, 2).view_as(out)
    assert relative_error(product.detach(), out) < 1e-13
    gradient = torch.einsum("spbm,spbn->bmn", g, a)
    want = use.block.gather(torch.autograd.grad(out, params, v), torch.float64)
    assert relative_error(gradient, want) < 1e-13
    kfac.update_factors(closure)
    assert len(kfac.factors.blocks) == 1


def test_the_embedding_block_is_exact_for_single_tokens() -> None:
    torch.manual_seed(0)
    net = nn.Embedding(5, 3)
    tokens, y = torch.randint(0, 5, (9,)), torch.randn(9, 3)
    problem = Problem(net, tokens, lambda out: F.mse_loss(out, y))
    for approximation in ("expand", "reduce"):
        kfac = fitted(problem, estimator="type-2", approximation=approximation)
        assert relative_error(estimated(kfac)[0], block_of(dense_ggn(problem), kfac, 0)) < 1e-13


def test_padding_has_no_part_in_an_embedding() -> None:
    net = nn.Embedding(5, 3, padding_idx=1)
    tokens = torch.tensor([[0, 1], [1, 4]])
    kfac = KFACPreconditioner(net, estimator="type-2")
    kfac.update_factors(lambda: F.mse_loss(net(tokens), torch.zeros(2, 2, 3)))
    ((left, _),) = kfac.factors.terms(0)
    assert left[0, 1] == 0.0 and left[0, 0] > 0.0 and left[0, 4] > 0.0


def test_the_fallbacks_diagonal_is_right_in_expectation() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.exp()

    torch.manual_seed(0)
    y = torch.randint(0, 3, (6,))
    problem = Problem(Scaled(), torch.randn(6, 3), lambda out: F.cross_entropy(out, y))
    want = dense_ggn(problem).diagonal()
    for estimator in ("mc", "type-2"):
        with pytest.warns(RuntimeWarning, match="only the diagonal") if estimator == "mc" else nothing():
            draws = torch.stack(
                [fitted(problem, estimator=estimator, seed=s).factors.diagonals[0]["diagonal"] for s in range(300)]
            )
        # Of a first update with decay 0.95 the running mean is a twentieth.
        draws = draws * 20.0
        standard = draws.std(0) / len(draws) ** 0.5
        assert ((draws.mean(0) - want).abs() < 5.0 * standard + 1e-12).all()


def nothing() -> object:
    import contextlib

    return contextlib.nullcontext()
