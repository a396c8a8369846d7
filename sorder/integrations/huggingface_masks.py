"""Hugging Face's mask functions, turned into a :class:`sorder.Mask` instead of an Nq × Nk tensor.

transformers describes a mask by a function of (batch, head, query, key) indices, put together from closures: causal,
windows, chunks, padding, packed sequences. Those it makes itself are recognised by their code, once a small sample has
shown that they mean here what they are taken for. Any other is evaluated, a block of rows at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sorder.ops.constants import constant
from sorder.ops.mask import Mask
from sorder.ops.row_ranges import mask_from_rows, padding_fields

MaskFunction = Callable[..., Any]

_NO_TENSOR = (
    'attn_implementation="sorder" describes the attention mask instead of listing it, but this model {}: it computes '
    'its attention itself, or changes the mask. Use attn_implementation="eager", whose products are exact as well'
)


class Pattern(NamedTuple):
    """An intersection of what transformers' mask functions say, in the positions of queries and keys.

    Attributes:
        left: a query sees keys at most this many positions before it; ``None`` for no bound.
        right: and at most this many after it; causal is 0.
        padding: (B, N), true where a key is real.
        documents: (B, N), the number of the packed sequence that a position belongs to.
        chunks: (size, (B,) first positions): a query sees the keys of its chunk.
        packed: positions restart with every document, so that the pattern holds within documents only.
    """

    left: int | None = None
    right: int | None = None
    padding: Tensor | None = None
    documents: Tensor | None = None
    chunks: tuple[int, Tensor] | None = None
    packed: bool = False

    def meet(self, other: Pattern) -> Pattern | None:
        """The intersection; ``None`` where one pattern cannot say it."""
        parts = {}
        for name in ("padding", "documents", "chunks"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None:
                return None
            parts[name] = theirs if mine is None else mine
        left, right = _least(self.left, other.left), _least(self.right, other.right)
        return Pattern(left, right, **parts, packed=self.packed or other.packed)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedMask(Mask):
    """A mask that transformers takes for one that needs no more preparation, as a static cache asks for.

    A model that computes with it as with a tensor is told that it cannot.
    """

    ndim: ClassVar[int] = 4

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_TENSOR.format(f"passes it to {getattr(function, '__name__', function)}"))

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(_NO_TENSOR.format("indexes it"))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_NO_TENSOR.format(f"asks for its {name}"))


@torch._disable_dynamo  # closures and values are looked at; what comes out is small
def mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | Mask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    cache_position: Tensor | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Mask | Tensor | None:
    """transformers' mask interface, all by keyword.

    Args:
        batch_size: B.
        kv_length: Nk.
        q_length: Nq.
        q_offset: position of the first query, such as the number of cached tokens.
        kv_offset: position of the first key, such as where a sliding cache begins.
        mask_function: of (batch, head, query, key) positions, true where the query sees the key; default causal.
        attention_mask: (B, N), true where a token is real; or what this function returned.
        allow_is_causal_skip: ``None`` may stand for the mask of a single query that sees every key.
        allow_is_bidirectional_skip: ``None`` may stand for no mask.
        cache_position: (Nq,), positions of the queries, instead of their number and offset (transformers 4).
        device: where the mask is used.
        options: what transformers' own mask functions take besides.

    Returns:
        ``None`` where nothing is hidden and a skip is allowed; a mask description; or a boolean tensor (B, 1, Nq, Nk)
        for a mask that is no interval of keys in every row.
    """
    from transformers.masking_utils import causal_mask_function

    if isinstance(attention_mask, Mask):  # prepared
        return attention_mask
    function = causal_mask_function if mask_function is None else mask_function
    if cache_position is not None:
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    assert q_length is not None
    offset = int(q_offset) - int(kv_offset)
    pattern = recognise(function)
    if pattern is not None and attention_mask is not None:
        pattern = pattern.meet(Pattern(padding=attention_mask))
    if pattern is not None and pattern.documents is not None and _is_one(pattern.documents):
        pattern = pattern._replace(documents=None, packed=False)  # a compiled model does not look at the positions
    simple = pattern is not None and not (pattern.packed and pattern.documents is None)
    if pattern is None or not simple or (pattern.documents is not None and (offset or q_length != kv_length)):
        return _evaluated(
            batch_size, q_length, kv_length, int(q_offset), kv_offset, function, attention_mask, device, options
        )
    fields: dict[str, Any] = {}
    if pattern.padding is not None:
        fields = padding_fields(_padding(pattern.padding, kv_offset, kv_length))
    left, right = pattern.left, pattern.right
    if left is not None and left >= offset + q_length - 1:
        left = None
    if right is not None and offset + right >= kv_length - 1:
        right = None
    if pattern.documents is not None:
        fields["documents"] = pattern.documents
    if pattern.chunks is not None:
        fields["documents"] = _chunk_ids(*pattern.chunks, int(q_offset), q_length, kv_offset, kv_length)
    # A causal mask is never left out: a model that does not hand its attention to ours would silently see the future.
    may_skip = allow_is_bidirectional_skip or (allow_is_causal_skip and q_length == 1)
    if may_skip and left is right is None and not fields:
        return None
    causal = right == 0
    window = (left, None if causal else right)
    return PreparedMask(causal=causal, alignment=offset, window=None if window == (None, None) else window, **fields)


def _padding(attention_mask: Tensor, kv_offset: int, kv_length: int) -> Tensor:
    """(B, Nk) of the keys at hand; what the mask does not reach is not real."""
    real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return torch.nn.functional.pad(real, (0, kv_length - real.shape[-1]))


def _is_one(documents: Tensor) -> bool:
    known = constant(documents)
    return known is not None and bool((known == known[:, :1]).all())


def _chunk_ids(size: int, first: Tensor, q_offset: int, n_q: int, kv_offset: int, n_k: int) -> tuple[Tensor, Tensor]:
    def ids(offset: int, n: int) -> Tensor:
        return (torch.arange(offset, offset + n, device=first.device) - first[:, None]) // size

    return ids(q_offset, n_q), ids(kv_offset, n_k)


def _evaluated(
    batch_size: int, q_length: int, kv_length: int, q_offset: int, kv_offset: int,
    function: MaskFunction, attention_mask: Tensor | None, device: Any, options: dict[str, Any],
) -> Mask | Tensor:  # fmt: skip
    from transformers.masking_utils import sdpa_mask

    by_number = "q_length" in inspect.signature(sdpa_mask).parameters
    options = {name: options[name] for name in ("use_vmap",) if name in options}

    def visible(first: int, last: int) -> Tensor:
        if by_number:
            rows = {"q_length": last - first, "q_offset": q_offset + first, "device": device}
        else:
            rows = {"cache_position": torch.arange(q_offset + first, q_offset + last, device=device)}
        block: Any = sdpa_mask(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=function,
            attention_mask=attention_mask, allow_is_causal_skip=False, **rows, **options,
        )  # fmt: skip
        return block.expand(batch_size, -1, last - first, kv_length)

    mask = mask_from_rows(visible, q_length, kv_length, batch_size)
    return PreparedMask(ranges=mask.ranges) if isinstance(mask, Mask) else mask


def recognise(function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function that transformers made; ``None`` for any other."""
    kind = _kinds().get(getattr(function, "__code__", None))
    return None if kind is None else kind(*(cell.cell_contents for cell in function.__closure__ or ()))


