"""Sees, while a closure runs, which layers use which parameters, and carries vectors back to their outputs.

Nothing is hung on modules: a torch-function mode sees the functions that modules call, whoever calls them, so that
layers without a forward of their own (``nn.MultiheadAttention.out_proj``), tied weights and plain functions of
parameters are met, and a user's hooks run as they would without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from sorder.curvature.graph import nodes
from sorder.func.recompute import _Recompute
from sorder.kfac.layers import Layer, Rows, match_layer
from sorder.kfac.layout import Block, Place, Registry

_functorch = torch._C._functorch
# What the report calls uses that no torch function shows.
UNSEEN = "a derivative inside the closure, or an autograd.Function"


@dataclass(frozen=True, eq=False)
class Use:
    """One call of a layer, and where its parameters are.

    Attributes:
        layer: the call. block: of its parameters.
        bias: 1 where the block's last column is a bias that the call adds, 0 where it has one that the call does not
            add, None where it has none.
        outputs_left: whether the call's outputs number the rows of the block's matrices; otherwise its inputs do, as
            an embedding's token numbers do.
        recomputed: met inside a checkpoint, where every backward pass makes it anew.
    """

    layer: Layer
    block: Block
    bias: float | None
    outputs_left: bool
    recomputed: bool = False


# Called with a use, the derivative at its outputs as Layer.outputs gives it, and whether this is the first vector.
Visit = Callable[[Use, Tensor, bool], None]


class Capture(TorchFunctionMode):
    """Context in which a closure's layers are recorded; :meth:`sweep` then carries vectors back.

    Recomputation by :func:`sorder.func.checkpoint` runs under the modes of the first run, so that layers inside are met
    in the backward pass; ``torch.utils.checkpoint`` leaves the outer graph in place, and its layers are met at once.

    Args:
        params: the parameters. registry: their blocks so far; new ones are added.
    """

    def __init__(self, params: Sequence[Tensor], registry: Registry) -> None:
        super().__init__()
        self._params = list(params)
        self._registry = registry
        self._storages: dict[int, list[int]] = {}
        for i, p in enumerate(self._params):
            self._storages.setdefault(p.untyped_storage().data_ptr(), []).append(i)
        self._rows = Rows()
        self._uses: list[tuple[Use, GradientEdge]] = []
        self._hidden: set[int] = set()
        self._receive: Callable[[Use, Tensor], None] | None = None
        self.others: dict[int, set[str]] = {}

    # ------------------------------------------------------------------ the forward pass

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.multi_head_attention_forward:
            with self._inside_attention(args[0] if args else kwargs["query"]):
                return function(*args, **kwargs)
        result = function(*args, **kwargs)
        self._look(function, args, kwargs, result)
        return result

    @contextmanager
    def _inside_attention(self, query: Tensor) -> Iterator[None]:
        """The function's own calls of ``linear``, which the mode does not see while it handles the function."""
        linear = F.linear

        def seen(*args: Any, **kwargs: Any) -> Tensor:
            result = linear(*args, **kwargs)
            self._look(linear, args, kwargs, result)
            return result

        self._rows = Rows((query.shape[0], query.shape[1] if query.dim() == 3 else 1))
        try:
            with mock.patch.object(F, "linear", seen):
                yield
        finally:
            self._rows = Rows()

    def _look(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return
        met = {i for t in tree_iter((args, kwargs)) if isinstance(t, Tensor) for i in self._of_storage(t)}
        if not met:
            return
        if met & set(self._of_storage(result)):
            return  # a view
        recomputed = _functorch.is_functorch_wrapped_tensor(result)
        if not result.requires_grad:
            if not torch.is_grad_enabled() and not recomputed:
                self._hidden |= {i for i in met if self._params[i].requires_grad}
            return
        uses, covered = self._match(function, args, kwargs)
        for i in met - covered:
            self.others.setdefault(i, set()).add(getattr(function, "__name__", str(function)))
        if not recomputed:
            edge = get_gradient_edge(result)
            self._uses += [(use, edge) for use in uses]
            return
        for use in uses:
            use = replace(use, recomputed=True)
            result.register_hook(lambda g, use=use: self._deliver(use, g))

    def _deliver(self, use: Use, g: Tensor) -> None:
        if self._receive is not None:
            self._receive(use, plain(g))

    def _of_storage(self, tensor: Tensor) -> list[int]:
        tensor = unwrapped(tensor)
        if tensor.layout != torch.strided or tensor._is_zerotensor():
            return []
        found = self._storages.get(tensor.untyped_storage().data_ptr(), [])
        return [i for i in found if _starts_in(tensor, self._params[i])]

    def _match(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Use], set[int]]:
        """The uses that a call is, and the numbers of the parameters that they account for."""
        args = tuple(plain(a) if isinstance(a, Tensor) else a for a in args)
        kwargs = {k: plain(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        layer = match_layer(function, args, kwargs, self._rows)
        if layer is None:
            return [], set()
        if layer.vectors:
            vectors = tuple(self._place(v)[0] for v in layer.vectors)
            return self._stack(layer, vectors)
        place, turned = self._place(layer.weight)
        bias, _ = self._place(layer.bias)
        if bias is not None and layer.weight is not None and bias.rows != layer.weight.shape[int(layer.transposed)]:
            bias = None  # one number for all outputs is no column
        uses: list[Use] = []
        block: Block | None = None
        apart: Block | None = None
        if place is not None:
            transposed = layer.transposed and not turned
            if turned and not layer.transposed:
                return [], set()
            kind, groups = layer.kind, layer.groups
            block, joint, apart = self._registry.for_weight(kind, place, bias, transposed, groups)
            if block is not None:
                column = None if not block.vectors else 1.0 if joint else 0.0
                uses.append(Use(layer, block, column, outputs_left=kind != "embedding"))
        elif bias is not None:
            apart = self._registry.for_vectors("bias", (bias,))
        if apart is not None:
            alone = replace(layer, inputs=None, outputs=partial(_flat_groups, layer.outputs))
            uses.append(Use(alone, apart, None, outputs_left=True))
        return uses, {p.index for use in uses for p in use.block.places}

    def _stack(self, layer: Layer, vectors: tuple[Place | None, ...]) -> tuple[list[Use], set[int]]:
        places = tuple(v for v in vectors if v is not None)
        if not places:
            return [], set()
        outputs = layer.outputs
        if len(places) < len(vectors):
            # One of the two is frozen, or no parameter.
            which = vectors.index(places[0])
            outputs = partial(_half, layer.outputs, which)
        block = self._registry.for_vectors(layer.kind, places)
        if block is None:
            return [], set()
        return [Use(replace(layer, outputs=outputs), block, None, outputs_left=True)], {p.index for p in places}

    def _place(self, tensor: Tensor | None) -> tuple[Place | None, bool]:
        """The rows of a parameter that ``tensor`` is, if it is that, and whether it is transposed."""
        if tensor is None:
            return None, False
        for i in self._of_storage(tensor):
            p = self._params[i]
            offset = tensor.storage_offset() - p.storage_offset()
            if not p.requires_grad or p.dim() == 0:
                continue
            if tensor.shape[1:] == p.shape[1:] and tensor.stride() == p.stride() and offset % p.stride(0) == 0:
                return Place(i, offset // p.stride(0), tensor.shape[0]), False
            if not offset and tensor.dim() == 2 == p.dim():
                turned = p.t()
                if tensor.shape == turned.shape and tensor.stride() == turned.stride():
                    return Place(i, 0, p.shape[0]), True
        return None, False

    # ------------------------------------------------------------------ the backward passes

    def sweep(
        self, vectors: Iterable[tuple[Tensor, Tensor]], visit: Visit, visit_other: Callable[[int, Tensor], None]
    ) -> None:
        """Carry each (outputs z, vector v) back: derivatives of ⟨z, v⟩.

        Args:
            visit: called for every use and vector. visit_other: called for every parameter without a block, or whose
                layers do not lead to z, with its own derivative.
        """
        last: Tensor | None = None
        missed: set[int] = set()
        for z, v in vectors:
            first, last = z is not last, z
            missed = self._missed(z) if first else missed
            self._receive = partial(self._visit, visit, first)
            asked = [
                i
                for i, p in enumerate(self._params)
                if p.requires_grad and (i in self._hidden or i in missed or not self._registry.covers(i))
            ]
            targets: list[Any] = [edge for _, edge in self._uses] + [self._params[i] for i in asked]
            if not targets:
                return
            try:
                found = torch.autograd.grad(z, targets, v, retain_graph=True, allow_unused=True)
            finally:
                self._receive = None
            for (use, _), g in zip(self._uses, found, strict=False):
                if g is not None:
                    self._visit(visit, first, use, g)
            for i, g in zip(asked, found[len(self._uses) :], strict=True):
                if g is not None and (i in missed or not self._registry.covers(i)):
                    visit_other(i, g.to_dense() if g.layout != torch.strided else g)

    def _missed(self, z: Tensor) -> set[int]:
        """Numbers of the parameters with a block that ``z`` depends on, but not by their layers' calls.

        Those that it depends on in both ways are noted in ``others``. Second derivatives and classes of
        ``autograd.Function`` are no torch functions; the graph shows what they used.
        """
        above: dict[Any, list[Any]] = {}
        for node in nodes(z):
            for below, _ in node.next_functions:
                above.setdefault(below, []).append(node)
        calls: dict[int, set[Any]] = {}
        for use, edge in self._uses:
            for place in use.block.places:
                calls.setdefault(place.index, set()).add(edge.node)
        numbers = {id(p): i for i, p in enumerate(self._params)}
        missed = set()
        for leaf in above:
            i = numbers.get(id(getattr(leaf, "variable", None)))
            if i is None or not self._registry.covers(i):
                continue
            by_layer = apart = False
            seen, queue = set(), [leaf]
            while queue:
                node = queue.pop()
                if node in seen:
                    continue
                seen.add(node)
                if node in calls.get(i, ()) or getattr(type(node), "_forward_cls", None) is _Recompute:
                    by_layer = True
                else:
                    apart = apart or node not in above  # it is the last one, z's own
                    queue += above.get(node, [])
            if apart and i not in self.others:
                self.others[i] = {UNSEEN}
            if not by_layer:
                missed.add(i)
        return missed

    @staticmethod
    def _visit(visit: Visit, first: bool, use: Use, g: Tensor) -> None:
        with torch.no_grad():
            visit(use, use.layer.outputs(g), first)

    @property
    def used(self) -> set[int]:
        """Numbers of the parameters that layers or other functions used."""
        return {p.index for use, _ in self._uses for p in use.block.places} | self._hidden | set(self.others)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of ``torch.func``."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def plain(tensor: Tensor) -> Tensor:
    """:func:`unwrapped`, without graph."""
    return unwrapped(tensor).detach()


def _starts_in(tensor: Tensor, p: Tensor) -> bool:
    """Whether the first entry of ``tensor``, which has the storage of ``p``, is one of ``p``."""
    offset = tensor.storage_offset() - p.storage_offset()
    if offset < 0 or not p.numel():
        return False
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True), reverse=True):
        if size > 1 and stride:
            offset -= min(offset // stride, size - 1) * stride
    return offset == 0


def _flat_groups(outputs: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
    return outputs(g).flatten(2).unsqueeze(2)


def _half(outputs: Callable[[Tensor], Tensor], which: int, g: Tensor) -> Tensor:
    return outputs(g).chunk(2, -1)[which]
