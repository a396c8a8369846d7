"""Kronecker factors of a block: sums over a batch, and their running means."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sorder.kfac.capture import Use
from sorder.kfac.layout import Block

APPROXIMATIONS = ("expand", "reduce")


@dataclass
class Term:
    """One Kronecker product of a block, C_inputs ⊗ C_outputs. A block has two where an embedding is the head, too.

    Attributes:
        outputs: Σ ggᵀ over rows and vectors, (groups, m, m), or its diagonal (groups, m).
        inputs: Σ aaᵀ over rows, likewise. rows: their number.
    """

    outputs: Tensor | float = 0.0
    inputs: Tensor | float = 0.0
    rows: int = 0


@dataclass
class FactorSums:
    """Sums over a batch, which may come in several pieces.

    With a the inputs and g the derivatives of an output's loss vector, a layer shared over positions s contributes

    - "expand": Σ over samples and positions, as if every position were a sample;
    - "reduce": Σ over samples of (mean_s a)(mean_s a)ᵀ and (Σ_s g)(Σ_s g)ᵀ

    (Eschenhagen et al., *Kronecker-factored approximate curvature for modern neural network architectures*, 2023). A
    block's curvature is (Σ aaᵀ / rows) ⊗ Σ ggᵀ. Several uses of one block are further rows.

    Attributes:
        terms: of every block, by the side of its outputs ("left" or "right"). diagonals: Σ g∘g of parameters
            without a block.
    """

    approximation: str
    max_size: int
    dtype: torch.dtype | None
    terms: dict[Block, dict[str, Term]] = field(default_factory=dict)
    diagonals: dict[int, Tensor] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)

    def visit(self, use: Use, g: Tensor, first: bool) -> None:
        """Add one use's part for one vector."""
        side = "left" if use.outputs_left else "right"
        term = self.terms.setdefault(use.block, {}).setdefault(side, Term())
        g = outputs_of(use, g, self.approximation, self._dtype(g))
        term.outputs = term.outputs + self._outer(g)
        if first if use.recomputed else id(use) not in self._counted:
            if not use.recomputed:
                self._counted.add(id(use))
            self._add_inputs(term, use, g)

    def visit_other(self, index: int, g: Tensor) -> None:
        """Add a parameter's own derivative for one vector."""
        square = g.to(wide(g, self.dtype)).square()
        self.diagonals[index] = square + self.diagonals[index] if index in self.diagonals else square

    def _dtype(self, g: Tensor) -> torch.dtype | None:
        """What a layer's rows are multiplied in: their own 16 bits on a GPU, where the sums are float32 all the same.

        Under autocast the layer itself saw its inputs in the 16 bits of its outputs.
        """
        exact = g.is_cuda and g.dtype in (torch.float16, torch.bfloat16) and self.approximation == "expand"
        return g.dtype if self.dtype is None and exact else self.dtype

    def _add_inputs(self, term: Term, use: Use, g: Tensor) -> None:
        dtype = wide(g, self.dtype)
        if use.layer.inputs is None:
            term.inputs = g.new_ones(1, 1, 1, dtype=dtype)
            term.rows = 1
            return
        a = use.layer.inputs()
        if a.is_floating_point():
            a = inputs_of(use, a, self.approximation, self._dtype(g))
            term.inputs, term.rows = term.inputs + self._outer(a), term.rows + a.shape[0] * a.shape[1]
            return
        assert use.layer.weight is not None
        samples, positions = a.shape
        size = use.layer.weight.shape[0]
        if self.approximation == "expand":
            counts = torch.bincount(a.flatten(), minlength=size + 1)[:size].to(dtype)
            term.rows += a.numel()
        else:
            _, (ids, sums) = _per_sample(a, g.new_ones(a.numel(), 1, dtype=dtype), size)
            shares = (sums.squeeze(-1) / positions).square()
            counts = shares.new_zeros(size + 1).index_add_(0, ids, shares)[:size]
            term.rows += samples
        term.inputs = term.inputs + counts[None]

    def _outer(self, x: Tensor) -> Tensor:
        """Σ xxᵀ over samples and positions, or its diagonal where it is too large."""
        if x.shape[-1] > self.max_size:
            return x.to(wide(x, self.dtype)).square().sum((0, 1))
        return gram(x.flatten(0, 1).transpose(0, 1))


_ROWS = 4096
"""Rows of one product in 16 bits."""


def gram(rows: Tensor) -> Tensor:
    """Σ xxᵀ over the rows x of (groups, rows, m), in float32 at least.

    Products of 16-bit rows are exact, their sums float32. But the matrix units of NVIDIA's GPUs cut off what they add,
    where adding elsewhere rounds to nearest: every few rows a sum of squares loses some units in its last place, a
    share that grows with the rows (1.6e-5 of 5,000 in bfloat16, 2.8e-5 in float16 on an H200). So they come
    ``_ROWS`` at a time.
    """
    if rows.dtype not in (torch.float16, torch.bfloat16):
        return rows.mT @ rows
    size = rows.shape[-1]
    rows = F.pad(rows, (0, -size % 8))  # for the matrix units; a bias's column has made the width odd
    sums = (torch.bmm(some.mT, some, out_dtype=torch.float32) for some in rows.split(_ROWS, 1))
    return functools.reduce(Tensor.add_, sums)[:, :size, :size]


