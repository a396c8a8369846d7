"""Routing of plain ``F.scaled_dot_product_attention`` through ``sorder.attention``, models left as they are."""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex_module
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from sorder.func._user_warning import warn_user
from sorder.ops import flex
from sorder.ops.attention import NotServedError, attention, is_causal_bias
from sorder.ops.constants import constant
from sorder.ops.mask import Mask
from sorder.ops.replaced_name import ReplacedName
from sorder.ops.row_ranges import padding_fields

# The function itself, whatever a library may have put in its place in torch.nn.functional.
_SDPA: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention

_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_CONCERNED = frozenset((_SDPA, F.multi_head_attention_forward, *_BACKWARD))

_NUMBERS = re.compile(r"[\d., ()]+")
_warned: set[str] = set()


class exact_attention(TorchFunctionMode, ContextDecorator):
    """Routes ``F.scaled_dot_product_attention`` and ``flex_attention`` through :func:`sorder.attention`.

    They then have exact derivatives to second order in linear memory. A context manager and a decorator, for the thread
    that enters it; :meth:`enable` and :meth:`disable` switch it for the process. It catches the functions under any
    name, imported earlier or not, inside ``nn.MultiheadAttention`` (with ``need_weights=False``) and
    ``nn.TransformerEncoderLayer`` (in eval mode too, where it turns their fused inference path off), under
    ``torch.func`` transforms, autocast and ``vmap``. Contexts nest, the innermost decides, and all is as before on
    exit. Where ``torch.utils.checkpoint`` is used, take derivatives inside as well, since they run the model again; the
    threads of the autograd engine inherit the context.

    Served are masks and biases of every shape, with their derivatives, grouped heads, dropout, and jagged nested
    tensors (to first order, beyond which PyTorch differentiates none of their operations). A causal mask is routed as
    ``is_causal=True``, and a ``key_padding_mask`` of ``nn.MultiheadAttention`` is not combined with it to an Nq × Nk
    tensor. A block mask of ``flex_attention`` is evaluated, a block of rows at a time; where every row sees one
    interval of keys it costs two numbers a row, else it is held as a boolean Nq × Nk matrix.

    What the operator does not serve (a ``score_mod`` of ``flex_attention``, widths beyond 256) runs as materialised
    attention: exact in every order of derivative, with Nq × Nk scores held for each head. It warns once per reason.
    (Tensors that a ``score_mod`` captures have first derivatives by ``torch.autograd`` only: PyTorch's indexing inside
    it refuses ``torch.func`` and a second derivative, with an error.)

    Not seen: attention written out by hand, ``need_weights=True`` (both exact already), TorchScript, and what
    ``torch.compile`` has compiled (curvature products and optimizers run compiled models eagerly).

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

    lets_functions_pass = True
    """It leaves custom Functions alone, for :mod:`sorder.ops.levels`."""

    def __init__(self, enabled: bool = True, *, strict: bool = False) -> None:
        if callable(enabled):
            raise TypeError("exact_attention is called to decorate: write @sorder.exact_attention()")
        super().__init__()
        self._enabled = enabled
        self._strict = strict
        # As long as the object lives: torch.compile goes wrong, without a word, at a graph break inside a mode with an
        # __enter__ or __exit__ of its own. It knows no locks either, and routes no flex_attention.
        if not torch.compiler.is_dynamo_compiling():
            for name in _flex_names:
                name.acquire()
                weakref.finalize(self, name.release).atexit = False

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
            if func is F.multi_head_attention_forward:
                padding, kwargs = _without_padding(args, kwargs) if self._enabled else (None, kwargs)
                args = () if padding is not None else args
                with _lookup.replaced_for(self if padding is None else _PaddedRouting(self, padding)):
                    return func(*args, **kwargs)
            with _engine.replaced_for(self):
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
        *,
        real: Tensor | None = None,
    ) -> Tensor:
        """SDPA's arguments, and in ``real`` (B, Nk) which keys are no padding."""
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if not self._enabled:
            return _SDPA(query, key, value, attn_mask, is_causal=is_causal, **options)
        nested = query.is_nested or key.is_nested or value.is_nested
        if attn_mask is not None and not (is_causal or nested) and _is_causal(attn_mask, query, key):
            attn_mask, is_causal = None, True
        mask = None if real is None else Mask(**padding_fields(real))
        try:
            return attention(query, key, value, attn_mask, is_causal=is_causal, mask=mask, **options)
        except (NotImplementedError, TypeError, ValueError) as error:
            reason = self._refused(error)
            if nested:
                raise NotImplementedError(
                    f"exact_attention: {reason}. Nested tensors are not materialised; pad them, or leave the call out "
                    "by `with exact_attention(False)`"
                ) from error
        if real is not None:
            attn_mask, is_causal = _with_padding(attn_mask, is_causal, real, query), False
        output = _materialised(query, key, value, attn_mask, is_causal=is_causal, **options)
        # Not before: where the input is at fault, SDPA's own error is the better one.
        _warn_once(reason, "scaled_dot_product_attention", query, key)
        return output

    def _route_flex(self, query: Tensor, key: Tensor, *args: Any) -> Any:
        try:
            return flex.served(query, key, *args)
        except (NotImplementedError, TypeError, ValueError) as error:
            reason = self._refused(error)
        output = flex.materialised(query, key, *args)
        _warn_once(reason, "flex_attention", query, key)
        return output

    def _refused(self, error: Exception) -> str:
        """Why a call is not served; raises where it must be."""
        if self._strict:
            raise NotImplementedError(f"exact_attention(strict=True): {error}") from error
        return error.reason if isinstance(error, NotServedError) else str(error)


