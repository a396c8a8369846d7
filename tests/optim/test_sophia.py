"""Sophia: the rule itself, when the curvature is taken, and from what."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.curvature import CurvaturePoint, diagonal
from sorder.optim import SophiaG, SophiaH, gnb_loss
from tests.cases import dense_ggn, flatten, make_problem, relative_error
from tests.optim.problem import closure_of, data, model, values


def curvature(optimizer: Any) -> Tensor:
    return torch.cat([optimizer.state[p]["hessian"].flatten() for p in optimizer.param_groups[0]["params"]])


def estimate(net: nn.Module, seed: int, step: int) -> list[Tensor]:
    """Hutchinson's estimate with the probe of a step."""
    params = list(net.parameters())
    generator = torch.Generator().manual_seed(seed + 7919 * step)
    with CurvaturePoint(closure_of(net), params, "hessian") as point:
        return diagonal.hutchinson(point.product, params, generator)


def test_the_record_of_a_step() -> None:
    """In the released code's terms, sign(m)·min(|m| / (rho·h + 1e-15), 1), on coordinates of positive h."""
    net, other = model(), model()
    optimizer = SophiaH(net.parameters(), lr=0.02, gamma=0.4, weight_decay=0.1, update_interval=3, seed=7)
    m = [torch.zeros_like(p) for p in other.parameters()]
    h = [torch.zeros_like(p) for p in other.parameters()]
    for number in range(8):
        if number % 3 == 0:
            h = [0.99 * a + 0.01 * d for a, d in zip(h, estimate(other, 7, number), strict=True)]
        gradients = torch.autograd.grad(closure_of(other)(), list(other.parameters()))
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(other.parameters(), gradients, strict=True)):
                p.mul_(1 - 0.02 * 0.1)
                m[i] = 0.965 * m[i] + 0.035 * g
                ratio = (m[i].abs() / (0.4 * h[i].clamp_min(0.0) + 1e-15)).clamp(max=1.0)
                p.sub_(0.02 * m[i].sign() * ratio)
        optimizer.step(closure_of(net))
        assert relative_error(values(net), values(other)) < 1e-9
        u = [(a / (0.4 * b).clamp_min(1e-12)) for a, b in zip(m, h, strict=True)]
        record = optimizer.last_step
        assert record.step == number + 1 and record.curvature_updated == (number % 3 == 0)
        assert record.win_rate == pytest.approx(float((flatten(u).abs() < 1).double().mean()))
        assert record.curvature_norm == pytest.approx(float(flatten(h).norm()))
        assert record.update_norm == pytest.approx(0.02 * float(flatten(u).clamp(-1, 1).norm()))
    assert 0.0 < optimizer.last_step.win_rate < 1.0, "both branches of the clip were met"


@pytest.mark.parametrize(("interval", "want"), [(1, list(range(1, 13))), (10, [1, 11])])
def test_when_the_curvature_is_updated(interval: int, want: list[int]) -> None:
    net = model()
    optimizer = SophiaH(net.parameters(), update_interval=interval)
    found = []
    for number in range(1, 13):
        due, before = optimizer.curvature_due, curvature(optimizer) if number > 1 else None
        optimizer.step(closure_of(net))
        changed = before is None or not torch.equal(curvature(optimizer), before)
        assert changed == due == optimizer.last_step.curvature_updated
        found += [number] * changed
        assert curvature(optimizer).abs().min() > 0.0, "not stuck at zero before the second update"
    assert found == want


