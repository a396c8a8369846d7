"""The preconditioner: inverses, running means, intervals, state, and what it does for conjugate gradients."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.kfac import KFACPreconditioner, inverses
from sorder.kfac.factors import corrected
from sorder.optim import NewtonCG
from tests.cases import flatten, make_problem, relative_error
from tests.kfac.blocks import coordinates, estimated
from tests.kfac.test_capture import language_loss, transformer
from tests.optim.problem import closure_of, model

DAMPING = 0.03


def fitted(net: nn.Module, closure: Any, **options: Any) -> KFACPreconditioner:
    """With factors of the closure, and the damping that it is given."""
    kfac = KFACPreconditioner(net, **{"least_damping": 0.0, **options})
    kfac.update_factors(closure)
    return kfac


def solved(kfac: KFACPreconditioner, number: int, v: list[Tensor]) -> Tensor:
    """The preconditioner's result for one block, flat."""
    return flatten(kfac(v))[coordinates(kfac, number)]


@pytest.mark.parametrize("inverse", ["cholesky", "eigen", "ekfac"])
@pytest.mark.parametrize("name", ["mlp", "conv", "conv2d"])
def test_inverses_are_those_of_the_damped_blocks(name: str, inverse: str) -> None:
    problem = make_problem(name)
    net = problem.module
    kfac = fitted(net, lambda: problem.loss_fn(net(problem.inputs)), inverse=inverse)
    kfac.update(None, DAMPING)
    v = [torch.randn_like(p) for p in net.parameters()]
    for number, dense in enumerate(estimated(kfac)):
        x = flatten(v)[coordinates(kfac, number)]
        if inverse == "cholesky":
            ((left, right),) = kfac.factors.terms(number)
            pi = (right.diagonal(dim1=1, dim2=2).mean() / left.diagonal(dim1=1, dim2=2).mean()).sqrt()
            eye = [torch.eye(f.shape[-1], dtype=torch.float64) for f in (left, right)]
            damped = torch.kron(left[0] + DAMPING**0.5 / pi * eye[0], right[0] + DAMPING**0.5 * pi * eye[1])
        else:
            damped = dense + DAMPING * torch.eye(len(dense), dtype=torch.float64)
        assert relative_error(damped @ solved(kfac, number, v), x) < 1e-10


@pytest.mark.parametrize("inverse", ["cholesky", "eigen"])
def test_a_sum_of_two_kronecker_products_is_inverted_as_one(inverse: str) -> None:
    net = transformer()
    kfac = fitted(net, lambda: language_loss(net), inverse=inverse)
    kfac.update(None, DAMPING)
    number = next(n for n in range(len(kfac.factors.blocks)) if len(kfac.factors.terms(n)) == 2)
    total: Any = 0.0
    for left, right in kfac.factors.terms(number):
        left, right = inverses.damped(left, right, DAMPING / 2)
        left, right = (torch.diag_embed(f)[0] if f.dim() == 2 else f[0] for f in (left, right))
        total = total + torch.kron(left, right)
    v = [torch.randn_like(p) for p in net.parameters()]
    assert relative_error(total @ solved(kfac, number, v), flatten(v)[coordinates(kfac, number)]) < 1e-10


@pytest.mark.parametrize("inverse", ["cholesky", "eigen", "ekfac"])
def test_it_is_symmetric_and_positive_definite(inverse: str) -> None:
    net = transformer()
    kfac = fitted(net, lambda: language_loss(net), inverse=inverse)
    kfac.update(None, DAMPING)
    count = sum(p.numel() for p in net.parameters())
    columns = []
    for e in torch.eye(count, dtype=torch.float64):
        parts = e.split([p.numel() for p in net.parameters()])
        columns.append(flatten(kfac([t.view_as(p) for t, p in zip(parts, net.parameters(), strict=True)])))
    matrix = torch.stack(columns)
    assert relative_error(matrix, matrix.T) < 1e-12
    assert torch.linalg.eigvalsh(matrix).min() > 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inverse", ["cholesky", "eigen", "ekfac"])
