"""Factors do not depend on how a model is called: checkpoints, micro-batches, autocast, scaled losses, hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sorder.func
from sorder.curvature import errors
from sorder.kfac import KFACPreconditioner
from tests.cases import Transformer, relative_error

TOKENS, TARGETS = torch.randint(0, 5, (3, 4)), torch.randint(0, 5, (3, 4))
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")


@pytest.fixture(autouse=True)
def _forget_warnings() -> None:
    errors._warned.clear()


def fitted(params: Any, closure: Any, loss_scale: float = 1.0, **options: Any) -> KFACPreconditioner:
    kfac = KFACPreconditioner(params, **options)
    kfac.update_factors(closure, loss_scale=loss_scale)
    return kfac


def tensors(kfac: KFACPreconditioner) -> list[Tensor]:
    """All that is known, block by block in the order of the parameters."""
    factors = kfac.factors
    order = sorted(range(len(factors.blocks)), key=lambda n: str(factors.blocks[n].pack()))
    found = [factors.running[n][name] for n in order for name in sorted(factors.running[n]) if name != "weight"]
    found += [factors.scales[n]["scale"] for n in order if factors.scales[n]]
    return found + [d["diagonal"] for _, d in sorted((factors.diagonals or {}).items())]


def transformer(wrap: Callable[[nn.Module], Callable[..., Tensor]] | None = None) -> nn.Module:
    torch.manual_seed(1)
    return Transformer(wrap=wrap).double()


def language_loss(model: nn.Module, rows: slice = slice(None)) -> Tensor:
    return F.cross_entropy(model(TOKENS[rows]).flatten(0, 1), TARGETS[rows].flatten())


@pytest.mark.parametrize("inverse", ["cholesky", "ekfac"])
@pytest.mark.parametrize("estimator", ["mc", "type-2", "empirical"])
@pytest.mark.parametrize("how", ["torch", "sorder"])
def test_checkpoints(how: str, estimator: str, inverse: str) -> None:
    def torchs(block: nn.Module) -> Callable[..., Tensor]:
        return lambda h: checkpoint(block, h, use_reentrant=False)

    plain, wrapped = transformer(), transformer(torchs if how == "torch" else sorder.func.checkpoint)
    options = {"estimator": estimator, "inverse": inverse, "samples": 2}
    want = fitted(plain, lambda: language_loss(plain), **options)
    got = fitted(wrapped, lambda: language_loss(wrapped), **options)
    assert len(want.factors.blocks) == 11 and not want.factors.diagonals
    assert relative_error(tensors(got), tensors(want)) < 1e-12


@pytest.mark.parametrize("inverse", ["cholesky", "ekfac"])
@pytest.mark.parametrize("estimator", ["type-2", "empirical"])
@pytest.mark.parametrize("wrap", [None, sorder.func.checkpoint], ids=["plain", "checkpoint"])
def test_micro_batches_are_the_whole_batch(wrap: Any, estimator: str, inverse: str) -> None:
    """Images, whose rows do not mix: the random signs cancel."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    call = wrap(net) if wrap else net
    x, y = torch.randn(12, 1, 4, 4).double(), torch.randint(0, 3, (12,))

    def part(rows: slice) -> Callable[[], Tensor]:
        return lambda: F.cross_entropy(call(x[rows]), y[rows], reduction="sum") / 12

    options = {"estimator": estimator, "inverse": inverse}
    whole = fitted(net, part(slice(None)), **options)
    parts = fitted(net, [part(slice(0, 5)), part(slice(5, 6)), part(slice(6, 12))], **options)
    assert relative_error(tensors(parts), tensors(whole)) < 1e-12


