"""What became of every parameter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sorder.kfac.kronecker import Factors, Options
from sorder.kfac.layout import Block

_OUTSIDE = "no layer that has Kronecker structure"


def report(factors: Factors, params: Sequence[Tensor], names: Sequence[str], options: Options) -> str:
    """One line for every parameter: its block, the sizes of the block's factors (outputs ⊗ inputs), and why.

    A bias is one more input. A block without inputs, of a norm's scale and bias or of a bias alone, is a single matrix,
    dense or, where it is too large, diagonal.
    """
    if not factors.updates:
        return "no factors yet: they are measured at the first update"
    rows = [("parameter", "shape", "curvature (outputs ⊗ inputs)", "why")]
    for i, (p, name) in enumerate(zip(params, names, strict=True)):
        places = [(number, place) for number, b in enumerate(factors.blocks) for place in b.places if place.index == i]
        others = (factors.others or {}).get(i, ())
        beside = f"; NOT in it: its use by {', '.join(others)}" if others else ""
        for number, place in places:
            part = name if place.rows == p.shape[0] else f"{name}[{place.start}:{place.start + place.rows}]"
            block = factors.blocks[number]
            why = f"{_layer(block, factors.running[number])}{_joint(block, names, i)}{beside}"
            rows.append((part, _shape(p), _factors(factors, number, options), why))
        if places:
            continue
        if i in (factors.diagonals or {}):
            by = f"used by {', '.join(others)}, " if others else ""
            rows.append((name, _shape(p), "diagonal", f"fallback: {by}{_OUTSIDE}"))
        else:
            rows.append((name, _shape(p), "damping only", "the loss did not use it"))
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)) + f"  {row[3]}" for row in rows]
    return "\n".join(lines)


def fallbacks(factors: Factors, names: Sequence[str]) -> list[str]:
    """Names of the parameters that the diagonal fallback serves."""
    return [names[i] for i in sorted(factors.diagonals or {})]


def partly(factors: Factors, names: Sequence[str]) -> list[str]:
    """Names of the parameters that are also used in a way that their block leaves out."""
    return [names[i] for i in (factors.others or {}) if i not in (factors.diagonals or {})]


def _shape(p: Tensor) -> str:
    return "×".join(map(str, p.shape)) or "scalar"


def _layer(block: Block, entry: dict[str, object]) -> str:
    both = "left.outputs" in entry and "right.outputs" in entry
    kind = "embedding and linear, summed" if both else block.kind
    return f"{kind}, {block.groups} groups" if block.groups > 1 else kind


def _joint(block: Block, names: Sequence[str], index: int) -> str:
    partners = [names[p.index] for p in block.places if p.index != index]
    return f", joint with {', '.join(partners)}" if partners else ""


def _factors(factors: Factors, number: int, options: Options) -> str:
    if factors.blocks[number].weight is None:  # its inputs are the number one
        outputs, _ = factors.terms(number)[0]
        return f"{'diagonal' if outputs.dim() == 2 else 'dense'} {outputs.shape[-1]} × {outputs.shape[-1]}"
    name = "EKFAC" if options.inverse == "ekfac" else "K-FAC"
    shapes = []
    for left, right in factors.terms(number):
        sides = [f"{f.shape[-1]}{' (diagonal)' if f.dim() == 2 else ''}" for f in (left, right)]
        shapes.append(" ⊗ ".join(sides))
    return f"{name} {' + '.join(shapes)}"
