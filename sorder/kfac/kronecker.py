"""Kronecker-factored curvature: running factors of every block, their inverses, and products with these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sorder.curvature import CurvaturePoint
from sorder.kfac import inverses
from sorder.kfac.estimate import Batch
from sorder.kfac.factors import Entry, FactorSums, ScaleSums, averaged, corrected
from sorder.kfac.layout import Block, Registry
from sorder.linalg.past_modes import sees_no_modes

Vector = Sequence[Tensor]
Mean = Callable[[list[Tensor]], list[Tensor]]
INVERSES = ("cholesky", "eigen", "ekfac")


@dataclass(frozen=True)
class Options:
    """What :class:`sorder.kfac.KFACPreconditioner` explains."""

    estimator: str = "mc"
    samples: int = 1
    approximation: str = "expand"
    inverse: str = "cholesky"
    decay: float = 0.95
    max_size: int = 8192
    least_damping: float = 0.0
    factor_dtype: torch.dtype | None = None
    inverse_dtype: torch.dtype | None = None
    seed: int = 0


@dataclass(frozen=True)
class Factors:
    """Everything that is known of the curvature. Never changed in place: an update makes another one.

    Attributes:
        blocks: the blocks. running: of every block, running means of its factors, named "left.outputs", "left.inputs",
            "right.outputs", "right.inputs" after the side of a term's outputs. inverse: of every block, or empty.
        scales: of every block, running means of EKFAC's scales in the basis of ``inverse``.
        diagonals: of parameters without a block, running means of the diagonal.
        used: numbers of the parameters that the last update met. others: names of functions that used a parameter
            outside its block.
        updates: number of updates of the factors.
    """

    blocks: tuple[Block, ...] = ()
    running: tuple[Entry, ...] = ()
    inverse: tuple[inverses.Inverse | None, ...] = ()
    scales: tuple[Entry | None, ...] = ()
    diagonals: dict[int, Entry] | None = None
    used: frozenset[int] = frozenset()
    others: dict[int, tuple[str, ...]] | None = None
    updates: int = 0

    def terms(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """(left, right) factors of block ``number``: one Kronecker product, or two that are summed."""
        entry = self.running[number]
        found = []
        for side in ("left", "right"):
            if f"{side}.outputs" in entry:
                outputs, inputs = corrected(entry, f"{side}.outputs"), corrected(entry, f"{side}.inputs")
                found.append((outputs, inputs) if side == "left" else (inputs, outputs))
        return found


def updated(
    factors: Factors,
    point: CurvaturePoint,
    options: Options,
    *,
    new_bases: bool = True,
    loss_scale: float = 1.0,
    rank: int = 0,
    mean: Mean = list,
    params: Sequence[Tensor] | None = None,
) -> Factors:
    """Factors after another batch. Inverses stay what they were, but EKFAC's scales are measured in them.

    Args:
        point: the batch, as a point of its closures; they run again.
        new_bases: make EKFAC's eigenbases anew, before that.
        rank: of this process, which draws labels of its own. mean: over processes.
        params: those of ``point``, in the order of the factors' numbers. Default: the point's own order.
    """
    registry = Registry(factors.blocks)
    seed = options.seed + 7919 * factors.updates + 104_729 * rank
    batch = Batch(point, params or point.params, registry, options.estimator, options.samples, seed, loss_scale)
    sums = FactorSums(options.approximation, options.max_size, options.factor_dtype)
    batch.sweep(sums)
    measured = list(zip(registry.blocks, _measured(registry.blocks, sums), strict=True))
    # A layer whose result the loss does not see has nothing yet.
    measured = [(b, entry) for b, entry in measured if entry or b in factors.blocks]
    blocks, fresh = tuple(b for b, _ in measured), [entry for _, entry in measured]
    running = [*factors.running, *({"weight": 0.0} for _ in blocks[len(factors.running) :])]
    flat = [t for entry in fresh for t in entry.values()]
    _check_finite(flat)
    common = iter(mean(flat))
    for number, entry in enumerate(fresh):
        if entry:
            named = {name: next(common) for name in entry}
            old = running[number] if running[number]["weight"] else None
            running[number] = averaged(old, named, options.decay)
    diagonals = dict(factors.diagonals or {})
    in_blocks = {p.index for b in blocks for p in b.places}
    numbers = sorted(sums.diagonals.keys() - in_blocks)
    _check_finite([sums.diagonals[i] for i in numbers])
    for i, d in zip(numbers, mean([sums.diagonals[i] for i in numbers]), strict=True):
        diagonals[i] = averaged(diagonals.get(i), {"diagonal": d}, options.decay)
    absent = [None] * (len(blocks) - len(factors.blocks))
    out = Factors(
        blocks,
        tuple(running),
        (*factors.inverse, *absent),
        (*factors.scales, *absent),
        diagonals,
        frozenset(batch.used),
        {i: tuple(sorted(names)) for i, names in sorted(batch.others.items())},
        factors.updates + 1,
    )
    if options.inverse == "ekfac":
        if new_bases or None in out.inverse:
            out = inverted(out, options, 0.0)
        out = _rescaled(out, batch, options, mean)
    return out


@sees_no_modes
def inverted(factors: Factors, options: Options, damping: float) -> Factors:
    """Factors with inverses, or eigenbases, made anew from the running means; λ is in those of "cholesky"."""
    made: list[inverses.Inverse | None] = []
    for number, block in enumerate(factors.blocks):
        terms = factors.terms(number)
        if not terms:
            made.append(None)
            continue
        terms = [tuple(t.to(_factorisation_dtype(t, options)) for t in pair) for pair in terms]  # type: ignore[misc]
        made.append(_inverse(terms, block.kind, options, damping))
    return _replaced(factors, inverse=tuple(made), scales=tuple(None for _ in made))


def factor_damping(factors: Factors, options: Options, damping: float) -> float:
    """λ of the factors: ``damping``, but no less than ``options.least_damping`` times the mean eigenvalue of K."""
    return max(damping, options.least_damping * mean_eigenvalue(factors)) if options.least_damping else damping


def mean_eigenvalue(factors: Factors) -> float:
    """Trace of K over the number of entries that it covers."""
    traces, count = [], 0
    for number in range(len(factors.blocks)):
        terms = factors.terms(number)
        for left, right in terms:
            means = inverses.mean_eigenvalue(left) * inverses.mean_eigenvalue(right)
            traces.append(means.sum() * left.shape[-1] * right.shape[-1])
        if terms:
            count += left.shape[0] * left.shape[-1] * right.shape[-1]
    for entry in (factors.diagonals or {}).values():
        traces.append(corrected(entry, "diagonal").sum())
        count += entry["diagonal"].numel()
    return torch.stack([t.to(traces[0].device) for t in traces]).sum().item() / count if traces else 0.0


@sees_no_modes
def solve(factors: Factors, v: Vector, damping: float) -> list[Tensor]:
    """(K + λ)⁻¹v, K the Kronecker-factored curvature; one tensor per parameter, in the dtypes of ``v``."""
    with torch.no_grad():
        # What no block and no diagonal covers has no curvature.
        out = [t / damping if damping > 0.0 else t.clone() for t in v]
        for i, entry in (factors.diagonals or {}).items():
            d = corrected(entry, "diagonal")
            out[i] = (v[i] / inverses.positive(d.reshape(1, 1, -1), damping).reshape(d.shape)).to(v[i].dtype)
        for block, inverse, scale in zip(factors.blocks, factors.inverse, factors.scales, strict=True):
            if inverse is None:
                continue
            reference = next(t for t in (inverse["left"], inverse["right"], inverse["scale"]) if t is not None)
            x = block.gather(v, reference.dtype)
            known = inverse if scale is None else {**inverse, "scale": corrected(scale, "scale"), "damped": True}
            block.scatter(inverses.apply(known, x, damping), out)
    return out


def packed(factors: Factors) -> dict[str, Any]:
    """Plain containers of tensors, numbers and strings, for a state dict."""
    return {**vars(factors), "blocks": [b.pack() for b in factors.blocks], "used": sorted(factors.used)}


def unpacked(state: dict[str, Any], devices: Sequence[torch.device]) -> Factors:
    """Inverse of :func:`packed`; each block's tensors on the device of its parameters."""
    blocks = tuple(Block.unpack(b) for b in state["blocks"])
    own = [devices[b.places[0].index] for b in blocks]
    moved: dict[str, Any] = {
        name: tuple(_moved(entry, device) for entry, device in zip(state[name], own, strict=True))
        for name in ("running", "inverse", "scales")
    }
    moved["diagonals"] = {i: _moved(entry, devices[i]) for i, entry in (state["diagonals"] or {}).items()}
    return Factors(**{**state, **moved, "blocks": blocks, "used": frozenset(state["used"])})