def test_plain_steps_between_updates_and_a_clear_error_without_a_closure() -> None:
    net, other = model(), model()
    closed, plain = (SophiaH(n.parameters(), lr=0.01, update_interval=4) for n in (net, other))
    for _ in range(8):
        closed.step(closure_of(net))
        plain.zero_grad()
        closure_of(other)().backward()
        if plain.curvature_due:
            before = values(other)
            with pytest.raises(TypeError, match=r"update_curvature\(closure\)"):
                plain.step()
            assert torch.equal(values(other), before)
            plain.update_curvature(closure_of(other))
        plain.step()
    assert relative_error(values(net), values(other)) < 1e-12


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    net = model()
    optimizer = SophiaH(net.parameters())
    optimizer.step(closure_of(net))
    before = copy.deepcopy((values(net), optimizer.state_dict(), optimizer.last_step))
    for p in net.parameters():
        p.grad = torch.full_like(p, float("nan"))
    with pytest.raises(FloatingPointError, match=r"gradient of parameter 0 \(shape \(6, 4\)\) is not finite"):
        optimizer.step()
    assert str((values(net), optimizer.state_dict(), optimizer.last_step)) == str(before)


@pytest.mark.parametrize("kind", [SophiaH, SophiaG])
def test_grad_scaler(kind: Any) -> None:
    """The curvature under a scale of 1024 is that without; an overflow changes nothing."""
    nets = [model().float(), model().float()]
    x, y = data()
    x = x.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [kind(net.parameters(), lr=0.01, update_interval=2) for net in nets]
    for scaled, net, optimizer in zip((False, True), nets, optimizers, strict=True):
        for number in range(3):
            optimizer.zero_grad()
            if optimizer.curvature_due:
                gnb, plain = lambda net=net: gnb_loss(net(x)), lambda net=net: F.cross_entropy(net(x), y)
                optimizer.update_curvature(gnb if kind is SophiaG else plain)
            loss_value = F.cross_entropy(net(x), y)
            if not scaled:
                loss_value.backward()
                optimizer.step()
                continue
            scaler.scale(loss_value).backward()
            if number == 1:
                before = values(net), str(optimizer.state_dict())
                net[0].weight.grad[0, 0] = float("inf")
                scaler.step(optimizer)
                assert torch.equal(values(net), before[0]) and str(optimizer.state_dict()) == before[1]
                scaler.update(1024.0)
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(net(x), y)).backward()
            scaler.step(optimizer)
            scaler.update(1024.0)
    assert relative_error(curvature(optimizers[1]), curvature(optimizers[0])) < 1e-5
    assert relative_error(values(nets[1]), values(nets[0])) < 1e-5


def test_gnb_is_the_ggn_diagonal_in_expectation() -> None:
    problem = make_problem("mlp")
    net = problem.module
    samples = []
    for seed in range(600):
        optimizer = SophiaG(net.parameters(), lr=0.0, betas=(0.0, 0.0), seed=seed)
        optimizer.update_curvature(lambda: gnb_loss(net(problem.inputs)))
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        samples.append(curvature(optimizer))
    found, want = torch.stack(samples), dense_ggn(problem).diagonal()
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - want).abs() <= 5 * error + 1e-12).all() and error.max() < 0.1 * want.max()


def test_gnb_does_not_depend_on_how_the_batch_is_split() -> None:
    """The same labels, given to one closure for 12 rows, and to three for 2, 3 and 7."""
    net = model()
    x, y = data()

    def sampled(rows: slice) -> tuple[Tensor, int]:
        return F.cross_entropy(net(x[rows]), y[rows], reduction="sum"), len(y[rows])

    found = []
    for splits in ([slice(0, 12)], [slice(0, 2), slice(2, 5), slice(5, 12)]):
        optimizer = SophiaG(net.parameters(), lr=0.0)
        closures = [lambda rows=rows: sampled(rows) for rows in splits]
        optimizer.step(closure_of(net), curvature_closure=closures)
        found.append(curvature(optimizer))
    assert relative_error(found[1], found[0]) < 1e-12


