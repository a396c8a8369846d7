"""Where a closure splits into outputs z(θ) and a loss ℓ(z), and the curvature of ℓ there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sorder.curvature.errors import warn_once
from sorder.curvature.evaluation import Evaluation
from sorder.curvature.loss_watch import SPLITS, LossSum, LossWatch, bind
from sorder.curvature.output_curvature import (
    OutputProduct,
    by_double_backward,
    closed_form,
    fisher,
    hessian,
)
from sorder.func.ambient import FirstCallMode

KINDS = ("auto", "hessian", "ggn", "fisher")
# A tensor's place in a run: a call's number and argument, or the number of a leaf among the returned outputs.
Position = tuple[int, str] | int


class NoOutputsError(ValueError):
    """A closure shows no outputs at which its loss could be split for the GGN."""


@dataclass
class Split:
    """Outputs z of one run, with their graph; u ↦ H_ℓ u; and where z is met when the closure runs again.

    ``separates`` tells that the loss depends on the parameters through z alone.
    """

    outputs: list[Tensor]
    product: OutputProduct
    positions: list[Position]
    separates: bool


def find_split(evaluation: Evaluation, watch: LossWatch, kind: str | None, sign: float, seed: int) -> Split | None:
    """The split for ``kind``, or None where the Hessian is to be taken.

    Raises:
        ValueError: ``kind`` is "ggn" or "fisher", and the closure shows no outputs, or no likelihood.
    """
    if kind is None or kind == "hessian":
        return None
    losses = watch.find(evaluation.root)
    returned = [
        (i, z)
        for i, z in enumerate(tree_leaves(evaluation.outputs))
        if isinstance(z, Tensor) and z.requires_grad and z.is_floating_point()
    ]
    closed = losses is not None and losses.exact and all(closed_form(call) for call, _ in losses.terms)
    if kind == "fisher":
        if not closed or losses is None:
            raise ValueError(
                "the Fisher matrix, 'fisher', needs a loss that defines a distribution of labels: the closure must "
                "return the result of cross_entropy, mse_loss or binary_cross_entropy_with_logits, or a multiple of it"
            )
        return _closed_split(losses, seed)
    if losses is not None and closed and _same_storage(losses, returned):
        return _closed_split(losses)
    if returned:
        outputs = [z for _, z in returned]
        if not _reaches(evaluation.root, outputs):
            raise ValueError("the loss does not depend on the outputs that the closure returned")
        return Split(outputs, by_double_backward(evaluation.root, outputs), [i for i, _ in returned], False)
    if losses is not None and (losses.convex(sign) or kind == "ggn"):
        if closed:
            return _closed_split(losses)
        calls = {id(call.outputs): call for call, _ in losses.terms}
        outputs = [call.outputs for call in calls.values()]
        positions: list[Position] = [call.position for call in calls.values()]
        return Split(outputs, by_double_backward(evaluation.root, outputs), positions, False)
    if kind == "ggn":
        raise NoOutputsError(
            "the Gauss-Newton matrix, 'ggn', needs the model's outputs: return (loss, outputs) from the closure with "
            "outputs still attached to the graph, or return the result of a torch loss function such as cross_entropy"
        )
    if losses is None and watch.seen:
        warn_once(
            "auto takes the Hessian",
            f"curvature 'auto' takes the Hessian: the closure calls {', '.join(watch.seen)}, but the loss that it "
            "returns is something else, such as a sum with a penalty written by hand. For the Gauss-Newton matrix pass "
            "the penalty as weight_decay= of the optimizer, or return (loss, outputs); for the Hessian say 'hessian'.",
        )
    return None


def _same_storage(losses: LossSum, returned: Sequence[tuple[int, Tensor]]) -> bool:
    """Whether every loss takes all of one returned tensor, so that both places split the same."""
    places = {(z.data_ptr(), z.numel(), z.dtype) for _, z in returned}
    calls = {(c.outputs.data_ptr(), c.outputs.numel(), c.outputs.dtype) for c, _ in losses.terms}
    return bool(places) and calls == places


def _reaches(root: Tensor, outputs: Sequence[Tensor]) -> bool:
    found = torch.autograd.grad(root, outputs, retain_graph=True, allow_unused=True)
    return any(g is not None for g in found)


def _closed_split(losses: LossSum, fisher_seed: int | None = None) -> Split:
    numbers: dict[int, int] = {}
    outputs: list[Tensor] = []
    positions: list[Position] = []
    pieces = []
    for k, (call, scale) in enumerate(losses.terms):
        call.check_unchanged()
        number = numbers.setdefault(id(call.outputs), len(outputs))
        if number == len(outputs):
            outputs.append(call.outputs)
            positions.append(call.position)
        loss = closed_form(call)
        assert loss is not None
        pieces.append((number, hessian(loss, scale) if fisher_seed is None else fisher(loss, scale, fisher_seed + k)))

    def product(u: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor | None] = [None] * len(u)
        for number, piece in pieces:
            part, so_far = piece(u[number]), found[number]
            found[number] = part if so_far is None else so_far + part
        return [z for z in found if z is not None]

    return Split(outputs, product, positions, separates=len(outputs) == 1)


class SplitRecorder(FirstCallMode):
    """Meets the outputs at ``positions`` again, in another run of the same closure."""

    def __init__(self, positions: Sequence[Position]) -> None:
        super().__init__()
        self._wanted = {p for p in positions if not isinstance(p, int)}
        self._positions = positions
        self._calls = 0
        self._found: dict[tuple[int, str], Tensor] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in SPLITS:
            name, first, others = bind(function, args, kwargs)
            for key, value in ((name, first), *others.items()):
                if (self._calls, key) in self._wanted:
                    self._found[self._calls, key] = value
            self._calls += 1
        return function(*args, **kwargs)

    def outputs(self, returned: Any) -> list[Tensor]:
        """Tensors at the positions; ``returned`` is what the run returned beside the loss."""
        leaves = tree_leaves(returned)
        return [leaves[p] if isinstance(p, int) else self._found[p] for p in self._positions]
