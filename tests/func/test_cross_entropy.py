"""The cross-entropy with closed-form derivatives against PyTorch's in float64, and what it holds."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sorder.func import cross_entropy as module
from sorder.func import hvp, written_out
from sorder.func.cross_entropy import cross_entropy, logsumexp, serves
from sorder.func.written_out import WrittenOut
from tests.cases import relative_error

ROWS, CLASSES = 10, 5
generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


x, v = normal(ROWS, CLASSES), normal(ROWS, CLASSES)
y = torch.randint(CLASSES, (ROWS,), generator=generator)
y[2] = y[7] = -100
weight = torch.tensor([0.5, 1.0, 2.0, 0.0, 1.5]).double()
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": weight},
    "smoothing": {"label_smoothing": 0.2},
    "all": {"weight": weight, "label_smoothing": 0.2, "reduction": "none", "ignore_index": 7},
}
Loss = Callable[[Tensor], Tensor]


def both(compute: Callable[[Callable[..., Tensor]], Any]) -> tuple[Any, Any]:
    """What ``compute`` makes of our loss, and of PyTorch's."""
    return compute(cross_entropy), compute(F.cross_entropy)


def hvp_twice_reversed(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    return grad(lambda x: (grad(f)(x) * v).sum())(x)


def live_dual(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        (g,) = torch.autograd.grad(f(forward_ad.make_dual(leaf, v)), leaf)
        return forward_ad.unpack_dual(g).tangent


def double_backward(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    return torch.autograd.grad(g, leaf, v)[0]


def curvature_along(f: Loss, x: Tensor, v: Tensor) -> Tensor:
    return (jvp(grad(f), (x,), (v,))[1] * v).sum()


MODES: dict[str, Callable[[Loss, Tensor, Tensor], Tensor]] = {
    "value": lambda f, x, v: f(x),
    "gradient": lambda f, x, v: grad(f)(x),
    "tangent": lambda f, x, v: jvp(f, (x,), (v,))[1],
    "forward over reverse": lambda f, x, v: jvp(grad(f), (x,), (v,))[1],
    "reverse over forward": lambda f, x, v: grad(lambda x: jvp(f, (x,), (v,))[1])(x),
    "reverse over reverse": hvp_twice_reversed,
    "forward over forward": lambda f, x, v: jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (v,))[1],
    "live dual numbers": live_dual,
    "double backward": double_backward,
    "directions mapped": lambda f, x, v: vmap(lambda v: jvp(grad(f), (x,), (v,))[1])(torch.stack([v, 2 * v])),
    "directions mapped, reversed": lambda f, x, v: vmap(lambda v: hvp_twice_reversed(f, x, v))(torch.stack([v, -v])),
    "logits mapped": lambda f, x, v: vmap(lambda x: jvp(grad(f), (x,), (v,))[1], 1)(torch.stack([x, -x], 1)),
    "hessian": lambda f, x, v: hessian(f)(x),
    "jacrev twice": lambda f, x, v: jacrev(jacrev(f))(x),
    "product's gradient in v": lambda f, x, v: grad(lambda v: curvature_along(f, x, v))(v),
    "third order, reverse": lambda f, x, v: grad(lambda x: curvature_along(f, x, v))(x),
    "third order, forward": lambda f, x, v: jvp(lambda x: jvp(grad(f), (x,), (v,))[1], (x,), (v,))[1],
    "fourth order": lambda f, x, v: jvp(grad(lambda x: curvature_along(f, x, v)), (x,), (v,))[1],
}


@pytest.fixture
def three_rows_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows do not divide the number of rows."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 3 * CLASSES * 8)


@pytest.mark.usefixtures("three_rows_a_block")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_pytorch_in_float64(name: str, mode: str) -> None:
    options = OPTIONS[name]
    target = y if "ignore_index" not in options else torch.where(y < 0, options["ignore_index"], y)
    # The square gives the loss's cotangent a tangent.
    got, want = both(lambda loss: MODES[mode](lambda x: loss(x, target, **options).square().sum(), x, v))
    assert relative_error(got, want) < 1e-13


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize(
    "options", [{"reduction": "sum"}, {"reduction": "none"}, {"size_average": False}, {"reduce": False}]
)
def test_reductions(options: dict[str, Any]) -> None:
    got, want = both(lambda loss: jvp(grad(lambda x: loss(x, y, weight, **options).exp().sum()), (x,), (v,)))
    assert relative_error(got, want) < 1e-14


@pytest.mark.parametrize("mode", MODES)
def test_logsumexp_equals_pytorch_in_float64(mode: str) -> None:
    got = MODES[mode](lambda x: logsumexp(x, 1).square().sum(), x, v)
    assert relative_error(got, MODES[mode](lambda x: torch.logsumexp(x, 1).square().sum(), x, v)) < 1e-13


@pytest.mark.parametrize(("dim", "keepdim"), [(0, False), (1, True), (-1, False), ((1,), True), ((0, 1), False)])
def test_logsumexp_dimensions(dim: Any, keepdim: bool) -> None:
    got, want = logsumexp(x, dim, keepdim), torch.logsumexp(x, dim, keepdim)
    assert got.shape == want.shape
    assert relative_error(got, want) < 1e-15


SHAPES = ((CLASSES,), (1, CLASSES), (6, CLASSES), (2, CLASSES, 3), (3, CLASSES, 2, 2))


@pytest.mark.parametrize("rows", [1, 2, 4, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_borders_of_blocks(shape: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", rows * CLASSES * 8)
    x, v = normal(*shape), normal(*shape)
    target = torch.randint(CLASSES, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=generator)
    more = {"weight": weight.flip(0) + 1, "label_smoothing": 0.1, "reduction": "none"}
    got, want = both(lambda loss: jvp(grad(lambda x: loss(x, target).exp().sum()), (x,), (v,)))
    assert relative_error(got, want) < 1e-14
    got, want = both(lambda loss: jvp(grad(lambda x: loss(x, target, **more).exp().sum()), (x,), (v,)))
    assert relative_error(got, want) < 1e-14


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_without_rows(reduction: str) -> None:
    x, y = torch.zeros(0, CLASSES).double(), torch.zeros(0, dtype=torch.int64)
    got, want = both(lambda loss: loss(x, y, reduction=reduction))
    torch.testing.assert_close(got, want, equal_nan=True)
    assert grad(lambda x: cross_entropy(x, y, reduction="sum"))(x).shape == (0, CLASSES)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_all_rows_ignored(reduction: str, smoothing: float) -> None:
    ignored = torch.full((ROWS,), -100)
    options: Any = {"reduction": reduction, "label_smoothing": smoothing}
    got, want = both(lambda loss: loss(x, ignored, **options))
    torch.testing.assert_close(got, want, equal_nan=True)
    assert bool(got.isnan().all()) == (reduction == "mean")
    results = jvp(grad(lambda x: cross_entropy(x, ignored, **options).sum()), (x,), (v,))
    assert all(torch.equal(r, torch.zeros_like(x)) for r in results)


def test_classes_of_probability_zero() -> None:
    masked = x.masked_fill(torch.arange(CLASSES) == 4, -math.inf)
    target = torch.where(y == 4, 0, y)
    target[2], masked[2, 0] = -100, -math.inf  # where an ignored row's index points
    direction = v.masked_fill(masked == -math.inf, 0.0)
    got, want = both(lambda loss: jvp(grad(lambda x: loss(x, target) ** 2), (masked,), (direction,)))
    assert bool((got[0][:, 4] == 0).all())
    assert bool((got[1][:, 4] == 0).all())
    assert relative_error(got, want) < 1e-14


BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 5e-7}


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", ["plain", "weight", "smoothing"])
def test_narrow_dtypes_are_evaluated_in_float32(name: str, dtype: torch.dtype, scale: float) -> None:
    # At 1e4 three close rivals at the top keep probabilities from being one and zero.
    x = normal(30, 200) * scale
    x[:, :3] = 4 * scale + normal(30, 3) * (32 if dtype == torch.bfloat16 and scale > 1 else 1)
    x, v = x.to(dtype), normal(30, 200).to(dtype)
    target = torch.randint(3, (30,), generator=generator)
    options: dict[str, Any] = {"label_smoothing": 0.2} if name == "smoothing" else {}
    exact = dict(options)
    if name == "weight":
        options["weight"] = torch.rand(200, generator=generator).to(dtype) + 0.5
        exact["weight"] = options["weight"].double()

    def loss(x: Tensor) -> Tensor:
        return cross_entropy(x, target, **options)

    def reference(x: Tensor) -> Tensor:
        return F.cross_entropy(x, target, **exact)

    want = jvp(grad(reference), (x.double(),), (v.double(),))
    for got in (jvp(grad(loss), (x,), (v,)), (grad(loss)(x), hvp_twice_reversed(loss, x, v))):
        assert [t.dtype for t in got] == [dtype, dtype]
        for a, b in zip(got, want, strict=True):
            assert relative_error(a, b) < BOUNDS[dtype]
    assert loss(x).dtype == dtype
    assert relative_error(loss(x), reference(x.double())) < BOUNDS[dtype]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}])
def test_dtype_of_the_loss_is_pytorchs(dtype: torch.dtype, options: dict[str, Any], autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, want = both(lambda loss: loss(x.to(dtype), y, **options))
        assert got.dtype == want.dtype
        assert logsumexp(x.to(dtype), 1).dtype == torch.logsumexp(x.to(dtype), 1).dtype


def test_mapped_targets() -> None:
    targets = torch.stack([y, y.flip(0), y.roll(1)], 1)

    def product(loss: Callable[..., Tensor], y: Tensor, mode: str) -> Tensor:
        return MODES[mode](lambda x: loss(x, y, label_smoothing=0.1, weight=weight), x, v)

    for mode in ("forward over reverse", "reverse over reverse"):
        got = vmap(lambda y: product(cross_entropy, y, mode), 1)(targets)  # noqa: B023
        want = torch.stack([product(F.cross_entropy, y, mode) for y in targets.T])
        assert relative_error(got, want) < 1e-14


def test_gradients_per_sample_twice_mapped() -> None:
    logits, targets = normal(2, 3, CLASSES), torch.randint(CLASSES, (2, 3), generator=generator)
    got, want = both(
        lambda loss: vmap(vmap(lambda x, y: grad(lambda x: loss(x, y) ** 2)(x)))(logits, targets),
    )
    assert relative_error(got, want) < 1e-14


class LiveStorage(TorchDispatchMode):
    """Counts bytes of live storages that operations inside make; ``peak`` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)):
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, key, None)
                self.peak = max(self.peak, sum(self._sizes.values()))
        return out


# Whole tensors like the logits, in their dtype: logits and gradient, their tangents (a second backward pass holds one
# less), and a sum of two gradients in reverse over forward.
WHOLE = {"forward-over-reverse": 4, "reverse-over-reverse": 3, "reverse-over-forward": 6}


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_product_holds(mode: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, classes = 1024, 512
    monkeypatch.setattr(module, "BLOCK_BYTES", 32 * classes * 4)
    monkeypatch.setattr(written_out, "LARGE", rows * classes)
    features = torch.randn(rows, 2).to(dtype)
    head, direction = torch.randn(2, classes).to(dtype), torch.randn(2, classes).to(dtype)
    target = torch.randint(classes, (rows,))
    with LiveStorage() as storage:
        hvp(lambda w: F.cross_entropy(features @ w, target), (head,), direction, argnums=0, mode=mode)
    whole = rows * classes * dtype.itemsize
    blocks, columns = 4 * module.BLOCK_BYTES, 128 * rows
    assert storage.peak < WHOLE[mode] * whole + blocks + columns
    assert storage.peak > (WHOLE[mode] - 1) * whole  # the count counts


@pytest.mark.parametrize("mode", WHOLE)
def test_products_replace_large_losses(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    f = lambda x: F.cross_entropy(x, y, label_smoothing=0.1) + x.logsumexp(1).square().mean()  # noqa: E731
    want = double_backward(f, x, v)
    calls = []
    monkeypatch.setattr(module._Value, "forward", lambda *args: calls.append(1) or module._value(args[0], args[1:]))
    assert relative_error(hvp(f, (x,), v, argnums=0, mode=mode), want) < 1e-13
    assert not calls  # small ones stay
    monkeypatch.setattr(written_out, "LARGE", 1)
    assert relative_error(hvp(f, (x,), v, argnums=0, mode=mode), want) < 1e-13
    assert calls


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (x.softmax(-1), {}),
        (y, {"weight": weight.clone().requires_grad_()}),
        (y[:-1], {}),
        (y.int(), {}),
        (y, {"reduction": "median"}),
        (y, {"label_smoothing": 2.0}),
        (y, {"weight": weight[1:]}),
    ],
    ids=["probabilities", "differentiated weight", "shape", "int32", "reduction", "smoothing", "weight's shape"],
)
def test_what_is_left_to_pytorch(target: Tensor, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_out, "LARGE", 1)
    assert not serves(x, target, **options)

    def result() -> Any:
        try:
            return F.cross_entropy(x, target, **options)
        except (RuntimeError, ValueError) as error:
            return type(error), str(error)

    want = result()
    with WrittenOut(norms=False):
        got = result()
    assert torch.equal(got, want) if isinstance(want, Tensor) else got == want


def test_mapped_weights_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_out, "LARGE", 1)
    weights = torch.stack([weight, weight.flip(0)])
    f = lambda w: hvp(lambda x: F.cross_entropy(x, y, w), (x,), v, argnums=0)  # noqa: E731
    assert relative_error(vmap(f)(weights), torch.stack([f(w) for w in weights])) < 1e-14


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_traced_graphs_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_out, "LARGE", 1)

    def loss(x: Tensor) -> Tensor:
        with WrittenOut(norms=False):
            return F.cross_entropy(x, y) + torch.logsumexp(x, 1).square().sum()

    product = torch.func.linearize(grad(loss), x)[1](v)
    assert relative_error(product, jvp(grad(loss), (x,), (v,))[1]) < 1e-14
