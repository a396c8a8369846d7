"""What the four maps are told about which scores exist, besides ``spec.causal``: row ranges, masks, slopes, a seed."""

from __future__ import annotations

from typing import NamedTuple

import torch

HIDING_BIAS = -1e6
"""A bias at or below this hides its key as −∞ does.

Masks are often written as −1e9 or as the dtype's least number. No such key has weight beside a visible one, and where
a row has no other, a log-sum-exp of that size would leave its derivatives no digits.
"""


class Visibility(NamedTuple):
    """Tensors on the query's device that no derivative is taken of; each may be absent. A score exists where all agree.

    Attributes:
        start, stop: int32, expanded to (..., Nq) = ``q.shape[:-1]`` (strides may be 0): row i sees the keys
            start_i ≤ j < stop_i, none if stop_i ≤ start_i. 0 ≤ start, stop ≤ Nk. Both or neither.
        shown: bool, expanded to (..., Nq, Nk): for masks that are no interval.
        slopes: float32, expanded to ``q.shape[:-2]``: adds slope · (j − i) to the scores (ALiBi).
        seed: int64 (2,): key and counter words of the dropout generator, see :func:`sorder.kernels.philox.dropped`.
    """

    start: torch.Tensor | None = None
    stop: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    seed: torch.Tensor | None = None


NOTHING = Visibility()
