"""A byte-level language model and some bytes, made on the spot, for the examples beside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = b"the quick brown fox jumps over the lazy dog; " * 40


class ByteModel(nn.Module):
    """Predicts a byte from the one before it and its own position in a window: logits (batch, length, 256)."""

    def __init__(self, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.mix = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embedding(tokens) + self.positions[:length]
        return self.head(self.mix(x, src_mask=mask, is_causal=True))


def windows(length: int = 32) -> Tensor:
    """The text cut into rows of ``length`` + 1 bytes."""
    tokens = torch.tensor(list(TEXT))
    return tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)


def language_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Mean cross-entropy of every byte but the first of (batch, length + 1)."""
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