@pytest.mark.parametrize("damping", [0.0, 1e-20, 1e-8])
@pytest.mark.filterwarnings("ignore:K-FAC. a factor of")
def test_no_nan_near_damping_zero(damping: float, inverse: str, dtype: torch.dtype) -> None:
    """Rank-deficient factors: two samples, a constant input, a token that is never met."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    tokens, y = torch.zeros(2, 2, dtype=torch.long), torch.tensor([0, 0])
    kfac = fitted(net, lambda: F.cross_entropy(net(tokens), y), inverse=inverse)
    kfac.update(None, damping)
    for scale in (1.0, 1e-12):
        out = kfac([scale * torch.randn_like(p) for p in net.parameters()])
        assert all(t.isfinite().all() for t in out)


def test_a_failed_factorisation_raises_its_damping_and_warns() -> None:
    bad = torch.tensor([[[1.0, 2.0], [2.0, 1.0]]])
    with pytest.warns(RuntimeWarning, match="a factor of linear was not positive definite; its damping was raised by"):
        lower = inverses.cholesky(bad, "linear")
    raised = lower @ lower.mT - bad
    assert raised[0, 0, 0] >= 0.999 and raised[0, 0, 0] == pytest.approx(float(raised[0, 1, 1]), rel=1e-4)
    assert raised[0, 0, 1].abs() < 1e-5
    with pytest.raises(FloatingPointError, match="cannot be factorised"):
        inverses.cholesky(torch.full((1, 2, 2), float("nan")), "linear")


@pytest.mark.parametrize("inverse", ["cholesky", "ekfac"])
def test_the_report_says_which_factor_is_which(inverse: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    name = "EKFAC" if inverse == "ekfac" else "K-FAC"
    for max_size, norm in ((8192, "dense"), (7, "diagonal")):
        kfac = fitted(net, lambda: nn.functional.cross_entropy(net(x), y), inverse=inverse, max_size=max_size)
        heading, *lines = kfac.report().splitlines()
        assert "curvature (outputs ⊗ inputs)" in heading
        found = {line.split()[0]: line for line in lines}
        assert f"{name} 4 ⊗ 4  " in found["0.weight"] and f"{name} 2 ⊗ 5  " in found["2.bias"]
        assert all(f"{norm} 8 × 8  " in found[p] and "⊗" not in found[p] for p in ("1.weight", "1.bias"))


def test_too_large_a_factor_is_diagonal_and_reported() -> None:
    problem = make_problem("mlp")
    net = problem.module
    kfac = fitted(net, lambda: problem.loss_fn(net(problem.inputs)), max_size=4, estimator="type-2")
    assert [tuple(f.dim() for f in kfac.factors.terms(n)[0]) for n in (0, 1)] == [(2, 2), (3, 2)]
    assert "K-FAC 5 (diagonal) ⊗ 5 (diagonal)" in kfac.report()
    full = fitted(net, lambda: problem.loss_fn(net(problem.inputs)), estimator="type-2")
    for small, large in zip(kfac.factors.terms(0)[0], full.factors.terms(0)[0], strict=True):
        assert relative_error(small, large.diagonal(dim1=1, dim2=2)) < 1e-12
    kfac.update(None, DAMPING)
    assert all(t.isfinite().all() for t in kfac([torch.ones_like(p) for p in net.parameters()]))


def test_running_means_are_corrected_for_their_start() -> None:
    net = model()
    kfac = fitted(net, closure_of(net), decay=0.9, estimator="type-2")
    once = [t for n in (0, 1) for pair in kfac.factors.terms(n) for t in pair]
    alone = fitted(net, closure_of(net), decay=0.0, estimator="type-2")
    assert relative_error(once, [t for n in (0, 1) for pair in alone.factors.terms(n) for t in pair]) < 1e-12
    second = fitted(net, closure_of(net, seed=2), decay=0.0, estimator="type-2")
    kfac.update_factors(closure_of(net, seed=2))
    ((left, _),) = kfac.factors.terms(0)
    (first,), (other,) = ([p[0] for p in k.factors.terms(0)] for k in (alone, second))
    assert relative_error(left, (0.9 * 0.1 * first + 0.1 * other) / 0.19) < 1e-12
    assert corrected(kfac.factors.running[0], "left.outputs") is not kfac.factors.running[0]["left.outputs"]


@pytest.mark.parametrize(("interval", "want"), [(1, list(range(12))), (10, [0, 10])])
def test_when_factors_and_inverses_are_renewed(interval: int, want: list[int]) -> None:
    from sorder.curvature import CurvaturePoint

    net = model()
    for which in ("factor_interval", "inverse_interval"):
        kfac = KFACPreconditioner(net, **{which: interval})  # type: ignore[arg-type]
        factors, inverse, changed = None, None, []
        for number in range(12):
            with CurvaturePoint(closure_of(net), list(net.parameters())) as point:
                kfac.refresh(point)
            kfac.update(None, DAMPING)
            now = kfac.factors.running, kfac.factors.inverse[0]
            moved = now[0] != factors if which == "factor_interval" else now[1] is not inverse
            changed += [number] * moved
            factors, inverse = now
        assert changed == want


@pytest.mark.parametrize("inverse", ["cholesky", "eigen", "ekfac"])
def test_a_state_dict_resumes_bit_identically(inverse: str) -> None:
    net = transformer()
    options: dict[str, Any] = {"inverse": inverse, "factor_interval": 2, "inverse_interval": 3, "decay": 0.7}
    v = [torch.randn_like(p) for p in net.parameters()]

    def advance(kfac: KFACPreconditioner, numbers: range) -> list[Tensor]:
        from sorder.curvature import CurvaturePoint

        for number in numbers:
            rows = slice(number % 3, number % 3 + 1)
            with CurvaturePoint(lambda rows=rows: language_loss(net, rows), list(net.parameters())) as point:
                kfac.refresh(point)
            kfac.update(None, 0.1 / (number + 1))
        return kfac(v)

    kfac = KFACPreconditioner(net, **options)
    advance(kfac, range(4))
    file = io.BytesIO()
    torch.save(kfac.state_dict(), file)
    kept = copy.deepcopy(kfac.state_dict())
    want = advance(kfac, range(4, 9))
    other = KFACPreconditioner(net, **options)
    advance(other, range(2))
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert str(other.state_dict()) == str(kept), "saved tensors are not changed in place"
    assert all(torch.equal(a, b) for a, b in zip(advance(other, range(4, 9)), want, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "exact"}, "estimator must be one of 'mc', 'type-2', 'empirical', got 'exact'"),
        ({"approximation": "sum"}, "approximation must be one of"),
        ({"inverse": "lu"}, "inverse must be one of"),
        ({"decay": 1.0}, r"decay must lie in \[0.0, 1.0\), got 1.0"),
        ({"samples": 0}, "samples must be an integer of at least 1, got 0"),
        ({"factor_interval": 1.5}, "factor_interval must be an integer"),
        ({"max_size": 0}, "max_size must be"),
        ({"samples": True}, "samples must be an integer of at least 1, got True"),
        ({"seed": "0"}, "seed must be an integer, got '0'"),
        ({"least_damping": None}, r"least_damping must lie in \[0.0, inf\), got None"),
        ({"inverse_dtype": torch.float16}, "inverse_dtype must be torch.float32, torch.float64 or None"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFACPreconditioner(model(), **options)


def test_wrong_use_is_named() -> None:
    net = model()
    kfac = KFACPreconditioner(net)
    assert "no factors yet" in kfac.report()
    with pytest.raises(RuntimeError, match=r"call update_factors\(closure\) first"):
        kfac.update(None, 0.1)
    kfac.update_factors(closure_of(net))
    with pytest.raises(ValueError, match="v must have one tensor for each of 4 parameters"):
        kfac([torch.ones(3)])
    with pytest.raises(ValueError, match=r"v\[1\] must have the parameter's shape .*, got \(1,\)"):
        kfac([torch.ones(p.shape if i != 1 else 1) for i, p in enumerate(kfac.params)])
    for damping in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="damping must lie in"):
            kfac.update(None, damping)
    for scale in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="loss_scale must lie in"):
            kfac.update_factors(closure_of(net), loss_scale=scale)
    wider = KFACPreconditioner(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)))
    with pytest.raises(ValueError, match=r"parameters of these shapes, but 0\.weight has"):
        wider.load_state_dict(kfac.state_dict())
    assert not wider.factors.updates
    from sorder.curvature import CurvaturePoint

    missing = r"has 2 that the optimizer does not step \(the first is 0\.weight, of shape \(6, 4\)\)"
    unknown = r"does not know 2 of the optimizer's \(the first has shape \(3, 6\)\)"
    with CurvaturePoint(closure_of(net), list(net[2].parameters())) as point, pytest.raises(ValueError, match=missing):
        kfac.refresh(point, force=True)
    with pytest.raises(ValueError, match=unknown):
        NewtonCG(net.parameters(), preconditioner=KFACPreconditioner(net[0]))
    with pytest.raises(ValueError, match=r"does not know 4 of .* and has 4 that .*: make both from the"):
        NewtonCG(model().parameters(), preconditioner=kfac)
    with pytest.raises(TypeError, match=r"^KFACPreconditioner takes parameters, got a dict: pass its values\(\)$"):
        KFACPreconditioner(dict(net.named_parameters()))


@pytest.mark.parametrize("inverse", ["cholesky", "ekfac"])
def test_newton_cg_may_group_the_parameters_in_another_order(inverse: str) -> None:
    nets = [model() for _ in range(3)]
    optimizers = []
    for i, net in enumerate(nets):
        # Square, so that only the identities tell these weights from a wrong assignment.
        net[0], net[2] = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        net.load_state_dict(nets[0].state_dict())
        matrices, vectors = ([p for p in net.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
        groups = [{"params": matrices[::-1]}, {"params": vectors}] if i else net.parameters()
        kfac = KFACPreconditioner(net, inverse=inverse, factor_interval=2, inverse_interval=3)
        # Where λ is left to itself, rounding grows to a percent within four steps, in one order too.
        optimizers.append(NewtonCG(groups, preconditioner=kfac, damping=0.1, damping_update="constant"))
    for i in range(4):
        for net, optimizer in zip(nets[:2], optimizers[:2], strict=True):
            optimizer.step(closure_of(net, i))
    assert relative_error(*(flatten(list(net.parameters())).detach() for net in nets[:2])) < 1e-9
    nets[2].load_state_dict(nets[1].state_dict())
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    for i in range(4, 8):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.step(closure_of(net, i))
    resumed = [flatten(list(net.parameters())) for net in nets]
    assert torch.equal(resumed[2], resumed[1]) and relative_error(resumed[1], resumed[0]) < 1e-9


def test_newton_cg_with_it_takes_fewer_iterations() -> None:
    """A badly scaled problem, solved to a residual; the products are exact, so that the step is the same."""
    torch.manual_seed(0)
    x = torch.randn(300, 20).double() * torch.logspace(-2, 1, 20, dtype=torch.float64)
    y = torch.randint(0, 5, (300,))
    found = []
    for use in (False, True):
        torch.manual_seed(1)
        net = nn.Linear(20, 5).double()
        kfac = KFACPreconditioner(net, estimator="type-2", inverse="eigen", least_damping=0.0)

        def closure(net: nn.Module = net) -> Tensor:
            return F.cross_entropy(net(x), y)

        if use:
            kfac.update_factors(closure)
        optimizer = NewtonCG(
            net.parameters(), damping=1e-4, preconditioner=kfac if use else None, cg_iterations=300,
            cg_stop="residual", cg_tolerance=1e-9,
        )  # fmt: skip
        optimizer.step(closure)
        found.append((optimizer.last_step.cg_iterations, flatten(list(net.parameters())).detach()))
    assert 3 * found[1][0] <= found[0][0]
    assert relative_error(found[1][1], found[0][1]) < 1e-3


@pytest.mark.parametrize("interval", [1, 100])
def test_a_group_added_to_newton_cg_joins_the_preconditioner(interval: int) -> None:
    """Its blocks are measured at the next step, whenever that would be due."""
    net, whole = model(), model()
    net[2].bias.requires_grad_(False)
    whole[2].bias.requires_grad_(False)
    options: dict[str, Any] = {"factor_interval": interval, "inverse_interval": interval, "decay": 0.0}
    kfac = KFACPreconditioner(net[0].named_parameters(), estimator="type-2", **options)
    optimizer = NewtonCG(net[0].parameters(), preconditioner=kfac, damping=0.1, lr=0.0)
    optimizer.step(closure_of(net))
    assert len(kfac.factors.blocks) == 1
    with pytest.raises(ValueError, match="lr must lie in"):
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": -1.0})
    assert len(kfac.params) == 2
    optimizer.add_param_group({"params": list(net[2].parameters())})
    optimizer.step(closure_of(net))
    assert [id(p) for p in kfac.params] == [id(p) for p in net.parameters() if p.requires_grad]
    assert kfac.names == ["weight", "bias", "parameter 2"]
    other = KFACPreconditioner(whole, estimator="type-2")
    other.update_factors(closure_of(whole))
    for one, two in zip(kfac.factors.running, other.factors.running, strict=True):
        for name in ("left.inputs", "left.outputs"):
            assert relative_error(corrected(one, name), corrected(two, name)) < 1e-12
    assert None not in kfac.factors.inverse


def test_the_state_of_newton_cg_holds_its_preconditioner() -> None:
    nets, optimizers = [model(), model()], []
    for net in nets:
        kfac = KFACPreconditioner(net, factor_interval=2)
        optimizers.append(NewtonCG(net.parameters(), preconditioner=kfac, lr=0.5))
    for i in range(3):
        optimizers[0].step(closure_of(nets[0], i))
    file = io.BytesIO()
    torch.save({"model": nets[0].state_dict(), "optimizer": optimizers[0].state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    nets[1].load_state_dict(saved["model"])
    optimizers[1].load_state_dict(saved["optimizer"])
    for i in range(3, 6):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.step(closure_of(net, i))
    assert torch.equal(flatten(list(nets[0].parameters())), flatten(list(nets[1].parameters())))
    assert "preconditioner" not in NewtonCG(model().parameters()).state_dict()
    small = KFACPreconditioner(nn.Linear(4, 3, bias=False))
    with pytest.raises(ValueError, match="with 1 parameters, got one with 4"):
        small.load_state_dict(saved["optimizer"]["preconditioner"])
    with pytest.raises(ValueError, match="lacks factors, shapes, damping"):
        small.load_state_dict({})


@pytest.mark.parametrize("inverse", ["cholesky", "eigen", "ekfac"])
def test_the_factors_have_a_damping_of_their_own(inverse: str) -> None:
    """Never less than a multiple of the mean eigenvalue of what they make."""
    net = transformer()
    kfac = fitted(net, lambda: language_loss(net), inverse=inverse, least_damping=10.0)
    exact = fitted(net, lambda: language_loss(net), inverse=inverse)
    dense = estimated(exact) if inverse != "ekfac" else estimated(fitted(net, lambda: language_loss(net)))
    mean = sum(float(d.trace()) for d in dense) / sum(len(d) for d in dense)
    v = [torch.randn_like(p) for p in net.parameters()]
    for damping, want in ((0.5 * mean, 10.0 * mean), (20.0 * mean, 20.0 * mean)):
        kfac.update(None, damping)
        exact.update(None, want)
        assert kfac.damping == pytest.approx(want, rel=1e-9)
        assert relative_error(kfac(v), exact(v)) < 1e-9


def test_a_diagonal_block_of_a_transposed_parameter() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight.T @ x[0])[None]

    model, x = Transposed(), torch.randn(1, 4)
    preconditioner = KFACPreconditioner(model, inverse="eigen")
    preconditioner.update_factors(lambda: F.cross_entropy(model(x), torch.tensor([1])))
    preconditioner.update(None, 0.1)
    (solved,) = preconditioner([torch.ones(4, 3)])
    assert solved.shape == (4, 3) and (solved > 0).all() and (solved <= 10).all()
