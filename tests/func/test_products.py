"""hvp, ggnvp, fvp and empirical_fvp against dense float64 matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sorder
from sorder.func import empirical_fvp, fvp, ggnvp, hvp, value_grad_hvp
from sorder.func.loss_call import find_loss_call
from tests.cases import (
    CASES,
    CLOSED_FORM_CASES,
    dense_ggn,
    dense_hessian,
    flatten,
    make_problem,
    relative_error,
    unflatten,
)

Loss = Callable[[Tensor, Tensor], Tensor]
BOUND = 1e-12
MODES = ("forward-over-reverse", "reverse-over-reverse", "reverse-over-forward")


@pytest.mark.parametrize("name", CASES)
def test_hvp_equals_dense_hessian(name: str) -> None:
    problem = make_problem(name)
    params, v = problem.params, problem.random_tangent()
    want = unflatten(dense_hessian(problem) @ flatten(v), params)
    value, gradient = problem.objective(params), torch.func.grad(problem.objective)(params)
    for mode in MODES:
        got = value_grad_hvp(problem.objective, (params,), (v,), mode=mode)
        assert relative_error(got[0], value) < BOUND
        assert relative_error(got[1], (gradient,)) < BOUND
        assert relative_error(got[2], (want,)) < BOUND, mode
        assert got[2][0].keys() == params.keys()


@pytest.mark.parametrize("name", CASES)
def test_ggnvp_equals_dense_ggn(name: str) -> None:
    problem = make_problem(name)
    params, v = problem.params, problem.random_tangent()
    want = unflatten(dense_ggn(problem) @ flatten(v), params)
    got = ggnvp(problem.model_fn, problem.loss_fn, (params,), (v,))
    assert relative_error(got, (want,)) < BOUND


@pytest.mark.parametrize("name", CASES)
def test_closed_form_is_found_where_there_is_one(name: str) -> None:
    problem = make_problem(name)
    found = find_loss_call(problem.loss_fn, problem.model_fn(problem.params))
    assert (found is not None) == (name in CLOSED_FORM_CASES)


@pytest.mark.parametrize("name", CLOSED_FORM_CASES)
def test_fvp_is_positive_semidefinite_symmetric_and_reproducible(name: str) -> None:
    problem = make_problem(name)
    params = problem.params

    def product(v: dict[str, torch.Tensor]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        return flatten(fvp(problem.model_fn, problem.loss_fn, (params,), v, argnums=0, generator=generator))

    u, v = problem.random_tangent(1), problem.random_tangent(2)
    fu, fv = product(u), product(v)
    assert flatten(u) @ fu > 0
    assert abs(flatten(v) @ fu - flatten(u) @ fv) < 1e-12 * flatten(u).norm() * fv.norm()
    assert torch.equal(fu, product(u))


@pytest.mark.parametrize("name", CLOSED_FORM_CASES)
def test_fvp_has_the_ggn_for_expectation(name: str) -> None:
    problem = make_problem(name)
    params, v = problem.params, problem.random_tangent()
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [flatten(fvp(problem.model_fn, problem.loss_fn, (params,), (v,), generator=generator)) for _ in range(100)]
    )
    want = dense_ggn(problem) @ flatten(v)
    # The squared error of the mean is expected at trace(covariance)/100; the bound is three times its root.
    spread = (draws.var(0).sum() / len(draws)).sqrt()
    assert (draws.mean(0) - want).norm() < 3 * spread
    assert spread < 0.5 * want.norm()


@pytest.mark.parametrize(("name", "loss"), [("mlp", F.cross_entropy), ("regression", F.mse_loss)])
def test_empirical_fvp_equals_the_outer_products_of_per_sample_gradients(name: str, loss: Loss) -> None:
    target = torch.randint(0, 3, (6,)) if name == "mlp" else torch.randn(5, 2).double()
    problem = make_problem(name)
    params, v = problem.params, problem.random_tangent()

    def sample_loss(params: dict[str, Tensor], n: int) -> Tensor:
        return loss(problem.model_fn(params)[n : n + 1], target[n : n + 1])

    g = torch.stack([flatten(torch.func.grad(sample_loss)(params, n)) for n in range(len(target))])
    want = g.T @ (g @ flatten(v)) / len(target)
    got = empirical_fvp(problem.model_fn, lambda out: loss(out, target), (params,), (v,))
    assert relative_error(got, want) < BOUND
    total = empirical_fvp(
        problem.model_fn, lambda out: len(target) * loss(out, target), (params,), (v,), reduction="sum"
    )
    assert relative_error(total, want * len(target)) < BOUND


@pytest.mark.parametrize("sample_dims", [1, 2])
def test_empirical_fvp_of_sequences_and_of_tokens(sample_dims: int) -> None:
    problem = make_problem("transformer")
    params, v = problem.params, problem.random_tangent()
    target = torch.randint(0, 5, (2, 4))

    def sample_losses(vector: Tensor) -> Tensor:
        out = problem.model_fn(unflatten(vector, params)).transpose(1, 2)
        losses = F.cross_entropy(out, target, reduction="none")
        return losses.mean(1) if sample_dims == 1 else losses.flatten()

    g = torch.func.jacrev(sample_losses)(flatten(params))
    want = g.T @ (g @ flatten(v)) / len(g)
    loss = lambda out: F.cross_entropy(out.transpose(1, 2), target)  # noqa: E731
    got = empirical_fvp(problem.model_fn, loss, (params,), (v,), sample_dims=sample_dims)
    assert relative_error(got, want) < BOUND


def test_argnums_and_aux() -> None:
    def f(scale: float, x: torch.Tensor, y: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return scale * (x * y["a"]).sum() ** 3, x.sum()

    x, y = torch.randn(3).double(), {"a": torch.randn(3).double()}
    tx, ty = torch.randn(3).double(), {"a": torch.randn(3).double()}
    h = torch.func.hessian(lambda x, a: f(2.0, x, {"a": a})[0], argnums=(0, 1))(x, y["a"])
    for mode in MODES:
        got, aux = hvp(f, (2.0, x, y), tx, argnums=1, has_aux=True, mode=mode)
        assert relative_error(got, h[0][0] @ tx) < BOUND
        assert torch.equal(aux, x.sum())
        got, _ = hvp(f, (2.0, x, y), (ty, tx), argnums=(2, 1), has_aux=True, mode=mode)
        assert relative_error(got[0], h[1][0] @ tx + h[1][1] @ ty["a"]) < BOUND
        assert relative_error(got[1], h[0][0] @ tx + h[0][1] @ ty["a"]) < BOUND
    problem = make_problem("mlp")
    params, v = problem.params, problem.random_tangent()
    model = lambda p: (problem.model_fn(p), p["0.bias"])  # noqa: E731
    product, aux = ggnvp(model, problem.loss_fn, (params,), v, argnums=0, has_aux=True)
    assert torch.equal(aux, params["0.bias"])
    assert relative_error(product, dense_ggn(problem) @ flatten(v)) < BOUND


def test_two_passes_of_one_product_see_one_dropout_mask() -> None:
    w, x = torch.randn(4, 3).double(), torch.randn(5, 4).double()
    y = torch.randint(0, 3, (5,))
    loss = lambda out: F.cross_entropy(out, y)  # noqa: E731

    def model(w: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        h = x @ w
        return torch.tanh(F.dropout(h, 0.5) if keep is None else h * keep)

    torch.manual_seed(3)
    keep = F.dropout(torch.ones(5, 3).double(), 0.5)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    got = ggnvp(model, loss, (w,), (w,))
    assert relative_error(got, ggnvp(lambda w: model(w, keep), loss, (w,), (w,))) < BOUND
    assert torch.equal(torch.get_rng_state(), after)


def test_nll_loss_counts_as_cross_entropy_of_the_log_softmax_input() -> None:
    problem = make_problem("mlp")
    params, v, y = problem.params, problem.random_tangent(), torch.randint(0, 3, (6,))
    want = ggnvp(problem.model_fn, lambda out: F.cross_entropy(out, y), (params,), (v,))
    log_model = lambda p: F.log_softmax(problem.model_fn(p), -1)  # noqa: E731
    got = ggnvp(log_model, lambda out: F.nll_loss(out, y), (params,), (v,))
    assert relative_error(got, want) < BOUND


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: 2 * F.cross_entropy(out, y),
        lambda out, y: F.cross_entropy(out, y) + out.square().mean(),
        lambda out, y: F.cross_entropy(out.exp(), y),
        lambda out, y: F.cross_entropy(out, y, reduction="none").mean(),
        lambda out, y: F.cross_entropy(out, out.softmax(-1)),
        lambda out, y: F.mse_loss(torch.ones_like(out), out) + 0 * F.cross_entropy(out, y),
        lambda out, y: F.cross_entropy(out, y).exp(),
    ],
)
def test_what_is_not_a_bare_loss_call_goes_through_double_backward(loss) -> None:
    problem = make_problem("mlp")
    params, v, y = problem.params, problem.random_tangent(), torch.randint(0, 3, (6,))
    assert find_loss_call(lambda out: loss(out, y), problem.model_fn(params)) is None
    problem = type(problem)(problem.module, problem.inputs, lambda out: loss(out, y))
    got = ggnvp(problem.model_fn, problem.loss_fn, (params,), (v,))
    assert relative_error(got, dense_ggn(problem) @ flatten(v)) < BOUND


def test_ggn_of_a_view_chain_and_of_loss_modules() -> None:
    problem = make_problem("transformer")
    params, v, y = problem.params, problem.random_tangent(), torch.randint(0, 5, (2, 4))
    losses = (
        lambda out: torch.nn.CrossEntropyLoss()(out.permute(0, 2, 1), y),
        lambda out: F.cross_entropy(out[:, :-1].reshape(-1, out.size(-1)), y[:, 1:].reshape(-1)),
        lambda out: F.cross_entropy(out.mT.mT.view(-1, 5), y.view(-1), None, None, -100, None, "sum"),
    )
    for loss in losses:
        assert find_loss_call(loss, problem.model_fn(params)) is not None
        case = type(problem)(problem.module, problem.inputs, loss)
        got = ggnvp(case.model_fn, loss, (params,), (v,))
        assert relative_error(got, dense_ggn(case) @ flatten(v)) < BOUND


def test_products_under_vmap_give_the_matrix() -> None:
    problem = make_problem("mlp")
    params = problem.params
    basis = torch.eye(flatten(params).numel(), dtype=torch.float64)
    tangents = torch.func.vmap(lambda row: unflatten(row, params))(basis)
    h = torch.func.vmap(lambda v: flatten(hvp(problem.objective, (params,), v, argnums=0)))(tangents)
    g = torch.func.vmap(lambda v: flatten(ggnvp(problem.model_fn, problem.loss_fn, (params,), v, argnums=0)))(tangents)
    assert relative_error(h, dense_hessian(problem)) < BOUND
    assert relative_error(g, dense_ggn(problem)) < BOUND


def test_hvp_under_bfloat16_autocast_is_near_float32() -> None:
    problem = make_problem("mlp")
    module = problem.module.float()
    params = {n: p.detach() for n, p in module.named_parameters()}
    x, y = problem.inputs.float(), torch.randint(0, 3, (6,))
    f = lambda p: F.cross_entropy(torch.func.functional_call(module, p, (x,)), y)  # noqa: E731
    v = {n: torch.randn_like(p) for n, p in params.items()}
    want = hvp(f, (params,), (v,))
    for mode in MODES:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = hvp(f, (params,), (v,), mode=mode)
        assert 1e-6 < relative_error(got, want) < 5e-2, mode


@pytest.mark.parametrize("product", ["hvp", "ggnvp"])
def test_fused_attention_points_to_exact_attention(product: str) -> None:
    x = torch.randn(1, 1, 5, 8)

    def model(w: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x * w, x, x)

    def take() -> Tensor:
        if product == "ggnvp":
            return sorder.func.ggnvp(model, lambda z: z.square().sum(), (x,), x, argnums=0)
        return sorder.func.hvp(lambda w: model(w).square().sum(), (x,), x, argnums=0)

    with pytest.raises(NotImplementedError, match=r"under sorder\.exact_attention\(\)"):
        take()
    with sorder.exact_attention():
        assert take().norm() > 0
