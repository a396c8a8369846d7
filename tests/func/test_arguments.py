"""What is wrong with the arguments of a product is named; what is merely unusual is served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sorder.func import empirical_fvp, fvp, ggnvp, hvp, value_grad_hvp
from sorder.func.hvp import Mode

MODES = get_args(Mode)
X, Y = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]]), torch.tensor([0, 1, 1])
W = torch.tensor([[1.0, 0.3], [-0.2, 2.0]])
PARAMS = {"a": W, "b": W + 1.0}


def model(w: Tensor) -> Tensor:
    return X @ w


def loss(z: Tensor) -> Tensor:
    return F.cross_entropy(z, Y)


def square(w: Tensor) -> Tensor:
    return w.square().sum()


def objective(params: dict[str, Tensor]) -> Tensor:
    return (params["a"] @ params["b"]).sin().sum()


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a module for its parameters": (
        lambda: hvp(square, (torch.nn.Linear(2, 2),), {"weight": W}, argnums=0),
        TypeError,
        r"primals\[0\] must be tensors, got the module Linear: pass dict\(module.named_parameters\(\)\)",
    ),
    "a generator": (
        lambda: ggnvp(model, loss, (torch.nn.Linear(2, 2).parameters(),), (W,)),
        TypeError,
        r"primals\[0\] must be tensors, got a generator: pass a list or a dict",
    ),
    "f is no function": (lambda: hvp((W,), square, (W,)), TypeError, "f must be callable, got tuple"),  # type: ignore[arg-type]
    "primals": (lambda: hvp(square, W, (W,)), TypeError, "primals must be a tuple of the function's"),  # type: ignore[arg-type]
    "no primals": (lambda: hvp(square, (), ()), ValueError, "primals must hold at least one argument"),
    "an integer primal": (
        lambda: hvp(lambda n, w: w.sum(), (torch.arange(3), W), (torch.arange(3), W)),
        TypeError,
        r"primals\[0\] must be a floating-point tensor, got one of torch.int64; leave",
    ),
    "a number among the primals": (
        lambda: hvp(lambda w, p: w.sum(), (W, {"n": 3}), ({"n": 3},), argnums=(1,)),
        TypeError,
        r"primals\[1\]\['n'\] must be a floating-point tensor, got int",
    ),
    "tangents without a tuple": (
        lambda: hvp(objective, (PARAMS,), PARAMS),
        TypeError,
        "tangents must be a tuple with an entry for each of 1 .* got dict; an int argnums",
    ),
    "a tuple too many": (
        lambda: hvp(objective, (PARAMS,), (PARAMS,), argnums=0),
        ValueError,
        r"missing tangents\['a'\], tangents\['b'\], unexpected .* not a tuple around it",
    ),
    "too many": (lambda: hvp(square, (W,), (W, W)), ValueError, r"structure .*: unexpected tangents\[1\]$"),
    "a missing key": (
        lambda: hvp(objective, (PARAMS,), ({"a": W},)),
        ValueError,
        r"structure of the differentiated primals: missing tangents\[0\]\['b'\]$",
    ),
    "an extra key": (
        lambda: hvp(objective, (PARAMS,), {**PARAMS, "c": W}, argnums=0),
        ValueError,
        r"primals: unexpected tangents\['c'\]$",
    ),
    "many missing keys": (
        lambda: hvp(lambda p: p["k0"].sum(), ({f"k{i}": W for i in range(50)},), ({},)),
        ValueError,
        r"tangents\[0\]\['k3'\] and 46 more",
    ),
    "a shape": (
        lambda: hvp(objective, (PARAMS,), ({"a": W, "b": W[0]},)),
        ValueError,
        r"tangents\[0\]\['b'\] must have the primal's shape \(2, 2\), got \(2,\)",
    ),
    "a dtype": (
        lambda: hvp(square, (W,), W.double(), argnums=0),
        ValueError,
        r"tangents must have the primal's dtype torch.float32, got torch.float64",
    ),
    "a device": (lambda: hvp(square, (W,), (W.to("meta"),)), ValueError, "device cpu, got meta"),
    "None for a tangent": (
        lambda: hvp(objective, (PARAMS,), ({"a": W, "b": None},)),
        TypeError,
        r"tangents\[0\]\['b'\] must be a tensor of shape \(2, 2\), got NoneType",
    ),
    "an unknown mode": (lambda: hvp(square, (W,), (W,), mode="forward"), ValueError, "mode must be one of"),  # type: ignore[arg-type]
    "argnums out of range": (lambda: hvp(square, (W,), W, argnums=1), ValueError, r"lie in \[-1, 1\), got 1"),
    "argnums twice": (lambda: hvp(square, (W,), (W, W), argnums=(0, -1)), ValueError, "distinct arguments"),
    "a name for argnums": (lambda: hvp(square, (W,), W, argnums="a"), TypeError, "argnums must be None, an int"),  # type: ignore[arg-type]
    "an integer loss": (
        lambda: hvp(lambda w: (w > 0).sum(), (W,), (W,)),
        ValueError,
        "scalar tensor of floating-point numbers, got torch.int64",
    ),
    "a complex loss": (lambda: hvp(lambda w: w.sum() * 1j, (W,), (W,)), ValueError, "got torch.complex64"),
    "a number as loss": (lambda: hvp(lambda w: 1.0, (W,), (W,)), ValueError, "got float"),
    "aux not announced": (
        lambda: hvp(lambda w: (square(w), w), (W,), (W,)),
        ValueError,
        r"got tuple; a function that returns \(scalar, aux\) needs has_aux=True",
    ),
    "aux not returned": (
        lambda: value_grad_hvp(square, (W,), (W,), has_aux=True),
        ValueError,
        r"with has_aux=True f must return a pair \(value, aux\), got Tensor",
    ),
    "aux not returned by a model": (
        lambda: ggnvp(model, loss, (W,), (W,), has_aux=True),
        ValueError,
        "model_fn must return a pair",
    ),
    "the model is no function": (lambda: ggnvp(None, loss, (W,), (W,)), TypeError, "model_fn must be callable"),  # type: ignore[arg-type]
    "the loss is no function": (
        lambda: fvp(model, "cross_entropy", (W,), (W,)),  # type: ignore[arg-type]
        TypeError,
        "loss_fn must be callable, got str",
    ),
    "outputs that are no tensors": (
        lambda: ggnvp(lambda w: {"z": X @ w, "n": 3}, lambda out: loss(out["z"]), (W,), (W,)),
        TypeError,
        r"model_fn must return .*floating-point tensors, got int at \['n'\]",
    ),
    "integer outputs": (
        lambda: ggnvp(lambda w: (X @ w).long(), lambda z: z.sum(), (W,), (W,)),
        TypeError,
        "model_fn must return .* got torch.int64",
    ),
    "no outputs": (lambda: ggnvp(lambda w: {}, lambda out: W.sum(), (W,), (W,)), TypeError, "model_fn must return"),
    "a loss for each row": (
        lambda: ggnvp(model, lambda z: z.square(), (W,), (W,)),
        ValueError,
        r"loss_fn must return a scalar tensor .* got shape \(3, 2\)$",
    ),
    "a Fisher loss for each row": (
        lambda: fvp(model, lambda z: F.cross_entropy(z, Y, reduction="none"), (W,), (W,)),
        ValueError,
        r"loss_fn must return a scalar tensor .* got shape \(3,\)$",
    ),
    "no likelihood": (lambda: fvp(model, lambda z: z.sum(), (W,), (W,)), ValueError, "name no distribution"),
    "sample_dims": (lambda: empirical_fvp(model, loss, (W,), (W,), sample_dims=3), ValueError, "sample_dims"),
    "half a dimension": (lambda: empirical_fvp(model, loss, (W,), (W,), sample_dims=1.5), ValueError, "got 1.5"),  # type: ignore[arg-type]
    "a boolean for sample_dims": (
        lambda: empirical_fvp(model, loss, (W,), (W,), sample_dims=True),
        ValueError,
        "sample_dims must be an integer of at least 1, got True",
    ),
    "a word for the generator": (
        lambda: fvp(model, loss, (W,), (W,), generator="x"),  # type: ignore[arg-type]
        TypeError,
        "generator must be a torch.Generator or None, got 'x'",
    ),
    "reduction": (lambda: empirical_fvp(model, loss, (W,), (W,), reduction="none"), ValueError, "reduction must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("mode", MODES)
def test_a_function_that_is_no_scalar_is_named_in_every_mode(mode: Mode) -> None:
    with pytest.raises(ValueError, match=r"f must return a scalar tensor .*, got shape \(2, 2\)"):
        hvp(lambda w: w**2, (W,), (W,), mode=mode)


@pytest.mark.parametrize("product", [ggnvp, fvp, empirical_fvp])
def test_swapped_functions_are_recognised(product: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="model_fn and loss_fn look swapped"):
        product(loss, model, (W,), (W,))
    # Here both run on what the other gives: a scalar, and a matrix of it.
    with pytest.raises(ValueError, match="are model_fn and loss_fn swapped"):
        product(square, lambda z: X * z, (W,), (W,))


def test_an_error_of_the_model_itself_stays() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ggnvp(lambda w: X.T @ w.T @ w, loss, (W,), (W,))
    with pytest.raises(KeyError, match="logits"):
        ggnvp(lambda w: {"z": X @ w}, lambda out: loss(out["logits"]), (W,), (W,))


@pytest.mark.parametrize("other", [lambda d: dict(reversed(d.items())), OrderedDict], ids=["order", "OrderedDict"])
def test_entries_of_dicts_are_matched_by_key(other: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    v = {"a": torch.ones(2, 2), "b": W.T}
    want, got = (hvp(objective, (PARAMS,), t, argnums=0) for t in (v, other(v)))
    assert torch.equal(got["a"], want["a"]) and torch.equal(got["b"], want["b"])
    assert not torch.allclose(want["a"], want["b"])
