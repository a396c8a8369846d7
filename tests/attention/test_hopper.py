"""The Hopper kernels (J and T in Gluon) against the oracle: every launch setting, ragged lengths, layouts, groups."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

import sorder
from sorder.func import hvp
from sorder.kernels import backward_and_tangent, forward_and_tangent, launch
from sorder.kernels.hopper import dispatch
from sorder.kernels.spec import AttentionSpec
from sorder.ops import maps
from tests.cases import counting

from . import oracle
from .cases import BOUNDS, Case, make, parametrize
from .test_maps import KERNELS, check, outputs

CASES = [
    Case(n_q, n_k, d, dv, causal, layout, lead, "qkv", "o", dual, kv_heads)
    for dual in ("o", "")  # with and without dȮ: other sweeps, other settings
    for n_q, n_k, d, dv, causal, layout, lead, kv_heads in (
        (300, 300, 64, 64, True, "contiguous", (2, 3), 0),
        (257, 129, 64, 64, False, "contiguous", (1, 2), 0),
        (130, 520, 64, 64, True, "heads_last", (2, 2), 0),
        (1000, 77, 128, 128, False, "contiguous", (1, 2), 0),
        (333, 700, 128, 128, True, "heads_last", (1, 2), 0),
        (700, 333, 128, 128, True, "contiguous", (2, 2), 0),
        (200, 200, 40, 40, True, "contiguous", (1, 2), 0),
        (200, 300, 80, 64, False, "contiguous", (1, 3), 0),
        (200, 300, 32, 96, True, "contiguous", (1, 2), 0),
        (63, 65, 64, 64, True, "contiguous", (3,), 0),
        (1, 1, 64, 64, True, "contiguous", (2,), 0),
        (100, 100, 64, 64, True, "contiguous", (2, 1, 2, 2), 0),
        (300, 300, 64, 64, True, "contiguous", (2, 6), 2),
        (300, 200, 128, 128, False, "heads_last", (1, 4), 1),
        (200, 300, 128, 64, True, "contiguous", (2, 4), 2),
        (130, 140, 64, 64, True, "fused", (2, 2), 0),
        (130, 140, 64, 64, True, "odd_width_stride", (2, 2), 0),
        (130, 140, 64, 64, False, "expanded", (2, 2), 0),
    )
]


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems go to the Hopper kernels, too."""
    if not (torch.cuda.is_available() and dispatch._is_hopper(torch.device("cuda", 0))):
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    monkeypatch.setattr(dispatch, "_MIN_SCORES", 0)
    yield


