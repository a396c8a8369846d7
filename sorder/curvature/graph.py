"""Looks through an autograd graph for what would make second derivatives silently wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from sorder.curvature.errors import CurvatureError, MissingDerivativeError, remedy, warn_once


def nodes(root: Tensor) -> Iterator[Any]:
    """Every node of the graph of ``root``, once."""
    seen, queue = set(), [root.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        queue.extend(parent for parent, _ in node.next_functions)


def python_nodes(root: Tensor) -> list[Any]:
    """Nodes of ``autograd.Function`` classes in the graph of ``root``."""
    return [node for node in nodes(root) if isinstance(node, BackwardCFunction)]


def coarsest_eps(root: Tensor) -> float:
    """The largest machine epsilon of what the graph of ``root`` computes, such as of an autocast region inside."""
    dtypes = {root.dtype} | {output.dtype for node in nodes(root) for output in node._input_metadata}
    return max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)


def names(functions: Sequence[Any]) -> list[str]:
    """Names of the classes behind the nodes ``functions``."""
    return sorted({type(node).__name__.removesuffix("Backward") for node in functions})


def refuse_reentrant_checkpoints(functions: Sequence[Any]) -> None:
    """CurvatureError if there is one: the parameters inside are not in the graph, and would count as unused."""
    if any(getattr(type(node), "_forward_cls", None) is CheckpointFunction for node in functions):
        operation = "torch.utils.checkpoint with use_reentrant=True"
        raise CurvatureError(f"{operation} hides parameters from the graph. Remedy: {remedy(operation)}.")


@contextmanager
def watch_for_cuts(functions: Sequence[Any]) -> Iterator[None]:
    """Context of a backward pass with ``create_graph=True``: finds Functions whose backward leaves no graph.

    ``once_differentiable`` and backwards that detach give gradients that are constant to autograd, and their part of
    the Hessian would be zero. Where the incoming gradient is differentiable and the outgoing one is not, the graph is
    cut. Where neither is, the Function may be linear, and a warning says that it is taken to be.

    Raises:
        MissingDerivativeError: (on leaving) a Function cuts the graph.
    """
    cut: list[str] = []

    def attach(node: Any) -> Any:
        (name,) = names([node])

        def look(outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
            if any(g is not None and g.requires_grad for g in outgoing):
                return
            if _is_once_differentiable(node) or any(g is not None and g.requires_grad for g in incoming):
                cut.append(f"autograd.Function {name}")
            else:
                warn_once(
                    f"linear {name}",
                    f"the backward of autograd.Function {name} gives a gradient without graph, so {name} counts as "
                    "linear in curvature products. If it is not, write its backward in differentiable operations.",
                )

        return node.register_hook(look)

    handles = [attach(node) for node in functions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if cut:
        raise MissingDerivativeError(cut[0])


def _is_once_differentiable(node: Any) -> bool:
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    code = getattr(backward, "__code__", None)
    return code is not None and code.co_filename == torch.autograd.function.__file__
