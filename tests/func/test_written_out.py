"""The written-out norms and losses equal PyTorch's, and are right where PyTorch's are wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sorder.func import hvp, value_grad_hvp
from sorder.func.written_out import WrittenOut
from tests.cases import relative_error

w, b = torch.rand(4).double() + 0.5, torch.randn(4).double()
target = torch.randn(2, 4, 4).double()
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4,), w * x[0, 0, 0], b),
    "layer_norm 2d": lambda x: torch.layer_norm(x, (4, 4), eps=1e-3),
    "batch_norm": lambda x: F.batch_norm(x, None, None, w, b, training=True),
    "batch_norm eval": lambda x: F.batch_norm(x, b, w, w, b, training=False),
    "instance_norm": lambda x: F.instance_norm(x, weight=w, bias=b),
    "mse_loss": lambda x: F.mse_loss(x, target),
    "mse_loss sum": lambda x: F.mse_loss(x, target.sin(), reduction="sum"),
    "mse_loss weighted": lambda x: F.mse_loss(x, target, weight=target.exp()),
    "huber_loss": lambda x: F.huber_loss(x, target, delta=0.7),
    "silu": F.silu,
    "silu module": torch.nn.SiLU(),
    "silu inplace": lambda x: F.silu(x * 1.0, inplace=True),
    "mish": F.mish,
    "glu": lambda x: F.glu(x, 1),
    "group_norm": lambda x: F.group_norm(x, 2, w, b),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, target.sign()),
    "huber_loss none": lambda x: F.huber_loss(x, target, reduction="none"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_value_and_second_derivative(name: str) -> None:
    operation = OPERATIONS[name]
    x = torch.randn(2, 4, 4).double()
    with WrittenOut(norms=True):
        written_out = operation(x)
    assert relative_error(written_out, operation(x)) < 1e-13
    f = lambda x: (operation(x) ** 3).sum()  # noqa: E731
    v = torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (product,) = torch.autograd.grad(gradient, leaf, v)
    for mode in ("forward-over-reverse", "reverse-over-reverse", "reverse-over-forward"):
        assert relative_error(hvp(f, (x,), (v,), mode=mode), product) < 1e-12
        mapped = torch.func.vmap(lambda v: hvp(f, (x,), v, argnums=0, mode=mode))(torch.stack([v, -v]))  # noqa: B023
        assert relative_error(mapped[1], -product) < 1e-12


def test_hardsigmoid_which_pytorch_cannot_differentiate_twice() -> None:
    x = 4 * torch.randn(2, 4, 4).double()
    with WrittenOut(norms=False):
        assert relative_error(F.hardsigmoid(x), torch._C._nn.hardsigmoid(x)) < 1e-15
    product = hvp(lambda x: F.hardsigmoid(x).pow(3).sum(), (x,), (x,))
    inside = (x.abs() < 3).double()
    assert relative_error(product, x * inside * 6 * F.hardsigmoid(x) / 36) < 1e-14


def test_a_backward_pass_that_is_differentiable_only_if_recorded() -> None:
    class Cube(torch.autograd.Function):
        """Stands for PyTorch's operations of this kind: its backward has a forward-mode rule under grad mode alone."""

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            if not torch.is_grad_enabled():
                raise NotImplementedError("Trying to use forward AD with cube_backward that does not support it")
            return 3 * g * ctx.saved_tensors[0] ** 2

        @staticmethod
        def jvp(ctx, t: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            return 3 * t * ctx.saved_tensors[0] ** 2

    x = torch.randn(5).double()
    assert relative_error(hvp(lambda x: Cube.apply(x).sum(), (x,), (x,)), 6 * x * x) < 1e-14


def test_running_statistics_are_refused_rather_than_wrong() -> None:
    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    x = torch.randn(3, 4).double()
    f = lambda x: F.batch_norm(x, mean, var, training=True).pow(3).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="use mode='forward-over-reverse'"):
        hvp(f, (x,), (x,), mode="reverse-over-forward")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_keep_dtype_and_compute_in_float32(dtype: torch.dtype) -> None:
    x = (100 + torch.randn(3, 64)).to(dtype)
    want = F.layer_norm(x, (64,))
    with WrittenOut(norms=True):
        got = F.layer_norm(x, (64,))
    assert got.dtype == want.dtype
    assert relative_error(got, want) < 1e-2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weighted_huber_loss(reduction: str) -> None:
    """PyTorch's weighted mean is over the entries for huber_loss, over the weights for mse_loss."""
    x, weight = torch.randn(2, 4, 4).double(), target.exp()
    for loss in (F.huber_loss, F.mse_loss):
        f = lambda x: loss(x, target, reduction=reduction, weight=weight).sum()  # noqa: B023, E731
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        (product,) = torch.autograd.grad(gradient, leaf, x)
        value, slope, curvature = value_grad_hvp(f, (x,), x, argnums=0)
        for got, want in ((value, f(x)), (slope, gradient), (curvature, product)):
            assert relative_error(got, want) < 1e-13


@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss])
def test_weights_of_another_shape_are_refused_as_by_pytorch(loss: Callable[..., Tensor]) -> None:
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="same size"):
        hvp(lambda x: loss(x, torch.zeros(4, 3), weight=torch.ones(3)), (x,), x, argnums=0)


def test_linearize_of_a_product_says_what_to_do() -> None:
    x = torch.randn(3)
    with pytest.raises(NotImplementedError, match="mode='reverse-over-reverse'"):
        torch.func.linearize(lambda x: hvp(lambda x: x.pow(4).sum(), (x,), x, argnums=0), x)


def test_norms_take_what_pytorchs_take() -> None:
    x = torch.randn(2, 4, 3)
    calls = (
        lambda: torch.layer_norm(x, (4, 3), None, None, 1e-3, False),
        lambda: torch.layer_norm(x, normalized_shape=(3,), cudnn_enable=False),
        lambda: F.layer_norm(x, (2, 4, 3)),
        lambda: F.group_norm(x[:0], 2),
    )
    for call in calls:
        with WrittenOut(norms=True):
            found = call()
        torch.testing.assert_close(found, call())
    for shape in [(4,), (2, 3), (1, 2, 4, 3)]:
        with WrittenOut(norms=True), pytest.raises(RuntimeError, match="normalized_shape"):
            F.layer_norm(x, shape)
