"""One run of a closure, in whichever style it is written."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch import Tensor

Closure = Callable[[], Any]


@dataclass
class Evaluation:
    """What one run of a closure gave.

    Attributes:
        root: the scalar that was minimised, with its graph: what the closure called ``backward`` on, summed, or else
            the loss that it returned.
        returned: the loss as the closure returned it; a tensor without graph.
        outputs: what the closure returned beside the loss, or None.
        gradient: gradients of the parameters where the closure called ``backward`` itself, else None.
    """

    root: Tensor
    returned: Any
    outputs: Any = None
    gradient: list[Tensor | None] | None = None


class PlainClosure:
    """A closure for an optimizer that steps by loss, gradient and curvature of one function.

    :func:`run_closure` refuses it where it changes ``.grad`` after ``backward``, as gradient clipping does: that would
    be the gradient of another function than the loss.
    """

    def __init__(self, closure: Closure) -> None:
        self._closure = closure

    def __call__(self) -> Any:
        return self._closure()


@dataclass
class _BackwardCalls:
    """The ``backward`` calls of one run; ``written`` holds what they left in ``.grad``, with its version then."""

    roots: list[Tensor] = field(default_factory=list)
    gradient: list[Tensor | None] | None = None
    written: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)

    def look(self, params: Sequence[Tensor]) -> None:
        """Note the parameters whose ``.grad`` was changed since; one set to None was not."""
        for i, (grad, version) in self.written.items():
            now = params[i].grad
            if now is not None and (now is not grad or now._version != version):
                self.changed.add(i)


def run_closure(
    closure: Closure,
    params: Sequence[Tensor],
    *,
    differentiate: bool = True,
    gradients: Sequence[Tensor | None] | None = None,
) -> Evaluation:
    """Run ``closure`` with gradients enabled and whatever it passes to ``backward`` taken out of its hands.

    A ``backward`` inside the closure would free the graph and could add a graph to ``.grad``. Inside this function it
    computes gradients with respect to ``params`` alone, keeps the graph, and adds detached gradients to ``.grad``;
    with ``differentiate=False`` it computes nothing and adds ``gradients``, where given, instead.

    Raises:
        TypeError: the closure returned neither a loss nor ``(loss, outputs)``.
        ValueError: the loss is not a scalar, or has no graph and ``backward`` was not called; a
            :class:`PlainClosure` changed ``.grad``.
    """
    calls = _BackwardCalls()
    with torch.enable_grad(), _intercept_backward(calls, params, differentiate, gradients), eager():
        result = closure()
    loss, outputs = _split(result)
    if differentiate and isinstance(closure, PlainClosure):
        calls.look(params)
        if calls.changed:
            i = min(calls.changed)
            raise ValueError(
                f"the closure changed .grad after backward() (of parameter {i}, shape {tuple(params[i].shape)}), as "
                "gradient clipping, unscaling and averaging over ranks do: the step would follow another function's "
                "gradient than the loss's and the curvature's. Leave the gradient as it is; to bound steps use "
                "max_step_norm= or damping_update='trust-region', to average over ranks process_group="
            )
    if calls.roots:
        with torch.enable_grad():  # which a step has off
            root = total(calls.roots)
    elif isinstance(loss, Tensor) and (loss.requires_grad or not differentiate):
        root = loss
    else:
        raise ValueError(
            f"closure must return a loss that depends on the parameters, or call backward() itself, but it "
            f"returned {_describe(loss)} without a graph: is it detached, or computed under no_grad or inference_mode?"
        )
    if root.numel() != 1:
        raise ValueError(f"closure must return a scalar loss, got one of shape {tuple(root.shape)}")
    if root.dim():
        with torch.enable_grad():
            root = root.reshape(())
    returned = loss.detach() if isinstance(loss, Tensor) else loss
    return Evaluation(root, returned, outputs, calls.gradient)


def total(losses: Sequence[Tensor]) -> Tensor:
    """Sum of scalars, on the device of the first."""
    found = losses[0]
    for loss in losses[1:]:
        # Not torch.stack: a sum is recognised as one of loss functions by the additions.
        found = found + (loss if loss.shape == found.shape else loss.reshape(found.shape)).to(found)
    return found


def _split(result: Any) -> tuple[Any, Any]:
    allowed = "closure must return the loss, a scalar tensor, or (loss, outputs)"
    loss, outputs = result, None
    if isinstance(result, (tuple, list)):
        if len(result) != 2:
            raise TypeError(f"{allowed}, got {len(result)} values")
        loss, outputs = result
    if isinstance(loss, Tensor) and not loss.is_complex():
        return loss, outputs
    # A number passes where backward() was called.
    if isinstance(loss, Number) and not isinstance(loss, complex):
        return loss, outputs
    place = "" if loss is result else " in place of the loss"
    raise TypeError(f"{allowed}, got {_kind(loss)}{place}{_where_the_loss_is(loss)}")


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, list(value)[:6]))}"
    return f"a {type(value).__name__}" + (f", {value!r}" if isinstance(value, (str, complex)) else "")


def _where_the_loss_is(value: Any) -> str:
    """Advice for results that hold the loss, such as the outputs of Hugging Face's models."""
    if isinstance(value, Mapping) and "loss" in value:
        return ": return its entry 'loss'"
    return ": return its attribute .loss" if isinstance(getattr(value, "loss", None), Tensor) else ""