def _moved(entry: Entry | None, device: torch.device) -> Entry | None:
    if entry is None:
        return None
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in entry.items()}


def dense_block(factors: Factors, number: int) -> Tensor:
    """The curvature of block ``number`` as a matrix, for tests and small problems.

    Coordinates run over groups, rows and columns of the block's matrices.
    """
    inverse, scale = factors.inverse[number], factors.scales[number]
    if scale is not None and inverse is not None:
        q = [
            torch.diag_embed(torch.ones((*s.shape[:1], k), dtype=s.dtype)) if f is None else f
            for f, s, k in zip(
                (inverse["left"], inverse["right"]), [scale["scale"]] * 2, scale["scale"].shape[1:], strict=True
            )
        ]
        values = corrected(scale, "scale")
        parts = [torch.kron(a, b) @ s.flatten().diag() @ torch.kron(a, b).T for a, b, s in zip(*q, values, strict=True)]
        return torch.block_diag(*parts)
    total: Any = 0.0
    for left, right in factors.terms(number):
        left, right = (torch.diag_embed(f) if f.dim() == 2 else f for f in (left, right))
        total = total + torch.block_diag(*(torch.kron(a, b) for a, b in zip(left, right, strict=True)))
    return total


def _measured(blocks: Sequence[Block], sums: FactorSums) -> list[dict[str, Tensor]]:
    found = []
    for block in blocks:
        entry: dict[str, Tensor] = {}
        for side, term in sums.terms.get(block, {}).items():
            if term.rows:
                assert isinstance(term.outputs, Tensor) and isinstance(term.inputs, Tensor)
                entry |= {f"{side}.inputs": term.inputs / term.rows, f"{side}.outputs": term.outputs}
        found.append(entry)
    return found


