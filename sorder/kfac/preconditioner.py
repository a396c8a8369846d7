"""Kronecker-factored curvature as a preconditioner of conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from sorder.curvature import CurvaturePoint
from sorder.curvature.checks import check_not_dict, check_vector
from sorder.curvature.errors import warn_once
from sorder.kfac import kronecker
from sorder.kfac.factors import APPROXIMATIONS
from sorder.kfac.kronecker import INVERSES, Factors, Mean, Options
from sorder.kfac.report import fallbacks, partly, report
from sorder.kfac.scores import ESTIMATORS

Vector = Sequence[Tensor]


class KFACPreconditioner:
    r"""(K + λ)⁻¹ with K the Kronecker-factored approximation (K-FAC) of a model's Gauss–Newton matrix (GGN).

    K is block-diagonal, one block for each layer: A ⊗ G, with A the second moment of the layer's inputs (a one for the
    bias included) and G that of derivatives at its outputs (Martens & Grosse, *Optimizing neural networks with
    Kronecker-factored approximate curvature*, 2015, arXiv:1503.05671). In front of exact GGN products it makes
    the first few iterations of conjugate gradients worth many, and they make it right:

        optimizer = sorder.NewtonCG(model.parameters(), preconditioner=sorder.KFACPreconditioner(model))
        optimizer.step(closure)  # measures the factors, every ``factor_interval`` steps, where it takes its products

    To a tight residual at larger damping it may need as many iterations as plain conjugate gradients, or more.

    Layers are met where torch functions use their parameters: linear layers (also ``x @ W``, Hugging Face's ``Conv1D``,
    and all projections of ``nn.MultiheadAttention``), convolutions (groups, dilation), embeddings (A is diagonal), and
    the scale and bias of layer, RMS, group and batch norm (one dense block). Uses of one weight add up; one that is
    both embedding and head gets the sum of two Kronecker products. A parameter used in any other way gets an estimate
    of the GGN's diagonal, and a warning says so; :meth:`report` tells what each parameter has, and why.

    Nothing is hung on the model, so that hooks, compiled modules (which run eagerly here), autocast and both kinds of
    checkpoint (``torch.utils.checkpoint`` without re-entry, :func:`sorder.func.checkpoint`) are served.

    Args:
        params: a module, parameters, or (name, parameter) pairs: those that require gradients, the optimizer's own,
            whatever their order and groups there.
        estimator: of the GGN. "mc" (default): with labels sampled from the model, ``samples`` backward passes;
            "type-2": with exact square roots of the loss's Hessians, one backward pass for each class; "empirical":
            with the labels at hand, one pass, an estimate of another matrix. Where a sample has several rows of the
            loss and the network mixes them, as attention does, the last two draw a sign for each row, and are exact in
            expectation only.
        samples: of "mc". Default 1.
        approximation: for weights shared over positions, "expand" (default) takes each position for a sample, "reduce"
            sums over positions first (Eschenhagen et al. 2023, arXiv:2311.00636). The first dimension of a layer's
            input counts samples.
        inverse: "cholesky" (default): (A + π√λ)⁻¹ ⊗ (G + √λ/π)⁻¹ with π the balance of their mean eigenvalues (Martens
            & Grosse, section 6.3); "eigen": (A ⊗ G + λ)⁻¹ exactly; "ekfac": the same with the curvature's own diagonal
            in the place of the products of eigenvalues, another set of backward passes (George et al. 2018,
            arXiv:1806.03884).
        decay: of the running means of factors, corrected for bias; 0 forgets. Default 0.95.
        factor_interval, inverse_interval: points from one update to the next of the factors, and of the inverses or
            eigenbases. Default 1. "eigen" and "ekfac" follow a new λ without a new inverse.
        max_size: factors of more rows are kept as diagonals. Default 8192.
        least_damping: the factors' λ is no less than this multiple of the mean eigenvalue of K, whatever damping is
            asked for. Default 1. On minibatches Newton-CG's own λ falls towards zero, since the loss that it asks is
            the batch's; conjugate gradients without a preconditioner stop before they come to directions of small
            curvature, which differ from batch to batch, but behind (K + λ)⁻¹ they would begin there. 0 is for systems
            that are to be solved accurately.
        factor_dtype, inverse_dtype: in which factors are summed, and factorised. Default: the parameters', float32 at
            least; what a layer saw in 16 bits on a GPU is multiplied in 16 bits, and summed in the float32 of its
            matrix units (to a few 1e-5).
        seed: of labels and signs, which are functions of it and of the number of the update. Default 0.

    Raises:
        TypeError: ``params`` is a dict.
        ValueError: an option is out of range, or (by an update) the loss is not cross_entropy, mse_loss,
            binary_cross_entropy_with_logits, a multiple of one, or a sum.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> kfac = sorder.KFACPreconditioner(model, estimator="type-2")
        >>> kfac.update_factors(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> kfac.update(None, 0.1)
        >>> [tuple(t.shape) for t in kfac([torch.ones_like(p) for p in model.parameters()])]
        [(2, 3), (2,)]
        >>> print(kfac.report())
        parameter  shape  curvature (outputs ⊗ inputs)  why
        weight     2×3    K-FAC 2 ⊗ 4                   linear, joint with bias
        bias       2      K-FAC 2 ⊗ 4                   linear, joint with weight
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        *,
        estimator: str = "mc",
        samples: int = 1,
        approximation: str = "expand",
        inverse: str = "cholesky",
        decay: float = 0.95,
        factor_interval: int = 1,
        inverse_interval: int = 1,
        max_size: int = 8192,
        least_damping: float = 1.0,
        factor_dtype: torch.dtype | None = None,
        inverse_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        options = {
            "estimator": estimator,
            "samples": samples,
            "approximation": approximation,
            "inverse": inverse,
            "decay": decay,
            "max_size": max_size,
            "least_damping": least_damping,
            "factor_dtype": factor_dtype,
            "inverse_dtype": inverse_dtype,
            "seed": seed,
        }
        check_options({**options, "factor_interval": factor_interval, "inverse_interval": inverse_interval})
        self.options = Options(**options)  # type: ignore[arg-type]
        self.factor_interval, self.inverse_interval = factor_interval, inverse_interval
        self.names, self.params = named(params)
        if not self.params:
            raise ValueError("params has no parameter that requires a gradient")
        self.factors = Factors()
        # Entry i of a vector is for parameter _order[i]; the factors and the state keep to the order of ``params``.
        self._order = list(range(len(self.params)))
        self.damping = 0.0
        self._refreshed = self._updated = 0

    def update_factors(self, closure: Any, *, loss_scale: float = 1.0) -> None:
        """Measure the factors on a batch, whether or not an update is due.

        Parameters, ``.grad``, buffers and random generators stay as they are. The closure runs twice, and
        must see the same batch both times, so fetch the batch before it, not inside.

        Args:
            closure: returns the loss, or ``(loss, outputs)``; or a sequence of closures, whose losses are summed: the
                micro-batches of one batch.
            loss_scale: what the closure's loss is multiplied by, such as ``scaler.get_scale()``. Default 1.
        """
        check_loss_scale(loss_scale)
        kept = [(p.grad, None if p.grad is None else p.grad.detach().clone()) for p in self.params]
        point: CurvaturePoint | None = None
        try:
            point = CurvaturePoint(closure, self.params, None)
            self._measure(point, loss_scale, 0, list)
        finally:
            if point is not None:
                point.rollback()
            for p, (grad, value) in zip(self.params, kept, strict=True):
                p.grad = grad
                if grad is not None and value is not None:
                    grad.detach().copy_(value)
        self._refreshed += 1

    def refresh(
        self, point: CurvaturePoint, *, force: bool = False, loss_scale: float = 1.0, rank: int = 0, mean: Mean = list
    ) -> None:
        """Measure the factors at ``point``, if an update is due or ``force`` is set; its closures run again.

        An optimizer calls it with every point that it makes, before :meth:`update`. ``rank`` and ``mean`` are for
        data-parallel training: the process's number, and the mean of tensors over processes. Vectors are then in the
        order of the point's parameters.
        """
        self.check_params(point.params)
        numbers = {id(p): i for i, p in enumerate(self.params)}
        self._order = [numbers[id(p)] for p in point.params]
        if force or self._refreshed % self.factor_interval == 0 or not self.factors.updates:
            self._measure(point, loss_scale, rank, mean)
        self._refreshed += 1

    def update(self, product: Callable[[Vector], Sequence[Tensor]] | None, damping: float) -> None:
        """Set λ, and make the inverses anew where that is due. ``product`` is not used."""
        self._check_measured()
        if not 0.0 <= damping < float("inf"):
            raise ValueError(f"damping must lie in [0.0, inf), got {damping!r}")
        self.damping = kronecker.factor_damping(self.factors, self.options, float(damping))
        # EKFAC's bases know nothing of λ, and its scales were measured in them.
        if self.options.inverse != "ekfac":
            if self._updated % self.inverse_interval == 0 or None in self.factors.inverse:
                self.factors = kronecker.inverted(self.factors, self.options, self.damping)
            self._updated += 1

    def __call__(self, v: Vector) -> list[Tensor]:
        """(K + λ)⁻¹v, one tensor per parameter, of its shape and in the dtype of ``v``.

        They are in the order of the last point given to :meth:`refresh`, which an optimizer does; else of ``params``.
        """
        self._check_measured()
        check_vector(v, [self.params[i] for i in self._order])
        if None in self.factors.inverse and self.options.inverse != "ekfac":
            self.factors = kronecker.inverted(self.factors, self.options, self.damping)
        own = [t for _, t in sorted(zip(self._order, v, strict=True), key=lambda pair: pair[0])]
        found = kronecker.solve(self.factors, own, self.damping)
        return [found[i] for i in self._order]

    def report(self) -> str:
        """A table: every parameter, its block with the sizes of its factors, and why.

        The sizes read outputs ⊗ inputs, as a weight's rows and columns do: "K-FAC 2 ⊗ 4" is G of 2 × 2 and A of 4 × 4
        in A ⊗ G. A bias is one more input. "dense 8 × 8" is a block without inputs: a norm's scale and bias, or a bias
        alone.
        """
        return report(self.factors, self.params, self.names, self.options)

    def state_dict(self) -> dict[str, Any]:
        """Factors, inverses and counters, as plain containers of tensors that are never changed in place."""
        return {
            "factors": kronecker.packed(self.factors),
            "shapes": [tuple(p.shape) for p in self.params],
            "damping": self.damping,
            "refreshed": self._refreshed,
            "updated": self._updated,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where another preconditioner for the same parameters stopped, bit for bit.

        Raises:
            ValueError: it is not the state of a preconditioner for parameters like these. Nothing has changed.
        """
        missing = [name for name in ("factors", "shapes", "damping", "refreshed", "updated") if name not in state_dict]
        if missing:
            raise ValueError(f"state_dict must be that of a KFACPreconditioner, but lacks {', '.join(missing)}")
        saved, own = [tuple(s) for s in state_dict["shapes"]], [tuple(p.shape) for p in self.params]
        if len(saved) != len(own):
            raise ValueError(
                f"state_dict must be that of a KFACPreconditioner with {len(own)} parameters, got one with {len(saved)}"
            )
        for name, got, shape in zip(self.names, saved, own, strict=True):
            if got != shape:
                raise ValueError(
                    f"state_dict must be that of a KFACPreconditioner for parameters of these shapes, but {name} has "
                    f"{shape}, and had {got}"
                )
        devices = [p.device for p in self.params]
        self.factors = kronecker.unpacked(state_dict["factors"], devices)
        self.damping = state_dict["damping"]
        self._refreshed, self._updated = state_dict["refreshed"], state_dict["updated"]

    def add_params(self, params: Iterable[Tensor], names: Iterable[str]) -> None:
        """Let more parameters join, behind the others; the next point updates the factors.

        :meth:`sorder.NewtonCG.add_param_group` calls this for its preconditioner.
        """
        self.params += list(params)
        self.names += list(names)
        self._order += range(len(self._order), len(self.params))
        self._refreshed = self._updated = 0

    def check_params(self, params: Sequence[Tensor]) -> None:
        """ValueError unless these, of an optimizer, are the preconditioner's, in any order; frozen ones may be others.

        :class:`sorder.NewtonCG` calls it when it is made.
        """
        own, given = {id(p) for p in self.params}, {id(p) for p in params}
        unknown = [p for p in params if p.requires_grad and id(p) not in own]
        missing = [(n, p) for n, p in zip(self.names, self.params, strict=True) if id(p) not in given]
        found = []
        if unknown:
            shape = tuple(unknown[0].shape)
            found.append(f"does not know {len(unknown)} of the optimizer's (the first has shape {shape})")
        if missing:
            name, shape = missing[0][0], tuple(missing[0][1].shape)
            found.append(f"has {len(missing)} that the optimizer does not step (the first is {name}, of shape {shape})")
        if found:
            raise ValueError(
                f"the preconditioner and the optimizer must have the same parameters, but the preconditioner "
                f"{' and '.join(found)}: make both from the same model"
            )

    def _measure(self, point: CurvaturePoint, loss_scale: float, rank: int, mean: Mean) -> None:
        self.factors = kronecker.updated(
            self.factors,
            point,
            self.options,
            new_bases=self._refreshed % self.inverse_interval == 0,
            loss_scale=loss_scale,
            rank=rank,
            mean=mean,
            params=self.params,
        )
        warn_of_fallbacks(self.factors, self.names)

    def _check_measured(self) -> None:
        if not self.factors.updates:
            raise RuntimeError("the preconditioner has no factors yet: call update_factors(closure) first")


def warn_of_fallbacks(factors: Factors, names: Sequence[str]) -> None:
    """Warn, once for each set of parameters, of what the blocks leave out."""
    for found, what in (
        (fallbacks(factors, names), "only the diagonal of the curvature is estimated"),
        (partly(factors, names), "a further use of the weight is left out of its block"),
    ):
        if found:
            shown = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
            warn_once(
                f"kfac {what} {shown}",
                f"K-FAC: {what} for {shown}, which makes the preconditioner weaker there; report() tells why",
            )


def named(params: Any) -> tuple[list[str], list[Tensor]]:
    """Names and tensors of the parameters that require gradients, tied ones once."""
    check_not_dict("KFACPreconditioner", params)
    pairs = params.named_parameters() if isinstance(params, nn.Module) else params
    names: list[str] = []
    found: list[Tensor] = []
    for i, item in enumerate(pairs):
        name, p = item if isinstance(item, tuple) else (f"parameter {i}", item)
        if p.requires_grad and all(p is not q for q in found):
            names.append(name)
            found.append(p)
    return names, found


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer, True and False left out."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_loss_scale(loss_scale: Any) -> None:
    """ValueError unless a loss can have been multiplied by ``loss_scale``."""
    if not isinstance(loss_scale, SupportsFloat) or not 0.0 < float(loss_scale) < float("inf"):
        raise ValueError(f"loss_scale must lie in (0.0, inf), got {loss_scale!r}")


def check_options(options: Mapping[str, Any]) -> None:
    """ValueError that names the first option out of its range, what it is and what is allowed."""
    choices = {"estimator": ESTIMATORS, "approximation": APPROXIMATIONS, "inverse": INVERSES}
    for name, allowed in choices.items():
        if options[name] not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {options[name]!r}")
    for name in ("samples", "factor_interval", "inverse_interval", "max_size"):
        if not is_integer(options[name]) or options[name] < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {options[name]!r}")
    if not is_integer(options["seed"]):
        raise ValueError(f"seed must be an integer, got {options['seed']!r}")
    for name, high in (("least_damping", float("inf")), ("decay", 1.0)):
        value = options[name]
        if not isinstance(value, SupportsFloat) or not 0.0 <= float(value) < high:
            raise ValueError(f"{name} must lie in [0.0, {high}), got {value!r}")
    for name in ("factor_dtype", "inverse_dtype"):
        if options[name] not in (None, torch.float32, torch.float64):
            raise ValueError(f"{name} must be torch.float32, torch.float64 or None, got {options[name]!r}")
