"""The solver's own operations pass torch-function modes by; what it calls is under them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sorder.linalg import cg
from sorder.linalg.past_modes import past_modes, sees_no_modes


class Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


A = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
b = torch.tensor([1.0, 2.0], dtype=torch.float64)


def test_only_the_product_and_the_preconditioner_are_seen() -> None:
    def preconditioner(r: Tensor) -> Tensor:
        return r / A.diagonal()

    expected = cg(lambda v: A @ v, b, preconditioner=preconditioner)
    with Noting() as mode:
        result = cg(lambda v: A @ v, b, preconditioner=preconditioner)
    assert torch.equal(result.x, expected.x)
    assert mode.seen.count("matmul") + mode.seen.count("__matmul__") == result.products
    assert set(mode.seen) <= {"matmul", "__matmul__", "div", "__truediv__", "diagonal"}


def test_modes_that_are_off_stay_off() -> None:
    with Noting() as mode, torch._C.DisableTorchFunction():
        with past_modes([b]) as under_modes, under_modes():
            b.sum()
        sees_no_modes(b.sum)()
    assert mode.seen == []


def test_an_error_turns_modes_on_again() -> None:
    def fail(v: Tensor) -> Tensor:
        raise RuntimeError("no product")

    with Noting() as mode:
        try:
            cg(fail, b)
        except RuntimeError:
            b.sum()
    assert mode.seen[-1] == "sum"


class Marked(Tensor):
    pass


def test_subclasses_stay_what_they_are() -> None:
    kinds = set()

    def matvec(v: Tensor) -> Tensor:
        kinds.add(type(v))
        return A @ v

    result = cg(matvec, b.as_subclass(Marked))
    assert kinds == {Marked} == {type(result.x)}
    assert torch.equal(result.x.as_subclass(Tensor), cg(lambda v: A @ v, b).x)
    with Noting() as mode:
        cg(lambda v: A @ v, torch.nn.Parameter(b))
    assert set(mode.seen) <= {"matmul", "__matmul__"}
