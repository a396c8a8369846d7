"""Curvature factors of a closure's batch, at a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sorder.curvature import CurvaturePoint
from sorder.curvature.loss_watch import LossSum, LossWatch
from sorder.curvature.output_curvature import closed_form
from sorder.kfac.capture import Capture
from sorder.kfac.layout import Registry
from sorder.kfac.scores import score_vectors

NEEDS_LABELS = (
    "K-FAC needs a loss that defines a distribution of labels: the closure must return the result of cross_entropy, "
    "nll_loss of log_softmax, mse_loss or binary_cross_entropy_with_logits (with reduction 'mean' or 'sum'), a "
    "multiple of it, or a sum of such"
)
Vectors = Iterator[tuple[Tensor, Tensor]]


@dataclass
class Batch:
    """A point's closures, run again as often as asked for: the same function, without a trace.

    Args:
        point: where, and of what. params: its parameters, in the order that the blocks count them in.
        registry: the blocks known so far; runs add to it.
        estimator, samples, seed: see :func:`sorder.kfac.scores.score_vectors`. Every sweep draws the same vectors.
        loss_scale: what the loss was multiplied by, as a ``GradScaler`` does; taken out again.
    """

    point: CurvaturePoint
    params: Sequence[Tensor]
    registry: Registry
    estimator: str
    samples: int
    seed: int
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        self._kept: tuple[Capture, Callable[[], Vectors]] | None = None
        self.used: set[int] = set()
        self.others: dict[int, set[str]] = {}

    def sweep(self, visitor: object) -> None:
        """Carry the vectors of the whole batch back to ``visitor.visit`` and ``visitor.visit_other``.

        One closure's graph is kept for the next sweep; of several, one at a time exists, and each runs again.
        """
        count = self.point.closures
        for number in range(count):
            capture, vectors = self._kept or self._run(number)
            if count == 1:
                self._kept = capture, vectors
            with torch.enable_grad(), self.point.derivatives():
                capture.sweep(vectors(), visitor.visit, visitor.visit_other)  # type: ignore[attr-defined]
            self.used |= capture.used
            for index, names in capture.others.items():
                self.others.setdefault(index, set()).update(names)

    def _run(self, number: int) -> tuple[Capture, Callable[[], Vectors]]:
        with Capture(self.params, self.registry) as capture, LossWatch() as watch:
            root = self.point.rerun(number).root
        losses = watch.find(root)
        if losses is None or not losses.exact or not all(closed_form(call) for call, _ in losses.terms):
            raise ValueError(NEEDS_LABELS)
        seed = self.seed + 1_000_003 * number
        return capture, partial(_vectors, losses, self.estimator, self.samples, seed, self.loss_scale)


def _vectors(losses: LossSum, estimator: str, samples: int, seed: int, loss_scale: float) -> Vectors:
    for call, scale in losses.terms:
        loss = closed_form(call)
        assert loss is not None
        generator = torch.Generator(call.outputs.device).manual_seed(seed)
        with torch.no_grad():
            for v in score_vectors(loss, scale / loss_scale, estimator, samples, generator):
                yield call.outputs, v