def test_several_forward_passes_in_one_closure() -> None:
    """One layer used twice in a pass, and two passes in a loss: every use counts."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    x, y = torch.randn(8, 3).double(), torch.randint(0, 3, (8,))

    def halves() -> Tensor:
        losses = [F.cross_entropy(layer(x[s]), y[s]) for s in (slice(0, 4), slice(4, 8))]
        return 0.5 * losses[0] + losses[1] / 2

    whole = fitted(layer, lambda: F.cross_entropy(layer(x), y), estimator="type-2")
    assert relative_error(tensors(fitted(layer, halves, estimator="type-2")), tensors(whole)) < 1e-12
    twice = fitted(layer, lambda: F.cross_entropy(layer(layer(x).tanh()), y), estimator="type-2")
    ((left, right),) = twice.factors.terms(0)
    inner = F.pad(layer(x).tanh(), (0, 1), value=1.0).detach()
    outer = F.pad(x, (0, 1), value=1.0)
    assert relative_error(right[0], (inner.T @ inner + outer.T @ outer) / 16) < 1e-12
    assert left[0].trace() > 0.0


@pytest.mark.parametrize("scale", [1024.0, 2.0**-10])
def test_a_scaled_loss_is_unscaled(scale: float) -> None:
    model = transformer()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    want = fitted(model, lambda: language_loss(model), inverse="ekfac")
    got = fitted(model, lambda: scaler.scale(language_loss(model)), loss_scale=scaler.get_scale(), inverse="ekfac")
    assert relative_error(tensors(got), tensors(want)) < 1e-12
    with pytest.raises(ValueError, match="loss_scale must lie in"):
        got.update_factors(lambda: language_loss(model), loss_scale=0.0)


def test_autocast_gives_float32_factors_near_the_exact_ones() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))

    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(net(x), y)

    options = {"estimator": "type-2", "inverse": "ekfac"}
    want = tensors(fitted(net, lambda: F.cross_entropy(net(x), y), **options))
    got = tensors(fitted(net, autocast, **options))
    assert all(t.dtype is torch.float32 for t in got)
    count = len([n for n in want if n.dim() == 3])
    assert relative_error(got[: count - 3], want[: count - 3]) < 2e-2


def test_half_precision_parameters_have_wide_factors() -> None:
    net = nn.Linear(4, 3).bfloat16()
    x, y = torch.randn(8, 4).bfloat16(), torch.randint(0, 3, (8,))
    kfac = fitted(net, lambda: F.cross_entropy(net(x), y), inverse_dtype=torch.float64)
    assert all(t.dtype is torch.float32 for t in tensors(kfac))
    kfac.update(None, 0.1)
    assert kfac.factors.inverse[0]["left"].dtype is torch.float64
    out = kfac([torch.ones_like(p) for p in net.parameters()])
    assert all(t.dtype is torch.bfloat16 for t in out)


def test_a_users_hooks_run_as_without_it_and_nothing_is_left_behind() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    x, y = torch.randn(9, 4).double(), torch.randint(0, 3, (9,))
    calls: list[str] = []
    net[2].register_forward_hook(lambda *_: calls.append("forward"))
    net[2].register_full_backward_hook(lambda *_: calls.append("backward"))
    net[2].weight.register_hook(lambda g: calls.append("gradient"))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    hooks = [dict(m._forward_hooks) for m in net.modules()], [dict(m._backward_hooks) for m in net.modules()]
    before = copy.deepcopy([*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters())])
    state = torch.get_rng_state()
    kfac = fitted(net, lambda: F.cross_entropy(net(x), y))
    after = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert ([dict(m._forward_hooks) for m in net.modules()], [dict(m._backward_hooks) for m in net.modules()]) == hooks
    assert calls.count("forward") == 2 and calls.count("gradient") == 1  # of the point's own gradient alone
    assert len(kfac.factors.blocks) == 2
    assert all(not p._backward_hooks or p is net[2].weight for p in net.parameters())


def test_a_compiled_model() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(9, 4).double(), torch.randint(0, 3, (9,))
    compiled = torch.compile(net, backend="aot_eager")
    want = fitted(net, lambda: F.cross_entropy(net(x), y))
    got = fitted(net, lambda: F.cross_entropy(compiled(x), y))
    assert len(got.factors.blocks) == 2 and relative_error(tensors(got), tensors(want)) < 1e-12


class Conv1D(nn.Module):
    """A linear layer with transposed weight, as GPT-2 of Hugging Face has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