def _describe(loss: Any) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r}"


class _BackwardDispatch:
    """``torch.autograd.backward`` where threads have handlers of their own for the calls that they make.

    The function is one for the whole process. If every interception put back what it found, those of two threads that
    overlap would be undone in another order than they were made, and one would stay for good. So a single dispatcher
    stands there while there are any; what a thread without a handler calls goes on as it came.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._installed: Callable[..., None] | None = None
        self._original: Callable[..., None] = torch.autograd.backward
        self._thread = threading.local()

    @contextmanager
    def to(self, handler: Callable[..., None]) -> Iterator[None]:
        """Have ``handler(original, *args, **kwargs)`` take this thread's calls; ``original`` is the handler outside."""
        handlers = self._handlers()
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._install()
        handlers.append(handler)
        try:
            yield
        finally:
            handlers.pop()
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._remove()

    def _handlers(self) -> list[Callable[..., None]]:
        return self._thread.__dict__.setdefault("handlers", [])

    def _install(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            call: Callable[..., None] = original
            # One that somebody wrapped, or fetched before it was removed, has nothing to do any more.
            for handler in self._handlers() if self._installed is backward else ():
                call = functools.partial(handler, call)
            call(*args, **kwargs)

        self._original, self._installed = original, backward
        torch.autograd.backward = backward

    def _remove(self) -> None:
        # What another library has put there since is not ours to remove.
        if torch.autograd.backward is self._installed:
            torch.autograd.backward = self._original
        self._installed = None


_backward_dispatch = _BackwardDispatch()


@contextmanager
def _intercept_backward(
    calls: _BackwardCalls,
    params: Sequence[Tensor],
    differentiate: bool,
    gradients: Sequence[Tensor | None] | None,
) -> Iterator[None]:
    ours = {id(p) for p in params}

    def backward(
        original: Callable[..., None],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        chosen = [inputs] if isinstance(inputs, Tensor) else inputs
        wanted = None if chosen is None else {id(t) for t in chosen}
        if wanted is not None and not wanted & ours:
            original(tensors, grad_tensors, True, create_graph, grad_variables, inputs)
            return
        heads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        weights = grad_tensors if grad_tensors is not None else grad_variables
        weights = [weights] if isinstance(weights, Tensor) or weights is None else list(weights)
        weights += [None] * (len(heads) - len(weights))
        for head, weight in zip(heads, weights, strict=True):
            if weight is None and head.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            root = head if weight is None else (head * weight).sum()
            calls.roots.append(root)
            found: Sequence[Tensor | None]
            if differentiate:
                found = torch.autograd.grad(root, params, retain_graph=True, allow_unused=True)
                # Parameters that were left out of inputs keep a gradient for the curvature, but not in .grad.
                calls.gradient = added(calls.gradient or [None] * len(params), found)
            else:
                found = [g if g is None else g.clone() for g in gradients or ()]
            calls.look(params)
            for i, (p, g) in enumerate(zip(params, found, strict=False)):
                if g is not None and (wanted is None or id(p) in wanted):
                    p.grad = g if p.grad is None else p.grad.detach() + g
                    calls.written[i] = (p.grad, p.grad._version)

    with _backward_dispatch.to(backward):
        yield


def added(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> list[Tensor | None]:
    """a + b, None being zero."""
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]


def eager() -> Any:
    """Context in which compiled modules run eagerly: what torch.compile made has no second derivative."""
    # Nothing can be compiled unless dynamo was loaded; loading it here would cost seconds.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
