"""Optimizers of sorder and their rivals, under one name each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import sorder

# Newton-CG's and K-FAC's own default is 1, the whole way to one batch's minimum; half the way is better for the others.
# Sophia's and AdaHessian's come from short trials at the example's sizes on a CPU: for Sophia the best of 1e-3 to
# 1.2e-2, for AdaHessian its default, since 0.3 gains little and 0.5 loses much.
LEARNING_RATES = {
    "newton-cg": 0.5,
    "kfac": 0.5,
    "sophia-h": 2e-3,
    "sophia-g": 2e-3,
    "adahessian": 0.15,
    "adamw": 3e-3,
    "muon": 2e-2,
}
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
CURVATURE = {
    "newton-cg": sorder.NewtonCG,
    "kfac": sorder.KFAC,
    "sophia-h": sorder.SophiaH,
    "sophia-g": sorder.SophiaG,
    "adahessian": sorder.AdaHessian,
}
# Their steps have a length of their own, which no warm-up has to hold back.
OWN_LENGTH = {"newton-cg", "kfac"}
PRECONDITIONERS = ("none", "diagonal", "squared-gradient", "kfac", "ekfac")
# What CG reaches in ten iterations without a preconditioner, it reaches in three behind Kronecker factors.
KFAC_CG_ITERATIONS = 3
# Lookahead wraps another optimizer. This Adahessian is sorder's, without the reference cycle of create_graph.
NOT_FROM_TORCH_OPTIMIZER = {"lookahead", "adahessian"}


def find(name: str) -> Callable[..., Optimizer]:
    """The maker of the optimizer called ``name``, given the model: a key of LEARNING_RATES, or of torch-optimizer.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "newton-cg":
        return newton_cg
    if name in CURVATURE:
        return lambda model, **options: CURVATURE[name](model.named_parameters(), **options)
    if name == "adamw":
        return lambda model, **options: torch.optim.AdamW(model.parameters(), **{**ADAMW, **options})
    if name == "muon":
        return MuonAndAdamW
    try:
        known = torch_optimizers()
    except ImportError:
        raise ValueError(f"optimizer {name!r} is not built in, and torch-optimizer is not installed") from None
    if name not in known:
        raise ValueError(f"no optimizer {name!r}; there are {', '.join([*LEARNING_RATES, *sorted(known)])}")
    kind = known[name]

    def make_it(model: nn.Module, **options: Any) -> Optimizer:
        if "lr" in options and inspect.signature(kind).parameters["lr"].default is None:
            raise ValueError(f"{name} chooses its own learning rate, and takes no --lr")
        return kind(model.parameters(), **options)

    return make_it


def torch_optimizers() -> dict[str, type[Optimizer]]:
    """The classes of torch-optimizer that train a model by ``step()`` after ``backward()``, by lower-case name."""
    import torch_optimizer

    classes = [c for c in vars(torch_optimizer).values() if isinstance(c, type) and issubclass(c, Optimizer)]
    named = {c.__name__.lower(): c for c in classes if c is not Optimizer}
    return {name: c for name, c in named.items() if name not in NOT_FROM_TORCH_OPTIMIZER}


def make(name: str, model: nn.Module, lr: float | None, **options: Any) -> Optimizer:
    """The optimizer called ``name``; without ``lr`` it has the learning rate above, or its own.

    Raises:
        ValueError: there is none of that name, or it refuses an option.
    """
    lr = LEARNING_RATES.get(name) if lr is None else lr
    return find(name)(model, **({} if lr is None else {"lr": lr}), **options)


def newton_cg(
    model: nn.Module, preconditioner: str = "none", factors: dict[str, Any] | None = None, **options: Any
) -> sorder.NewtonCG:
    """Newton-CG behind one of PRECONDITIONERS; ``factors`` are options of :class:`sorder.KFACPreconditioner`.

    Raises:
        ValueError: there is none of that name, or an option is out of range.
    """
    if preconditioner not in PRECONDITIONERS:
        raise ValueError(f"no preconditioner {preconditioner!r}; there are {', '.join(PRECONDITIONERS)}")
    chosen: Any = None if preconditioner == "none" else preconditioner
    if preconditioner in ("kfac", "ekfac"):
        inverse = "cholesky" if preconditioner == "kfac" else "ekfac"
        chosen = sorder.KFACPreconditioner(model, **{"inverse": inverse, **(factors or {})})
        options = {"cg_iterations": KFAC_CG_ITERATIONS, **options}
    return sorder.NewtonCG(model.named_parameters(), preconditioner=chosen, **options)


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


def step(optimizer: Optimizer, loss: Callable[[], Tensor], curvature_loss: Callable[[], Any]) -> Tensor:
    """One step on ``loss``, which sorder's optimizers differentiate themselves; the others want ``.grad``.

    Curvature costs more than a gradient, and part of the batch serves as well for it (Byrd et al. 2011, *On the use of
    stochastic Hessian information*), so it gets a loss of its own: for SophiaG a :func:`sorder.gnb_loss`.
    """
    if isinstance(optimizer, tuple(CURVATURE.values())):
        return cast(Any, optimizer).step(loss, curvature_closure=curvature_loss)
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    return value.detach()


def scalars(optimizer: Optimizer) -> dict[str, float]:
    """What the optimizer tells of its last step, by TensorBoard tag."""
    if isinstance(optimizer, sorder.NewtonCG):
        newton = optimizer.last_step
        assert newton is not None
        return {
            "newton-cg/CG iterations": newton.cg_iterations,
            "newton-cg/products": newton.products,
            "newton-cg/damping": newton.damping,
            "newton-cg/reduction ratio": newton.reduction_ratio,
            "newton-cg/curvature along the step": newton.curvature_along_step,
            "newton-cg/step length": newton.step_length,
        }
    if isinstance(optimizer, sorder.KFAC):
        kfac = optimizer.last_step
        assert kfac is not None
        return {
            "kfac/learning rate of the model": kfac.learning_rate,
            "kfac/momentum of the model": kfac.momentum,
            "kfac/products": kfac.products,
            "kfac/damping": kfac.damping,
            "kfac/reduction ratio": kfac.reduction_ratio,
            "kfac/step length": kfac.step_length,
        }
    if isinstance(optimizer, sorder.SophiaH | sorder.SophiaG):
        sophia = optimizer.last_step
        assert sophia is not None
        return {
            "sophia/win rate": sophia.win_rate,
            "sophia/curvature norm": sophia.curvature_norm,
            "sophia/update norm": sophia.update_norm,
        }
    return {}
