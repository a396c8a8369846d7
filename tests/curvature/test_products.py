"""Every product on live parameters, in every mode, against a dense float64 matrix."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sorder.func
from sorder.curvature import CurvaturePoint
from sorder.curvature.errors import CurvatureError
from tests.cases import CASES, Transformer, dense_ggn, dense_hessian, flatten, make_problem, relative_error

MODES = ("reverse-over-reverse", "forward-over-reverse")
BOUND = 1e-11
KEEP_TORCH_JIT_QUIET = pytest.mark.filterwarnings("ignore:.*torch.jit.*")
pytestmark = KEEP_TORCH_JIT_QUIET


def tangent(params: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in params]


@pytest.fixture(autouse=True)
def no_fallback(request: pytest.FixtureRequest) -> object:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*taking .* instead.*")
        if "torch's checkpoint" in request.node.name:  # the Function inside has no forward mode in torch 2.11
            warnings.filterwarnings("ignore", "forward-over-reverse cannot differentiate custom autograd.Function")
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_hessian_equals_the_dense_one(name: str, mode: str) -> None:
    problem = make_problem(name)
    params = list(problem.module.parameters())
    v = tangent(params)
    with CurvaturePoint(lambda: problem.loss_fn(problem.module(problem.inputs)), params, "hessian", mode=mode) as point:
        products = [point.product(v), point.product(v)]
    assert point.evaluations == (1 if mode == "reverse-over-reverse" else 3)
    assert point.products == 2
    for product in products:
        assert relative_error(flatten(product), dense_hessian(problem) @ flatten(v)) < BOUND


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("returns", ["loss", "loss and outputs"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "partial"])
def test_ggn_equals_the_dense_one(name: str, returns: str, mode: str) -> None:
    problem = make_problem(name)
    params = list(problem.module.parameters())

    def closure() -> Tensor | tuple[Tensor, Tensor]:
        outputs = problem.module(problem.inputs)
        loss = problem.loss_fn(outputs)
        return loss if returns == "loss" else (loss, outputs)

    if name == "other_loss" and returns == "loss":
        assert CurvaturePoint(closure, params).kind == "hessian"
        return
    v = tangent(params)
    with CurvaturePoint(closure, params, mode=mode) as point:
        product = point.product(v)
    assert point.kind == "ggn"
    assert relative_error(flatten(product), dense_ggn(problem) @ flatten(v)) < BOUND
    gradient = torch.autograd.grad(problem.loss_fn(problem.module(problem.inputs)), params)
    assert relative_error(flatten(point.gradient), flatten(gradient)) < BOUND


@pytest.mark.parametrize("name", ["mlp", "conv", "regression", "multilabel"])
def test_the_mean_of_fisher_products_is_the_ggn_product(name: str) -> None:
    problem = make_problem(name)
    params = list(problem.module.parameters())
    v = tangent(params)
    draws = []
    for seed in range(300):
        with CurvaturePoint(
            lambda: problem.loss_fn(problem.module(problem.inputs)), params, "fisher", seed=seed
        ) as point:
            draws.append(flatten(point.product(v)))
    draws = torch.stack(draws)
    error = (draws.mean(0) - dense_ggn(problem) @ flatten(v)).norm()
    # The error's expectation is the standard error; three of them leave no room for a wrong factor.
    standard = (draws.var(0).sum() / len(draws)).sqrt()
    assert 0.0 < error < 3.0 * standard
    assert standard < 0.3 * (dense_ggn(problem) @ flatten(v)).norm()


class Conv(nn.Module):
    """Convolution, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Softplus(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(12, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class DropoutTransformer(nn.Module):
    """torch's own encoder layer, dropout in attention included."""

    def __init__(
        self, wrap: Callable[[nn.Module], Callable[..., Tensor]] = lambda block: block, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=dropout, batch_first=True)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.wrap = wrap

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.wrap(self.layer)(self.embedding(tokens)))


def reentrant_free(block: nn.Module) -> Callable[..., Tensor]:
    return lambda h: torch_checkpoint(block, h, use_reentrant=False)


LIVE = {
    "batch norm and dropout": (Conv, lambda: torch.randn(4, 1, 4, 4)),
    "transformer with dropout": (DropoutTransformer, lambda: torch.randint(0, 5, (2, 4))),
    "torch's checkpoint": (lambda: DropoutTransformer(reentrant_free), lambda: torch.randint(0, 5, (2, 4))),
    "sorder's checkpoint": (
        lambda: Transformer(depth=1, wrap=sorder.func.checkpoint),
        lambda: torch.randint(0, 5, (2, 4)),
    ),
}


def buffers(module: nn.Module) -> list[Tensor]:
    return [b.clone() for b in module.buffers()]


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", list(LIVE))
def test_one_function_through_all_products(name: str, mode: str, kind: str) -> None:
    """The same masks in every product, against a dense matrix built with the same random state; buffers move once."""
    make, inputs = LIVE[name]
    with sorder_exact_attention():
        module, x = make().double(), inputs()
        x = x.double() if x.is_floating_point() else x
        params = list(module.parameters())
        state, start = torch.get_rng_state(), buffers(module)

        def closure() -> Tensor:
            z = module(x)
            return F.cross_entropy(z.flatten(0, -2), torch.arange(z.shape[:-1].numel()) % z.shape[-1])

        matrix = dense(closure, params, kind)
        moved = buffers(module)
        for b, value in zip(module.buffers(), start, strict=True):
            b.data.copy_(value)
        torch.set_rng_state(state)
        v = tangent(params)
        with CurvaturePoint(closure, params, kind, mode=mode) as point:
            after = torch.get_rng_state()
            first = point.product(v)
            torch.rand(3)
            drawn = torch.get_rng_state()
            second = point.product(v)
        assert torch.equal(torch.get_rng_state(), drawn), "a product drew random numbers of its own"
        for b, value in zip(module.buffers(), moved, strict=True):
            assert torch.equal(b, value), "buffers did not move as in one run"
        torch.set_rng_state(state)
        closure()
        assert torch.equal(torch.get_rng_state(), after), "the point left the generator elsewhere than one run"
    assert relative_error(flatten(first), matrix @ flatten(v)) < BOUND
    assert relative_error(flatten(second), flatten(first)) < 1e-14


def test_buffers_move_once() -> None:
    module, x = Conv().double(), torch.randn(4, 1, 4, 4).double()
    twin = Conv().double()
    twin.load_state_dict(module.state_dict())
    params = list(module.parameters())
    state = torch.get_rng_state()
    twin(x)
    torch.set_rng_state(state)
    for mode in MODES:
        module.load_state_dict({**module.state_dict(), **{k: v for k, v in Conv().double().named_buffers()}})
        with CurvaturePoint(lambda: module(x).square().sum(), params, "hessian", mode=mode) as point:
            point.product(tangent(params))
            point.value()
        for a, b in zip(module.buffers(), twin.buffers(), strict=True):
            assert torch.equal(a, b)


def dense(closure: Callable[[], Tensor], params: list[Tensor], kind: str) -> Tensor:
    """Hessian, or GGN of the cross-entropy, from one evaluation and one reverse pass per row."""

    def rows(out: Tensor) -> Tensor:
        found = [
            torch.autograd.grad(o, params, retain_graph=True, allow_unused=True, materialize_grads=True)
            for o in out.flatten()
        ]
        return torch.stack([flatten(g) for g in found])

    if kind == "hessian":
        return rows(flatten(torch.autograd.grad(closure(), params, create_graph=True)))
    seen: list[Tensor] = []
    original = F.cross_entropy

    def spy(z: Tensor, y: Tensor, *rest: object, **options: object) -> Tensor:
        seen.append(z)
        return original(z, y, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "cross_entropy", spy)
        closure()
    z = seen[-1]
    p = z.detach().softmax(-1)
    h = (torch.diag_embed(p) - p[..., None] * p[..., None, :]) / len(p)
    j = rows(z).reshape(*z.shape, -1)
    return torch.einsum("nap,nab,nbq->pq", j, h, j)


def sorder_exact_attention() -> object:
    from sorder.ops.routing import exact_attention

    return exact_attention()


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_autocast_is_close_to_float64(kind: str, mode: str) -> None:
    module, tokens = DropoutTransformer(dropout=0.0), torch.randint(0, 5, (4, 4))
    double = DropoutTransformer(dropout=0.0).double()
    double.load_state_dict(module.state_dict())

    def product(model: nn.Module, autocast: bool) -> Tensor:
        def closure() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

        params = list(model.parameters())
        v = [t.to(params[0].dtype) for t in tangent([p.double() for p in params])]
        with sorder_exact_attention(), CurvaturePoint(closure, params, kind, mode=mode) as point:
            return flatten(point.product(v))

    exact = product(double, False)
    # bfloat16 keeps 8 bits: 2⁻⁸ a rounding, and some tens of them in a row through two blocks and back.
    assert relative_error(product(module, True), exact) < 0.1
    assert relative_error(product(module, False), exact) < 1e-4


def test_a_caller_s_autocast_region_does_not_reach_the_derivatives() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 4)
    params = list(module.parameters())
    results = []
    for mode in MODES:
        with torch.autocast("cpu", torch.bfloat16):
            inside = CurvaturePoint(lambda: module(x).float().square().mean(), params, "hessian", mode=mode)
            with inside:
                results.append(flatten(inside.product(tangent(params))))
    exact = CurvaturePoint(lambda: module(x).square().mean(), params, "hessian")
    want = flatten(exact.product(tangent(params)))
    for got in results:
        assert 1e-4 < relative_error(got, want) < 0.1  # bfloat16 in the closure, nowhere else


