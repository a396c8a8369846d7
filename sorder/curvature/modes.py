"""The ways to take a product with a Hessian or a Jacobian at one point of a closure's live parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from sorder.curvature.evaluation import Evaluation
from sorder.curvature.graph import python_nodes, watch_for_cuts
from sorder.curvature.split import Position, SplitRecorder
from sorder.curvature.substitution import dual_parameters, functional
from sorder.func.gradient import grad_and_value
from sorder.func.wide_norms import ForwardMode
from sorder.func.written_out import WrittenOut
from sorder.linalg.past_modes import sees_no_modes

Vector = Sequence[Tensor]
Product = Callable[[Vector], list[Tensor]]
# Called with what a run found (outputs, or loss and gradient); raises if it is not what the first run found.
Check = Callable[..., None]


@sees_no_modes
def zeros_for_none(found: Sequence[Tensor | None], like: Vector) -> list[Tensor]:
    """``found`` dense, with zeros in the place of missing tensors and of autograd's symbolic zeros."""
    return [
        torch.zeros_like(p)
        if g is None or g._is_zerotensor()
        else (g.to_dense() if g.layout != torch.strided else g).detach()
        for g, p in zip(found, like, strict=True)
    ]


def hessian_reverse_over_reverse(root: Tensor, params: Vector) -> tuple[list[Tensor | None], Product]:
    """Gradient, and v ↦ ∇⟨g, v⟩ through one graph that is kept: a product is one second backward pass."""
    with watch_for_cuts(python_nodes(root)):
        gradient = torch.autograd.grad(root, params, create_graph=True, allow_unused=True)
    # A gradient without graph is constant: its parameter enters linearly.
    curved = [i for i, g in enumerate(gradient) if g is not None and g.requires_grad]
    heads = [g for g in gradient if g is not None and g.requires_grad]

    def product(v: Vector) -> list[Tensor]:
        if not heads:
            return zeros_for_none([None] * len(params), params)
        w = [v[i] for i in curved]
        found = torch.autograd.grad(heads, params, w, retain_graph=True, allow_unused=True)
        return zeros_for_none(found, params)

    return [None if g is None else g.detach() for g in gradient], product


def hessian_by_substitution(
    run: Callable[[], Evaluation], params: Vector, used: Sequence[int], check: Check
) -> Product:
    """v ↦ ``torch.func.jvp(grad(f))``, f the closure with its parameters substituted; nothing is kept."""
    substituted = functional(lambda: run().root, params, used)

    def root(*values: Tensor) -> tuple[Tensor, tuple[()]]:
        with WrittenOut(norms=False):
            return substituted(*values), ()

    gradient = grad_and_value(root, keep_graph=lambda _: False)

    def product(v: Vector) -> list[Tensor]:
        values = tuple(p.detach() for p in params)
        (found, (value, _)), (tangents, _) = torch.func.jvp(gradient, values, tuple(v))[:2]
        check([value], found)
        return zeros_for_none(tangents, params)

    return product


def hessian_by_dual_numbers(run: Callable[[], Evaluation], params: Vector, check: Check) -> Product:
    """v ↦ tangent of the gradient, the live parameters being dual numbers; nothing is kept.

    It serves what ``torch.func`` refuses, such as saved-tensor hooks, but holds a graph of the tangents, too.
    """

    def product(v: Vector) -> list[Tensor]:
        with dual_parameters(params, v):
            with WrittenOut(norms=False):
                root = run().root
            found = torch.autograd.grad(root, params, allow_unused=True)
            duals = [None if g is None else forward_ad.unpack_dual(g) for g in found]
            check(
                [forward_ad.unpack_dual(root).primal.detach()],
                [None if d is None else d.primal for d in duals],
            )
            return zeros_for_none([None if d is None else d.tangent for d in duals], params)

    return product


def jacobian_transpose(outputs: Vector, params: Vector) -> Product:
    """c ↦ Jᵀc through the outputs' graph, which is kept."""

    def product(c: Vector) -> list[Tensor]:
        found = torch.autograd.grad(outputs, params, list(c), retain_graph=True, allow_unused=True)
        return zeros_for_none(found, params)

    return product


def jacobian_by_double_backward(outputs: Vector, params: Vector) -> Product:
    """v ↦ J v = ∇ᵤ⟨Jᵀu, v⟩, since Jᵀu is linear in u: one backward pass through a kept graph of Jᵀu."""
    # Jᵀu is wanted for its graph only, so u is a scalar expanded to the outputs' shape and costs no memory.
    u = [z.new_zeros(()).expand(z.shape).requires_grad_() for z in outputs]
    pulled = torch.autograd.grad(outputs, params, u, create_graph=True, allow_unused=True)
    kept = [i for i, w in enumerate(pulled) if w is not None and w.requires_grad]
    heads = [w for w in pulled if w is not None and w.requires_grad]

    def product(v: Vector) -> list[Tensor]:
        if not heads:
            return [torch.zeros_like(z) for z in outputs]
        found = torch.autograd.grad(heads, u, [v[i] for i in kept], retain_graph=True, allow_unused=True)
        return zeros_for_none(found, outputs)

    return product


def jacobian_by_dual_numbers(
    run: Callable[[], Evaluation], params: Vector, positions: Sequence[Position], check: Check
) -> Product:
    """v ↦ J v, the live parameters being dual numbers, without any graph; nothing is kept."""

    def product(v: Vector) -> list[Tensor]:
        with dual_parameters(params, v, graph=False), ForwardMode(), SplitRecorder(positions) as recorder:
            duals = [forward_ad.unpack_dual(z) for z in recorder.outputs(run().outputs)]
            check([d.primal.detach() for d in duals])
            return zeros_for_none([d.tangent for d in duals], [d.primal for d in duals])

    return product


def jacobian_by_substitution(
    run: Callable[[], Evaluation],
    params: Vector,
    positions: Sequence[Position],
    used: Sequence[int],
    check: Check,
) -> Product:
    """v ↦ J v by ``torch.func.jvp`` of the closure with its parameters substituted; nothing is kept."""

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        # The recorder is entered first, so that it sees substituted arguments.
        with ForwardMode(), SplitRecorder(positions) as recorder:
            evaluation = functional(run, params, used)(*values)
        own = {id(p): value for p, value in zip(params, values, strict=True)}
        return tuple(own.get(id(z), z) for z in recorder.outputs(evaluation.outputs))

    def product(v: Vector) -> list[Tensor]:
        values = tuple(p.detach() for p in params)
        found, tangents = torch.func.jvp(outputs, values, tuple(v))[:2]
        check(found)
        return list(tangents)

    return product


def relative_difference(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """‖a − b‖/‖b‖ over the tensors that both have."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    norms = [[torch.linalg.vector_norm(t, dtype=_wide(t)).item() for t in (x - y, y)] for x, y in pairs]
    difference, norm = (sum(n[k] ** 2 for n in norms) ** 0.5 for k in (0, 1))
    return difference / norm if norm > 0.0 else 0.0


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
