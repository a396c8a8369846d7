"""torch.compile and torch.export of models with sorder.attention: one graph, and products that are right or refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, jvp

import sorder
from sorder.ops.mask import Mask
from sorder.ops.varlen import attention_varlen

from . import oracle

BOUND = 1e-12
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what the compiler says of itself
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler"),
    ),
]
Products = dict[str, Tensor]


def test_importing_sorder_does_not_load_the_compiler() -> None:
    code = "import sys, sorder; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(sorder.attention(q, k, v, **self.options).transpose(1, 2).flatten(-2))


def model() -> nn.Module:
    return nn.Sequential(Layer(is_causal=True), nn.Tanh(), Layer(mask=Mask(causal=True, window=(2, 0)))).double()


def inputs() -> Tensor:
    return torch.randn(2, 6, 8).double()


def error(got: Any, want: Any) -> float:
    got, want = (torch.cat([x.flatten() for x in tree]) for tree in (got, want))
    return oracle.relative_error(got, want)


# ---------------------------------------------------------------------- first order


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trains_in_one_graph_on_a_gpu(dtype: torch.dtype) -> None:
    net, x = model().to("cuda", dtype), inputs().to("cuda", dtype)
    parameters = list(net.parameters())
    want = torch.autograd.grad(net(x).float().sin().sum(), parameters)
    compiled = torch.compile(net, fullgraph=True)
    got = torch.autograd.grad(compiled(x).float().sin().sum(), parameters)
    assert error(got, want) <= (1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_trains_in_one_graph(backend: str) -> None:
    net, x = model(), inputs()
    parameters = list(net.parameters())
    want = torch.autograd.grad(net(x).sin().sum(), parameters)
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    assert error(torch.autograd.grad(compiled(x).sin().sum(), parameters), want) <= BOUND
    with torch.no_grad():
        assert error([compiled(x)], [net(x)]) <= BOUND


def test_there_is_no_graph_break() -> None:
    explanation = torch._dynamo.explain(model())(inputs())
    assert explanation.graph_break_count == 0 and explanation.graph_count == 1


def _on(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: sorder.attention(q, k, v, **options)


FEATURES: dict[str, Callable[..., Tensor]] = {
    "scale and softcap": _on(scale=0.3, softcap=2.0),
    "grouped heads": lambda q, k, v: sorder.attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "boolean mask": _on(attn_mask=torch.ones(9, 9, dtype=torch.bool).tril(2)),
    "bias of the inputs": lambda q, k, v: sorder.attention(q, k, v, q.mean(-1, keepdim=True) * torch.arange(9)),
    "sinks": lambda q, k, v: sorder.attention(q, k, v, sinks=v[0, :, 0, 0]),
    "padding": lambda q, k, v: sorder.attention(q, k, v, mask=Mask(causal=True, key_stop=torch.tensor([9, 5]))),
    "a mask from outside": _on(mask=Mask(causal=True, alignment="bottom_right", alibi=torch.rand(4))),
    "packed": _on(mask=Mask(causal=True, cu_seqlens=torch.tensor([0, 4, 9]))),
    "dropout": _on(dropout_p=0.4),
    "log-sum-exp": lambda q, k, v: sorder.attention(q, k, v, return_lse=True)[1],
    "varlen": lambda q, k, v: attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 4, 9])),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_in_one_graph(feature: str) -> None:
    leaves = [torch.randn(2, 4, 9, 8).double().requires_grad_() for _ in range(3)]

    def loss(*x: Tensor) -> Tensor:
        return FEATURES[feature](*x).sin().sum()

    torch.manual_seed(1)
    want = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    got = torch.autograd.grad(compiled(*leaves), leaves, allow_unused=True, materialize_grads=True)
    assert error(got, want) <= BOUND


def test_lengths_may_change() -> None:
    net = model()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (6, 9):
        x = torch.randn(2, n, 8).double()
        assert error([compiled(x)], [net(x)]) <= BOUND


def test_jagged_lengths_of_documents_may_change() -> None:
    def loss(q: Tensor, cu: Tensor) -> Tensor:
        return sorder.attention(q, q, q, mask=Mask(cu_seqlens=cu)).sin().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    q = torch.randn(2, 9, 8).double()
    for cu in ([0, 4, 9], [0, 1, 9], [0, 8, 9]):
        assert error([compiled(q, torch.tensor(cu))], [loss(q, torch.tensor(cu))]) <= BOUND


@pytest.mark.parametrize("how", ["varlen", "mask"])
def test_boundaries_that_change_after_the_first_are_remembered(how: str) -> None:
    def attend(q: Tensor, cu: Tensor) -> Tensor:
        if how == "varlen":
            return attention_varlen(q, q, q, cu, causal=True)
        return sorder.attention(q, q, q, mask=Mask(causal=True, cu_seqlens=cu))

    compiled = torch.compile(attend, backend="eager")
    q, first, second = torch.randn(9, 9, 8).double(), torch.tensor([0, 4, 9]), torch.tensor([0, 6, 9])
    attend(q, first)
    for cu in (first, first, second, first):
        assert error([compiled(q, cu)], [attend(q, cu.clone())]) <= BOUND


def test_a_mask_from_outside_may_change() -> None:
    masks = [Mask(key_stop=torch.tensor([9, 5])), Mask(key_stop=torch.tensor([2, 7]))]
    q = torch.randn(2, 4, 9, 8).double()

    def attend(q: Tensor, mask: Mask) -> Tensor:
        return sorder.attention(q, q, q, mask=mask)

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    for mask in (*masks, *masks):
        assert error([compiled(q, mask)], [attend(q, mask)]) <= BOUND
    masks[0].key_stop.fill_(3)  # type: ignore[union-attr]
    assert error([compiled(q, masks[0])], [attend(q, Mask(key_stop=3))]) <= BOUND


def test_ids_of_documents_break_the_graph_and_say_why() -> None:
    q, ids = torch.randn(2, 4, 9, 8).double(), torch.tensor([3] * 4 + [1] * 5)

    def attend(q: Tensor, ids: Tensor) -> Tensor:
        return sorder.attention(q, q, q, mask=Mask(causal=True, documents=ids))

    compiled = torch.compile(attend, backend="eager")
    for order in (range(9), range(8, -1, -1), (0, 5, 1, 6, 2, 7, 3, 8, 4)):
        x = ids[torch.tensor(list(order))]
        assert error([compiled(q, x)], [attend(q, x)]) <= BOUND
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"sorder.Mask\(documents=.*give cu_seqlens"):
        torch.compile(attend, backend="eager", fullgraph=True)(q, ids)


# ---------------------------------------------------------------------- products

MODES = ["forward-over-reverse", "reverse-over-reverse", "reverse-over-forward"]


def products(net: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Callable[..., Tensor]]:
    params = {name: p.detach() for name, p in net.named_parameters()}
    direction = {name: torch.sin(3 * p + 1) for name, p in params.items()}
    return params, direction, lambda p: functional_call(net, p, (x,)).sin().sum()


@pytest.mark.parametrize("warm", [False, True])
def test_products_of_compiled_models(warm: bool) -> None:
    net, x = Layer(is_causal=True).double(), inputs()
    params, direction, loss = products(net, x)
    want = sorder.func.hvp(loss, (params,), direction, argnums=0).values()
    compiled = torch.compile(net, backend="aot_eager")
    if warm:
        compiled(x).sum().backward()
    params, direction, loss = products(compiled, x)
    for mode in MODES if warm else MODES[:1]:
        assert error(sorder.func.hvp(loss, (params,), direction, argnums=0, mode=mode).values(), want) <= BOUND
    assert error(jvp(grad(loss), (params,), (direction,))[1].values(), want) <= BOUND


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_curvature_points_and_newton_run_compiled_models_eagerly(kind: str, fullgraph: bool) -> None:
    net, x = model(), inputs()
    parameters = list(net.parameters())
    direction = [torch.sin(3 * p.detach() + 1) for p in parameters]
    compiled = torch.compile(net, backend="aot_eager", fullgraph=fullgraph)
    target = torch.randn(2, 6, 8).double()

    def product(net: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with sorder.curvature.CurvaturePoint(lambda: nn.functional.mse_loss(net(x), target), parameters, kind) as point:
            return list(point.product(direction))

    compiled(x)
    assert error(product(compiled), product(net)) <= BOUND
    optimizer = sorder.NewtonCG(parameters, curvature=kind)
    losses = [optimizer.step(lambda: nn.functional.mse_loss(compiled(x), target)).item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_a_double_backward_through_a_compiled_backward_says_so() -> None:
    net, x = model(), inputs()
    parameters = list(net.parameters())
    gradient = torch.autograd.grad(torch.compile(net, backend="aot_eager")(x).sum(), parameters, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(gradient[0].sum(), parameters)


def test_what_is_left_to_python_around_attention_does_not_lose_it_in_a_double_backward() -> None:
    """Behind the graph break that vmap makes, after a pass of first order that has compiled its backward."""
    q, k, v = torch.randn(3, 2, 4, 5, 8).double()
    q.requires_grad_()
    compiled = torch.compile(
        lambda q: torch.vmap(lambda *x: sorder.attention(*x))(q, k, v).sin().sum(), backend="aot_eager"
    )
    torch.autograd.grad(compiled(q), q)
    (gradient,) = torch.autograd.grad(compiled(q), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(gradient.sum(), q)


@pytest.mark.parametrize("broken", [False, True])
def test_routing_inside_what_is_compiled(broken: bool) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).double()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=not broken)
    def loss(q: Tensor) -> Tensor:
        with sorder.exact_attention():
            x = nn.functional.scaled_dot_product_attention(q, k, v)
            if broken:
                torch._dynamo.graph_break()
            return nn.functional.scaled_dot_product_attention(x, k, v).sin().sum()

    want = oracle.dense(oracle.dense(q, k, v)[0], k, v)[0].sin().sum()
    assert error([loss(q)], [want]) <= BOUND
    assert sum("sorder.attention_forward" in name for name in seen) == 2


def test_the_eager_backend_keeps_the_second_derivative() -> None:
    net, x = model(), inputs()
    parameters = list(net.parameters())

    def product(net: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        gradient = torch.autograd.grad(net(x).sin().sum(), parameters, create_graph=True)
        return torch.autograd.grad(gradient, parameters, [torch.ones_like(g) for g in gradient])

    assert error(product(torch.compile(net, backend="eager", fullgraph=True)), product(net)) <= BOUND


def test_compiled_functions_that_take_a_product() -> None:
    """The compiler leaves the part under torch.func to Python."""
    params, direction, loss = products(Layer(is_causal=True).double(), inputs())
    want = sorder.func.hvp(loss, (params,), direction, argnums=0).values()

    @torch.compile(backend="aot_eager")
    def product(params: Products, direction: Products) -> Products:
        return jvp(grad(loss), (params,), (direction,))[1]

    assert error(product(params, direction).values(), want) <= BOUND


def test_forward_mode_through_a_recorded_operator_is_not_zero() -> None:
    """Operators in a traced graph, called with dual numbers and recorded tensors."""
    import torch.autograd.forward_ad as forward_ad

    q, k, v, t = torch.randn(4, 2, 5, 4).double()
    constants = (None,) * 6, (0.5, True, None, 0.0, "ieee")

    def recorded(q: Tensor) -> Tensor:
        return torch.ops.sorder.attention_forward(q, k, v, *constants[0], *constants[1])[0]

    want = jvp(lambda q: sorder.attention(q, k, v, is_causal=True), (q,), (t,))[1]
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(recorded(forward_ad.make_dual(q, t))).tangent
    assert oracle.relative_error(found, want) <= BOUND
    with pytest.raises(NotImplementedError, match="differentiate the function that it was traced from"):
        grad(lambda q: recorded(q).sum())(q)


# ---------------------------------------------------------------------- export


def test_exported_documents_are_not_looked_at() -> None:
    class Packed(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return sorder.attention(x, x, x, mask=Mask(documents=ids))

    x, scattered = inputs(), torch.tensor([0, 1, 0, 1, 1, 2])
    program = torch.export.export(Packed(), (x, torch.tensor([0, 0, 0, 1, 1, 1])), strict=False)
    assert error([program.module()(x, scattered)], [Packed()(x, scattered)]) <= BOUND


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    net, x = model(), inputs()
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=3)}
    program = torch.export.export(net, (x,), dynamic_shapes=(sizes,), strict=strict)
    operators = [str(node.target) for node in program.run_decompositions().graph.nodes]
    assert sum("sorder.attention_forward" in name for name in operators) == 2
    other = torch.randn(3, 9, 8).double()
    assert error([program.module()(other)], [net(other)]) <= BOUND
    parameters = dict(program.module().named_parameters())
    output = functional_call(program.module(), parameters, (x,))
    got = torch.autograd.grad(output.sin().sum(), list(parameters.values()))
    want = torch.autograd.grad(net(x).sin().sum(), list(net.parameters()))
    assert error(got, want) <= BOUND


# ---------------------------------------------------------------------- what is promised to compilers


def _view(x: Tensor, layout: str) -> Tensor:
    """x (B, H, N, d) with its strides changed."""
    if layout == "heads last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        return torch.cat([x.transpose(1, 2)] * 3, -1)[..., x.shape[-1] : 2 * x.shape[-1]].transpose(1, 2)
    if layout == "expanded":
        return x[:, :1].expand(x.shape)
    if layout == "odd width stride":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    return x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("layout", ["contiguous", "heads last", "fused", "expanded", "odd width stride"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fake_kernels_promise_what_the_operators_return(
    device: str, dtype: torch.dtype, layout: str, width: int, bias: bool
) -> None:
    """On a GPU without a bias, PyTorch's fused kernels are among the operators."""
    q, k, v = (_view(torch.randn(2, 4, 9, d).to(device, dtype), layout) for d in (8, 8, width))
    inputs = (q, k, v, torch.randn(1, 4, 9, 1).to(device, dtype) if bias else None)
    visibility, spec = (None,) * 5, (0.3, True, None, 0.0, "ieee")
    operators = torch.ops.sorder
    tangents = tuple(None if x is None else torch.randn_like(x) for x in inputs)
    first = (*inputs, *visibility)
    caches = (*first, *operators.attention_forward(*first, *spec))
    to, tl, *low = operators.attention_tangent(*caches, *tangents, *spec)
    moved = (to, tl, *(low or (None,)))
    calls = {("forward", ""): (*first, *spec), ("tangent", ""): (*caches, *tangents, *spec)}
    for wanted in ("qkvb" if bias else "qkv", "kv", "q"):
        calls["backward", wanted] = (*caches, torch.randn_like(to), None, wanted, *spec)
        calls["backward_tangent", wanted] = (*caches, to, tl, *tangents, *moved, to, None, wanted, *spec)
    for (name, _), arguments in calls.items():
        operator = getattr(operators, f"attention_{name}")
        real = operator(*arguments)
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            assert all(s == t or n == 1 for s, t, n in zip(a.stride(), b.stride(), a.shape, strict=True)), name


def test_opcheck() -> None:
    q, k, v = (torch.randn(2, 4, 9, 8).double().requires_grad_() for _ in range(3))
    arguments = (q, k, v, *(None,) * 6, 0.3, True, None, 0.0, "ieee")
    torch.library.opcheck(torch.ops.sorder.attention_forward.default, arguments)
