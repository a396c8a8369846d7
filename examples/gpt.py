"""A small GPT with rotary positions, in plain PyTorch: nothing in it knows of curvature."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import sorder.func


class GPT(nn.Module):
    """Decoder-only transformer; embedding and output head share their weight.

    Args:
        vocabulary: number of token values; 256 for bytes.
        width: of the residual stream. heads: divides ``width`` into even parts. layers: number of blocks.
        checkpoint_blocks: recompute each block where it is differentiated instead of remembering it.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, checkpoint_blocks: bool = False) -> None:
        super().__init__()
        if width % heads or width // heads % 2:
            raise ValueError(f"width {width} must be an even multiple of the number of heads, {heads}")
        self.head_width = width // heads
        self.checkpoint_blocks = checkpoint_blocks
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:  # GPT-2's initialisation: what adds to the residual stream is scaled by its depth
                depth = (2 * layers) ** -0.5 if name.endswith(("project.weight", "contract.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) of the token after each of ``tokens`` (batch, length)."""
        x = self.embedding(tokens)
        cos, sin = rotary_angles(tokens.shape[1], self.head_width, tokens.device)
        for block in self.blocks:
            x = (sorder.func.checkpoint(block) if self.checkpoint_blocks else block)(x, cos, sin)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = rearrange(qkv, "b n (three h d) -> three b h n d", three=3, h=self.heads)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.project(rearrange(mixed, "b h n d -> b n (h d)"))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))


def rotary_angles(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, width/2) of rotary positions (Su et al. 2021, arXiv:2104.09864)."""
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x_i, x_{i + d/2}) of (…, length, d) by the position's angles."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
