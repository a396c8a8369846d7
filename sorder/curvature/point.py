"""Curvature of a closure at one point of its live parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sorder.curvature import modes
from sorder.curvature.checks import check_not_dict, check_not_module, check_point, check_vector
from sorder.curvature.errors import MissingDerivativeError, missing_derivative
from sorder.curvature.evaluation import Closure, Evaluation, added, run_closure, total
from sorder.curvature.fallback import FORWARD, REVERSE, first_that_works
from sorder.curvature.graph import coarsest_eps, names, python_nodes, refuse_reentrant_checkpoints
from sorder.curvature.loss_watch import LossWatch
from sorder.curvature.modes import Product, Vector
from sorder.curvature.replay import Replay
from sorder.curvature.split import Split, find_split
from sorder.ops.versions import version_of

RANDOMNESS = "a closure that changes between runs (its randomness, its data, or parameters moved since)"


class CurvaturePoint:
    r"""Loss, gradient and outputs of a closure at one point, and products with its curvature there.

    The closure is a plain function of nothing over live parameters, as an optimizer is given one. It returns the loss
    or ``(loss, outputs)``, and may call ``backward`` itself. It runs once when the point is made, and may run again in
    products, where it must see the same batch: fetch that before it, not inside. Products see the function of the first
    run: the same dropout masks and buffers; buffers and random generators end up as after one run, however many
    products are taken. The parameters must not move before the last product. Plain ``F.scaled_dot_product_attention``
    needs :func:`sorder.exact_attention` around the point and its products.

    With J the Jacobian of the outputs z(θ) and ℓ the loss as a function of z, products are with

    - ``"hessian"``: ∇²ℓ(z(θ));
    - ``"ggn"``: Jᵀ(∇²ℓ)J, the generalised Gauss–Newton matrix (Schraudolph, *Fast curvature matrix-vector products*,
      2002), positive semidefinite where ℓ is convex. ∇²ℓ is a closed form for cross_entropy (also nll_loss of a
      log_softmax), mse_loss and binary_cross_entropy_with_logits, and a double backward for any other loss;
    - ``"fisher"``: Jᵀ(Σ g gᵀ)J with g the gradients of the rows of those three losses for labels drawn once from the
      model's own distribution; an unbiased estimate of the Fisher, which here is the GGN (Martens, *New insights and
      perspectives on the natural gradient method*, JMLR 2020);
    - ``"auto"``: the GGN where the closure returns outputs, or where its loss is seen to be a nonnegative multiple, a
      sum or a weighted mean of results of torch's convex loss functions; otherwise the Hessian.

    Args:
        closure: a closure, or a sequence of closures whose losses are summed.
        params: the parameters, leaf tensors that require gradients. Those that the loss does not use have gradient
            and curvature zero; it must use one of them.
        kind: see above; default ``"auto"``. ``self.kind`` tells which was taken. None asks for loss and gradient
            alone.
        mode: ``"reverse-over-reverse"`` keeps a differentiable graph of the gradient (Hessian) or of Jᵀu (GGN): a
            product is one pass through it, nothing of the model is run again, and anything that can be differentiated
            twice in reverse is served. It costs about twice the gradient's memory. ``"forward-over-reverse"`` keeps
            nothing for the Hessian and the outputs' own graph for the GGN, and runs the closure again with tangents
            in every product: for the GGN that costs little more memory than a gradient. It needs forward-mode
            derivatives; where one is missing the other mode takes over with one warning. ``"auto"`` (default) expects
            many products at one point. For the Hessian it is reverse-over-reverse, which then is faster (a
            linear layer's 6 matrix products against 9). For the GGN it is reverse-over-reverse on the
            CPU, where the time to run small operations again counts, and forward-over-reverse elsewhere, where memory
            counts (a large vocabulary can turn that around). If an operation has no derivative in the mode taken, the
            other takes over, with one warning.
        sign: 1 for the loss itself (default), −1 to turn loss, gradient and curvature around.
        seed: of the labels that ``"fisher"`` draws. Default 0.

    Attributes:
        loss: the sum of losses times ``sign``, a 0-dimensional tensor without graph.
        gradient: its gradient, one tensor per parameter, zeros for unused ones.
        returned, outputs: what the closure returned, without graph; lists where ``closure`` is a sequence. The
            outputs are kept until :meth:`release`, which leaving the context calls.
        kind: "hessian", "ggn" or "fisher". products: number of products taken. evaluations: runs of closures.

    Raises:
        TypeError: ``params`` is a dict, a module or pairs with names, or ``closure`` no closure.
        ValueError: an argument is out of range; the loss is not a scalar, has no graph, or depends on none of
            ``params``; ``kind`` is not to be had.
        CurvatureError: (by :meth:`product`) an operation lacks the derivatives; the message names it and the remedy.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
        >>> params = list(model.parameters())
        >>> with CurvaturePoint(lambda: torch.nn.functional.cross_entropy(model(x), y), params) as point:
        ...     product = point.product([torch.ones_like(p) for p in params])
        >>> point.kind, [tuple(p.shape) for p in product]
        ('ggn', [(2, 3), (2,)])
    """

    def __init__(
        self,
        closure: Closure | Sequence[Closure],
        params: Sequence[Tensor],
        kind: str | None = "auto",
        *,
        mode: str = "auto",
        sign: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._single = callable(closure)
        # What is neither a callable nor several is refused below; a tensor can be iterated over, but holds none.
        several = isinstance(closure, Iterable) and not isinstance(closure, Tensor) and not callable(closure)
        self._closures: list[Closure] = list(cast(Iterable[Closure], closure if several else [closure]))
        check_not_dict("CurvaturePoint", params)
        check_not_module("CurvaturePoint", params)
        self.params = list(params)
        check_point(self._closures, self.params, kind, mode, sign, seed)
        self._sign = sign
        self._mode = mode
        self._products: list[Product] = []
        self._replays: list[Replay] = []
        self._autocast = {
            device: torch.get_autocast_dtype(device)
            for device in sorted({"cpu", *(p.device.type for p in self.params)})
            if torch.is_autocast_enabled(device)
        }
        self.products = self.evaluations = 0
        self.outputs: Any = None
        try:
            self._evaluate(kind, seed)
        except BaseException:
            self.rollback()
            raise
        self._versions = list(map(version_of, self.params))

    # ------------------------------------------------------------------ the first run

    def _evaluate(self, kind: str | None, seed: int) -> None:
        self._evaluations: list[Evaluation] = []
        watches: list[LossWatch] = []
        for closure in self._closures:
            self._replays.append(Replay())
            with self._replays[-1].first(), LossWatch(self._replays[-1].before.include) as watch:
                self._evaluations.append(run_closure(closure, self.params))
            watches.append(watch)
        self.evaluations = len(self._closures)
        self.process_group = next((g for r in self._replays if (g := r.buffers.process_group)), None)
        self.loss = self._sign * total([e.root.detach() for e in self._evaluations])
        self.returned = self._as_given([e.returned for e in self._evaluations])
        self.outputs = self._as_given([tree_map(_detached, e.outputs) for e in self._evaluations])
        for evaluation in self._evaluations:
            refuse_reentrant_checkpoints(python_nodes(evaluation.root))
        with self.derivatives():
            splits = [
                find_split(e, watch, kind, self._sign, seed + 1_000_003 * i)
                for i, (e, watch) in enumerate(zip(self._evaluations, watches, strict=True))
            ]
            if kind == "auto":
                kind = "hessian" if any(split is None for split in splits) else "ggn"
            self.kind = kind
            totals: list[Tensor | None] = [None] * len(self.params)
            for number, split in enumerate(splits):
                product: Product
                if self.kind is None:
                    root, known = self._evaluations[number].root, self._evaluations[number].gradient
                    gradient = known or list(torch.autograd.grad(root, self.params, allow_unused=True))
                    product = _no_product
                elif self.kind == "hessian" or split is None:
                    gradient, product = self._prepare_hessian(number, watches[number].wrong)
                else:
                    gradient, product = self._prepare(number, split)
                totals = added(totals, gradient)
                self._products.append(product)
        if all(g is None for g in totals):
            raise ValueError(
                f"closure must return a loss that depends on the parameters, but it uses none of the {len(totals)} "
                "given: does it call another model, or a copy, than the one that they are of?"
            )
        self.gradient = [g * self._sign for g in modes.zeros_for_none(totals, self.params)]
        for evaluation in self._evaluations:
            evaluation.root, evaluation.outputs = evaluation.root.detach(), None

    def _prepare(self, number: int, split: Split) -> tuple[list[Tensor | None], Product]:
        """Gradient of one closure, and its product with Jᵀ H_ℓ J."""
        root, gradient = self._evaluations[number].root, self._evaluations[number].gradient
        if gradient is None and split.separates:
            # In two stages, the first of which frees the loss's own graph: with many classes that is half of it.
            (dz,) = torch.autograd.grad(root, split.outputs)
            gradient = list(torch.autograd.grad(split.outputs, self.params, dz, retain_graph=True, allow_unused=True))
            del dz
        elif gradient is None:
            gradient = list(torch.autograd.grad(root, self.params, retain_graph=True, allow_unused=True))
        used = [i for i, g in enumerate(gradient) if g is not None]
        pull = modes.jacobian_transpose(split.outputs, self.params)
        suspects = names(python_nodes(split.outputs[0]))

        values = [z.detach() for z in split.outputs]
        tolerance = _tolerance(split.outputs)

        def check(found: Sequence[Tensor]) -> None:
            if modes.relative_difference(found, values) > tolerance:
                raise MissingDerivativeError(RANDOMNESS)

        def dual() -> Product:
            run = partial(self.rerun, number)
            return modes.jacobian_by_dual_numbers(run, self.params, split.positions, check)

        def substituted() -> Product:
            run = partial(self.rerun, number)
            return modes.jacobian_by_substitution(run, self.params, split.positions, used, check)

        def reverse() -> Product:
            return modes.jacobian_by_double_backward(split.outputs, self.params)

        order = [(FORWARD, dual), (FORWARD, substituted), (REVERSE, reverse)]
        on_cpu = all(p.device.type == "cpu" for p in self.params)
        if self._mode == REVERSE:
            order = order[2:]
        elif self._mode == "auto" and on_cpu:
            order = order[2:] + order[:2]
        push = first_that_works(order, suspects)

        def product(v: Vector) -> list[Tensor]:
            return pull(split.product(push(v)))

        return gradient, product

    def _prepare_hessian(self, number: int, wrong: str | None) -> tuple[list[Tensor | None], Product]:
        """Gradient of one closure, and its product with the Hessian.

        ``wrong`` names an operation that it calls, and whose backward pass has a wrong derivative.
        """
        root, gradient = self._evaluations[number].root, self._evaluations[number].gradient
        suspects = names(python_nodes(root))
        reverse_product: Product | None = None
        failure = wrong
        if self._mode != FORWARD and failure is None:
            try:
                kept, reverse_product = modes.hessian_reverse_over_reverse(root, self.params)
                gradient = gradient or kept
            except RuntimeError as error:
                failure = missing_derivative(error)
                if failure is None:
                    raise
        gradient = gradient or list(torch.autograd.grad(root, self.params, allow_unused=True))
        used = [i for i, g in enumerate(gradient) if g is not None]

        loss = root.detach()
        tolerance = _tolerance([root])

        def check(found: Sequence[Tensor], found_gradient: Sequence[Tensor | None]) -> None:
            # Near a minimum gradients differ by rounding alone; other masks also change the loss.
            changed = modes.relative_difference(found, [loss]) > 1e-3 * tolerance
            if changed and modes.relative_difference(found_gradient, gradient) > tolerance:
                raise MissingDerivativeError(RANDOMNESS)

        def reverse() -> Product:
            if failure is not None:
                raise MissingDerivativeError(failure)
            if reverse_product is not None:
                return reverse_product
            # The graph was given up for forward-over-reverse; the same run, once more.
            return modes.hessian_reverse_over_reverse(self.rerun(number).root, self.params)[1]

        def substituted() -> Product:
            return modes.hessian_by_substitution(partial(self.rerun, number), self.params, used, check)

        def dual() -> Product:
            return modes.hessian_by_dual_numbers(partial(self.rerun, number), self.params, check)

        order = [(FORWARD, substituted), (FORWARD, dual), (REVERSE, reverse)]
        if self._mode == REVERSE:
            order = order[2:]
        elif self._mode == "auto":
            order = order[2:] + order[:2]
        return gradient, first_that_works(order, suspects)

    # ------------------------------------------------------------------ later runs

    def product(self, v: Sequence[Tensor]) -> list[Tensor]:
        """Curvature times ``v``.

        Args:
            v: one tensor per parameter, of its shape; cast to its dtype.

        Returns:
            One tensor per parameter, in the dtype of the entries of ``v``.

        Raises:
            TypeError: ``v`` is no sequence of real floating-point tensors.
            ValueError: its length, a shape or a device differs.
            RuntimeError: the point has been released, or a parameter has changed since it was made.
        """
        if not self._products:
            raise RuntimeError("product() after release()")
        check_vector(v, self.params)
        for i, (p, before) in enumerate(zip(self.params, self._versions, strict=True)):
            if version_of(p) != before:
                raise RuntimeError(f"params[{i}] has changed since the point was made; make a new CurvaturePoint")
        cast = [t.detach().to(p.dtype) for t, p in zip(v, self.params, strict=True)]
        sums: list[Tensor] | None = None
        with torch.enable_grad(), self.derivatives():
            for product in self._products:
                part = product(cast)
                sums = part if sums is None else [a + b for a, b in zip(sums, part, strict=True)]
        self.products += 1
        assert sums is not None
        return [t.to(w.dtype) * self._sign for t, w in zip(sums, v, strict=True)]

    def value(self) -> Tensor:
        """``sign`` times the loss of the same function where the parameters are now, a 0-dimensional tensor."""
        return self._sign * total([self.rerun(i).root.detach() for i in range(len(self._closures))])

    def release(self) -> None:
        """Free graphs and outputs. No product can be taken any more; :meth:`value` still works."""
        self._products.clear()
        self.outputs = None

    def rollback(self) -> None:
        """Buffers and random generators as they were before the point was made; frees the graphs."""
        for replay in reversed(self._replays):
            replay.rollback()
        self.release()

    def __enter__(self) -> CurvaturePoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def closures(self) -> int:
        """Number of closures whose losses are summed."""
        return len(self._closures)

    def rerun(self, number: int) -> Evaluation:
        """Closure ``number`` (from 0) once more where the parameters are now, with a graph, for further derivatives.

        It sees the random numbers, buffers and autocast region of the first run, and leaves no trace, ``.grad``
        included. Take derivatives of its ``root``, the loss, inside :meth:`derivatives`.
        """
        self.evaluations += 1
        with ExitStack() as stack:
            stack.enter_context(self._replays[number].again())
            stack.enter_context(gradients_kept(self.params))
            for device, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            # A cached cast of a parameter would outlive the transform that it was made under.
            cache = torch.is_autocast_cache_enabled()
            stack.callback(torch.set_autocast_cache_enabled, cache)
            torch.set_autocast_cache_enabled(False)
            gradients = self._evaluations[number].gradient
            return run_closure(self._closures[number], self.params, differentiate=False, gradients=gradients)

    @contextmanager
    def derivatives(self) -> Iterator[None]:
        """Context for derivatives of :meth:`rerun`: outside the caller's autocast region, as PyTorch asks; they leave
        no trace in buffers and random generators, even where they run parts of the model again (checkpoints).
        """
        with ExitStack() as stack:
            for replay in reversed(self._replays):
                stack.enter_context(replay.undisturbed())
            for device in self._autocast:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _as_given(self, values: list[Any]) -> Any:
        return values[0] if self._single else values


def _no_product(v: Vector) -> list[Tensor]:
    raise RuntimeError("this point was made with kind=None, for loss and gradient alone")


def _tolerance(roots: Sequence[Tensor]) -> float:
    """Relative difference up to which two runs count as the same: kernels may differ, random masks may not."""
    return min(0.1, 4.0 * max(coarsest_eps(root) for root in roots) ** 0.5)


@contextmanager
def gradients_kept(params: Sequence[Tensor]) -> Iterator[None]:
    """Context that puts ``.grad`` of ``params`` back on leaving."""
    kept = [p.grad for p in params]
    try:
        yield
    finally:
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