class _PaddedRouting:
    """What a call of multi-head attention is routed by: its padding, and the context's routing."""

    def __init__(self, routing: exact_attention, real: Tensor) -> None:
        self._routing, self._real = routing, real

    def _route(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._routing._route(*args, real=self._real, **kwargs)


def _attend(original: Callable[..., Tensor], routing: exact_attention | None, *args: Any, **kwargs: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` while replaced: a mode on the stack sees the original and decides."""
    routing = routing or _process.routing
    if routing is None or any(isinstance(m, exact_attention) for m in _get_current_function_mode_stack()):
        return original(*args, **kwargs)
    return routing._route(*args, **kwargs)


def _flex(original: Callable[..., Any], _: None, *args: Any) -> Any:
    """What flex_attention ends in, by its flag without a compiler: as it would be without, unless it is routed."""
    if torch.compiler.is_dynamo_compiling():
        return original(*args)
    routing = _innermost()
    if routing is not None and routing._enabled:
        with _outer_routing_off():
            return routing._route_flex(*args)

    def call(*args: Any) -> Any:
        return original(*args)

    environment = getattr(flex_module, "setup_compilation_env", None)  # not in every version
    with nullcontext("eager") if environment is None else environment() as backend:
        return torch.compile(call, backend=backend, fullgraph=True)(*args)


def _flex_device(original: Callable[..., None], _: None, *args: Any) -> None:
    routing = _innermost()
    if routing is None or not routing._enabled:
        original(*args)


def _innermost() -> exact_attention | None:
    contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, exact_attention)]
    return contexts[-1] if contexts else _process.routing


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
        for name in (_lookup, *_flex_names):
            name.acquire()
        self.routing = routing
        # The fused inference path sees no function mode in other threads.
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        _set_stack([routing, *_get_current_function_mode_stack()])

    def switch_off(self) -> None:
        if self.routing is None:
            return
        routing, self.routing = self.routing, None
        for name in (_lookup, *_flex_names):
            name.release()
        torch.backends.mha.set_fastpath_enabled(self._fast_path)
        routing._enabled = False  # on the stack of another thread, it stays there without effect
        _set_stack([mode for mode in _get_current_function_mode_stack() if mode is not routing])


_lookup = ReplacedName(F, "scaled_dot_product_attention", _attend)
_engine = ReplacedName(torch.autograd, "_engine_run_backward", _run_backward)
# flex_attention is a Python function that no mode sees. What it ends in is looked up when it is called, but reached
# without a compiler only under a flag, and on a CPU only past a check that there is a backward.
_FLEX: dict[str, dict[str, Any]] = {
    "flex_attention_hop": {"call": _flex},
    "_validate_device": {"call": _flex_device},
    "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": {"value": True},
}
_flex_names = [ReplacedName(flex_module, name, **new) for name, new in _FLEX.items() if hasattr(flex_module, name)]
if len(_flex_names) < len(_FLEX):  # a version of PyTorch that is built otherwise: not routed
    _flex_names.clear()
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


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def _without_padding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    """Multi-head attention's keys that are no padding, (B, Nk), and its arguments without them, all by name.

    Combined with a causal mask by PyTorch, padding would become an Nq × Nk tensor for every head. ``None``, and
    ``kwargs`` as they are, where there is no padding, or it must stay: keys are appended, or weights returned.
    """
    given = _MULTI_HEAD.bind(*args, **kwargs).arguments
    padding = given.get("key_padding_mask")
    kept = given.get("need_weights", True) or given.get("add_zero_attn") or given.get("bias_k") is not None
    padding = None if padding is None or kept else constant(padding)
    if padding is None:
        return None, kwargs
    if padding.dtype != torch.bool:  # nn.MultiheadAttention has made it additive
        hidden = padding == -torch.inf
        if not bool((hidden | (padding == 0)).all()):
            return None, kwargs
        padding = hidden
    return ~padding.reshape(-1, padding.shape[-1]), {**given, "key_padding_mask": None}


def _with_padding(mask: Tensor | None, causal: bool, real: Tensor, query: Tensor) -> Tensor:
    """The mask that materialised attention takes, (B, 1 or H, Nq, Nk)."""
    shown = real[:, None, None, :]
    if causal:
        shown = shown & torch.ones(query.shape[-2], real.shape[-1], dtype=torch.bool, device=real.device).tril()
    if mask is None:
        return shown
    return mask & shown if mask.dtype == torch.bool else mask.masked_fill(~shown, -torch.inf)


def _is_causal(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether ``mask``, one for all heads and constant, hides exactly the keys after the query."""
    n_q, n_k = query.shape[-2], key.shape[-2]
    unwrapped = constant(mask)
    if unwrapped is None or is_causal_bias(mask):
        return False
    mask = unwrapped
    if mask.shape[-2:] != (n_q, n_k) or mask.numel() != n_q * n_k or not n_q:
        return False
    visible = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    causal = torch.ones(n_q, n_k, dtype=torch.bool, device=mask.device).tril()
    return bool(((visible == causal) & (hidden != causal)).all())


def _materialised(*args: Any, **kwargs: Any) -> Tensor:
    # The choice of backend is the process's, so threads take turns.
    with _backend_lock, sdpa_kernel(SDPBackend.MATH):
        return _SDPA(*args, **kwargs)


def _warn_once(reason: str, function: str, query: Tensor, key: Tensor) -> None:
    kind = _NUMBERS.sub("", reason)
    if kind in _warned:
        return
    _warned.add(kind)
    matrix = query.shape[:-1].numel() * key.shape[-2] * max(query.element_size(), 4) / 1e9
    warn_user(
        f"exact_attention: {reason}. This call of {function} (query {tuple(query.shape)}, key {tuple(key.shape)}), and "
        "others like it, run as PyTorch's materialised attention instead: exact in every order of derivative, but each "
        f"order holds the Nq × Nk scores of every head, {matrix:.3g} GB a matrix here. exact_attention(strict=True) "
        "raises instead.",
        UserWarning,
    )
