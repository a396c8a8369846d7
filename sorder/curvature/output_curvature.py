"""Curvature of a loss in the model's outputs: the middle factor of Jᵀ H_ℓ J."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sorder.curvature.loss_watch import WatchedCall
from sorder.func.loss_call import LossCall, match_loss_call

OutputProduct = Callable[[Sequence[Tensor]], list[Tensor]]


def closed_form(call: WatchedCall) -> LossCall | None:
    """The loss whose Hessian in its input needs no graph, or None if ``call`` has no closed form."""
    if call.arguments is None:
        return None
    arguments = {k: v.detach() if isinstance(v, Tensor) else v for k, v in call.arguments.items()}
    return match_loss_call(call.function, (call.outputs.detach(),), arguments)


def hessian(loss: LossCall, scale: float) -> Callable[[Tensor], Tensor]:
    """u ↦ scale·∇²ₗ(loss)·u."""
    return lambda u: loss.hvp(u).mul_(scale)


def fisher(loss: LossCall, scale: float, seed: int) -> Callable[[Tensor], Tensor]:
    """u ↦ scale·Σ g gᵀu over the rows of ``loss``, g the gradients for labels drawn once from the model."""
    labels = loss.sample(torch.Generator(loss.input.device).manual_seed(seed))
    return lambda u: loss.fvp(u, labels).mul_(scale)


def by_double_backward(root: Tensor, outputs: Sequence[Tensor]) -> OutputProduct:
    """u ↦ ∇²ₗ(root)·u for any loss, through a second graph over the outputs."""
    gradients = torch.autograd.grad(root, outputs, create_graph=True, allow_unused=True)
    # A gradient without graph is constant: the loss is linear in that output.
    curved = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]

    def product(u: Sequence[Tensor]) -> list[Tensor]:
        if not curved:
            return [torch.zeros_like(z) for z in outputs]
        return list(
            torch.autograd.grad(
                [g for _, g in curved],
                outputs,
                [u[i] for i, _ in curved],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        )

    return product
