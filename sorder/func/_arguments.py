"""What the products share: which arguments are differentiated, and checks on tangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

Argnums = int | Sequence[int] | None


@dataclass(frozen=True)
class Moving:
    """The differentiated arguments of a call ``f(*primals)``.

    Attributes:
        function: ``f`` of the differentiated arguments alone.
        primals: these arguments.
        tangents: their tangents.
        single: whether ``argnums`` was an int, so that results are not tuples.
    """

    function: Callable[..., Any]
    primals: tuple[Any, ...]
    tangents: tuple[Any, ...]
    single: bool

    def result(self, tree: tuple[Any, ...]) -> Any:
        """``tree``, one entry per differentiated argument, in the form that ``argnums`` asks for."""
        return tree[0] if self.single else tree


def moving(f: Callable[..., Any], primals: Any, tangents: Any, argnums: Argnums) -> Moving:
    """Split ``primals`` by ``argnums``; raises TypeError or ValueError, naming the argument."""
    if not isinstance(primals, tuple | list):
        raise TypeError(f"primals must be a tuple of the function's arguments, got {type(primals).__name__}")
    primals = tuple(primals)
    single = isinstance(argnums, int)
    if argnums is None:
        positions = tuple(range(len(primals)))
    else:
        positions = tuple(_position(n, len(primals)) for n in ([argnums] if isinstance(argnums, int) else argnums))
    if not positions or len(set(positions)) < len(positions):
        raise ValueError(f"argnums must name distinct arguments, at least one, got {argnums}")
    if single:
        tangents = (tangents,)
    elif not isinstance(tangents, tuple | list):
        raise TypeError(f"tangents must be a tuple like the primals, got {type(tangents).__name__}")
    selected = tuple(primals[i] for i in positions)
    tangents = tuple(tangents)
    _check_tangents(selected, tangents)

    def restricted(*values: Any) -> Any:
        arguments = list(primals)
        for i, value in zip(positions, values, strict=True):
            arguments[i] = value
        return f(*arguments)

    return Moving(restricted, selected, tangents, single)


def _position(argnum: int, count: int) -> int:
    if not -count <= argnum < count:
        raise ValueError(f"argnums must lie in [{-count}, {count}), got {argnum}")
    return argnum % count


def _check_tangents(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> None:
    primal_leaves, primal_spec = tree_flatten(primals)
    leaves, spec = tree_flatten(tangents)
    if spec != primal_spec:
        raise ValueError(f"tangents must have the structure of the primals, {primal_spec}, got {spec}")
    for index, (primal, tangent) in enumerate(zip(primal_leaves, leaves, strict=True)):
        if not isinstance(primal, Tensor) or not primal.is_floating_point():
            got = str(primal.dtype) if isinstance(primal, Tensor) else type(primal).__name__
            raise TypeError(
                f"primals: leaf {index} must be a floating-point tensor, got {got}; leave it out by argnums"
            )
        if not isinstance(tangent, Tensor) or tangent.shape != primal.shape:
            got = str(tuple(tangent.shape)) if isinstance(tangent, Tensor) else type(tangent).__name__
            raise ValueError(f"tangents: leaf {index} must have shape {tuple(primal.shape)}, got {got}")


def check_scalar(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a 0-dimensional tensor."""
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must return a scalar tensor, got {got}")