def test_gnb_loss_leaves_out_rows_and_draws_from_the_model() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20000, 3).clone().requires_grad_()
    keep = torch.arange(20000) < 15000
    loss, rows = gnb_loss(logits, keep=keep, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert int(rows) == 15000 and (gradient[15000:] == 0).all()
    p = logits[0].detach().softmax(-1)
    drawn = (p - gradient[:15000]).mean(0)
    assert (drawn - p).abs().max() < 5 * 0.5 / 15000**0.5
    with pytest.raises(ValueError, match="keep must be bool"):
        gnb_loss(logits, keep=keep.float())
    with pytest.raises(ValueError, match=r"logits must be floating-point of shape \(..., C\), got .* \(2, 0\)"):
        gnb_loss(torch.zeros(2, 0))
    assert int(gnb_loss(torch.zeros(3))[1]) == 1  # one prediction
    for given, name in ((None, "NoneType"), ((logits, logits), "tuple")):
        with pytest.raises(TypeError, match=rf"^logits must be a tensor .*, got {name}: pass .* attribute \.logits\)"):
            gnb_loss(given)


def test_every_update_draws_labels_of_its_own() -> None:
    logits = torch.zeros(64, 3, requires_grad=True)
    optimizer = SophiaG([logits], lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, update_interval=1)
    found = []
    for _ in range(2):
        optimizer.step(lambda: logits.square().sum(), curvature_closure=lambda: gnb_loss(logits))
        found.append(curvature(optimizer))
    assert not torch.equal(found[0], found[1])


def test_a_closure_without_a_count_is_refused() -> None:
    net = model()
    for wrong, got in (
        (closure_of(net), r"a tensor of shape \(\)"),
        (lambda: net(data()[0]), r"a tensor of shape \(12, 3\)"),
        (lambda: (net(data()[0]), data()[1]), r"\(a tensor of shape \(12, 3\), a tensor of shape \(12,\)\)"),
        (lambda: {"logits": net(data()[0])}, "a dict"),
        (lambda: None, "None"),
    ):
        optimizer = SophiaG(net.parameters())
        before = values(net)
        expected = rf"^curvature_closure .* must return sorder.gnb_loss\(logits\), .* got {got}: wrap the logits"
        with pytest.raises(ValueError, match=expected):
            optimizer.update_curvature([lambda: gnb_loss(net(data()[0])), wrong])
        with pytest.raises(ValueError, match=expected):
            optimizer.step(closure_of(net), curvature_closure=wrong)
        assert torch.equal(values(net), before) and optimizer.last_step is None
    optimizer.update_curvature(lambda: (gnb_loss(net(data()[0]))[0], np.array(12)))
    with pytest.raises(TypeError, match="curvature_closure"):
        SophiaG(net.parameters()).step(closure_of(net))


@pytest.mark.parametrize("kind", [SophiaH, SophiaG])
def test_update_curvature_leaves_no_trace(kind: Any) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4).double(), nn.Dropout(0.1), *model())
    x, y = data()
    optimizer = kind(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    before = copy.deepcopy([list(net.parameters()), list(net.buffers()), [p.grad for p in net.parameters()]])
    state = torch.get_rng_state()

    def closure() -> Any:
        optimizer.zero_grad(set_to_none=False)
        return gnb_loss(net(x)) if kind is SophiaG else F.cross_entropy(net(x), y)

    optimizer.update_curvature(closure)
    after = [list(net.parameters()), list(net.buffers()), [p.grad for p in net.parameters()]]
    assert all(torch.equal(a, b) for s, t in zip(after, before, strict=True) for a, b in zip(s, t, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_estimators() -> None:
    """The exact one is the diagonal; many probes come near it; a callable is called."""
    found = {}
    options: dict[str, dict[str, Any]] = {
        "exact": {"estimator": "exact"},
        "probes": {"probes": 300},
        "bekas": {"probes": 300, "estimator": "bekas", "distribution": "normal"},
        "callable": {"estimator": lambda product, like, generator: diagonal.exact(product, like)},
    }
    for name, option in options.items():
        net = model()
        optimizer = SophiaH(net.parameters(), **option)
        optimizer.step(closure_of(net))
        found[name] = curvature(optimizer)
    assert torch.equal(found["callable"], found["exact"])
    for name in ("probes", "bekas"):
        assert 0.0 < relative_error(found[name], found["exact"]) < 0.3


def test_micro_batches_are_the_whole_batch() -> None:
    x, y = data()
    nets = [model(), model()]
    for net, rows in zip(nets, ([slice(0, 12)], [slice(0, 5), slice(5, 12)]), strict=True):
        optimizer = SophiaH(net.parameters(), lr=0.01, update_interval=2)
        for _ in range(3):
            optimizer.step([lambda r=r, net=net: F.cross_entropy(net(x[r]), y[r], reduction="sum") / 12 for r in rows])
    assert relative_error(values(nets[1]), values(nets[0])) < 1e-9


@pytest.mark.parametrize(("state_dtype", "want"), [(None, torch.bfloat16), (torch.float32, torch.float32)])
def test_the_states_dtype_survives_a_state_dict(state_dtype: torch.dtype | None, want: torch.dtype) -> None:
    p = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    optimizer = SophiaH([p], lr=0.1, state_dtype=state_dtype)
    for _ in range(2):
        optimizer.step(lambda: p.float().pow(4).sum())
    assert p.dtype is torch.bfloat16 and (p < torch.tensor([1.0, 2.0])).all()
    q = p.detach().clone().requires_grad_()
    other = SophiaH([q])
    other.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "hessian"):
        assert other.state[q][name].dtype is want
        assert torch.equal(other.state[q][name], optimizer.state[p][name])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gamma": 0.0}, r"gamma must lie in \(0.0, inf\), got 0.0"),
        ({"eps": 0.0}, "eps must lie in"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers in"),
        ({"update_interval": 0}, "update_interval must be an integer of at least 1, got 0"),
        ({"probes": 1.5}, "probes must be an integer"),
        ({"update_interval": None}, "update_interval must be an integer of at least 1, got None"),
        ({"lr": "fast"}, r"lr must lie in \[0.0, inf\), got 'fast'"),
        ({"betas": None}, "betas must be two numbers in"),
        ({"betas": ("0.9", 0.99)}, "betas must be two numbers in"),
        ({"seed": "0"}, "seed must be an integer, got '0'"),
        ({"maximize": "yes"}, "maximize must be True or False, got 'yes'"),
        ({"distribution": "uniform"}, "distribution must be one of 'rademacher', 'normal'"),
        ({"estimator": "guess"}, "estimator must be one of"),
        ({"state_dtype": torch.int8}, "state_dtype must be a floating-point"),
        ({"attention": "fast"}, "attention must be 'exact' or None"),
    ],
)
def test_options_are_checked(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SophiaH(model().parameters(), **option)


def test_gradient_clipping_in_the_closure_and_outside() -> None:
    nets = [model(), model()]
    inside, outside = (SophiaH(net.parameters(), lr=0.01, gamma=1e3, update_interval=2) for net in nets)
    for _ in range(4):

        def closure() -> Tensor:
            inside.zero_grad()
            loss = closure_of(nets[0])()
            loss.backward()
            nn.utils.clip_grad_norm_(nets[0].parameters(), 1e-3)
            return loss

        inside.step(closure)
        outside.zero_grad()
        closure_of(nets[1])().backward()
        nn.utils.clip_grad_norm_(nets[1].parameters(), 1e-3)
        outside.step(curvature_closure=closure_of(nets[1]))
        m = torch.cat([outside.state[p]["exp_avg"].flatten() for p in nets[1].parameters()])
        assert 0.0 < m.norm() <= 1e-3
    assert relative_error(values(nets[0]), values(nets[1])) < 1e-9


@pytest.mark.parametrize("kind", [SophiaH, SophiaG])
def test_autocast(kind: Any) -> None:
    net, (x, y) = model().float(), data()
    x = x.float()

    def logits() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    optimizer = kind(net.parameters(), lr=0.05, update_interval=2)
    gnb = (lambda: gnb_loss(logits())) if kind is SophiaG else None
    losses = [
        float(optimizer.step(lambda: F.cross_entropy(logits().float(), y), curvature_closure=gnb)) for _ in range(20)
    ]
    assert losses[-1] < 0.7 * losses[0] and curvature(optimizer).dtype is torch.float32