def test_a_transposed_weight() -> None:
    torch.manual_seed(0)
    layer, linear = Conv1D(4, 3).double(), nn.Linear(4, 3).double()
    with torch.no_grad():
        linear.weight.copy_(layer.weight.T)
        linear.bias.copy_(layer.bias)
    x, y = torch.randn(7, 2, 4).double(), torch.randint(0, 3, (14,))
    found = []
    for net in (layer, linear):
        kfac = fitted(net, lambda net=net: F.cross_entropy(net(x).flatten(0, 1), y), estimator="type-2")
        kfac.update(None, 0.1)
        weight, bias = torch.arange(12).double().view(3, 4), torch.arange(3).double()
        weight, bias = kfac([weight if net is linear else weight.T, bias])
        found.append([weight if net is linear else weight.T, bias])
    assert relative_error(found[0], found[1]) < 1e-12


def test_all_projections_of_multihead_attention() -> None:
    torch.manual_seed(0)
    width, x = 4, torch.randn(5, 3, 4).double()
    memory, target = torch.randn(6, 3, 4).double(), torch.randn(5, 3, 4).double()
    for options, key in (({}, x), ({}, memory), ({"kdim": 4, "vdim": 4}, memory), ({"batch_first": True}, x)):
        attention = nn.MultiheadAttention(width, 2, **options).double()  # type: ignore[arg-type]
        kfac = fitted(attention, lambda a=attention, k=key: F.mse_loss(a(x, k, k)[0], target))
        assert not kfac.factors.diagonals
        covered = sum(block.gather(kfac.params, torch.float64).numel() for block in kfac.factors.blocks)
        assert covered == sum(p.numel() for p in attention.parameters())
        lines = [line.split() for line in kfac.report().splitlines()]
        assert ["out_proj.weight", "4×4", "K-FAC", "4", "⊗", "5"] in [line[:6] for line in lines]


def test_samples_are_the_batch_of_multihead_attention() -> None:
    """Sequence-first or batch-first: "reduce" sums over the same positions."""
    torch.manual_seed(0)
    first = nn.MultiheadAttention(4, 2, batch_first=True).double()
    second = nn.MultiheadAttention(4, 2).double()
    second.load_state_dict(first.state_dict())
    x, y = torch.randn(3, 5, 4).double(), torch.randn(3, 4).double()
    a = fitted(first, lambda: F.mse_loss(first(x, x, x)[0].sum(1), y), approximation="reduce", inverse="ekfac")
    b = fitted(
        second,
        lambda: F.mse_loss(second(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1).sum(1), y),
        approximation="reduce",
        inverse="ekfac",
    )
    assert relative_error(tensors(b), tensors(a)) < 1e-10
    ((_, right),) = a.factors.terms(0)
    mean = F.pad(x.mean(1), (0, 1), value=1.0)
    assert relative_error(right[0], mean.T @ mean / 3) < 1e-12


def test_a_tied_embedding_and_head_are_summed() -> None:
    model = transformer()
    kfac = fitted(model, lambda: language_loss(model), estimator="type-2")
    number = next(n for n, b in enumerate(kfac.factors.blocks) if b.kind == "embedding")
    (embedding, head) = sorted(kfac.factors.terms(number), key=lambda pair: pair[0].dim())
    counts = torch.bincount(TOKENS.flatten(), minlength=5).double() / TOKENS.numel()
    assert relative_error(embedding[0][0], counts) < 1e-12
    h: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda _, x: h.append(x[0].detach().flatten(0, 1)))
    model(TOKENS)
    assert relative_error(head[1][0], h[0].T @ h[0] / 12) < 1e-12
    assert "embedding and linear, summed" in kfac.report()


