"""Triton's generator as the kernels call it, to compare with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(SEED, COUNTER, WORDS, N: tl.constexpr):
    i = tl.arange(0, N)
    counter = tl.load(COUNTER + i)
    upper = tl.load(SEED + 1) + tl.zeros([N], tl.int64)
    c = (counter.to(tl.uint32), (counter >> 32).to(tl.uint32), upper.to(tl.uint32), (upper >> 32).to(tl.uint32))
    word, _, _, _ = tl.philox(tl.load(SEED), c[0], c[1], c[2], c[3], n_rounds=7)
    tl.store(WORDS + i, word.to(tl.int64))


def first_words(seed: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """First output word of each counter, as int64; the number of counters is a power of two."""
    words = torch.empty_like(counters)
    _kernel[(1,)](seed, counters, words, counters.numel())
    return words
