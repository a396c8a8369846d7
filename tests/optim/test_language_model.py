"""Defaults train a small byte-level GPT, and do more with a step than AdamW does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.optim import NewtonCG

WIDTH, CONTEXT, STEPS = 32, 32, 20
TEXT = (
    "def step(self, closure):\n    loss = closure()\n    for group in self.param_groups:\n"
    "        for p in group['params']:\n            if p.grad is None:\n                continue\n"
    "            p.add_(p.grad, alpha=-group['lr'])\n    return loss\n\n\nclass Linear(Module):\n"
    "    def __init__(self, fan_in, fan_out):\n        super().__init__()\n"
    "        self.weight = Parameter(torch.empty(fan_out, fan_in))\n        self.reset()\n"
)


class GPT(nn.Module):
    """One pre-norm block with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 128, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions.weight
        q, k, v = self.qkv(self.norm1(h)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attention.transpose(1, 2).flatten(-2))
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        return self.head(self.norm3(h))


def train(make: object, steps: int) -> list[float]:
    torch.manual_seed(0)
    net = GPT()
    data = torch.tensor(list(TEXT.encode()))
    optimizer = make(net.parameters())
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        rows = torch.randint(0, len(data) - CONTEXT, (16, 1), generator=generator) + torch.arange(CONTEXT + 1)
        x, y = data[rows[:, :-1]], data[rows[:, 1:]]

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(net(x).flatten(0, 1), y.flatten())

        if isinstance(optimizer, NewtonCG):
            losses.append(optimizer.step(closure).item())
        else:
            optimizer.zero_grad()
            loss = closure()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_far_ahead_of_adamw_after_as_many_steps() -> None:
    newton = train(NewtonCG, STEPS)
    adamw = min(train(lambda p, lr=lr: torch.optim.AdamW(p, lr), STEPS)[-1] for lr in (3e-3, 1e-2, 3e-2))
    assert newton[0] > 4.5
    assert newton[-1] < adamw - 0.3
