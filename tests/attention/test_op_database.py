"""PyTorch's own sample inputs of scaled_dot_product_attention: value, gradient, forward AD and second derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

import sorder

from . import oracle

pytest.importorskip("expecttest", reason="torch.testing._internal imports it")
database = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db

# The samples lie in [−9, 9], so that most rows are one-hot and the gradients of queries and keys all but cancel.
BOUND, CANCELLED = 1e-12, 1e-8


@dataclasses.dataclass
class Sample:
    """One call: the tensors that are differentiated (query, key, value and a bias that requires a gradient)."""

    tensors: tuple[Tensor, ...]
    mask: Tensor | None
    options: dict[str, Any]

    def __str__(self) -> str:
        mask = "" if self.mask is None and len(self.tensors) == 3 else "-mask"
        shapes = "-".join("x".join(map(str, x.shape)) for x in self.tensors[:2])
        return f"{shapes}{mask}-{'-'.join(f'{k}={v}' for k, v in self.options.items())}"


def samples() -> list[Sample]:
    """The distinct problems of the database (it repeats those that differ in requires_grad alone)."""
    found: dict[str, Sample] = {}
    torch.manual_seed(0)
    for op in database:
        if op.name != "nn.functional.scaled_dot_product_attention":
            continue
        for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
            options = dict(sample.kwargs)
            arguments = [sample.input, *sample.args, options.pop("attn_mask", None)]
            tensors, mask = arguments[:3], arguments[3]
            if mask is not None and mask.requires_grad:
                tensors, mask = [*tensors, mask], None
            one = Sample(tuple(x.detach() for x in tensors), mask, options)
            found[str(one)] = one
    return list(found.values())


SAMPLES = samples()
Attention = Callable[..., Tensor]


def served(sample: Sample) -> Attention:
    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        torch.manual_seed(7)  # the dropout mask
        return sorder.attention(query, key, value, sample.mask if bias is None else bias, **sample.options)

    return call


def kept(sample: Sample, p: float) -> Tensor | None:
    """keep/(1 − p) of the operator's dropout, read off its output for one-hot values."""
    if p == 0:
        return None
    query, key, _, *bias = sample.tensors
    eye = torch.eye(key.shape[-2], dtype=query.dtype).expand(*key.shape[:-1], key.shape[-2])
    dropped = served(sample)(query, key, eye, *bias)
    return torch.where(dropped != 0, 1 / (1 - p), 0.0)


def materialised(sample: Sample) -> Attention:
    options = dict(sample.options)
    p = options.pop("dropout_p", 0.0)
    keep = kept(sample, p)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = query @ key.mT * (options.get("scale") or query.shape[-1] ** -0.5)
        if bias is not None:
            scores = scores + bias
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
        if options.get("is_causal"):
            visible = visible.tril()
        if sample.mask is not None:
            visible = visible & sample.mask
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return (weights if keep is None else weights * keep) @ value

    return call


def derivatives(attention: Attention, tensors: tuple[Tensor, ...]) -> dict[str, tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)

    def direction(x: Tensor) -> Tensor:
        return torch.randn(x.shape, dtype=x.dtype, generator=generator)

    value = attention(*tensors)
    weight, tangents = direction(value), tuple(direction(x) for x in tensors)
    everywhere = tuple(range(len(tensors)))

    def loss(*x: Tensor) -> Tensor:
        return (attention(*x) * weight).sin().sum()

    leaves = [x.clone().requires_grad_() for x in tensors]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    gradient = grad(loss, everywhere)
    return {
        "value": (value,),
        "gradient": tuple(x.detach() for x in first),
        "forward AD": (jvp(attention, tensors, tangents)[1],),
        "second gradient": torch.autograd.grad(first, leaves, tangents),
        "forward over reverse": jvp(gradient, tensors, tangents)[1],
        "reverse over forward": vjp(lambda *x: jvp(loss, x, tangents)[1], *tensors)[1](torch.tensor(1.0).double()),
    }


def test_the_database_has_samples() -> None:
    assert len(SAMPLES) >= 13
    assert any(len(sample.tensors) == 4 for sample in SAMPLES)
    assert any(sample.options.get("dropout_p") for sample in SAMPLES)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_equals_materialised(sample: Sample) -> None:
    want = derivatives(materialised(sample), sample.tensors)
    for order, outputs in derivatives(served(sample), sample.tensors).items():
        together, expected = (torch.cat([x.flatten() for x in xs]) for xs in (outputs, want[order]))
        assert oracle.relative_error(together, expected) <= BOUND, order
        for i, output in enumerate(outputs):
            assert oracle.relative_error(output, want[order][i]) <= CANCELLED, f"{order}, output {i}"
