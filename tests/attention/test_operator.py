"""The public operator: arguments, shapes, refusals, and inputs that break other people's software."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import sorder
from sorder.ops import maps

from . import oracle


def hessian_product(f, x, t):
    return jvp(grad(f), (x,), (t,))[1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(7, 4), (3, 7, 4), (2, 3, 7, 4), (2, 1, 2, 3, 7, 4)])
def test_equals_sdpa_with_any_leading_dimensions(shape: tuple[int, ...], causal: bool) -> None:
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    assert oracle.relative_error(sorder.attention(q, k, v, is_causal=causal, scale=0.3), want) <= 1e-14


def test_leading_dimensions_broadcast() -> None:
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(3, 6, 4), torch.randn(1, 1, 6, 2)
    got = sorder.attention(*(x.double() for x in (q, k, v)))
    assert oracle.relative_error(got, oracle.dense(*(x.double() for x in (q, k, v)))[0]) <= 1e-14


@given(
    n_q=st.integers(1, 40), n_k=st.integers(1, 40), d=st.integers(1, 20), dv=st.integers(1, 20), causal=st.booleans(),
    scale=st.none() | st.floats(-2, 2), heads=st.integers(1, 3), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_second_order_of_drawn_problems(n_q, n_k, d, dv, causal, scale, heads, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, t = (
        torch.randn(heads, *s, dtype=torch.float64, generator=generator)
        for s in ((n_q, d), (n_k, d), (n_k, dv), (n_k, d))
    )
    got = hessian_product(lambda k: sorder.attention(q, k, v, is_causal=causal, scale=scale).sin().sum(), k, t)
    want = hessian_product(lambda k: oracle.dense(q, k, v, causal, scale)[0].sin().sum(), k, t)
    assert (got - want).norm() <= 1e-12 * (want.norm() + 1)


@pytest.mark.parametrize(("n_q", "n_k"), [(256, 3), (3, 256)])
def test_causal_alignment_is_pytorchs(n_q: int, n_k: int) -> None:
    q, k, v = (torch.randn(n, 4, dtype=torch.float64) for n in (n_q, n_k, n_k))
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert oracle.relative_error(sorder.attention(q, k, v, is_causal=True), want) <= 1e-14
    got = hessian_product(lambda q: sorder.attention(q, k, v, is_causal=True).square().sum(), q, q)
    want = hessian_product(lambda q: oracle.dense(q, k, v, True)[0].square().sum(), q, q)
    assert got.isfinite().all()
    assert oracle.relative_error(got, want) <= 1e-13


def test_views_of_one_fused_projection() -> None:
    fused = torch.randn(2, 9, 3 * 2 * 4, dtype=torch.float64)

    def heads(x: torch.Tensor) -> list[torch.Tensor]:
        return [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in x.chunk(3, -1)]

    got = hessian_product(lambda x: sorder.attention(*heads(x), is_causal=True).sum(), fused, fused)
    want = hessian_product(lambda x: oracle.dense(*heads(x), causal=True)[0].sum(), fused, fused)
    assert oracle.relative_error(got, want) <= 1e-13


@pytest.mark.parametrize("cotangent", ["expanded", "transposed"])
def test_odd_cotangents(cotangent: str) -> None:
    q, k, v = (torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    g = (
        torch.ones(1, dtype=torch.float64).expand(2, 5, 5)
        if cotangent == "expanded"
        else torch.randn(2, 5, 5).mT.double()
    )

    def second(attention):
        first = torch.autograd.grad(attention(q, k, v), (q, k, v), g, create_graph=True)
        return torch.autograd.grad(first, (q, k, v), [g] * 3)

    for a, b in zip(second(sorder.attention), second(lambda *x: oracle.dense(*x)[0]), strict=True):
        assert oracle.relative_error(a, b) <= 1e-13


def test_empty_batch() -> None:
    q = torch.randn(0, 5, 4, requires_grad=True)
    out = sorder.attention(q, q, q)
    assert out.shape == (0, 5, 4)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


Q = torch.zeros(2, 5, 4)
REFUSED = [
    ((Q, Q, Q), {"scale": torch.tensor(1.0)}, TypeError, "scale must be a number"),
    ((Q, Q, Q), {"precision": "high"}, ValueError, "precision must be .* got 'high'"),
    ((Q, Q.double(), Q), {}, TypeError, "float64"),
    ((Q.long(), Q.long(), Q.long()), {}, TypeError, "int64"),
    ((Q, Q, [1.0]), {}, TypeError, "value must be a tensor, got list"),
    ((Q, Q[..., :3], Q), {}, ValueError, "same width"),
    ((Q, Q, Q[:, :3]), {}, ValueError, "same length"),
    ((Q, Q[:, :0], Q[:, :0]), {}, ValueError, "at least one key"),
    ((Q, Q.expand(3, 2, 5, 4)[:, :1], torch.zeros(4, 1, 5, 4)), {}, ValueError, "do not broadcast"),
    ((Q[0, 0], Q, Q), {}, ValueError, "at least two dimensions"),
    ((torch.zeros(5, 257),) * 3, {}, ValueError, "between 1 and 256"),
    ((Q, Q.to("meta"), Q), {}, ValueError, "share a device"),
]


@pytest.mark.parametrize(("tensors", "options", "error", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_refusals_name_the_argument(tensors, options, error, message) -> None:
    with pytest.raises(error, match=message):
        sorder.attention(*tensors, **options)


def test_meta_tensors() -> None:
    q = torch.empty(2, 5, 4, device="meta", requires_grad=True)
    out = sorder.attention(q, q, q, is_causal=True)
    assert torch.autograd.grad(out.sum(), q)[0].shape == (2, 5, 4)


def test_compiled_modules() -> None:
    """First order through any backend; second order where the backend keeps autograd's graph (others refuse)."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(8, 24, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sorder.attention(*self.qkv(x).chunk(3, -1), is_causal=True)

    layer = Layer()
    weight = layer.qkv.weight
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    (want,) = torch.autograd.grad(layer(x).sin().sum(), weight, create_graph=True)
    (want_product,) = torch.autograd.grad(want.sum(), weight)
    (got,) = torch.autograd.grad(torch.compile(layer, backend="aot_eager")(x).sin().sum(), weight)
    assert oracle.relative_error(got, want) <= 1e-13
    (got,) = torch.autograd.grad(torch.compile(layer, backend="eager")(x).sin().sum(), weight, create_graph=True)
    assert oracle.relative_error(got, want) <= 1e-13
    assert oracle.relative_error(torch.autograd.grad(got.sum(), weight)[0], want_product) <= 1e-13


