"""Hessians of torch's losses with respect to their input, as products in closed form.

A loss that is a sum over rows of −log p(y | z) has a block-diagonal Hessian in z. For softmax cross-entropy the
block of a row is m·(diag(p) − p pᵀ) with p = softmax(z) and m the row's weight (Schraudolph, *Fast curvature
matrix-vector products*, 2002), so that a product needs p and the tangent and no graph. It is computed in float32
at least, over blocks of rows: temporaries are a few blocks however large the vocabulary is.

``*_hvp`` are Hessian products. ``*_fvp`` are their one-sample estimates m·g gᵀu, with g the gradient of −log p(ŷ|z)
for labels ŷ drawn by ``sample_*_targets``; the mean over draws is the Hessian product, and the Fisher (Martens,
*New insights and perspectives on the natural gradient method*, JMLR 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22  # float32 temporaries of 16 MiB: they stay in a GPU's second-level cache


def cross_entropy_hvp(
    logits: Tensor,
    target: Tensor,
    tangent: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """∇²ₗ ``F.cross_entropy(logits, target, ...)`` · ``tangent``, with ``logits`` = l.

    Per row it is m·(p∘u − p·(pᵀu)); m is the row's total target mass times class weights, over the divisor of
    ``reduction``. It serves ``F.nll_loss`` as well, with log-probabilities as ``logits``: softmax(log p) = p, and the
    product then is the one with respect to the log-softmax's input.

    Args:
        logits: (C,), (N, C) or (N, C, d₁, …), any floating dtype.
        target: class indices, shaped like ``logits`` without C; or probabilities, shaped like ``logits``.
        tangent: u, shaped like ``logits``.
        weight: (C,) class weights. Default: ones.
        ignore_index: rows with this class index contribute nothing. Default −100.
        reduction: "mean" (default) or "sum".
        label_smoothing: in [0, 1]. Default 0.

    Returns:
        Tensor shaped like ``logits``, in its dtype.

    Raises:
        ValueError: shapes do not fit, or ``reduction`` is another.

    Example:
        >>> logits, target = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
        >>> cross_entropy_hvp(logits, target, torch.tensor([[1.0, 0.0]]))
        tensor([[ 0.2500, -0.2500]])
    """
    mass = _row_mass(logits, target, weight, ignore_index, reduction, label_smoothing)
    _check_shape("tangent", tangent, logits)
    dim = _class_dim(logits)

    def block(index: tuple[slice, ...]) -> Tensor:
        p = _softmax(logits[index], dim)
        pu = p * tangent[index]
        return (pu - p * pu.sum(dim, keepdim=True)) * mass[index]

    return _assemble(block, logits)


def cross_entropy_fvp(
    logits: Tensor,
    target: Tensor,
    tangent: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """One-sample estimate of :func:`cross_entropy_hvp`: per row m·g·(gᵀu) with g = p − onehot(label).

    Args:
        labels: class indices drawn by :func:`sample_cross_entropy_targets`; rows weigh what ``target`` says.
        logits, target, tangent, weight, ignore_index, reduction, label_smoothing: as in :func:`cross_entropy_hvp`.
    """
    mass = _row_mass(logits, target, weight, ignore_index, reduction, label_smoothing)
    _check_shape("tangent", tangent, logits)
    dim = _class_dim(logits)
    # Rows of weight zero may carry ignore_index, which is no index to gather with.
    hot = torch.where(mass.squeeze(dim) == 0, 0, labels).unsqueeze(dim)

    def block(index: tuple[slice, ...]) -> Tensor:
        p, u, y = _softmax(logits[index], dim), tangent[index], hot[index]
        gu = ((p * u).sum(dim, keepdim=True) - u.gather(dim, y)) * mass[index]
        return (p * gu).scatter_add(dim, y, -gu)

    return _assemble(block, logits)


def mse_hvp(
    input: Tensor,
    target: Tensor,
    tangent: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Hessian of ``F.mse_loss(input, target, ...)`` in ``input`` times ``tangent``: 2·weight∘u over the divisor.

    Args:
        input: predictions, any shape. target: broadcastable with ``input``; not used beyond its shape.
        tangent: u, shaped like ``input``. weight: None or shaped like ``input``. reduction: "mean" or "sum".
    """
    _check_shape("tangent", tangent, input)
    return (_mse_mass(input, target, weight, reduction) * tangent).to(input.dtype)