def _intersection(mask_functions: tuple[MaskFunction, ...]) -> Pattern | None:
    whole: Pattern | None = Pattern()
    for function in mask_functions:
        part = recognise(function)
        whole = None if whole is None or part is None else whole.meet(part)
    return whole


def _remapped(mask_function: MaskFunction, position_ids: Tensor) -> Pattern | None:
    """Positions count from the start of a document: within one, differences are those of indices."""
    inner = recognise(mask_function)
    if inner is None or not (inner.padding is inner.documents is inner.chunks is None):
        return None
    return inner._replace(packed=True)


@functools.cache
def _kinds() -> dict[CodeType | None, Callable[..., Pattern | None]]:
    """By the code of the function that a factory of transformers returns: what to make of its closure."""
    from transformers import masking_utils as hf

    ids = torch.tensor([[0, 0, 1, 1, 1]])
    real = ids == 1
    causal = hf.causal_mask_function
    # Factory: (arguments of a sample, what they should mean, pattern of the closure's cells in alphabetical order).
    expected: dict[str, tuple[tuple[Any, ...], Callable[[Tensor, Tensor], Tensor], Callable[..., Pattern | None]]] = {
        "causal_mask_function": ((), lambda i, j: j <= i, lambda: Pattern(right=0)),
        "bidirectional_mask_function": ((), lambda i, j: (i == i) & (j == j), Pattern),
        "sliding_window_overlay": ((2,), lambda i, j: j > i - 2, lambda w: Pattern(left=w - 1)),
        "sliding_window_bidirectional_overlay": (
            (2,),
            lambda i, j: (i - j).abs() <= 2,
            lambda w: Pattern(left=w, right=w),
        ),
        "chunked_overlay": (
            (2, torch.tensor([1])),
            lambda i, j: (i - 1) // 2 == (j - 1) // 2,
            lambda size, first: Pattern(chunks=(size, first)),
        ),
        "padding_mask_function": ((real,), lambda i, j: real[0, j], lambda padding: Pattern(padding=padding)),
        "packed_sequence_mask_function": (
            (ids,),
            lambda i, j: ids[0, i] == ids[0, j],
            lambda documents: Pattern(documents=documents),
        ),
        "and_masks": (
            (causal, lambda b, h, i, j: j != 1),
            lambda i, j: (j <= i) & (j != 1),
            _intersection,
        ),
        "remap_positions_for_packed_sequence": (
            (causal, torch.tensor([[0, 1, 0, 1, 2]])),
            lambda i, j: (j - 2 * (j > 1)) <= (i - 2 * (i > 1)),
            _remapped,
        ),
    }
    i, j = torch.arange(5)[:, None], torch.arange(5)
    zero = torch.zeros((), dtype=torch.long)
    known: dict[CodeType | None, Callable[..., Pattern | None]] = {}
    for name, (arguments, meaning, pattern) in expected.items():
        factory = getattr(hf, name, None)  # absent in some versions
        if factory is None:
            continue
        function = factory(*arguments) if arguments else factory
        if (function(zero, zero, i, j).expand(5, 5) == meaning(i, j)).all():
            known[function.__code__] = pattern
    return known
