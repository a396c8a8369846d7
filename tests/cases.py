"""Small float64 problems with which every curvature product is compared with a dense oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Problem:
    """A model as a pure function of its parameters, and a loss of its outputs.

    Attributes:
        module: the model, float64.
        inputs: its argument.
        loss_fn: outputs ↦ scalar.
    """

    module: nn.Module
    inputs: Tensor
    loss_fn: Callable[[Tensor], Tensor]

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def model_fn(self, params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(self.module, params, (self.inputs,))

    def objective(self, params: dict[str, Tensor]) -> Tensor:
        return self.loss_fn(self.model_fn(params))

    def random_tangent(self, seed: int = 1) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {n: torch.randn(p.shape, dtype=p.dtype, generator=generator) for n, p in self.params.items()}


class Attention(nn.Module):
    """Causal self-attention through ``F.scaled_dot_product_attention``, by its differentiable math backend."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        with sdpa_kernel(SDPBackend.MATH):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.norm1(h))
        return h + F.gelu(self.mlp(self.norm2(h)))


class Transformer(nn.Module):
    """Embedding, blocks, and a head tied to the embedding; ``wrap`` goes around every block."""

    def __init__(
        self, width: int = 4, depth: int = 2, wrap: Callable[[nn.Module], Callable[..., Tensor]] | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.wrap = wrap

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = self.wrap(block)(h) if self.wrap else block(h)
        return self.head(h)


class Partial(nn.Module):
    """One parameter that the output does not use, and one that enters linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(2))
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x)) + self.shift


def _mlp() -> Problem:
    target = torch.randint(0, 3, (6,))
    return Problem(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        torch.randn(6, 4),
        lambda out: F.cross_entropy(out, target),
    )


def _conv() -> Problem:
    target = torch.tensor([[0, 2, -100], [1, 1, 2]])
    weight = torch.tensor([0.5, 1.0, 2.0])
    return Problem(
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.GELU(), nn.Conv1d(3, 3, 2)),
        torch.randn(2, 2, 5),
        lambda out: F.cross_entropy(out, target, weight=weight, label_smoothing=0.1),
    )


def _conv2d() -> Problem:
    target = torch.randn(2, 3).softmax(-1)
    return Problem(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 3)),
        torch.randn(2, 1, 4, 4),
        lambda out: F.cross_entropy(out, target, reduction="sum"),
    )


def _transformer() -> Problem:
    tokens = torch.randint(0, 5, (2, 4))
    target = torch.randint(0, 5, (2, 4))
    return Problem(Transformer(), tokens, lambda out: F.cross_entropy(out.flatten(0, 1), target.flatten()))


def _regression() -> Problem:
    target = torch.randn(5, 2)
    return Problem(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        torch.randn(5, 3),
        lambda out: F.mse_loss(out, target),
    )


def _multilabel() -> Problem:
    target = torch.randint(0, 2, (5, 3)).double()
    weight, pos_weight = torch.rand(5, 1) + 0.5, torch.tensor([1.0, 2.0, 3.0])
    return Problem(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        torch.randn(5, 3),
        lambda out: F.binary_cross_entropy_with_logits(out, target, weight=weight, pos_weight=pos_weight),
    )


def _other_loss() -> Problem:
    target = torch.randn(5, 2)
    return Problem(
        nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)),
        torch.randn(5, 3),
        lambda out: torch.cosh(out - target).log().mean() + 0.1 * out.prod(-1).sum(),
    )


def _partial() -> Problem:
    return Problem(Partial(), torch.randn(4, 3), lambda out: out.square().mean())


_MAKERS: dict[str, Callable[[], Problem]] = {
    "mlp": _mlp,
    "conv": _conv,
    "conv2d": _conv2d,
    "transformer": _transformer,
    "regression": _regression,
    "multilabel": _multilabel,
    "other_loss": _other_loss,
    "partial": _partial,
}

CASES = tuple(_MAKERS)
CLOSED_FORM_CASES = ("mlp", "conv", "conv2d", "transformer", "regression", "multilabel")


def make_problem(name: str) -> Problem:
    """The problem called ``name``, in float64, the same at every call."""
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            return _MAKERS[name]()
        finally:
            torch.set_default_dtype(default)


def counting(counted: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose calls ``counted`` counts under ``name``."""

    def count(*args: Any) -> Any:
        counted[name] += 1
        return function(*args)

    return count


def flatten(tree: object) -> Tensor:
    """Leaves of a pytree, one after the other in one vector."""
    return torch.cat([leaf.reshape(-1) for leaf in torch.utils._pytree.tree_leaves(tree)])


def unflatten(vector: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of :func:`flatten` for a dict of parameters."""
    parts = vector.split([p.numel() for p in params.values()])
    return {name: part.view_as(p) for (name, p), part in zip(params.items(), parts, strict=True)}


def _rows(out: Tensor, x: Tensor) -> Tensor:
    """Jacobian by one reverse pass per output: no ``vmap``, under which layer norm's second derivative is wrong."""
    return torch.stack([torch.autograd.grad(o, x, retain_graph=True)[0] for o in out.flatten()])


def dense_hessian(problem: Problem) -> Tensor:
    """Hessian of the objective by reverse mode over reverse mode, (P, P)."""
    params = problem.params
    x = flatten(params).requires_grad_()
    (gradient,) = torch.autograd.grad(problem.objective(unflatten(x, params)), x, create_graph=True)
    return _rows(gradient, x)


def dense_ggn(problem: Problem) -> Tensor:
    """Jᵀ H J with J and H as matrices, (P, P)."""
    params = problem.params
    x = flatten(params).requires_grad_()
    out = problem.model_fn(unflatten(x, params))
    z = out.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.loss_fn(z), z, create_graph=True)
    j, h = _rows(out, x), _rows(gradient, z).reshape(out.numel(), -1)
    return j.T @ h @ j


def relative_error(got: object, want: object) -> float:
    """‖got − want‖ / ‖want‖ over all leaves, and infinite where something is not finite."""
    a, b = flatten(got).detach().double(), flatten(want).detach().double()
    if a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return float("inf")
    return float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float64).tiny))
