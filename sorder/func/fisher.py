"""Fisher products of pure functions: with sampled labels, and with the data's (the empirical Fisher)."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sorder.func._arguments import Argnums
from sorder.func.ggn import Loss, gauss_newton_product, swap_hint, through_loss_call
from sorder.func.loss_call import LossCall, find_loss_call


def fvp(
    model_fn: Callable[..., Any],
    loss_fn: Callable[[Any], Tensor],
    primals: tuple[Any, ...],
    tangents: Any,
    *,
    generator: torch.Generator | None = None,
    argnums: Argnums = None,
    has_aux: bool = False,
) -> Any:
    """Product Σₙ mₙ Jₙᵀ gₙ gₙᵀ Jₙ v of the Fisher matrix, estimated with one sampled label per row.

    gₙ is the gradient of −log p(ŷₙ | outputs) at a label ŷₙ drawn from the model's own prediction: the softmax for
    ``F.cross_entropy`` and ``F.nll_loss``, a Bernoulli for ``F.binary_cross_entropy_with_logits``, a Gaussian for
    ``F.mse_loss``. mₙ is the row's weight in the loss (class weights, ``ignore_index``, 1/N of a mean), so that the
    expectation over labels is the GGN product of :func:`sorder.func.ggnvp` (Martens, JMLR 2020). For the last two
    losses a row is an entry of the first dimension of the loss's input.

    Args:
        model_fn, primals, tangents, argnums, has_aux: as in :func:`sorder.func.ggnvp`.
        loss_fn: must return the result of one of the four losses on the outputs, or on a view or cast of them.
        generator: source of the labels. Default: torch's own of the outputs' device. The same state gives the same
            labels, as one Fisher matrix through several products needs.

    Returns:
        The product, like the differentiated arguments; with ``has_aux`` the pair (product, aux).

    Raises:
        ValueError: ``loss_fn`` is none of these losses; or as :func:`sorder.func.hvp`.
        TypeError: ``generator`` is no ``torch.Generator``; or as :func:`sorder.func.hvp`.

    Example:
        >>> x, y = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
        >>> loss = lambda logits: torch.nn.functional.cross_entropy(logits, y)
        >>> W, V = torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> fvp(lambda W: x @ W, loss, (W,), (V,), generator=torch.Generator().manual_seed(0))[0]
        tensor([[ 0.2500, -0.2500],
                [ 0.2500, -0.2500]])
    """

    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")

    def output_map(loss_fn: Loss, checked: Loss, outputs: Any, moved: Any) -> Any:
        call = find_loss_call(loss_fn, outputs)
        if call is None:
            checked(outputs)  # an error of its own, or a result that is no scalar, says more
            raise ValueError(
                "loss_fn must return F.cross_entropy, F.nll_loss, F.mse_loss or F.binary_cross_entropy_with_logits "
                "(reduction 'mean' or 'sum') of the model's outputs, or of a view of them: other losses name no "
                f"distribution to draw labels from{swap_hint(outputs)}"
            )
        labels = call.sample(generator)
        return through_loss_call(loss_fn, outputs, moved, lambda found, u: LossCall.fvp(found, u, labels))

    return gauss_newton_product(model_fn, loss_fn, primals, tangents, argnums, has_aux, output_map)


def empirical_fvp(
    model_fn: Callable[..., Any],
    loss_fn: Callable[[Any], Tensor],
    primals: tuple[Any, ...],
    tangents: Any,
    *,
    sample_dims: int = 1,
    reduction: str = "mean",
    argnums: Argnums = None,
    has_aux: bool = False,
) -> Any:
    """Product of the empirical Fisher matrix: the mean (or sum) of gₙ gₙᵀ over samples, times v.

    gₙ is the gradient of the n-th sample's loss at its true label. It is not an estimate of the Fisher matrix nor of
    the Hessian (Kunstner, Balles & Hennig, *Limitations of the empirical Fisher approximation*, NeurIPS 2019).

    Samples are the entries of the first ``sample_dims`` dimensions of every output tensor, and ``loss_fn`` is the
    mean or sum over them of losses that each see one sample. Two passes through the model, as :func:`ggnvp`;
    no per-sample gradient is stored.

    Args:
        model_fn, loss_fn, primals, tangents, argnums, has_aux: as in :func:`sorder.func.ggnvp`.
        sample_dims: 1 (default) takes sequences as samples where outputs are (batch, time, …); 2 takes tokens.
        reduction: "mean" (default) or "sum", how ``loss_fn`` joins samples.

    Raises:
        ValueError: ``reduction`` or ``sample_dims`` do not fit; or as :func:`sorder.func.hvp`.

    Example:
        >>> x, y, w = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0]])
        >>> loss = lambda out: ((out - y) ** 2).mean()
        >>> empirical_fvp(lambda w: x @ w, loss, (w,), torch.tensor([[1.0]]), argnums=0)
        tensor([[34.]])
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not isinstance(sample_dims, int) or isinstance(sample_dims, bool) or sample_dims < 1:
        raise ValueError(f"sample_dims must be an integer of at least 1, got {sample_dims!r}")

    def output_map(_: Loss, checked: Loss, outputs: Any, moved: Any) -> Any:
        shapes = {tuple(leaf.shape[:sample_dims]) for leaf in tree_leaves(outputs)}
        if len(shapes) != 1 or len(next(iter(shapes))) != sample_dims:
            raise ValueError(
                f"sample_dims must name leading dimensions that all outputs share, got {sample_dims} for outputs of "
                f"shapes {[tuple(leaf.shape) for leaf in tree_leaves(outputs)]}{swap_hint(outputs)}"
            )
        # ∇loss holds gₙ/N for a mean: Σₙ gₙ gₙᵀ/N is N times the outer products of its rows.
        count = prod(next(iter(shapes))) if reduction == "mean" else 1
        gradient = torch.func.grad(checked)(outputs)
        slopes = [
            (g * u).flatten(sample_dims).sum(-1) if g.dim() > sample_dims else g * u
            for g, u in zip(tree_leaves(gradient), tree_leaves(moved), strict=True)
        ]
        slope = count * torch.stack(slopes).sum(0)
        return tree_map(lambda g: g * slope.reshape(slope.shape + (1,) * (g.dim() - sample_dims)), gradient)

    return gauss_newton_product(model_fn, loss_fn, primals, tangents, argnums, has_aux, output_map)