def test_precision_follows_pytorch() -> None:
    from sorder.ops.attention import _float32_precision

    assert _float32_precision() == "ieee"
    torch.set_float32_matmul_precision("high")
    try:
        assert _float32_precision() == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert _float32_precision() == "ieee"


def test_the_twin_says_once_that_it_serves_something_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_LARGE", 16)
    monkeypatch.setattr(maps, "_warned", False)
    q = torch.randn(4, 4)
    with pytest.warns(UserWarning, match="tiled PyTorch twin"):
        sorder.attention(q, q, q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sorder.attention(q, q, q)


def test_imports_and_works_without_triton() -> None:
    """As on macOS and Windows."""
    script = """
        import sys
        sys.modules["triton"] = None
        import torch, sorder
        q = torch.randn(2, 5, 4, dtype=torch.float64)
        f = lambda q: sorder.attention(q, q, q).square().sum()
        print(torch.func.jvp(torch.func.grad(f), (q,), (q,))[1].shape)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert "torch.Size([2, 5, 4])" in done.stdout, done.stderr


def test_memory_is_linear() -> None:
    """No tensor that the twin makes at N = 2048 approaches N × N elements."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from sorder.kernels import twin

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.elements = max(self.elements, *sizes, 0)
            return out

    q = torch.randn(1, 2048, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "_TILE_ELEMENTS", 2**16)
        with Largest() as largest:
            hessian_product(lambda q: sorder.attention(q, q, q, is_causal=True).sin().sum(), q, q)
    assert 2048 * 8 <= largest.elements <= 2**16


@pytest.mark.gpu
def test_seventy_thousand_heads() -> None:
    x, t = (torch.randn(70_000, 1, 16, 16, device="cuda", dtype=torch.float16) for _ in range(2))
    got = hessian_product(lambda x: sorder.attention(x, x, x, is_causal=True).float().sin().sum(), x, t)
    want = hessian_product(lambda x: oracle.dense(x, x, x, True)[0].sin().sum(), x.double(), t.double())
    assert oracle.relative_error(got, want) <= 4e-3


@pytest.mark.gpu
def test_more_than_two_to_the_thirty_one_elements() -> None:
    """Offsets within one head and across heads pass 2³¹: the last rows are those of a small problem."""
    heads, n, d = 2, 2**24 + 64, 64
    q = torch.zeros(heads, n, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(heads, 128, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q[:, -64:] = torch.randn(heads, 64, d, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    f = lambda q: sorder.attention(q, k, v)[:, -64:].float().sin().sum()  # noqa: E731
    got = hessian_product(f, q, q)[:, -64:]
    small = q[:, -64:].double()
    want = hessian_product(lambda q: oracle.dense(q, k.double(), v.double())[0].sin().sum(), small, small)
    assert oracle.relative_error(got, want) <= 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current() -> None:
    x = torch.randn(1, 2, 100, 64, device="cuda:1")
    got = hessian_product(lambda x: sorder.attention(x, x, x).sin().sum(), x, x)
    want = hessian_product(lambda x: oracle.dense(x, x, x)[0].sin().sum(), x.double(), x.double())
    assert oracle.relative_error(got, want) <= 3e-6


@pytest.mark.parametrize("number", range(3))
def test_a_tangent_of_another_dtype_is_named(number: int) -> None:
    qkv = tuple(torch.randn(1, 5, 8) for _ in range(3))
    tangents = [torch.randn(1, 5, 8) for _ in range(3)]
    tangents[number] = tangents[number].half()
    name = ("query", "key", "value")[number]
    with pytest.raises(TypeError, match=f"the tangent of {name} must have its dtype torch.float32, got torch.float16"):
        torch.func.jvp(sorder.attention, qkv, tuple(tangents))
