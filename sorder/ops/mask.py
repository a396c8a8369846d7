"""``sorder.Mask``: the structure of a mask in words, turned once into the row ranges that the kernels skip by."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from sorder.kernels.mask import Visibility
from sorder.ops import ranges

_CACHED = 8
"""Problems (shapes, device) that a mask remembers its row ranges for."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)
_FAR = 2**62
"""A window's side beyond which positions would overflow."""
_LOOKS = (
    "sorder.Mask(documents=...) looks at whether the ids are in contiguous runs, which breaks the graph. For one graph "
    "give cu_seqlens, which nothing looks at, or the boolean matrix, attn_mask=query_ids[:, None] == key_ids"
)


class Structure(NamedTuple):
    """A mask for one problem: ``spec.causal``, what the maps get, and what ALiBi's positions add to the log-sum-exp."""

    causal: bool
    visibility: Visibility | None
    lse_shift: Tensor | None


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees, by structure: ``attention(q, k, v, mask=sorder.Mask(causal=True, window=(511, 0)))``.

    All that is given must agree (intersection). Query row i stands at key position ``p = i + offset``, where
    ``alignment`` gives the offset. What comes out as one interval of keys per row costs two integers a row, and tiles
    outside the intervals cost nothing; ids of documents that are not contiguous, and a ``key_padding`` with holes,
    cost a boolean matrix or row besides. A row that sees nothing gives zeros, in value and in every derivative.

    A mask may be kept and used for any shapes; it remembers the ranges of the last few. Its tensors count as they are
    when attention is called: changing one later changes the next call, but no derivative of this one. Integer tensors
    may have any dtype but uint64. "Per batch" below: an integer, or an integer tensor (B,) (or (B, H), …) of the
    leading dimensions of the query. Without arguments all is visible.

    Args:
        causal: keys j ≤ p.
        alignment: where row 0 stands among the keys: ``"top_left"`` (offset 0, PyTorch's), ``"bottom_right"`` (offset
            Nk − Nq, flash-attention's: the last query sees the last key), or an offset per batch, such as the filled
            length of a key-value cache. With documents, the words hold in each document; an offset in all.
        window: (left, right): keys p − left ≤ j ≤ p + right; ``None`` for a side without limit. A sliding window of
            w tokens, in the sense of Mistral, is ``causal=True, window=(w - 1, 0)``.
        prefix: number of leading keys that causal rows see whatever their position (prefix-LM), per batch. Needs
            ``causal=True``.
        key_start, key_stop: keys start ≤ j < stop, per batch: left padding, and lengths of right-padded sequences.
        key_padding: bool (B, Nk), True where the key is real (``nn.MultiheadAttention``'s ``key_padding_mask`` is the
            opposite).
        documents: integer ids (N,) or (B, N), or a pair (query ids, key ids): a query sees the keys with its id. For
            ids in contiguous runs, which is looked up once (on a GPU by one synchronisation), this costs no matrix.
            Looking breaks the graph of ``torch.compile``, which ``cu_seqlens`` does not; where it is not possible
            (ids mapped by ``vmap``, fake tensors, ``torch.export``), ids cost the matrix.
        cu_seqlens: boundaries of packed documents, integers (D + 1,) ascending from 0 as flash-attention takes them,
            or a pair (query, key); rows behind the last one see nothing. On the CPU others are refused; on a GPU the
            host never looks, nor does it under a transform or a compiler, and what wrong boundaries give is undefined.
        ranges: (start, stop), integers broadcastable to the query's (..., Nq): row i sees start ≤ j < stop.
        alibi: slopes, (H,) or (B, H): adds slope · (j − p) to the scores (Press et al. 2022, arXiv:2108.12409). For
            causal masks this is flash-attention's −slope · |p − j|. Constants: learn a bias through ``attn_mask``.
            The kernels count from the row's number i and add what p − i makes of it to the log-sum-exp afterwards.
            With an offset, float32 and shorter inputs lose digits by that: up to about 1e-7 · slope · |p − i| of the
            output (measured for one query at slope 1/2: 1e-4 behind 10⁴ keys, 6e-3 behind 10⁶). Float64 hardly does;
            a bias ``attn_mask`` = slope · (j − p) does not.

    Raises:
        TypeError, ValueError: (by the call of attention) naming the field that does not fit.

    Example:
        >>> q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
        >>> packed = sorder.Mask(causal=True, cu_seqlens=torch.tensor([0, 4, 6]))
        >>> sorder.attention(q, k, v, mask=packed).shape
        torch.Size([2, 4, 6, 8])
    """

    causal: bool = False
    alignment: Literal["top_left", "bottom_right"] | int | Tensor = "top_left"
    window: tuple[int | None, int | None] | None = None
    prefix: int | Tensor | None = None
    key_start: int | Tensor | None = None
    key_stop: int | Tensor | None = None
    key_padding: Tensor | None = None
    documents: Tensor | tuple[Tensor, Tensor] | None = None
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None
    ranges: tuple[Tensor, Tensor] | None = None
    alibi: Tensor | None = None
    _remembered: dict[Any, Structure] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.window, list):  # which might change behind what is remembered
            object.__setattr__(self, "window", tuple(self.window))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, whose tensors count their versions anew: without what is remembered by version."""
        return {**self.__dict__, "_remembered": {}}

    def to(self, device: torch.device | str) -> Mask:
        """A mask with its tensors on ``device``."""

        def moved(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(moved(y) for y in x)
            return x.to(device) if isinstance(x, Tensor) else x

        return Mask(**{f.name: moved(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init})

    def structure(
        self, lead: torch.Size, n_q: int, n_k: int, device: torch.device, causal: bool = False, wide: bool = False
    ) -> Structure:
        """The mask of a query (*lead, Nq, d) and Nk keys.

        ``causal`` adds PyTorch's causal mask, ``wide`` keeps slopes in float64.
        """
        problem = (lead, n_q, n_k, device, causal, wide)
        tensors = _tensors(self)
        if not _may_be_remembered(tensors, device):
            return _structure(self, *problem)
        key = (*problem, *(x._version for x in tensors))
        found = self._remembered.get(key)
        if found is None:
            with torch._C._DisableFuncTorch(), torch.no_grad():  # what is kept must not belong to a transform
                found = _structure(self, *problem)
            while len(self._remembered) >= _CACHED:
                self._remembered.pop(next(iter(self._remembered)), None)
            self._remembered[key] = found
        return found


def _tensors(mask: Mask) -> list[Tensor]:
    values: list[Any] = [getattr(mask, f.name) for f in dataclasses.fields(mask) if f.init]
    flat = (x for value in values for x in (value if isinstance(value, tuple) else (value,)))
    return [x for x in flat if isinstance(x, Tensor)]


def _may_be_remembered(tensors: list[Tensor], device: torch.device) -> bool:
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return not any(
        torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_inference() or x.requires_grad for x in tensors
    )


def _structure(
    mask: Mask, lead: torch.Size, n_q: int, n_k: int, device: torch.device, causal: bool, wide: bool
) -> Structure:
    _check(mask, device)
    rows = torch.arange(n_q, device=device)
    documents, shown = _documents(mask, lead, n_q, n_k)
    offset = _offset(mask, documents, lead, n_q, n_k)
    unshifted = isinstance(offset, int) and offset == 0
    position = rows + offset
    start, stop = _ends(mask, documents, position, lead)
    top_left = mask.causal and unshifted and mask.prefix is None
    if causal and not top_left:
        stop.append(rows + 1)
    if mask.key_padding is not None:
        real = _over_batch(mask.key_padding, lead, "key_padding", n_k).clone()  # of the caller, who may change it
        for ends, end in zip((start, stop), ranges.of_padding(real), strict=True):
            ends.append(end[..., None])
        padded = real[..., None, :]
        shown = padded if shown is None else shown & padded
    slopes = shift = None
    if mask.alibi is not None:
        slopes = _expanded(mask.alibi.to(torch.float64 if wide else torch.float32, copy=True), lead, "alibi")
        if not unshifted:
            exact = slopes if device.type == "mps" else slopes.double()
            shift = exact[..., None] * (rows - position)
    is_causal = not start and len(stop) == 1 and (causal or top_left)
    first = last = None
    if not is_causal and (start or stop):  # alone, it is the kernels' own arithmetic
        low, high = _extreme(torch.maximum, start, 0), _extreme(torch.minimum, stop, n_k)
        first, last = ranges.intersected(low, high, n_q, n_k, device)
        first, last = (x.expand(*lead, n_q) for x in (first, last))
    if shown is not None:
        shown = shown.expand(*lead, n_q, n_k)
    present = first is not None or shown is not None or slopes is not None
    return Structure(is_causal, Visibility(first, last, shown, slopes) if present else None, shift)


def _ends(
    mask: Mask, documents: ranges.Documents | None, position: Tensor, lead: torch.Size
) -> tuple[list[Tensor | int], list[Tensor | int]]:
    """Lower and upper ends of the keys that rows at ``position`` see; all apply."""
    device = position.device
    start: list[Tensor | int] = []
    stop: list[Tensor | int] = []
    if documents is not None:
        start.append(documents.key_start)
        stop.append(documents.key_stop)
    if mask.causal:
        last = position + 1
        if mask.prefix is not None:
            last = torch.maximum(last, _per_batch(mask.prefix, lead, device, "prefix"))
        stop.append(last)
    left, right = mask.window or (None, None)
    if left is not None:
        start.append(position - min(left, _FAR))
    if right is not None:
        stop.append(position + min(right, _FAR) + 1)
    if mask.key_start is not None:
        start.append(_per_batch(mask.key_start, lead, device, "key_start"))
    if mask.key_stop is not None:
        stop.append(_per_batch(mask.key_stop, lead, device, "key_stop"))
    if mask.ranges is not None:
        for ends, end in zip((start, stop), mask.ranges, strict=True):
            _expanded(end, torch.Size((*lead, position.shape[-1])), "ranges")  # or refused
            ends.append(end.long())
    return start, stop


def _extreme(choose: Any, ends: list[Tensor | int], default: int) -> Tensor | int:
    if not ends:
        return default
    result = ends[0]
    for end in ends[1:]:
        result = choose(result, end)
    return result


def _documents(mask: Mask, lead: torch.Size, n_q: int, n_k: int) -> tuple[ranges.Documents | None, Tensor | None]:
    """Each row's document, and what it shows (..., Nq, Nk) unless the keys of every document are an interval."""
    if mask.cu_seqlens is not None:
        cu_q, cu_k = _pair(mask.cu_seqlens)
        for cu, n, part, side in ((cu_q, n_q, "q", "query"), (cu_k, n_k, "k", "key")):
            if ranges.is_readable(cu):
                name = f"mask.cu_seqlens (of the {side}; attention_varlen's cu_seqlens_{part})"
                ranges.check_boundaries(cu, n, name, side)
        return ranges.of_cu_seqlens(cu_q, cu_k, n_q), None
    if mask.documents is None:
        return None, None
    ids_q, ids_k = (_over_batch(x, lead, "documents").long() for x in _pair(mask.documents))
    for name, ids, n in (("query", ids_q, n_q), ("key", ids_k, n_k)):
        if ids.shape[-1] != n:
            raise ValueError(f"mask.documents must hold an id for each of the {n} {name} rows, got {ids.shape[-1]}")
    by_id = _documents_by_id
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=_LOOKS)
        by_id = _documents_by_id_eagerly
    documents, intervals = by_id(ids_q, ids_k)
    return documents, None if intervals else ids_q[..., :, None] == ids_k[..., None, :]


def _documents_by_id(ids_q: Tensor, ids_k: Tensor) -> tuple[ranges.Documents, bool]:
    """Each row's document, and whether the keys of every document are an interval."""
    documents, unbroken = ranges.of_ids(ids_q, ids_k)
    if torch._C._functorch.is_functorch_wrapped_tensor(unbroken) or isinstance(unbroken, FakeTensor):
        return documents, False  # what cannot be looked at
    return documents, unbroken.is_meta or bool(unbroken)


# Only for compiled callers: the first call loads the compiler, which takes seconds.
_documents_by_id_eagerly = torch._disable_dynamo(_documents_by_id)


def _offset(mask: Mask, documents: ranges.Documents | None, lead: torch.Size, n_q: int, n_k: int) -> int | Tensor:
    """Key position minus row, per row where documents differ."""
    if not isinstance(mask.alignment, str):
        x = mask.alignment
        return x if isinstance(x, int) else _per_batch(x, lead, x.device, "alignment")
    if documents is None:
        return n_k - n_q if mask.alignment == "bottom_right" else 0
    if mask.alignment == "bottom_right":
        return documents.key_stop - documents.query_stop
    return documents.key_start - documents.query_start


def _pair(x: Any) -> tuple[Tensor, Tensor]:
    return x if isinstance(x, tuple) else (x, x)


def _over_batch(x: Tensor, lead: torch.Size, name: str, length: int | None = None) -> Tensor:
    """(B, …, N) with dimensions of size 1 for the leading ones of the query that it does not have."""
    if x.dim() < 1 or not _leads(x.shape[:-1], lead) or (length is not None and x.shape[-1] != length):
        wanted = "N" if length is None else str(length)
        raise ValueError(
            f"mask.{name} must have shape (batch…, {wanted}), where batch… are the query's leading dimensions "
            f"{tuple(lead)}, the first of them, or none; got {tuple(x.shape)}"
        )
    if x.dim() == 1:
        return x
    return x.reshape(*x.shape[:-1], *(1,) * (len(lead) - x.dim() + 1), x.shape[-1])


def _per_batch(x: int | Tensor, lead: torch.Size, device: torch.device, name: str) -> Tensor:
    """One number per batch as int64 (B, …, 1), to broadcast against rows."""
    x = torch.as_tensor(x, device=device).long()
    if not _leads(x.shape, lead):
        raise ValueError(
            f"mask.{name}, a number per batch, must have the query's leading dimensions {tuple(lead)} or the first of "
            f"them, got shape {tuple(x.shape)}"
        )
    return x.reshape(*x.shape, *(1,) * (len(lead) - x.dim() + 1))


def _leads(shape: torch.Size, lead: torch.Size) -> bool:
    """Whether ``shape`` broadcasts to as many of the first dimensions of ``lead``."""
    return len(shape) <= len(lead) and all(n in (1, m) for n, m in zip(shape, lead, strict=False))


def _expanded(x: Tensor, shape: torch.Size, name: str) -> Tensor:
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ValueError(f"mask.{name} of shape {tuple(x.shape)} does not broadcast to {tuple(shape)}") from None


def _described(x: object) -> str:
    """For messages: dtypes and shapes of tensors, not their entries."""
    if isinstance(x, tuple):
        return f"({', '.join(map(_described, x))})"
    if not isinstance(x, Tensor):
        return repr(x)
    return f"a {x.dtype} tensor" + (", nested" if x.is_nested else f" of shape {tuple(x.shape)}")


def _check(mask: Mask, device: torch.device) -> None:
    if not isinstance(mask.causal, bool):
        raise TypeError(f"mask.causal must be True or False, got {mask.causal!r}")
    for name in ("prefix", "key_start", "key_stop", "alignment"):
        x = getattr(mask, name)
        words = name == "alignment" and isinstance(x, str) and x in ("top_left", "bottom_right")
        if not (x is None or words or _is_integral(x)):
            allowed = '"top_left", "bottom_right", an integer' if name == "alignment" else "None, an integer"
            raise TypeError(f"mask.{name} must be {allowed} or an integer tensor, got {_described(x)}")
    if mask.prefix is not None and not mask.causal:
        raise ValueError(f"mask.prefix={mask.prefix!r} adds to what causal rows see; it needs causal=True")
    if mask.window is not None:
        sides = mask.window if isinstance(mask.window, tuple | list) else ()
        if len(sides) != 2 or not all(s is None or (_is_integral(s) and not isinstance(s, Tensor)) for s in sides):
            raise TypeError(f"mask.window must be (left, right), integers or None, got {mask.window!r}")
        if any(s is not None and s < 0 for s in sides):
            raise ValueError(
                f"mask.window={mask.window!r}: sides must not be negative; None is without limit (flash-attention's -1)"
            )
    for name in ("documents", "cu_seqlens", "ranges"):
        x = getattr(mask, name)
        parts = x if isinstance(x, tuple) else (x,)
        pair = name == "ranges" or isinstance(x, tuple)
        if x is not None and not (
            len(parts) == 1 + pair and all(isinstance(p, Tensor) and _is_integral(p) for p in parts)
        ):
            allowed = "a pair of integer tensors" if name == "ranges" else "an integer tensor or a pair of them"
            raise TypeError(f"mask.{name} must be {allowed}, got {_described(x)}")
    if mask.documents is not None and mask.cu_seqlens is not None:
        raise ValueError("mask.documents and mask.cu_seqlens say the same in two ways; give one of them")
    if mask.cu_seqlens is not None:
        sizes = [tuple(x.shape) for x in _pair(mask.cu_seqlens)]
        if sizes[0] != sizes[1] or len(sizes[0]) != 1 or sizes[0][0] < 1:
            raise ValueError(f"mask.cu_seqlens must have shape (documents + 1,), for query and key alike, got {sizes}")
    padding = mask.key_padding
    if padding is not None and not (isinstance(padding, Tensor) and padding.dtype == torch.bool):
        raise TypeError(
            "mask.key_padding must be a boolean tensor (B, Nk), True where a key is real; got "
            f"{padding.dtype if isinstance(padding, Tensor) else type(padding).__name__}"
        )
    slopes = mask.alibi
    if slopes is not None and not (isinstance(slopes, Tensor) and slopes.is_floating_point()):
        raise TypeError(f"mask.alibi must be a floating-point tensor of slopes (H,), got {_described(slopes)}")
    if slopes is not None and _is_differentiated(slopes):
        raise ValueError(
            "mask.alibi is differentiated, but slopes get no derivative; pass attn_mask = slopes[:, None, None] * "
            "(key positions − query positions), which does"
        )
    for x in _tensors(mask):
        if x.device != device:
            raise ValueError(
                f"the mask has a tensor on {x.device}, the query is on {device}; use mask.to(query.device)"
            )


def _is_differentiated(x: Tensor) -> bool:
    """By any transform."""
    if torch.compiler.is_compiling():  # which sees no wrappers
        return x.requires_grad
    while True:
        if x.requires_grad or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None):
            return True
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)


def _is_integral(x: object) -> bool:
    if isinstance(x, Tensor):
        return x.dtype in _INTEGERS
    return isinstance(x, int) and not isinstance(x, bool)
