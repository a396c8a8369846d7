"""Vectors v at a model's outputs whose outer products make up the curvature of its loss there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sorder.func.loss_call import LossCall
from sorder.func.output_hessian import _bce_mass, _class_dim, _mse_mass, _row_mass, _softmax, _wide

ESTIMATORS = ("mc", "type-2", "empirical")


def score_vectors(
    loss: LossCall, scale: float, estimator: str, samples: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Vectors v, each shaped like the outputs z, with Σ vvᵀ = scale·∇²ℓ in expectation, row by row.

    ``loss`` is a sum over rows of −m·log p(y | z), with m what a row weighs. The vectors are

    - "mc": √m times the score of labels drawn from p, ``samples`` of them (each over √samples): E[Σ vvᵀ] = ∇²ℓ;
    - "type-2": the columns of an exact square root of ∇²ℓ, as many as a row has outputs: √(m p_c)·(e_c − p) for
      softmax cross-entropy (Martens & Sutskever 2012; Dangel et al., *BackPACK*, 2020);
    - "empirical": √m times the score of the labels at hand, one.

    Rows are to count as independent, as they do under the likelihood, though one backward pass carries them all: where
    a network mixes rows (positions of a sequence do so in attention), cross terms must vanish. Scores of sampled labels
    are independent with mean zero; the other two get a random sign per row. Where rows do not mix the signs cancel.
    """
    z = loss.input
    root = abs(scale) ** 0.5
    if estimator == "type-2":
        vectors = _columns(loss)
    elif estimator == "empirical":
        vectors = iter([_score(loss, loss.target)])
    else:
        vectors = (_score(loss, loss.sample(generator)) / samples**0.5 for _ in range(samples))
    for v in vectors:
        if estimator != "mc":
            v = v * _signs(loss, generator)
        yield (root * v).to(z.dtype)


def _signs(loss: LossCall, generator: torch.Generator) -> Tensor:
    """±1 for each row, broadcastable with the outputs."""
    z = loss.input
    shape = list(z.shape)
    if _is_classes(loss):
        shape[_class_dim(z)] = 1
    elif z.dim() > 1:
        shape[-1] = 1
    signs = torch.empty(shape, dtype=_wide(z.dtype), device=z.device)
    return signs.bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)


def _is_classes(loss: LossCall) -> bool:
    return loss.name in ("cross_entropy", "nll_loss")


def _masses(loss: LossCall) -> Tensor:
    """Weight of every row (classes), or of every entry (square loss and binary cross-entropy)."""
    z, target, options = loss.input, loss.target, loss.options
    reduction = options.get("reduction", "mean")
    if _is_classes(loss):
        ignored, smoothing = options.get("ignore_index", -100), options.get("label_smoothing", 0.0)
        return _row_mass(z, target, options.get("weight"), ignored, reduction, smoothing)
    if loss.name == "mse_loss":
        mass = _mse_mass(z, target, options.get("weight"), reduction)
    else:
        mass = _bce_mass(z, target, options.get("weight"), options.get("pos_weight"), reduction)
    return mass.expand(z.shape)


def _score(loss: LossCall, labels: Tensor) -> Tensor:
    """√m·∇(−log p(label | z)) of every row, shaped like the outputs."""
    z, root = loss.input, _masses(loss).sqrt()
    if _is_classes(loss):
        dim, p = _class_dim(z), _softmax(z, _class_dim(z))
        if labels.shape == z.shape and labels.is_floating_point():
            return root * (p - labels)
        # Rows of weight zero may carry ignore_index, which is no class.
        hot = torch.where(root.squeeze(dim) == 0, 0, labels).unsqueeze(dim)
        return root * p.scatter_add(dim, hot, -torch.ones_like(p))
    wide = z.to(_wide(z.dtype))
    if loss.name == "mse_loss":
        # −log p of a Gaussian of variance ½ per unit of m/2.
        return root * (wide - labels) * 2.0**0.5
    return root * (torch.sigmoid(wide) - labels)


def _columns(loss: LossCall) -> Iterator[Tensor]:
    """Columns of a square root of every row's Hessian."""
    z, mass = loss.input, _masses(loss)
    if _is_classes(loss):
        dim, p = _class_dim(z), _softmax(z, _class_dim(z))
        for c in range(z.shape[dim]):
            root = (mass * p.narrow(dim, c, 1)).sqrt()
            column = -p * root
            column.narrow(dim, c, 1).add_(root)
            yield column
        return
    if loss.name != "mse_loss":
        sigma = torch.sigmoid(z.to(_wide(z.dtype)))
        mass = mass * sigma * (1.0 - sigma)
    root = mass.sqrt()
    for c in range(z.shape[-1] if z.dim() > 1 else 1):
        column = torch.zeros_like(root, memory_format=torch.contiguous_format)
        (column if z.dim() <= 1 else column.select(-1, c)).copy_(root if z.dim() <= 1 else root.select(-1, c))
        yield column