def wide(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """``dtype``, or by default that of ``x``, float32 at least."""
    return dtype or torch.promote_types(x.dtype, torch.float32)


def outputs_of(use: Use, g: Tensor, approximation: str, dtype: torch.dtype | None) -> Tensor:
    """g, (samples, positions, groups, m); positions are summed for "reduce"."""
    g = g.to(wide(g, dtype))
    if not use.outputs_left and use.bias is not None:
        g = F.pad(g, (0, 1))  # the bias's column is not the embedding's
    return g.sum(1, keepdim=True) if approximation == "reduce" else g


def inputs_of(use: Use, a: Tensor, approximation: str, dtype: torch.dtype | None) -> Tensor:
    """a with the bias's column, (samples, positions, groups, n); the mean over positions for "reduce"."""
    a = a.to(wide(a, dtype))
    if use.bias is not None:
        a = F.pad(a, (0, 1), value=use.bias)
    return a.mean(1, keepdim=True) if approximation == "reduce" else a


def _per_sample(ids: Tensor, g: Tensor, size: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Sums of the rows of ``g`` over equal token numbers of one sample; (samples, (token numbers, sums))."""
    samples = torch.arange(ids.shape[0], device=ids.device)[:, None]
    keys, inverse = torch.unique((samples * (size + 1) + ids).flatten(), return_inverse=True)
    sums = g.new_zeros(len(keys), g.shape[-1]).index_add_(0, inverse, g)
    return keys // (size + 1), (keys % (size + 1), sums)


@dataclass
class ScaleSums:
    """Σ over samples and vectors of (Q_leftᵀ ∇W Q_right)², ∇W a sample's own derivative: EKFAC's scales.

    They are the diagonal of the curvature in the basis, so that no other ones are nearer in Frobenius norm (George et
    al., *Fast approximate natural gradient descent in a Kronecker-factored eigenbasis*, 2018). Positions are summed
    in ∇W, for "expand" and "reduce" alike; uses of one block by the same sample count as separate samples.

    Args:
        bases: (Q_left, Q_right) of every block, (groups, m, m) and (groups, n, n); None for the identity.
    """

    dtype: torch.dtype | None
    bases: Mapping[Block, tuple[Tensor | None, Tensor | None]]
    scales: dict[Block, Tensor] = field(default_factory=dict)

    def visit(self, use: Use, g: Tensor, first: bool) -> None:
        """Add one use's part for one vector."""
        if use.block not in self.bases:
            return
        left, right = self.bases[use.block]
        q_out, q_in = (left, right) if use.outputs_left else (right, left)
        g = _rotated(outputs_of(use, g, "expand", self.dtype), q_out)
        square = self._square(use, g, q_in)
        square = square if use.outputs_left else square.transpose(1, 2)
        known = self.scales.get(use.block)
        self.scales[use.block] = square if known is None else known + square

    def visit_other(self, index: int, g: Tensor) -> None:
        """Parameters without a block have no basis."""

    def _square(self, use: Use, g: Tensor, q_in: Tensor | None) -> Tensor:
        """(groups, outputs, inputs)."""
        if use.layer.inputs is None:
            return g.sum(1).square().sum(0).unsqueeze(-1)
        a = use.layer.inputs()
        if not a.is_floating_point():
            assert use.layer.weight is not None
            size = use.layer.weight.shape[0]
            _, (ids, sums) = _per_sample(a, g.reshape(a.numel(), -1), size)
            return g.new_zeros(size + 1, sums.shape[-1]).index_add_(0, ids, sums.square())[:size].t()[None]
        a = _rotated(inputs_of(use, a, "expand", self.dtype), q_in)
        if a.shape[1] == 1:
            return torch.einsum("nbo,nbi->boi", g[:, 0].square(), a[:, 0].square())
        # A block of samples at a time: their derivatives are as many matrices.
        step = max(1, _ELEMENTS // (g.shape[2] * g.shape[3] * a.shape[3]))
        pieces = zip(g.split(step), a.split(step), strict=True)
        total = g.new_zeros(g.shape[2], g.shape[3], a.shape[3])
        for some_g, some_a in pieces:
            total += torch.einsum("nsbo,nsbi->nboi", some_g, some_a).square_().sum(0)
        return total


_ELEMENTS = 1 << 24  # of a temporary: 64 MiB in float32


def _rotated(x: Tensor, q: Tensor | None) -> Tensor:
    """Qᵀx for every row and group."""
    return x if q is None else torch.einsum("nsbi,bij->nsbj", x, q.to(x.dtype))


# ---------------------------------------------------------------------- running means

Entry = dict[str, Any]


def averaged(old: Entry | None, fresh: Mapping[str, Tensor], decay: float) -> Entry:
    """Exponential running means of ``fresh`` with the weight that corrects their bias; a new dict of new tensors."""
    if old is not None and any(k in old and old[k].shape != v.shape for k, v in fresh.items()):
        old = None
    weight = (0.0 if old is None else old["weight"]) * decay + (1.0 - decay)
    out: Entry = {"weight": weight}
    for name in sorted({*fresh, *(k for k in old or () if k != "weight")}):
        kept = None if old is None or name not in old else decay * old[name]
        new = None if name not in fresh else (1.0 - decay) * fresh[name]
        out[name] = new if kept is None else kept if new is None else kept + new
    return out


def corrected(entry: Entry, name: str) -> Tensor:
    """A running mean without the bias of its start from zero (Kingma & Ba 2014, section 3)."""
    return entry[name] / entry["weight"]
