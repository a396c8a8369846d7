"""Newton-CG and its rivals under one name each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import sorder

# Newton-CG's own default is 1, the whole way to one batch's minimum; half the way is better for the other batches.
LEARNING_RATES = {"newton-cg": 0.5, "adamw": 3e-3, "muon": 2e-2}
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def make(name: str, model: nn.Module, lr: float | None, **options: Any) -> Optimizer:
    """The optimizer called ``name``: newton-cg, adamw, muon, or a class of torch-optimizer in any case.

    ``lr`` and ``options`` are its keyword arguments; without ``lr`` it has the default above, or its own.

    Raises:
        ValueError: there is none of that name.
    """
    if name in LEARNING_RATES:
        return _built_in(name, model, LEARNING_RATES[name] if lr is None else lr, options)
    try:
        import torch_optimizer
    except ImportError:
        raise ValueError(f"optimizer {name!r} is not built in, and torch-optimizer is not installed") from None
    members = vars(torch_optimizer).items()
    known = {
        n.lower(): c for n, c in members if isinstance(c, type) and issubclass(c, Optimizer) and c is not Optimizer
    }
    if name not in known:
        raise ValueError(f"no optimizer {name!r}; there are {', '.join([*LEARNING_RATES, *sorted(known)])}")
    if lr is not None:
        options["lr"] = lr
    return known[name](model.parameters(), **options)


def _built_in(name: str, model: nn.Module, lr: float, options: dict[str, Any]) -> Optimizer:
    if name == "newton-cg":
        return sorder.NewtonCG(model.parameters(), lr=lr, **options)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, **{**ADAMW, **options})
    return MuonAndAdamW(model, lr, **options)


class MuonAndAdamW(Optimizer):
    """Muon for the matrices inside the blocks, AdamW for the rest, as Muon's authors advise (Jordan et al. 2024)."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.01) -> None:
        inner = {
            id(p) for block in model.get_submodule("blocks").children() for p in block.parameters() if p.dim() == 2
        }
        matrices = [p for p in model.parameters() if id(p) in inner]
        others = [p for p in model.parameters() if id(p) not in inner]
        self.parts: list[Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay),
            torch.optim.AdamW(others, lr=LEARNING_RATES["adamw"], **ADAMW),
        ]
        super().__init__([g for part in self.parts for g in part.param_groups], {})
        # The same dictionaries, so that a schedule reaches both.
        self.param_groups = [g for part in self.parts for g in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [g for part in self.parts for g in part.param_groups]


def step(optimizer: Optimizer, loss: Callable[[], Tensor], curvature_loss: Callable[[], Tensor]) -> Tensor:
    """One step on ``loss``, which Newton-CG differentiates itself; the others want its gradient in ``.grad``.

    Most of a Newton-CG step is products with the curvature. On part of the batch they serve as well and cost less (Byrd
    et al. 2011, *On the use of stochastic Hessian information*), so they get a loss of their own.
    """
    if isinstance(optimizer, sorder.NewtonCG):
        return optimizer.step(loss, curvature_closure=curvature_loss)
    second_order = type(optimizer).__name__ == "Adahessian"  # it differentiates the gradient once more

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward(create_graph=second_order)
        return value

    with sorder.exact_attention() if second_order else nullcontext():
        return cast(Tensor, optimizer.step(closure)).detach()
