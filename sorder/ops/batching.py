"""``vmap`` of the four maps: the mapped axis becomes one more leading dimension, or a loop where there is dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sorder.kernels.mask import Visibility


def batched(run: Callable[..., Any], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...], loop: bool) -> Any:
    """``run`` over a mapped axis of ``size``; its outputs (a tuple or list, ``None`` where absent) have it in front.

    Args:
        run: takes ``args``, one of the maps. What is not mapped is expanded without a copy.
        loop: one element after the other: dropout's counter is a head's number, so that elements that share one seed
            drop the same entries only each by itself.
    """
    if not loop:
        return run(*(_in_front(x, dim, size) for x, dim in zip(args, in_dims, strict=True)))
    outputs = [run(*(_element(x, dim, i) for x, dim in zip(args, in_dims, strict=True))) for i in range(size)]
    columns = zip(*outputs, strict=True)
    return type(outputs[0])([None if column[0] is None else torch.stack(column) for column in columns])


def _in_front(x: Any, dim: Any, size: int) -> Any:
    if isinstance(x, Visibility):
        return Visibility(*(_in_front(*pair, size) for pair in zip(x, dim, strict=True)))
    if not isinstance(x, torch.Tensor):
        return x
    return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _element(x: Any, dim: Any, index: int) -> Any:
    if isinstance(x, Visibility):
        return Visibility(*(_element(*pair, index) for pair in zip(x, dim, strict=True)))
    return x if dim is None else x.select(dim, index)


def legacy_rule(operator: Callable[..., Any], loop: Callable[[tuple[Any, ...]], bool]) -> Callable[..., Any]:
    """``operator``'s rule for the vmap inside ``torch.autograd.grad(is_grads_batched=True)``, which knows no others."""

    def rule(*args: Any) -> Any:
        return over_legacy_dim(operator, args, loop(args))

    return rule


def has_legacy_dim(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(x) for x in args)


def over_legacy_dim(run: Callable[..., Any], args: tuple[Any, ...], loop: bool) -> Any:
    """:func:`batched` over the dimension that the vmap of ``is_grads_batched=True`` hides in ``args``."""
    torch._C._vmapmode_increment_nesting()
    level = torch._C._vmapmode_decrement_nesting()  # of the vmap that is running
    split = [_without_legacy_dim(x, level) for x in args]
    size = next(size for _, size in split if size is not None)
    in_dims = tuple((None,) * len(x) if isinstance(x, Visibility) else None if n is None else 0 for x, n in split)
    outputs = batched(run, size, in_dims, tuple(x for x, _ in split), loop)
    return type(outputs)([None if x is None else torch._add_batch_dim(x, 0, level) for x in outputs])


def _without_legacy_dim(x: Any, level: int) -> tuple[Any, int | None]:
    """``x`` with the mapped dimension in front, and its size, which is ``None`` if ``x`` has none at this level."""
    if not isinstance(x, torch.Tensor) or not torch._C._functorch.is_legacy_batchedtensor(x):
        return x, None
    try:
        plain = torch._remove_batch_dim(x, level, -1, 0)
    except RuntimeError:  # mapped by an outer vmap only
        return x, None
    return plain, plain.shape[0]