def mse_fvp(
    input: Tensor,
    target: Tensor,
    tangent: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """One-sample estimate of :func:`mse_hvp`, of rank one per entry of the first dimension.

    With labels ŷ = input + ε/√2 (:func:`sample_mse_targets`), g = √m∘ε is the gradient of a row whose Hessian has
    diagonal m, and E[g gᵀ] = diag(m).
    """
    noise = (labels.to(_wide(labels.dtype)) - input) * 2.0**0.5
    return _rank_one(_mse_mass(input, target, weight, reduction).sqrt() * noise, tangent).to(input.dtype)


def bce_with_logits_hvp(
    logits: Tensor,
    target: Tensor,
    tangent: Tensor,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Hessian of ``F.binary_cross_entropy_with_logits`` in ``logits`` times ``tangent``.

    It is diagonal: weight·σ(1 − σ)·(1 − y + pos_weight·y) over the divisor, with σ the sigmoid of ``logits``.

    Args:
        logits, target, tangent: of one shape. weight, pos_weight: broadcastable to it. reduction: "mean" or "sum".
    """
    _check_shape("tangent", tangent, logits)
    sigma = torch.sigmoid(logits.to(_wide(logits.dtype)))
    mass = _bce_mass(logits, target, weight, pos_weight, reduction)
    return (mass * sigma * (1.0 - sigma) * tangent).to(logits.dtype)


def bce_with_logits_fvp(
    logits: Tensor,
    target: Tensor,
    tangent: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """One-sample estimate of :func:`bce_with_logits_hvp`, of rank one per entry of the first dimension.

    g = √m∘(σ − ŷ) with labels ŷ from :func:`sample_bce_with_logits_targets`, and E[g gᵀ] = diag(m σ(1 − σ)).
    """
    sigma = torch.sigmoid(logits.to(_wide(logits.dtype)))
    mass = _bce_mass(logits, target, weight, pos_weight, reduction)
    return _rank_one(mass.sqrt() * (sigma - labels), tangent).to(logits.dtype)


def sample_cross_entropy_targets(
    logits: Tensor,
    like_target: Tensor,
    generator: torch.Generator | None = None,
    *,
    ignore_index: int = -100,
) -> Tensor:
    """Class indices drawn from softmax(``logits``), shaped like ``logits`` without C.

    Where ``like_target`` holds class indices, rows that it ignores stay ``ignore_index``. The draw is the argmax of
    p/E with E exponential variates, which needs no cumulative sum over the classes.
    """
    dim = _class_dim(logits)
    labels = torch.empty(logits.select(dim, 0).shape, dtype=torch.int64, device=logits.device)
    for index in _blocks(logits.shape, dim):
        p = _softmax(logits.detach()[index], dim)
        rows = index[:dim] + index[dim + 1 :]
        labels[rows] = (p / torch.empty_like(p).exponential_(generator=generator)).argmax(dim)
    if like_target.shape == logits.shape:
        return labels
    return torch.where(like_target == ignore_index, like_target, labels)


def sample_mse_targets(input: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws from the Gaussian whose −log density is the squared error: mean ``input``, variance ½."""
    wide = input.detach().to(_wide(input.dtype))
    noise = torch.empty_like(wide).normal_(generator=generator)
    return wide + noise * 0.5**0.5


def sample_bce_with_logits_targets(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Zeros and ones drawn with probability sigmoid(``logits``)."""
    return torch.bernoulli(torch.sigmoid(logits.detach().to(_wide(logits.dtype))), generator=generator)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _class_dim(logits: Tensor) -> int:
    return 0 if logits.dim() == 1 else 1


def _softmax(logits: Tensor, dim: int) -> Tensor:
    return torch.softmax(logits, dim, dtype=_wide(logits.dtype))


def _check_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(f"{name} must have shape {tuple(like.shape)}, got {tuple(tensor.shape)}")


def _divisor(reduction: str, mean: Tensor | int) -> Tensor | int:
    if reduction == "mean":
        return mean
    if reduction == "sum":
        return 1
    raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")


def _row_mass(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """m of each row: Σ_c weight_c·(smoothed target)_c over the divisor; C kept as a dimension of size one."""
    dim, dtype = _class_dim(logits), _wide(logits.dtype)
    classes = logits.shape[dim]
    rows = logits.shape[:dim] + logits.shape[dim + 1 :]
    if weight is not None:
        weight = weight.to(dtype)
    if target.shape == logits.shape and target.is_floating_point():
        per_class = torch.ones(classes, dtype=dtype, device=logits.device) if weight is None else weight
        mass = torch.tensordot(target.to(dtype), per_class, ([dim], [0]))
        mass = mass * (1.0 - label_smoothing) + label_smoothing * per_class.sum() / classes
        return (mass / _divisor(reduction, max(1, prod(rows)))).unsqueeze(dim)
    if target.shape != rows:
        raise ValueError(
            f"target must have shape {tuple(rows)} (class indices) or {tuple(logits.shape)} (probabilities), "
            f"got {tuple(target.shape)} of {target.dtype}"
        )
    seen = target != ignore_index
    if weight is None:
        mass = seen.to(dtype)
        return (mass / _divisor(reduction, _or_one(mass.sum()))).unsqueeze(dim)
    own = torch.where(seen, weight[torch.where(seen, target, 0)], 0.0)
    mass = own * (1.0 - label_smoothing) + seen * (label_smoothing * weight.sum() / classes)
    return (mass / _divisor(reduction, _or_one(own.sum()))).unsqueeze(dim)


def _or_one(total: Tensor) -> Tensor:
    """``total``, or 1 where it is 0: rows of which none counts have no mass, rather than 0/0."""
    return torch.where(total == 0, 1, total)


def _mse_mass(input: Tensor, target: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """Diagonal of the Hessian, shaped like ``input`` or a scalar."""
    dtype = _wide(input.dtype)
    shape = torch.broadcast_shapes(input.shape, target.shape)
    # An input that broadcasting repeats r times is counted r times.
    repeats = prod(shape) // max(1, input.numel())
    if weight is None:
        scale = torch.tensor(2.0 * repeats, dtype=dtype, device=input.device)
        return scale / _divisor(reduction, max(1, prod(shape)))
    return 2.0 * repeats * weight.to(dtype) / _divisor(reduction, weight.sum())


def _bce_mass(
    logits: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: str
) -> Tensor:
    _check_shape("target", target, logits)
    target = target.to(_wide(logits.dtype))
    mass = torch.ones_like(target) if pos_weight is None else 1.0 - target + pos_weight * target
    if weight is not None:
        mass = mass * weight
    return mass / _divisor(reduction, max(1, logits.numel()))


def _rank_one(g: Tensor, tangent: Tensor) -> Tensor:
    """g·(gᵀu) with the inner product over all dimensions but the first."""
    _check_shape("tangent", tangent, g)
    dims = tuple(range(1, g.dim()))
    gu = g * tangent
    return g * (gu.sum(dims, keepdim=True) if dims else gu)


def _blocks(shape: torch.Size, class_dim: int) -> Iterator[tuple[slice, ...]]:
    """Slices that cut ``shape``, the class dimension kept whole, into blocks of few elements."""
    steps = [max(1, size) for size in shape]
    for dim in range(len(shape)):
        size = prod(steps)
        if dim != class_dim and size > _BLOCK_ELEMENTS:
            steps[dim] = max(1, steps[dim] * _BLOCK_ELEMENTS // size)
    starts = (range(0, size, step) for size, step in zip(shape, steps, strict=True))
    for corner in product(*starts):
        yield tuple(slice(a, a + step) for a, step in zip(corner, steps, strict=True))


def _assemble(block: Callable[[tuple[slice, ...]], Tensor], logits: Tensor) -> Tensor:
    """The blocks' results joined into one tensor like ``logits``."""
    indices = list(_blocks(logits.shape, _class_dim(logits)))
    if not indices:
        return torch.empty_like(logits)
    first = block(indices[0]).to(logits.dtype)
    if len(indices) == 1:
        return first
    # new_empty of a block's result, so that under vmap the output is batched wherever a block is.
    out = first.new_empty(logits.shape)
    out[indices[0]] = first
    for index in indices[1:]:
        out[index] = block(index).to(logits.dtype)
    return out