def test_plain_functions_of_parameters_and_weights_on_the_right() -> None:
    torch.manual_seed(0)
    w, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 5), (3, 5)))
    x, y = torch.randn(8, 4).double(), torch.randint(0, 3, (8,))
    kfac = fitted([w, v], lambda: F.cross_entropy(torch.tanh(x @ w) @ v.T, y), estimator="type-2")
    shapes = [(left.shape[-1], right.shape[-1]) for n in (0, 1) for left, right in kfac.factors.terms(n)]
    assert shapes == [(5, 4), (3, 5)]


class Odd(nn.Module):
    """Parameters in every kind of use that has no block, or no use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.deconv = nn.Linear(4, 4), nn.ConvTranspose1d(1, 1, 1)
        self.gain, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.deconv(self.body(x)[:, None])[:, 0] * self.gain
        return self.frozen(h) + 0.1 * torch.einsum("ij,nj->ni", self.body.weight, h)


def test_what_has_no_block_is_stated_and_served() -> None:
    net = Odd().double()
    x, y = torch.randn(8, 4).double(), torch.randint(0, 4, (8,))
    with pytest.warns(RuntimeWarning) as caught:
        kfac = fitted(net, lambda: F.cross_entropy(net(x), y))
    texts = [str(w.message) for w in caught if "K-FAC" in str(w.message)]
    assert any("only the diagonal" in t and "deconv.weight, deconv.bias" in t and "gain" in t for t in texts)
    assert any("a further use" in t and "body.weight" in t for t in texts)
    lines = {line.split()[0]: line for line in kfac.report().splitlines()[1:]}
    assert list(lines) == [n for n, p in net.named_parameters() if p.requires_grad]
    assert "fallback: used by conv_transpose1d" in lines["deconv.weight"]
    assert "NOT in it: its use by einsum" in lines["body.weight"]
    assert "the loss did not use it" in lines["unused"]
    assert "bias" in lines["frozen.bias"] and "dense 4 × 4" in lines["frozen.bias"]
    kfac.update(None, 0.5)
    v = [torch.ones_like(p) for p in kfac.params]
    out = dict(zip(kfac.names, kfac(v), strict=True))
    assert torch.equal(out["unused"], torch.full((2,), 2.0, dtype=torch.float64))
    assert all(t.isfinite().all() and (t != 0).any() for t in out.values())


def test_a_loss_without_labels_is_refused() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="K-FAC needs a loss that defines a distribution of labels"):
        fitted(net, lambda: net(torch.ones(1, 2)).cosh().sum())


class Shares(nn.Module):
    """Two layers with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Squared(torch.autograd.Function):
    """x ↦ xW², written by hand: no torch function shows that W is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight.square().T, 2.0 * weight * (x.T @ g)


def slope(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]


UNSEEN = "its use by a derivative inside the closure, or an autograd.Function"


@pytest.mark.parametrize(
    ("make", "outputs", "name", "want"),
    [
        (Shares, lambda net, x: net(x), "a.bias", "NOT in it: its use by linear"),
        (lambda: nn.Linear(4, 4), lambda net, x: Squared.apply(net(x), net.weight), "weight", f"NOT in it: {UNSEEN}"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), slope, "0.weight", f"NOT in it: {UNSEEN}"),
    ],
    ids=["shared bias", "autograd.Function", "derivative"],
)
def test_no_further_use_is_left_out_in_silence(
    make: Callable[[], nn.Module], outputs: Callable[..., Tensor], name: str, want: str
) -> None:
    torch.manual_seed(0)
    net, x, y = make().double(), torch.randn(6, 4).double(), torch.randint(0, 4, (6,))
    kfac = fitted(net, lambda: F.cross_entropy(outputs(net, x), y))
    lines = {line.split()[0]: line for line in kfac.report().splitlines()[1:]}
    assert "K-FAC 4 ⊗" in lines[name] and want in lines[name]


def test_a_weight_whose_layer_does_not_lead_to_the_loss_has_its_own_diagonal() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(1, 4).double()
    # Of the last layer the derivative sees the weight alone, and its call not at all.
    kfac = fitted(net, lambda: F.mse_loss(slope(net, x)[:, :1], x[:, :1]), estimator="type-2")
    weight, bias = (line for line in kfac.report().splitlines() if line.startswith("2."))
    assert "diagonal" in weight and "the loss did not use it" in bias
    (jacobian,) = torch.autograd.grad(slope(net, x)[0, 0], net[2].weight)
    (found,) = [d["diagonal"] / d["weight"] for i, d in kfac.factors.diagonals.items() if kfac.names[i] == "2.weight"]
    assert relative_error([found], [2.0 * jacobian.square()]) < 1e-12


def test_a_layer_that_the_loss_does_not_see_has_no_block() -> None:
    net, head = nn.Linear(3, 2).double(), nn.Linear(3, 5).double()
    x = torch.ones(4, 3).double()

    def loss() -> Tensor:
        head(x)
        return F.cross_entropy(net(x), torch.tensor([0, 1, 1, 0]))

    kfac = fitted([*net.parameters(), *head.parameters()], loss, inverse_interval=5)
    assert len(kfac.factors.blocks) == 1 and kfac.report().count("the loss did not use it") == 2
    kfac.update(None, 0.1)
    made = kfac.factors.inverse
    kfac([torch.ones_like(p) for p in kfac.params])
    assert kfac.factors.inverse is made  # not once more for each vector


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_tensor_of_the_same_storage_is_no_part_of_a_parameter(frozen: int) -> None:
    torch.manual_seed(0)
    flat = torch.randn(2, 4, 4, dtype=torch.float64)
    halves = [nn.Parameter(half, requires_grad=i != frozen) for i, half in enumerate(flat)]
    scale = torch.ones(4, dtype=torch.float64, requires_grad=True)  # so that both products are in the graph
    x, y = torch.randn(6, 4).double(), torch.randint(0, 4, (6,))

    def fit(weights: list[Tensor]) -> KFACPreconditioner:
        chosen = [w for w in (*weights, scale) if w.requires_grad]
        return fitted(chosen, lambda: F.cross_entropy(((x * scale) @ weights[0].T).tanh() @ weights[1].T, y))

    got, want = fit(halves), fit([half.detach().clone().requires_grad_(half.requires_grad) for half in halves])
    assert [b.pack() for b in got.factors.blocks] == [b.pack() for b in want.factors.blocks]
    assert len(got.factors.blocks) == 1 and relative_error(tensors(got), tensors(want)) < 1e-12


@pytest.mark.parametrize(
    ("call", "shape"), [(torch.addmm, (4, 3)), (lambda b, x, w: F.linear(x, w, b), (3, 4))], ids=["addmm", "linear"]
)
def test_a_bias_of_one_number_for_all_outputs_has_its_own_diagonal(
    call: Callable[..., Tensor], shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, (1,)))
    x, y = torch.randn(1, 4).double(), torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    kfac = fitted([weight, bias], lambda: F.mse_loss(call(bias, x, weight).square(), y), estimator="type-2")
    assert "K-FAC 3 ⊗ 4" in kfac.report().splitlines()[1] and "fallback" in kfac.report().splitlines()[2]
    jacobian = torch.autograd.functional.jacobian(lambda b: call(b, x, weight).square(), bias)
    found = kfac.factors.diagonals[1]
    assert relative_error([found["diagonal"] / found["weight"]], [jacobian.square().sum().reshape(1) * 2 / 3]) < 1e-12
    kfac.update(None, 0.1)
    assert all(t.isfinite().all() for t in kfac([torch.ones_like(p) for p in kfac.params]))


@pytest.mark.parametrize("call", [lambda x, w: torch.mm(x, mat2=w), lambda x, w: torch.matmul(input=x, other=w)])
def test_products_with_arguments_by_name(call: Callable[..., Tensor]) -> None:
    w, x = torch.ones(4, 3, requires_grad=True), torch.ones(2, 4)
    assert "K-FAC 3 ⊗ 4" in fitted([w], lambda: F.cross_entropy(call(x, w), torch.tensor([0, 2]))).report()