@pytest.mark.parametrize("wrap", [lambda block: block, sorder.func.checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("mode", ["auto", "forward-over-reverse"])
def test_a_weight_normed_layer_has_the_hessian_of_its_formula(
    wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]], mode: str
) -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    params, block = list(layer.parameters()), wrap(layer)

    def formula(bias: Tensor, g: Tensor, v: Tensor) -> Tensor:
        weight = g * v / v.square().sum(1, keepdim=True).sqrt()
        return F.cross_entropy(F.linear(x, weight, bias).sin(), y)

    def closure() -> Tensor:
        return F.cross_entropy(block(x).sin(), y)

    v = tangent(params)
    want = torch.func.jvp(torch.func.grad(formula, (0, 1, 2)), tuple(p.detach() for p in params), tuple(v))[1]
    with CurvaturePoint(closure, params, "hessian", mode=mode) as point, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*cannot differentiate _weight_norm.*; taking forward-over-reverse.*")
        assert relative_error(point.product(v), want) < BOUND


def test_a_wrong_second_backward_pass_is_refused_with_the_remedy() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    params = list(layer.parameters())

    def closure() -> Tensor:
        return layer(torch.ones(2, 4)).sin().sum()

    message = r"_weight_norm lacks a derivative.*takes the norms for constants"
    with (
        CurvaturePoint(closure, params, "hessian", mode="reverse-over-reverse") as point,
        pytest.raises(CurvatureError, match=message),
    ):
        point.product(tangent(params))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "function", [torch.det, torch.logdet, torch.cholesky_inverse, lambda a: torch.linalg.solve(a, a.sin())]
)
def test_functions_of_a_factorisation(function: Callable[[Tensor], Tensor], mode: str) -> None:
    torch.manual_seed(0)
    root = torch.randn(4, 4, dtype=torch.float64)
    p = (root @ root.T + torch.eye(4, dtype=torch.float64)).requires_grad_()

    def closure() -> Tensor:
        return function(p).sin().sum()

    def gradient(value: Tensor) -> Tensor:
        return torch.func.grad(lambda a: function(a).sin().sum())(value)

    v = tangent([p])
    want = torch.func.vjp(gradient, p.detach())[1](v[0])[0]
    with CurvaturePoint(closure, [p], "hessian", mode=mode) as point:
        assert relative_error(point.product(v), [want]) < BOUND
