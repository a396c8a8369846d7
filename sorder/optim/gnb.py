"""The loss with sampled labels whose squared gradient estimates the diagonal of the Gauss–Newton matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gnb_loss(
    logits: Tensor, *, keep: Tensor | None = None, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of labels drawn from the model, and the number of rows it is summed over.

    What :class:`sorder.optim.SophiaG` takes its curvature from (Gauss–Newton–Bartlett; Liu et al. 2023, algorithm 2).
    Squaring the gradient of a *mean* needs a factor of the batch size, which depends on how a batch is split; a sum
    and a count add up over micro-batches, so that the estimate does not depend on the split.

    Args:
        logits: (..., C), unnormalised log-probabilities of C classes; every row is one prediction.
        keep: (...), bool: the rows that count, as padding does not. Default: all.
        generator: of the labels. Default None: torch's global one, which SophiaG seeds for an update and puts back.

    Returns:
        The sum, a scalar with its graph, and the count of rows, a 0-dimensional integer tensor.

    Raises:
        TypeError: ``logits`` is no tensor.
        ValueError: ``logits`` has no class, or ``keep`` does not fit.

    Example:
        >>> logits = torch.zeros(4, 3, requires_grad=True)
        >>> loss, rows = gnb_loss(logits)
        >>> round(loss.item(), 3), int(rows)
        (4.394, 4)
    """
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"logits must be a tensor of shape (..., C), got {type(logits).__name__}: pass the model's logits (a "
            "Hugging Face model's output has them in its attribute .logits)"
        )
    if logits.dim() < 1 or not logits.shape[-1] or not logits.is_floating_point():
        raise ValueError(f"logits must be floating-point of shape (..., C), got {logits.dtype} {tuple(logits.shape)}")
    if keep is not None and (keep.shape != logits.shape[:-1] or keep.dtype != torch.bool):
        raise ValueError(
            f"keep must be bool of shape {tuple(logits.shape[:-1])}, got {keep.dtype} of shape {tuple(keep.shape)}"
        )
    rows = logits.reshape(-1, logits.shape[-1])
    if keep is not None:
        rows = rows[keep.reshape(-1)]
    # 16-bit probabilities would not sum to one.
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    with torch.no_grad():
        # Of C exponential clocks, that of rate p rings first with probability p. Unlike multinomial, this lets NaN
        # through to the loss, where an optimizer finds it.
        clocks = torch.empty_like(rows).exponential_(generator=generator)
        labels = (rows.softmax(-1) / clocks).argmax(-1)
    loss = F.cross_entropy(rows, labels, reduction="sum")
    return loss, torch.tensor(len(rows), device=logits.device)
