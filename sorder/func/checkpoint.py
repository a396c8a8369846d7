"""Activation checkpointing that composes with every ``torch.func`` transform."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import _is_torch_function_mode_enabled
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_unflatten

from sorder.func.ambient import Ambient, FirstCallMode
from sorder.func.recompute import recompute
from sorder.ops.memo import Memo
from sorder.ops.versions import version_of

_F = TypeVar("_F", bound=Callable[..., Any])

# These update their buffers without raising the version counter.
_MOVE_STATISTICS = (
    F.batch_norm,
    F.instance_norm,
    torch.batch_norm,
    torch.instance_norm,
    torch.native_batch_norm,
)


def checkpoint(function: _F, *, preserve_rng_state: bool = True) -> _F:
    """``function``, recomputed instead of remembered when it is differentiated.

    The value and all derivatives are those of ``function``. A graph keeps only what went in: tensor arguments and
    parameters. It composes with ``backward``, ``create_graph=True``, ``torch.func``'s ``grad``, ``vjp``, ``jvp``,
    ``vmap`` and ``linearize`` in any nesting and order (third derivatives too), with live tangents in
    ``torch.autograd.forward_ad.dual_level``, and with itself. Under ``jvp(grad(...))`` one block's dual activations
    exist at a time. ``torch.utils.checkpoint`` fails under ``torch.func.grad``, which refuses saved-tensor hooks.

    Recomputation replays the random state (dropout draws the same mask), autocast, and the torch-function modes
    of the first call. Buffers that a call moves (batch norm's statistics) move once; a nested checkpoint around such
    a module is refused by ``torch.func``. Variables of a closure are bound when the checkpointed function is called.

    What ``function`` depends on must be visible as an argument. Tensors in ``args`` and ``kwargs``, at any depth of
    pytree, are; so are the parameters and buffers of a ``torch.nn.Module`` that ``function`` is, is a method of, or
    holds in its closure, defaults or ``functools.partial`` arguments. A gradient for any other tensor would be lost:
    meeting one raises. Hold the block in the closure rather than the whole model, since each parameter in sight gets
    a gradient from each call, zero or not.

    Under ``jvp(grad(...))`` a block is evaluated forward once plainly and once with tangents, and again, with its
    pullback, once plainly and once with tangents: about twice the products without checkpoint. Where the gradient's
    graph is not recorded, as in :func:`sorder.func.hvp`, the pullback's evaluation with tangents does by itself. Of
    large :func:`sorder.attention` the graph keeps the output then, so that its value and, rounding permitting, its
    pullback are computed once.

    Args:
        function: module or callable; pytrees in and out, other arguments pass through. Its result may not depend
            on what changes between calls, the random state apart.
        preserve_rng_state: replay the default generators of the CPU and of the tensors' devices. Default True.

    Raises:
        RuntimeError: ``function`` uses a tensor that is differentiated but is not visible as above, or writes to an
            argument that is differentiated; or it draws random numbers under ``linearize``, whose graph cannot replay.

    Example:
        >>> W = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
        >>> block = checkpoint(lambda W, h: torch.tanh(h @ W))
        >>> loss = lambda W: block(W, torch.ones(1, 2)).sum()
        >>> torch.func.jvp(torch.func.grad(loss), (W,), (torch.ones(2, 2),))[1].shape
        torch.Size([2, 2])

        A module's parameters need no mention:

        >>> layer = torch.nn.Linear(2, 2)
        >>> checkpoint(layer)(torch.ones(1, 2)).sum().backward()
        >>> layer.weight.grad
        tensor([[1., 1.],
                [1., 1.]])
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")

    @functools.wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        call = _Call(function, leaves, spec, preserve_rng_state)
        result = call.rebuild(recompute(call, *call.tensors()))
        call.refuse_written(leaves)
        return result

    return checkpointed  # type: ignore[return-value]


class _Call:
    """One call of a function as a map from tensors (its modules' parameters, its tensor arguments) to tensors."""

    def __init__(
        self, function: Callable[..., Any], leaves: list[Any], spec: TreeSpec, preserve_rng_state: bool
    ) -> None:
        self._function = function
        self._spec = spec
        self._static = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._modules = nn.ModuleList(_unique(_modules_of(function)))
        parameters: dict[str, Tensor] = dict(self._modules.named_parameters())
        # A buffer is a constant unless a transform holds it, as it does in an ensemble under vmap.
        buffers = dict(self._modules.named_buffers())
        parameters.update({name: b for name, b in buffers.items() if _is_differentiated(b, -1, True)})
        self._constants = {name: b for name, b in buffers.items() if name not in parameters}
        self._moved: dict[str, Tensor] = {}
        self._written: list[int] = []
        self._names = list(parameters)
        # A mode that replaces parameters sees tensor methods, but not the Function that they are about to enter.
        visible = _is_torch_function_mode_enabled()
        self._inputs = [p.view_as(p) if visible else p for p in parameters.values()]
        self._inputs += [leaves[i] for i in self._positions]
        self._ambient = Ambient(self._inputs, preserve_rng_state)
        self._recorded = torch.is_grad_enabled()
        self._first = True
        self.memo = Memo()
        self._out_spec: TreeSpec | None = None
        self._out_static: list[Any] = []

    def tensors(self) -> list[Tensor]:
        """The map's inputs; given away, so that only the graph keeps them alive."""
        inputs, self._inputs = self._inputs, []
        return inputs

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._first:
            self._first = False
            before = {name: b.clone() for name, b in self._constants.items()}
            versions = {name: version_of(b) for name, b in self._constants.items()}
            # Detached, so that within the call whatever a derivative tracks came by another way.
            tensors = tuple(tensor.detach() for tensor in tensors)
            arguments = tensors[len(self._names) :]
            unwritten = [version_of(x) for x in arguments]
            watch = _Watch(self._recorded)
            with self._ambient.autocast(), self._ambient.modes(), watch:
                outputs = self._run(self._function, tensors, {})  # with the buffers themselves: they may be replaced
            self._refuse_traced_draws()
            present = dict(self._modules.named_buffers())
            for name, buffer in self._constants.items():
                kept = present.get(name) is buffer and version_of(buffer) == versions[name]
                if not kept or id(buffer) in watch.statistics:
                    self._moved[name] = before[name]
            same = [version_of(x) == v for x, v in zip(arguments, unwritten, strict=True)]
            self._written = [i for i, kept in zip(self._positions, same, strict=True) if not kept]
            # Later calls must not see a closure's variables rebound, as a loop over blocks rebinds its own.
            self._function = _freeze(self._function)
        else:
            moved = {name: buffer.clone() for name, buffer in self._moved.items()}
            with self._ambient.replay():
                outputs = self._run(self._function, tensors, {**self._constants, **moved})
        leaves, self._out_spec = tree_flatten(outputs)
        self._out_static = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._out_positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return tuple(leaves[i] for i in self._out_positions)

    def _run(self, function: Callable[..., Any], tensors: tuple[Tensor, ...], constants: dict[str, Tensor]) -> Any:
        count = len(self._names)
        state = {**constants, **dict(zip(self._names, tensors[:count], strict=True))}
        leaves = list(self._static)
        for i, tensor in zip(self._positions, tensors[count:], strict=True):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        if not len(self._modules):
            return function(*args, **kwargs)
        return torch.func.functional_call(_Holder(self._modules, function), state, args, kwargs)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> Any:
        """The function's result from the map's."""
        assert self._out_spec is not None
        leaves = list(self._out_static)
        for i, tensor in zip(self._out_positions, tensors, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, self._out_spec)

    def _refuse_traced_draws(self) -> None:
        if get_proxy_mode() is None:
            return
        with _disable_current_modes():
            if self._ambient.has_drawn():
                raise RuntimeError(
                    "checkpoint: the function draws random numbers, which a graph that torch.func.linearize or make_fx "
                    "traces cannot draw a second time. Trace it without checkpoint, or without dropout."
                )

    def refuse_written(self, leaves: Sequence[Any]) -> None:
        """Raises if the call wrote to one of its arguments ``leaves`` of which a derivative is taken."""
        for i in self._written:
            if _is_differentiated(leaves[i], -1, self._recorded):
                raise RuntimeError(
                    f"checkpoint: the function writes to its argument of shape {tuple(leaves[i].shape)}, which is "
                    "being differentiated; the derivative could not follow. Let it write to a clone."
                )


class _Holder(nn.Module):
    """Gives ``functional_call`` the modules that a plain function uses, under the names of a ``ModuleList``."""

    def __init__(self, modules: nn.ModuleList, function: Callable[..., Any]) -> None:
        super().__init__()
        self._modules.update(modules._modules)
        object.__setattr__(self, "function", function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        function: Any = self.function
        return function(*args, **kwargs)


class _Watch(FirstCallMode):
    """Watches a first call: raises where a derivative would be lost, and notes the running statistics it moves.

    A derivative is lost where a tensor that it tracks enters an operation: arguments come detached.
    """

    def __init__(self, recorded: bool) -> None:
        super().__init__()
        self._recorded = recorded
        self.statistics: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A nested region that turns gradients on records tensors of its own.
        recorded = self._recorded and not torch.is_grad_enabled()
        level = torch._C._functorch.maybe_current_level() or 0
        for leaf in tree_iter((args, kwargs)):
            if not isinstance(leaf, Tensor):
                continue
            if func in _MOVE_STATISTICS:
                self.statistics.add(id(leaf))
            if _is_differentiated(leaf, level, recorded):
                raise RuntimeError(
                    f"checkpoint: the function uses a tensor of shape {tuple(leaf.shape)} that is being "
                    "differentiated but is neither an argument nor a parameter of a module in its closure; its "
                    "gradient would be lost. Pass it as an argument."
                )
        return func(*args, **kwargs)


def _is_differentiated(tensor: Tensor, level: int, recorded: bool) -> bool:
    """Whether a transform above ``level`` wraps ``tensor``, it has a tangent, or, if ``recorded``, autograd has it."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return torch._C._functorch.maybe_get_level(tensor) > level
    if recorded and tensor.requires_grad:
        return True
    if forward_ad._current_level < 0:
        return False
    # A Function's forward hides tangents, and a tracer would dispatch the look as an operation.
    with _disable_current_modes(), forward_ad._set_fwd_grad_enabled(True):
        return forward_ad.unpack_dual(tensor).tangent is not None


def _modules_of(function: Any) -> Iterator[nn.Module]:
    """Modules that ``function`` is, is bound to, or holds in its closure, defaults or partial arguments."""
    if isinstance(function, functools.partial):
        yield from _modules_of(function.func)
        held: Any = (function.args, function.keywords)
    elif isinstance(function, nn.Module):
        held = function
    else:
        bound = getattr(function, "__self__", None)
        plain = getattr(function, "__func__", function)
        cells = (cell.cell_contents for cell in getattr(plain, "__closure__", None) or () if _is_filled(cell))
        defaults = (getattr(plain, "__defaults__", None), getattr(plain, "__kwdefaults__", None))
        held = (bound, list(cells), defaults)
    for leaf in tree_iter(held):
        if isinstance(leaf, nn.Module):
            yield leaf
        elif callable(leaf) and leaf is not function and hasattr(leaf, "__closure__"):
            yield from _modules_of(leaf)


def _freeze(function: Any, frozen: dict[int, Any] | None = None) -> Any:
    """``function`` with its closure's variables bound to what they hold now, and so for functions they hold."""
    frozen = {} if frozen is None else frozen
    if isinstance(function, MethodType):
        return MethodType(_freeze(function.__func__, frozen), function.__self__)
    if not isinstance(function, FunctionType) or not function.__closure__:
        return function
    if id(function) not in frozen:
        cells = tuple(CellType() for _ in function.__closure__)
        copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__ = function.__kwdefaults__
        frozen[id(function)] = copy
        for cell, original in zip(cells, function.__closure__, strict=True):
            if _is_filled(original):
                cell.cell_contents = _freeze(original.cell_contents, frozen)
    return frozen[id(function)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (raises ValueError while empty)
    except ValueError:
        return False
    return True


def _unique(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())