def _inverse(terms: Sequence[tuple[Tensor, Tensor]], name: str, options: Options, damping: float) -> inverses.Inverse:
    if options.inverse == "ekfac" and len(terms) == 2:
        # A basis for both: that of the factors' sums, each divided by its mean eigenvalue.
        left, right = (_balanced_sum(terms[0][side], terms[1][side]) for side in (0, 1))
        return inverses.by_eigenvalues(left, right, name)
    if len(terms) == 2:
        return inverses.of_two(terms[0], terms[1], damping, name)
    if options.inverse == "cholesky":
        return inverses.by_cholesky(*terms[0], damping, name)
    return inverses.by_eigenvalues(*terms[0], name)


def _balanced_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum of two factors, each divided by its mean eigenvalue; diagonal where both are."""
    if a.dim() != b.dim():
        a, b = (torch.diag_embed(f) if f.dim() == 2 else f for f in (a, b))
    sizes = [inverses.mean_eigenvalue(f).clamp_min(torch.finfo(f.dtype).tiny) for f in (a, b)]
    first, second = (f / s.view(-1, *[1] * (f.dim() - 1)) for f, s in zip((a, b), sizes, strict=True))
    return first + second


def _rescaled(factors: Factors, batch: Batch, options: Options, mean: Mean) -> Factors:
    """Another sweep, for the diagonal of the curvature in the present eigenbases."""
    bases = {b: (i["left"], i["right"]) for b, i in zip(factors.blocks, factors.inverse, strict=True) if i is not None}
    sums = ScaleSums(options.factor_dtype, bases)
    batch.sweep(sums)
    found = [b for b in factors.blocks if b in sums.scales]
    values = [sums.scales[b] for b in found]
    _check_finite(values)
    fresh = dict(zip(found, mean(values), strict=True))
    scales = [
        averaged(old, {"scale": fresh[block]}, options.decay) if block in fresh else old
        for block, old in zip(factors.blocks, factors.scales, strict=True)
    ]
    return _replaced(factors, scales=tuple(scales))


def _factorisation_dtype(t: Tensor, options: Options) -> torch.dtype:
    return options.inverse_dtype or torch.promote_types(t.dtype, torch.float32)


@sees_no_modes
def _check_finite(tensors: Sequence[Tensor]) -> None:
    if tensors and not bool(torch.stack([t.isfinite().all().to(tensors[0].device) for t in tensors]).all()):
        raise FloatingPointError("a factor of the Kronecker-factored curvature is not finite")


def _replaced(factors: Factors, **changes: Any) -> Factors:
    return Factors(**{**factors.__dict__, **changes})
