"""Where a block of Kronecker-factored curvature lies in the parameters: a stack of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Rows ``start`` to ``start + rows`` of parameter number ``index``, along its first dimension."""

    index: int
    start: int
    rows: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The view of these rows in ``tensors``, one per parameter."""
        return tensors[self.index].narrow(0, self.start, self.rows)

    def overlaps(self, other: Place) -> bool:
        """Whether the two share rows."""
        apart = self.start + self.rows <= other.start or other.start + other.rows <= self.start
        return self.index == other.index and not apart


@dataclass(frozen=True)
class Block:
    """Parameters that are seen as ``groups`` matrices of m rows and n columns.

    Attributes:
        kind: of layer: "linear", "conv2d", "embedding", "norm", "bias".
        weight: rows of a weight, flattened to matrices; transposed where ``transposed``. None for a stack.
        vectors: with a weight, its bias (or nothing), which is one more column; without, vectors that are stacked to
            one column, such as the scale and the bias of a norm.
        groups: matrices that the weight's rows divide into, for grouped convolutions.
    """

    kind: str
    weight: Place | None
    vectors: tuple[Place, ...]
    transposed: bool = False
    groups: int = 1

    @property
    def places(self) -> tuple[Place, ...]:
        """All that the block covers."""
        return self.vectors if self.weight is None else (self.weight, *self.vectors)

    def gather(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """(groups, m, n) in ``dtype``, from one tensor per parameter."""
        if self.weight is None:
            return torch.cat([v.of(tensors).reshape(-1) for v in self.vectors]).to(dtype).view(1, -1, 1)
        matrix = self.weight.of(tensors).to(dtype)
        matrix = matrix.t() if self.transposed else matrix.flatten(1)
        matrix = matrix.unflatten(0, (self.groups, -1))
        if not self.vectors:
            return matrix
        bias = self.vectors[0].of(tensors).to(dtype).view(self.groups, -1, 1)
        return torch.cat([matrix, bias], -1)

    def scatter(self, matrices: Tensor, tensors: Sequence[Tensor]) -> None:
        """Inverse of :meth:`gather`: writes (groups, m, n) into one tensor per parameter."""
        if self.weight is None:
            parts = matrices.flatten().split([v.of(tensors).numel() for v in self.vectors])
            for v, part in zip(self.vectors, parts, strict=True):
                v.of(tensors).copy_(part.view_as(v.of(tensors)))
            return
        target = self.weight.of(tensors)
        if self.vectors:
            self.vectors[0].of(tensors).copy_(matrices[..., -1].flatten())
            matrices = matrices[..., :-1]
        rows = matrices.flatten(0, 1)
        target.copy_(rows.t() if self.transposed else rows.view_as(target))

    def pack(self) -> tuple[Any, ...]:
        """Plain tuples, for a state dict."""
        weight = None if self.weight is None else (self.weight.index, self.weight.start, self.weight.rows)
        vectors = tuple((v.index, v.start, v.rows) for v in self.vectors)
        return (self.kind, weight, vectors, self.transposed, self.groups)

    @staticmethod
    def unpack(packed: Sequence[Any]) -> Block:
        """Inverse of :meth:`pack`."""
        kind, weight, vectors, transposed, groups = packed
        places = tuple(Place(*v) for v in vectors)
        return Block(kind, None if weight is None else Place(*weight), places, transposed, groups)


class Registry:
    """The blocks met so far. They do not overlap."""

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        self.blocks = list(blocks)

    def for_weight(
        self, kind: str, weight: Place, bias: Place | None, transposed: bool, groups: int
    ) -> tuple[Block | None, bool, Block | None]:
        """The block for a layer's weight; whether the bias is its column; the block of a bias that is not.

        A weight that is met with another bias, or none, keeps its block; the block is None where the weight overlaps
        one that is laid out otherwise.
        """
        known = next((b for b in self.blocks if b.weight == weight), None)
        if known is None:
            free = bias is None or self._free(bias)
            if not self._free(weight):
                return None, False, None if bias is None else self.for_vectors("bias", (bias,))
            known = Block(kind, weight, (bias,) if bias is not None and free else (), transposed, groups)
            self.blocks.append(known)
        joint = bias is not None and known.vectors == (bias,)
        alone = bias if bias is not None and not joint else None
        if (known.transposed, known.groups) != (transposed, groups):
            known = None
        return known, joint, None if alone is None else self.for_vectors("bias", (alone,))

    def for_vectors(self, kind: str, vectors: tuple[Place, ...]) -> Block | None:
        """The block that stacks ``vectors``; None where one of them is in another block."""
        block = Block(kind, None, vectors)
        if block in self.blocks:
            return block
        if not all(self._free(v) for v in vectors):
            return None
        self.blocks.append(block)
        return block

    def covers(self, index: int) -> bool:
        """Whether a block holds a part of parameter ``index``."""
        return any(p.index == index for b in self.blocks for p in b.places)

    def _free(self, place: Place) -> bool:
        return not any(place.overlaps(p) for b in self.blocks for p in b.places)
