"""Philox 4×32 with seven rounds in int64 PyTorch arithmetic: the dropout masks of the kernels, bit for bit.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3; the constants are in Triton's
``tl.philox`` too. A counter-based generator gives an entry of P the same word in every map and replay.
"""

from __future__ import annotations

import torch

ROUNDS = 7
_LOW = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def dropped(seed: torch.Tensor, counter: torch.Tensor, p: float) -> torch.Tensor:
    """Where dropout with probability ``p`` drops, bool of ``counter``'s shape.

    Args:
        seed: int64 (2,); the first number is the key, the second the upper half of the counter.
        counter: int64 ((z·Nq + i)·Nk + j) of query head z, row i, key j: the lower half.
        p: probability; dropped is where the first word of the output is below ``int(p · 2³²)``.
    """
    key, upper = seed[0], seed[1]
    return philox(key, counter, upper) < int(p * 2**32)


def philox(key: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """First 32-bit output word, as int64, for 64-bit halves ``lower`` and ``upper`` of the counter."""
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    c0, c1, c2, c3 = lower & _LOW, (lower >> 32) & _LOW, upper & _LOW, (upper >> 32) & _LOW
    for _ in range(ROUNDS):
        (high_b, low_b), (high_a, low_a) = _product(_ROUND_B, c2), _product(_ROUND_A, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return c0


def _product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) 32-bit words of the 64-bit product of two 32-bit words, without overflow of int64's sign."""
    low_half = (a & 0xFFFF) * b
    high_half = (a >> 16) * b + (low_half >> 16)
    return high_half >> 16, ((high_half & 0xFFFF) << 16) | (low_half & 0xFFFF)
