"""Small problems that reach every kernel, the Hopper ones or the portable ones, to be run under compute-sanitizer.

``compute-sanitizer --tool racecheck python -m tests.attention.small_problems hopper``
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import sorder
from sorder.kernels import launch
from sorder.kernels.hopper import dispatch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Problem = tuple[int, int, int, torch.dtype, tuple[int, int], dict[str, Any]]

HOPPER: list[Problem] = [
    (n_q, n_k, d, dtype, heads, {"is_causal": causal})
    for d in (64, 128)
    for n_q, n_k, dtype, heads, causal in (
        (200, 200, BF16, (2, 2), True),
        (130, 333, FP16, (2, 2), False),
        (200, 200, BF16, (4, 2), True),
    )
]
PORTABLE: list[Problem] = [
    (150, 150, 64, BF16, (2, 2), {"is_causal": True}),
    (150, 150, 64, FP32, (2, 2), {"is_causal": True}),
    (100, 170, 128, FP16, (2, 2), {}),
    (150, 150, 32, BF16, (4, 2), {"mask": sorder.Mask(causal=True, window=(40, 0))}),
    (150, 150, 64, BF16, (2, 2), {"dropout_p": 0.2}),
    (90, 150, 64, BF16, (2, 2), {"softcap": 5.0}),
    (100, 130, 64, BF16, (2, 2), {"attn_mask": (2, 100, 130)}),
]


def second_order(
    n_q: int, n_k: int, d: int, dtype: torch.dtype, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    """A second backward (B, J, T without dȮ) and a Hessian product (F, J, B, T with dȮ); not finite is an error."""

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    q, do = made(heads[0], n_q, d), made(heads[0], n_q, d)
    k, v = made(heads[1], n_k, d), made(heads[1], n_k, d)
    leaves = [q, k, v]
    shape = options.get("attn_mask")
    if isinstance(shape, tuple):
        leaves.append(made(*shape))
        options = {**options, "attn_mask": leaves[-1]}
    call: dict[str, Any] = {**options, "enable_gqa": heads[0] != heads[1]}
    first = torch.autograd.grad(sorder.attention(q, k, v, **call), leaves, do, create_graph=True)
    second = torch.autograd.grad(first, [*leaves, do], [torch.randn_like(x) for x in leaves])
    constant: dict[str, Any] = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.items()}

    def loss(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (sorder.attention(*inputs, **constant).float() * do.detach().float()).square().sum()

    point = tuple(x.detach() for x in (q, k, v))
    product = torch.func.jvp(torch.func.grad(loss), (point,), (tuple(torch.randn_like(x) for x in point),))[1]
    assert all(x.isfinite().all() for x in (*first, *second, *product)), (n_q, n_k, d, dtype, heads, options)


def main(family: str) -> None:
    torch.manual_seed(0)
    dispatch._MIN_SCORES = 0 if family == "hopper" else 2**60
    for deterministic in (False, True):  # T in one sweep and in two
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        for problem in HOPPER if family == "hopper" else PORTABLE:
            second_order(*problem)
    torch.use_deterministic_algorithms(False)
    launch._multiprocessors = lambda device: 1  # then a program serves all query heads of a group
    for problem in HOPPER if family == "hopper" else PORTABLE:
        if problem[4][0] != problem[4][1]:
            second_order(*problem)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
