"""Dropout: the generator, its statistics, and one mask for all maps, replays and transforms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import sorder
from sorder.kernels.philox import dropped, philox

from . import oracle


def words(*numbers: int) -> list[Tensor]:
    """Pairs of 32-bit words, low first, as int64."""
    pairs = [low | high << 32 for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
    return [torch.tensor(x - 2**64 if x >= 2**63 else x) for x in pairs]


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [
        ((0, 0, 0, 0), (0, 0), 0x5F6FB709),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x5207DDC2),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0x4DFCCABA),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], word: int) -> None:
    """Of the authors' Random123, seven rounds."""
    (key_,), (lower, upper) = words(*key), words(*counter)
    assert philox(key_, lower, upper).item() == word


def test_equals_tritons_generator() -> None:
    pytest.importorskip("triton")
    from .philox_kernel import first_words

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = torch.tensor([-(2**40) - 12345, 2**35 + 7], device=device)
    counters = torch.randint(0, 2**62, (64,), device=device)
    assert torch.equal(first_words(seed, counters), philox(seed[0], counters, seed[1]))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_independence(p: float) -> None:
    n = 2**18
    seeds = torch.randint(-(2**63), 2**63 - 1, (3, 2))
    seeds[2] = seeds[1]
    seeds[2, 1] += 1
    drops = [dropped(seed, torch.arange(n), p).double() for seed in seeds]
    for x in drops:
        assert abs(x.mean().item() - p) <= 5 * math.sqrt(p * (1 - p) / n)
        for shift in (1, 64, 1024):  # neighbours along a row, a column, a head
            correlation = ((x[shift:] - p) * (x[:-shift] - p)).mean().item() / (p * (1 - p))
            assert abs(correlation) <= 5 / math.sqrt(n - shift)
    for x, y in ((drops[0], drops[1]), (drops[1], drops[2])):
        assert abs(((x - p) * (y - p)).mean().item()) <= 5 * p * (1 - p) / math.sqrt(n)


def kept(q: Tensor, k: Tensor, p: float) -> Tensor:
    """The scaled mask of a call: one-hot values show it."""
    eye = torch.eye(k.shape[-2], dtype=q.dtype).expand(*k.shape[:-2], -1, -1)
    return sorder.attention(q, k, eye, dropout_p=p) / sorder.attention(q, k, eye)


Q, K, V = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (9, 11, 11))


def test_scale_and_expectation_are_sdpas() -> None:
    want = sorder.attention(Q, K, V)
    samples = torch.stack([sorder.attention(Q, K, V, dropout_p=0.4) for _ in range(200)])
    error = samples.mean(0) - want
    deviation = samples.std(0) / math.sqrt(len(samples))
    assert (error / deviation).abs().max() <= 5.5
    assert 0.6 <= (error / deviation).square().mean() <= 1.5  # neither biased nor without variance
    z = kept(Q, K, 0.4)
    assert ((z < 1e-12) | ((z - 1 / 0.6).abs() < 1e-10)).all()


def test_seed_is_the_default_generators() -> None:
    torch.manual_seed(5)
    first, second = (sorder.attention(Q, K, V, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(sorder.attention(Q, K, V, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    sorder.attention(Q, K, V, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), state)
    z = kept(Q, K, 0.5) > 0
    assert len({tuple(row.tolist()) for row in z.flatten(0, 2)}) > 50  # heads and rows drop other entries


def loss(q: Tensor, k: Tensor, v: Tensor, attention: Any) -> Tensor:
    return attention(q, k, v).sin().sum()


@pytest.mark.parametrize("route", ["forward_over_reverse", "double_backward", "checkpoint"])
def test_derivatives_see_the_mask_of_the_forward_pass(route: str) -> None:
    torch.manual_seed(11)
    z = kept(Q, K, 0.3)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(11)
        return sorder.attention(q, k, v, dropout_p=0.3)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracle.dense(q, k, v, kept=z)[0]

    def product(attention: Any) -> Any:
        if route == "forward_over_reverse":
            return jvp(grad(lambda *x: loss(*x, attention), argnums=(0, 1, 2)), (Q, K, V), (Q, K, V))[1]
        x = [a.clone().requires_grad_() for a in (Q, K, V)]
        if route == "checkpoint":
            return torch.autograd.grad(checkpoint(loss, *x, attention, use_reentrant=False), x)
        first = torch.autograd.grad(loss(*x, attention), x, create_graph=True)
        return torch.autograd.grad(first, x, (Q, K, V))

    for a, b in zip(product(ours), product(dense), strict=True):
        assert oracle.relative_error(a, b) <= 1e-12


def test_all_or_nothing() -> None:
    q = Q.clone().requires_grad_()
    v = V.clone().requires_grad_()
    out, lse = sorder.attention(q, K, v, dropout_p=1.0, return_lse=True)
    assert not out.any()
    assert oracle.relative_error(lse, oracle.dense(Q, K, V)[1]) <= 1e-14
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, v)))


def test_vmap_follows_its_randomness() -> None:
    batch = torch.stack([Q, Q, 2 * Q])

    def f(q: Tensor) -> Tensor:
        return sorder.attention(q, K, V, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="random"):
        vmap(f)(batch)
    same = vmap(f, randomness="same")(batch)
    assert torch.equal(same[0], same[1])
    different = vmap(f, randomness="different")(batch)
    assert not torch.equal(different[0], different[1])


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_of_products_sees_one_function_a_sample(randomness: str) -> None:
    batch = torch.stack([Q, 2 * Q])
    torch.manual_seed(2)
    gradients = vmap(grad(lambda q: sorder.attention(q, K, V, dropout_p=0.5).sin().sum()), randomness=randomness)(batch)
    torch.manual_seed(2)
    eye = torch.eye(K.shape[-2], dtype=K.dtype).expand(*K.shape[:-2], -1, -1)
    masks = vmap(lambda q: sorder.attention(q, K, eye, dropout_p=0.5), randomness=randomness)(batch)
    for q, got, shown in zip(batch, gradients, masks, strict=True):
        z = shown / sorder.attention(q, K, eye)
        want = grad(lambda q, z=z: oracle.dense(q, K, V, kept=z)[0].sin().sum())(q)
        assert oracle.relative_error(got, want) <= 1e-12


def test_vmap_over_tangents_of_one_drawn_function() -> None:
    def along(t: Tensor) -> Tensor:
        return jvp(lambda q: sorder.attention(q, K, V, dropout_p=0.5), (Q,), (t,))[1]

    torch.manual_seed(4)
    got = vmap(along, randomness="same")(torch.stack([Q, -2 * Q]))
    torch.manual_seed(4)
    z = kept(Q, K, 0.5)
    want = jvp(lambda q: oracle.dense(q, K, V, kept=z)[0], (Q,), (Q,))[1]
    assert oracle.relative_error(got[0], want) <= 1e-13
    assert oracle.relative_error(got[1], -2 * want) <= 1e-13
