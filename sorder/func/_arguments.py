"""What the products share: which arguments are differentiated, and checks on tangents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

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


def moving(name: str, f: Callable[..., Any], primals: Any, tangents: Any, argnums: Argnums) -> Moving:
    """Split ``primals`` by ``argnums``; raises TypeError or ValueError, naming the argument. ``name`` is that of f."""
    check_callable(name, f)
    if not isinstance(primals, tuple | list):
        raise TypeError(f"primals must be a tuple of the function's arguments, got {type(primals).__name__}")
    primals = tuple(primals)
    if not primals:
        raise ValueError("primals must hold at least one argument, got none")
    positions = _positions(argnums, len(primals))
    single = isinstance(argnums, int)
    if single:
        tangents = (tangents,)
    elif not isinstance(tangents, tuple | list):
        raise TypeError(
            f"tangents must be a tuple with an entry for each of {len(positions)} differentiated arguments, got "
            f"{type(tangents).__name__}; an int argnums takes one without the tuple"
        )
    selected = tuple(primals[i] for i in positions)
    for i, primal in zip(positions, selected, strict=True):
        if isinstance(primal, torch.nn.Module):
            raise TypeError(
                f"primals[{i}] must be tensors, got the module {type(primal).__name__}: pass "
                "dict(module.named_parameters()), and call the module by torch.func.functional_call"
            )
        if isinstance(primal, Iterator):
            raise TypeError(f"primals[{i}] must be tensors, got a {type(primal).__name__}: pass a list or a dict")
    tangents = _matching_tangents(selected, tuple(tangents), positions, single)

    def restricted(*values: Any) -> Any:
        arguments = list(primals)
        for i, value in zip(positions, values, strict=True):
            arguments[i] = value
        return f(*arguments)

    return Moving(restricted, selected, tangents, single)


def _positions(argnums: Any, count: int) -> tuple[int, ...]:
    if argnums is None:
        return tuple(range(count))
    numbers = tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise TypeError(f"argnums must be None, an int or a tuple of ints, got {argnums!r}")
    for n in numbers:
        if not -count <= n < count:
            raise ValueError(f"argnums must lie in [{-count}, {count}), got {n}")
    positions = tuple(n % count for n in numbers)
    if not positions or len(set(positions)) < len(positions):
        raise ValueError(f"argnums must name distinct arguments, at least one, got {argnums}")
    return positions


def _matching_tangents(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], positions: tuple[int, ...], single: bool
) -> tuple[Any, ...]:
    """``tangents`` in the structure of ``primals``; leaves are matched by their places, whatever a dict's order."""
    leaves, spec = tree_flatten_with_path(primals)
    given = {keystr(path): leaf for path, leaf in tree_flatten_with_path(tangents)[0]}
    places = [keystr(path) for path, _ in leaves]

    def name(place: str) -> str:
        # With an int argnums the tuple around the one tangent is ours.
        return "tangents" + (place.removeprefix("[0]") if single else place)

    if given.keys() != set(places):
        missing = [name(p) for p in places if p not in given]
        extra = [name(p) for p in given if p not in set(places)]
        parts = [f"{word} {_some(found)}" for word, found in (("missing", missing), ("unexpected", extra)) if found]
        hint = ""
        if single and isinstance(tangents[0], tuple) and len(tangents[0]) == 1:
            hint = "; with an int argnums tangents is the one pytree itself, not a tuple around it"
        raise ValueError(f"tangents must have the structure of the differentiated primals: {', '.join(parts)}{hint}")
    for place, (path, primal) in zip(places, leaves, strict=True):
        tangent = given[place]
        if not isinstance(primal, Tensor) or not primal.is_floating_point():
            number = positions[getattr(path[0], "idx", 0)]
            raise TypeError(
                f"primals[{number}]{keystr(path[1:])} must be a floating-point tensor, got {_kind(primal)}; leave what "
                "is not differentiated out by argnums"
            )
        if not isinstance(tangent, Tensor):
            raise TypeError(f"{name(place)} must be a tensor of shape {tuple(primal.shape)}, got {_kind(tangent)}")
        for what in ("shape", "dtype", "device"):
            want, got = getattr(primal, what), getattr(tangent, what)
            if want != got:
                want, got = (tuple(want), tuple(got)) if what == "shape" else (want, got)
                raise ValueError(f"{name(place)} must have the primal's {what} {want}, got {got}")
    return tuple(tree_unflatten([given[place] for place in places], spec))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _kind(value: Any) -> str:
    return f"one of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def check_callable(name: str, function: Any) -> None:
    """Raise TypeError unless ``function`` can be called."""
    if not callable(function):
        raise TypeError(f"{name} must be callable, got {type(function).__name__}")


def check_scalar(name: str, value: Any, hint: str = "") -> None:
    """Raise ValueError unless ``value`` is a real floating-point 0-dimensional tensor."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    if not isinstance(value, Tensor):
        got = type(value).__name__
    else:
        got = f"shape {tuple(value.shape)}" if value.dim() else str(value.dtype)
    raise ValueError(f"{name} must return a scalar tensor of floating-point numbers, got {got}{hint}")


def split_aux(name: str, returned: Any, has_aux: bool) -> tuple[Any, Any]:
    """(value, aux) of what ``name`` returned; aux is () without ``has_aux``."""
    if not has_aux:
        return returned, ()
    if not isinstance(returned, tuple) or len(returned) != 2:
        got = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise ValueError(f"with has_aux=True {name} must return a pair (value, aux), got {got}")
    return returned