@pytest.fixture(params=[False, True], ids=["one sweep", "two sweeps"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Without and with deterministic algorithms, for which T makes two sweeps."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(request.param, warn_only=True)
    yield request.param
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.gpu
@parametrize(CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_the_oracle(case: Case, dtype: torch.dtype, deterministic: bool, all_sizes: None) -> None:
    p = make(case, dtype, "cuda")
    assert dispatch.serves(p.q, p.k, p.v, None, None, p.spec, *p.tangents[:3])
    check(outputs(KERNELS, case, dtype, "cuda"), BOUNDS[dtype])


@pytest.mark.gpu
@parametrize([case for case in CASES if case.cotangent_tangents])
def test_values_and_tangents_in_one_sweep(case: Case, all_sizes: None) -> None:
    p = make(case, torch.bfloat16, "cuda")
    found = maps.forward_and_tangent(p.q, p.k, p.v, None, None, *p.tangents, p.spec)
    assert found is not None
    want = p.expected()
    results = {name: (got, want[name]) for name, got in zip(("o", "lse", "to", "tlse"), found, strict=False)}
    check(results, BOUNDS[torch.bfloat16])
    to, low = found[2].double(), found[4].double()
    assert low.norm() <= 2**-8 * to.norm()
    if p.k.shape[-2] > 1:  # else Ȯ is V̇
        assert oracle.relative_error(to + low, want["to"]) < oracle.relative_error(to, want["to"])


@pytest.mark.gpu
@parametrize([case for case in CASES if max(case.d, case.dv) <= 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_and_their_tangents_in_one_sweep(case: Case, dtype: torch.dtype, all_sizes: None) -> None:
    p = make(case, dtype, "cuda")
    o, lse = KERNELS.forward(p.q, p.k, p.v, None, None, p.spec)
    to, tlse, low = KERNELS.tangent(p.q, p.k, p.v, None, None, o, lse, *p.tangents, p.spec)
    operands = (p.q, p.k, p.v, o, lse, p.cotangents[0], *p.tangents[:3], to, tlse, low, p.cotangent_tangents[0])
    found, want = backward_and_tangent.backward_and_tangent(*operands, p.spec), p.expected()
    assert [x.shape for x in found] == 2 * [p.q.shape, p.k.shape, p.v.shape]
    names = ("dq", "dk", "dv", "tdq", "tdk", "tdv")
    check({name: (got, want[name]) for name, got in zip(names, found, strict=True)}, BOUNDS[dtype])


@pytest.mark.gpu
@parametrize([case for case in CASES if case.kv_heads])
def test_programs_that_serve_several_query_heads(
    case: Case, deterministic: bool, all_sizes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 1)  # then no group is divided among programs
    test_against_the_oracle(case, torch.bfloat16, deterministic, all_sizes)
    if max(case.d, case.dv) <= 64:
        test_gradients_and_their_tangents_in_one_sweep(case, torch.bfloat16, all_sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("causal", "sign"), [(False, 1), (True, 1), (True, -1)])
def test_scores_far_above_those_of_the_first_tile(d: int, causal: bool, sign: int, all_sizes: None) -> None:
    """In some tiles of rows, and in rows next to others, the first maximum is no measure of the weights."""
    torch.manual_seed(0)
    q, k, v, tq, tk, tv = (torch.randn(1, 3, 500, d, device="cuda", dtype=torch.bfloat16) for _ in range(6))
    k[:, :, 200:203] *= 60.0
    k[:, 1, 300:] *= 1e4  # beyond float32's exponents: weights would be infinite
    q[:, 2, ::3] = 0.0
    spec = AttentionSpec(sign * d**-0.5, causal)
    found = maps.forward_and_tangent(q, k, v, None, None, tq, tk, tv, None, spec)
    assert found is not None
    dense = functools.partial(oracle.dense, causal=causal, scale=spec.scale)
    primals, tangents = (tuple(x.double() for x in some) for some in ((q, k, v), (tq, tk, tv)))
    (o, lse), (to, tlse) = torch.func.jvp(dense, primals, tangents)
    check(dict(zip("abcd", zip(found, (o, lse, to, tlse), strict=False), strict=True)), BOUNDS[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_negative_scale(dtype: torch.dtype, all_sizes: None) -> None:
    """The largest score is that of the least product."""
    q, k, v = (3 * torch.randn(1, 2, 200, 64, device="cuda", dtype=dtype) for _ in range(3))
    t = torch.randn_like(q)
    attend = functools.partial(sorder.attention, is_causal=True, scale=-0.5)
    got = torch.func.jvp(lambda *x: torch.func.vjp(attend, *x)[1](t), (q, k, v), (t, t, t))
    wide = tuple(x.double() for x in (q, k, v, t))
    dense = lambda q, k, v: oracle.dense(q, k, v, True, -0.5)[0]  # noqa: E731
    want = torch.func.jvp(lambda *x: torch.func.vjp(dense, *x)[1](wide[3]), wide[:3], (wide[3],) * 3)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert oracle.relative_error(a, b) < 4 * BOUNDS[dtype]


@pytest.mark.gpu
def test_float16_and_partial_tangents_take_two_sweeps(all_sizes: None) -> None:
    x = torch.randn(1, 2, 100, 64, device="cuda", dtype=torch.float16)
    spec = AttentionSpec(0.125, True)
    assert maps.forward_and_tangent(x, x, x, None, None, x, x, x, None, spec) is None
    x = x.bfloat16()
    assert maps.forward_and_tangent(x, x, x, None, None, x, x, x, None, spec) is not None
    assert maps.forward_and_tangent(x, x, x, None, None, x, None, x, None, spec) is None


@pytest.mark.gpu
def test_a_hessian_product_takes_both_joint_sweeps(all_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[str] = Counter()
    for module, name in ((forward_and_tangent, "forward_and_tangent"), (backward_and_tangent, "backward_and_tangent")):
        monkeypatch.setattr(module, name, counting(counted, name, getattr(module, name)))
    x, t = torch.randn(2, 3, 1, 2, 150, 64, device="cuda", dtype=torch.bfloat16).unbind()

    def loss(attend: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return attend(*x).to(torch.float64).square().sum()

    attend = functools.partial(sorder.attention, is_causal=True)
    (got,) = hvp(functools.partial(loss, attend), (x,), (t,))
    assert counted == {"forward_and_tangent": 1, "backward_and_tangent": 1}
    (want,) = hvp(functools.partial(loss, attend), (x.double(),), (t.double(),))
    assert oracle.relative_error(got, want) < 4 * BOUNDS[torch.bfloat16]
    hvp(functools.partial(loss, sorder.attention), (x,), (t,))  # not causal: B and T apart are as fast
    assert counted == {"forward_and_tangent": 2, "backward_and_tangent": 1}


@pytest.mark.gpu
def test_only_what_is_wanted_is_computed(deterministic: bool, all_sizes: None) -> None:
    p = make(CASES[0], torch.bfloat16, "cuda")
    o, lse = KERNELS.forward(p.q, p.k, p.v, None, None, p.spec)
    to, tlse, low = KERNELS.tangent(p.q, p.k, p.v, None, None, o, lse, *p.tangents, p.spec)
    first = (p.q, p.k, p.v, None, None, o, lse, *p.cotangents, *p.tangents, to, tlse, low, *p.cotangent_tangents)
    everything = dict(zip("qkv", KERNELS.backward_tangent(*first, "qkv", p.spec), strict=False))
    for wanted in ("q", "k", "v", "kv", "qk", "qv"):
        some = dict(zip("qkv", KERNELS.backward_tangent(*first, wanted, p.spec), strict=False))
        for name, result in some.items():
            assert (result is not None) == (name in wanted)
            if result is not None:  # sums in another order are rounded otherwise
                assert (result - everything[name]).norm() <= 2e-3 * everything[name].norm()


@pytest.mark.gpu
def test_bitwise_reproducible(deterministic: bool, all_sizes: None) -> None:
    if not deterministic:
        pytest.skip("dQ̇ is added up in no determined order")
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(outputs(KERNELS, CASES[0], torch.bfloat16, "cuda"))
    assert all(torch.equal(runs[0][name][0], runs[1][name][0]) for name in runs[0])


@pytest.mark.gpu
def test_a_row_beyond_the_largest_score_stays_finite(all_sizes: None) -> None:
    """Keys beyond the end are zeros with score 0: beside scores of −200 they must not become infinite weights."""
    q = torch.full((1, 1, 70, 64), 5.0, device="cuda", dtype=torch.bfloat16)
    k, t = -q, torch.randn_like(q)
    spec = AttentionSpec(0.125, False)
    o, lse = KERNELS.forward(q, k, t, None, None, spec)
    to, tlse, *low = KERNELS.tangent(q, k, t, None, None, o, lse, t, t, t, None, spec)
    first = (q, k, t, None, None, o, lse, t, None, t, t, t, None, to, tlse, *low, None, None, "qkv", spec)
    grads = KERNELS.backward_tangent(*first)
    both = backward_and_tangent.backward_and_tangent(q, k, t, o, lse, t, t, t, t, to, tlse, *low, None, spec)
    assert all(x.isfinite().all() for x in (to, tlse, *grads[:3], *both))


def test_what_is_not_served() -> None:
    x = torch.empty(1, 8, 8192, 64, dtype=torch.bfloat16)
    assert not dispatch.serves(x, x, x, None, None, AttentionSpec(1.0, True), x)  # not on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(q=a["q"].float()),
        lambda a: a.update(bias=a["q"][..., :1]),
        lambda a: a.update(spec=AttentionSpec(1.0, True, softcap=30.0)),
        lambda a: a.update(spec=AttentionSpec(1.0, True, dropout=0.1)),
        lambda a: a.update(needed=None),
        lambda a: a.update(q=a["q"][..., :60], k=a["q"][..., :60]),
        lambda a: a.update(q=a["q"][..., :64, :], k=a["q"][..., :64, :]),
    ],
)
def test_what_a_hopper_gpu_leaves_to_the_portable_kernels(change: Callable[[dict], None]) -> None:
    if not dispatch._is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    x = torch.empty(1, 8, 8192, 64, dtype=torch.bfloat16, device="cuda")
    arguments = {"q": x, "k": x, "v": x, "bias": None, "vis": None, "spec": AttentionSpec(1.0, True), "needed": x}
    assert dispatch.serves(*arguments.values())
    change(arguments)
    assert not dispatch.serves(*arguments.values())
