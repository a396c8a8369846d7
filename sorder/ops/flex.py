"""``flex_attention`` on :func:`sorder.attention`: block masks become row ranges; score functions are materialised.

Both functions here take the place of PyTorch's higher-order operator, which gets query (B, Hq, Nq, d), key and value
(B or 1, Hk, Nk, …), a function of the scores, a BlockMask as a tuple, the scale and options of kernels, and returns
(output, log-sum-exp and maximum of the scores in units of log 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor

from sorder.ops.attention import NotServedError, attention
from sorder.ops.mask import Mask
from sorder.ops.row_ranges import mask_from_rows

_LOG2 = math.log(2.0)
Outputs = tuple[Tensor, Tensor, Tensor]


def served(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], block_mask: tuple[Any, ...],
    scale: float, kernel_options: dict[str, Any], *_: Any,
) -> Outputs:  # fmt: skip
    """In linear memory, wherever every row of the mask sees one interval of keys.

    Raises:
        NotServedError: there is a ``score_mod``, or the maxima of the scores are asked for.
    """
    if score_mod is not flex_module._identity:
        raise NotServedError(
            "score_mod: what a function does to the scores cannot be recognised",
            "Say it to sorder.attention as softcap=, as mask=sorder.Mask(alibi=...) or as an additive attn_mask",
        )
    if kernel_options.get("OUTPUT_MAX"):
        raise NotServedError("return_aux: the maxima of the scores are not kept", "Ask for lse=True alone")
    mask = _Blocks.of(block_mask).mask(query, key.shape[-2])
    output, lse = attention(
        query, key, value, mask if isinstance(mask, Tensor) else None, scale=scale,
        enable_gqa=query.shape[-3] != key.shape[-3], mask=mask if isinstance(mask, Mask) else None, return_lse=True,
    )  # fmt: skip
    return output, lse / _LOG2, lse.new_empty(0)


def materialised(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], block_mask: tuple[Any, ...],
    scale: float, kernel_options: dict[str, Any], *_: Any,
) -> Outputs:  # fmt: skip
    """With all scores held and every order of derivative."""
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3).to(wide) for x in (key, value))
    scores = scale * (query.to(wide) @ key.mT)
    positions = [torch.arange(n, device=query.device) for n in scores.shape]
    scores = _over_indices(score_mod, (0,))(scores, *positions).to(wide)
    mask = _Blocks.of(block_mask).mask(query, key.shape[-2])
    if mask is not None:
        scores = scores.masked_fill(~_dense(mask, key.shape[-2]), -torch.inf)
    maximum = scores.amax(-1)
    empty = maximum == -torch.inf
    lse = scores.masked_fill(empty[..., None], 0.0).logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(empty[..., None], 0.0)
    output = (weights @ value).to(query.dtype)
    return output, lse.masked_fill(empty, -torch.inf) / _LOG2, maximum / _LOG2


class _Blocks(NamedTuple):
    """What a BlockMask shows: all of the ``full`` blocks, and of the ``partial`` ones what its function says."""

    lengths: tuple[int, int]
    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor] | None
    size: tuple[int, int]
    function: Callable[..., Tensor]

    @staticmethod
    def of(fields: tuple[Any, ...]) -> _Blocks:
        n_q, n_k, count, indices, full_count, full_indices = fields[:6]
        full = None if full_count is None else (full_count, full_indices)
        return _Blocks((n_q, n_k), (count, indices), full, fields[-3:-1], fields[-1])

    def mask(self, query: Tensor, n_k: int) -> Mask | Tensor | None:
        """For a query (B, H, Nq, d) and Nk keys, in memory linear in Nq where every row sees an interval."""
        if min(self.size) >= flex_module._LARGE_SPARSE_BLOCK_SIZE:  # what stands for no mask
            return None
        rows, keys = self.size
        n_q, device = query.shape[-2], query.device
        zero = torch.zeros((), dtype=torch.int64, device=device)
        batches = _indices(lambda b: self.function(b, zero, zero, zero), query.shape[0], device)
        heads = _indices(lambda h: self.function(zero, h, zero, zero), query.shape[1], device)
        partial, full = _listed(*self.partial), None if self.full is None else _listed(*self.full)
        function = _over_indices(self.function)
        j = torch.arange(n_k, device=device)

        def visible(first: int, last: int) -> Tensor:
            def spread(blocks: Tensor) -> Tensor:
                some = blocks[..., first // rows : (last - 1) // rows + 1, :]
                return some.repeat_interleave(rows, -2)[..., : last - first, :].repeat_interleave(keys, -1)[..., :n_k]

            shown = function(batches, heads, torch.arange(first, last, device=device), j) & spread(partial)
            return shown if full is None else shown | spread(full)

        lead = max(len(batches), partial.shape[0]) * max(len(heads), partial.shape[1])
        return mask_from_rows(visible, n_q, n_k, lead, rows)


def _listed(count: Tensor, indices: Tensor) -> Tensor:
    """(B, H, row blocks, key blocks), True for the first ``count`` of the listed key blocks of every row block."""
    columns = indices.shape[-1]
    chosen = torch.arange(columns, device=indices.device) < count[..., None]
    dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter(-1, indices.long().masked_fill(~chosen, columns), True)[..., :columns]


def _indices(function: Callable[[Tensor], Tensor], size: int, device: torch.device) -> Tensor:
    """The batch or head indices at which a mask is evaluated: all where it depends on them, else one."""
    depends = False

    def probe(index: Tensor) -> Tensor:
        nonlocal depends
        with _index_transform():
            depends = torch._C._functorch.is_batchedtensor(function(index))
        return index

    torch.vmap(probe)(torch.arange(1, device=device))
    return torch.arange(size if depends else 1, device=device)


def _over_indices(function: Callable[..., Tensor], prefix: tuple[int | None, ...] = ()) -> Callable[..., Tensor]:
    """A function of single (batch, head, query, key) indices, of vectors of them: (B, H, Nq, Nk)."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=prefix + dims)

    def call(*args: Tensor) -> Tensor:
        with _index_transform():
            return function(*args)

    return call


def _index_transform() -> Any:
    """Lets ``tensor[index]`` pass under vmap, where it would ask for the value of the index."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # loads dynamo

    return TransformGetItemToIndex()


def _dense(mask: Mask | Tensor, n_k: int) -> Tensor:
    if isinstance(mask, Tensor):
        return mask
    assert mask.ranges is not None
    start, stop = (x[..., None] for x in mask.ranges)
    j = torch.arange(n_k, device=start.device)
    return (j >= start) & (j < stop)
