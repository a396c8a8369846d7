"""Routing of plain ``F.scaled_dot_product_attention`` through ``sorder.attention``, models left as they are."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from sorder.func._user_warning import warn_user
from sorder.ops.attention import NotServedError, attention

# The function itself, whatever a library may have put in its place in torch.nn.functional.
_SDPA: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention

_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_CONCERNED = frozenset((_SDPA, F.multi_head_attention_forward, *_BACKWARD))

_NUMBERS = re.compile(r"[\d., ()]+")
_warned: set[str] = set()


class exact_attention(TorchFunctionMode, ContextDecorator):
    """Routes ``F.scaled_dot_product_attention`` through :func:`sorder.attention`.

    It then has exact derivatives to second order in linear memory. A context manager and a decorator, for the thread
    that enters it; :meth:`enable` and :meth:`disable` switch it for the process. It catches the function under any
    name, imported earlier or not, inside ``nn.MultiheadAttention`` (with ``need_weights=False``) and
    ``nn.TransformerEncoderLayer`` (in eval mode too, where it turns their fused inference path off), under
    ``torch.func`` transforms, autocast and ``vmap``. Contexts nest, the innermost decides, and all is as before on
    exit. Where ``torch.utils.checkpoint`` is used, take derivatives inside as well, since they run the model again; the
    threads of the autograd engine inherit the context.

    A mask that is the causal one is routed as ``is_causal=True``. What the operator does not serve runs as materialised
    attention: exact in every order of derivative, with Nq × Nk scores held for each head. It warns once per reason.
    Not seen: attention written out by hand, ``need_weights=True`` (both exact already), and TorchScript.

    Args:
        enabled: False lets calls inside pass as they are, within an outer context, too. Default True.
        strict: raise where the operator does not serve a call, instead of materialising. Default False.

    Raises:
        NotImplementedError: (by the call of attention) with ``strict=True``, naming what is not served.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> with sorder.exact_attention():
        ...     gradient, product = torch.func.jvp(torch.func.grad(lambda x: layer(x).sin().sum()), (x,), (x,))
        >>> product.shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, enabled: bool = True, *, strict: bool = False) -> None:
        super().__init__()
        self._enabled = enabled
        self._strict = strict

    @staticmethod
    def enable(*, strict: bool = False) -> None:
        """Route in the whole process until :meth:`disable`; ``with exact_attention(False)`` still makes an exception.

        In threads other than the caller's, names imported from ``torch.nn.functional`` before this call are not seen.
        """
        exact_attention.disable()
        _process.switch_on(exact_attention(strict=strict))

    @staticmethod
    def disable() -> None:
        """Undo :meth:`enable`; nothing where routing is not enabled."""
        _process.switch_off()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CONCERNED:
            return func(*args, **kwargs)
        with _outer_routing_off():
            if func is _SDPA:
                return self._route(*args, **kwargs)
            # These Python functions run with this mode off, as whatever a handler calls does. One looks SDPA up in
            # torch.nn.functional; from the others, torch.utils.checkpoint runs the model again.
            name = _lookup if func is F.multi_head_attention_forward else _engine
            with name.replaced_for(self):
                return func(*args, **kwargs)

    def _route(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if not self._enabled:
            return _SDPA(query, key, value, attn_mask, is_causal=is_causal, **options)
        if attn_mask is not None and not is_causal and _is_causal(attn_mask, query.shape[-2], key.shape[-2]):
            attn_mask, is_causal = None, True
        try:
            if query.is_nested or key.is_nested or value.is_nested:
                raise NotServedError("nested tensors are not supported yet", "Pad them")
            return attention(query, key, value, attn_mask, is_causal=is_causal, **options)
        except (NotImplementedError, TypeError, ValueError) as error:
            if self._strict:
                raise NotImplementedError(f"exact_attention(strict=True): {error}") from error
            reason = error.reason if isinstance(error, NotServedError) else str(error)
        output = _materialised(query, key, value, attn_mask, is_causal=is_causal, **options)
        _warn_once(reason, query, key)  # not before: where the input is at fault, SDPA's own error is the better one
        return output


class _Name:
    """A name in a module of torch, replaced while some thread needs it to be.

    The name is one for all threads, so ``call(original, routing, *args)`` gets the calling thread's routing, or None.
    """

    def __init__(self, module: ModuleType, name: str, call: Callable[..., Any]) -> None:
        self._module, self._name, self._call = module, name, call
        self._lock = threading.Lock()
        self._users = 0
        self._original: Any = None
        self._local = threading.local()

    def acquire(self) -> None:
        with self._lock:
            if not self._users:
                self._original = getattr(self._module, self._name)
                setattr(self._module, self._name, self._replacement)
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                setattr(self._module, self._name, self._original)

    @contextmanager
    def replaced_for(self, routing: exact_attention) -> Iterator[None]:
        before = getattr(self._local, "routing", None)
        self.acquire()
        self._local.routing = routing
        try:
            yield
        finally:
            self._local.routing = before
            self.release()

    def _replacement(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._original, getattr(self._local, "routing", None), *args, **kwargs)


def _attend(original: Callable[..., Tensor], routing: exact_attention | None, *args: Any, **kwargs: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` while replaced: a mode on the stack sees the original and decides."""
    routing = routing or _process.routing
    if routing is None or any(isinstance(m, exact_attention) for m in _get_current_function_mode_stack()):
        return original(*args, **kwargs)
    return routing._route(*args, **kwargs)


def _run_backward(original: Callable[..., Any], routing: exact_attention | None, *args: Any, **kwargs: Any) -> Any:
    """The autograd engine, whose threads take over the modes of the one that calls it."""
    if routing is None:
        return original(*args, **kwargs)
    with routing:
        return original(*args, **kwargs)


class _Process:
    """The process-wide switch: a mode below all others of its thread, and the replaced name for other threads."""

    def __init__(self) -> None:
        self.routing: exact_attention | None = None
        self._fast_path = True

    def switch_on(self, routing: exact_attention) -> None:
        _lookup.acquire()
        self.routing = routing
        # The fused inference path sees no function mode in other threads.
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        _set_stack([routing, *_get_current_function_mode_stack()])

    def switch_off(self) -> None:
        if self.routing is None:
            return
        routing, self.routing = self.routing, None
        _lookup.release()
        torch.backends.mha.set_fastpath_enabled(self._fast_path)
        routing._enabled = False  # on the stack of another thread, it stays there without effect
        _set_stack([mode for mode in _get_current_function_mode_stack() if mode is not routing])


_lookup = _Name(F, "scaled_dot_product_attention", _attend)
_engine = _Name(torch.autograd, "_engine_run_backward", _run_backward)
_process = _Process()
_backend_lock = threading.RLock()


def _set_stack(modes: list[TorchFunctionMode]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


@contextmanager
def _outer_routing_off() -> Iterator[None]:
    """The innermost context decides: what it calls must not meet the outer ones."""
    stack = _get_current_function_mode_stack()
    others = [mode for mode in stack if not isinstance(mode, exact_attention)]
    if len(others) == len(stack):
        yield
        return
    _set_stack(others)
    try:
        yield
    finally:
        _set_stack(stack)


def _is_causal(mask: Tensor, n_q: int, n_k: int) -> bool:
    """Whether ``mask``, one for all heads and constant, hides exactly the keys after the query."""
    while torch._C._functorch.is_gradtrackingtensor(mask) and not _is_differentiated(mask):
        mask = torch._C._functorch.get_unwrapped(mask)
    if torch._C._functorch.is_functorch_wrapped_tensor(mask) or _is_differentiated(mask):
        return False
    if mask.shape[-2:] != (n_q, n_k) or mask.numel() != n_q * n_k or not n_q:
        return False
    visible = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    causal = torch.ones(n_q, n_k, dtype=torch.bool, device=mask.device).tril()
    return bool(((visible == causal) & (hidden != causal)).all())


def _is_differentiated(x: Tensor) -> bool:
    if x.requires_grad:
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _materialised(*args: Any, **kwargs: Any) -> Tensor:
    # The choice of backend is the process's, so threads take turns.
    with _backend_lock, sdpa_kernel(SDPBackend.MATH):
        return _SDPA(*args, **kwargs)


def _warn_once(reason: str, query: Tensor, key: Tensor) -> None:
    kind = _NUMBERS.sub("", reason)
    if kind in _warned:
        return
    _warned.add(kind)
    matrix = query.shape[:-1].numel() * key.shape[-2] * max(query.element_size(), 4) / 1e9
    warn_user(
        f"exact_attention: {reason}. This call of scaled_dot_product_attention (query {tuple(query.shape)}, key "
        f"{tuple(key.shape)}), and others like it, run as PyTorch's materialised attention instead: exact in every "
        f"order of derivative, but each order holds the Nq × Nk scores of every head, {matrix:.3g} GB a matrix here. "
        "exact_attention(strict=True) raises instead.",
        UserWarning,
    )
