"""Routing changes which kernel runs and nothing else: numbers are those of materialised attention, to second order."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_earlier
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from sorder.curvature.substitution import functional
from sorder.func import checkpoint
from sorder.ops import routing
from sorder.ops.mask import Mask
from sorder.ops.routing import exact_attention

from ..attention.oracle import dense


class Operator:
    """Stands before the operator and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        output = ATTENTION(*args, **kwargs)
        self.calls.append({"attn_mask": args[3], **kwargs})
        return output


ATTENTION = routing.attention
BUILTIN = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    counting = Operator()
    monkeypatch.setattr(routing, "attention", counting)
    monkeypatch.setattr(routing, "_warned", set())
    yield counting
    exact_attention.disable()
    assert F.scaled_dot_product_attention is BUILTIN
    assert not _get_current_function_mode_stack()
    assert torch.backends.mha.get_fastpath_enabled()


def tensors(*shape: int, count: int = 3) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for _ in range(count)]


def close(a: Tensor, b: Tensor, bound: float = 1e-12) -> bool:
    return bool((a - b).norm() <= bound * b.norm()) and bool(b.norm() > 0)


def second_order(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return f(x), *jvp(grad(f), (x,), (v,))


def check(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Value, gradient and Hessian product under routing against materialised attention."""
    v = torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):
        expected = second_order(f, x, v)
    with exact_attention():
        found = second_order(f, x, v)
    for a, b in zip(found, expected, strict=True):
        assert close(a, b)


# ---------------------------------------------------------------------- plain calls


NAMES: dict[str, Callable[..., Tensor]] = {
    "attribute": lambda *a, **k: F.scaled_dot_product_attention(*a, **k),
    "imported earlier": imported_earlier,
    "keywords": lambda q, k, v, **o: F.scaled_dot_product_attention(query=q, key=k, value=v, **o),
}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_materialised(operator: Operator, name: str, options: dict[str, Any]) -> None:
    x, w = tensors(2, 3, 7, 4, count=2)
    check(lambda x: (NAMES[name](x, x * w, x.sin(), **options) * w).sum(), x)
    assert len(operator.calls) == 2
    assert all(call["is_causal"] is options.get("is_causal", False) for call in operator.calls)


def test_off_outside_and_restored_after_an_exception(operator: Operator) -> None:
    q, k, v = tensors(1, 2, 5, 4)
    with pytest.raises(KeyboardInterrupt), exact_attention():
        F.scaled_dot_product_attention(q, k, v)
        raise KeyboardInterrupt
    F.scaled_dot_product_attention(q, k, v)
    assert len(operator.calls) == 1


def test_contexts_nest_and_the_innermost_decides(operator: Operator) -> None:
    q, k, v = tensors(1, 2, 5, 4)
    mha = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 5, 8)

    def calls(f: Callable[[], Any]) -> int:
        before = len(operator.calls)
        f()
        return len(operator.calls) - before

    for call in (
        lambda: F.scaled_dot_product_attention(q, k, v),
        lambda: imported_earlier(q, k, v),
        lambda: mha(x, x, x, need_weights=False),
    ):
        context = exact_attention()
        with context:
            assert calls(call) == 1
            with context:
                assert calls(call) == 1
                with exact_attention(False):
                    assert calls(call) == 0
                    with exact_attention():
                        assert calls(call) == 1
                    assert calls(call) == 0
            assert calls(call) == 1
        assert calls(call) == 0


def test_decorator(operator: Operator) -> None:
    @exact_attention(strict=True)
    def f(depth: int) -> Tensor:
        """A docstring."""
        q, k, v = tensors(1, 1, 3, 2)
        return f(depth - 1) if depth else F.scaled_dot_product_attention(q, k, v)

    assert f.__name__ == "f" and f.__doc__ == "A docstring."
    f(2)
    f(0)
    assert len(operator.calls) == 2


def test_other_modes_above_and_below(operator: Operator) -> None:
    class Seen(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Seen.count += func is BUILTIN
            return func(*args, **(kwargs or {}))

    q, k, v = tensors(1, 2, 5, 4)
    with exact_attention(), Seen():
        F.scaled_dot_product_attention(q, k, v)
    assert (len(operator.calls), Seen.count) == (1, 1)
    with Seen(), exact_attention():
        F.scaled_dot_product_attention(q, k, v)
        assert len(operator.calls) == 2
        with pytest.warns(UserWarning, match="widths"):
            F.scaled_dot_product_attention(_wide(q), _wide(k), v)
    assert (len(operator.calls), Seen.count) == (2, 2)  # what falls back is seen below


def test_a_substituted_parameter_as_the_query(operator: Operator) -> None:
    """Learned queries: the substitution must reach the operator, or their gradient would be lost."""
    query = nn.Parameter(torch.randn(1, 1, 3, 4, dtype=torch.float64))
    _, k, v = tensors(1, 1, 5, 4)
    value = query.detach().clone()
    with sdpa_kernel(SDPBackend.MATH):
        expected = grad(lambda q: F.scaled_dot_product_attention(q, k, v).square().sum())(value)
    with exact_attention():
        f = functional(lambda: F.scaled_dot_product_attention(query, k, v).square().sum(), [query])
        assert close(grad(f)(value), expected)
    assert len(operator.calls) == 1


# ---------------------------------------------------------------------- modules


def modules() -> dict[str, Callable[[], Callable[[Tensor], Tensor]]]:
    def mha(**options: Any) -> Callable[[Tensor], Tensor]:
        module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        return lambda x: module(x, x, x, need_weights=False, **options)[0]

    def encoder(layers: int, train: bool, **options: Any) -> Callable[[Tensor], Tensor]:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
        module = layer if layers == 1 else nn.TransformerEncoder(layer, layers)
        module.train(train)
        return lambda x: module(x, **options)

    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    return {
        "mha": mha,
        "mha, causal hint": lambda: mha(attn_mask=causal, is_causal=True),
        "mha, causal mask": lambda: mha(attn_mask=causal),
        "mha, boolean causal mask": lambda: mha(attn_mask=causal < 0),
        "encoder layer, train": lambda: encoder(1, True),
        "encoder layer, eval": lambda: encoder(1, False),
        "encoder, eval, causal": lambda: encoder(2, False, mask=causal),
    }


@pytest.mark.parametrize("case", modules())
def test_modules(operator: Operator, case: str) -> None:
    model = modules()[case]()
    weight, x = tensors(2, 6, 8, count=2)
    check(lambda x: (model(x) * weight).sum(), x)
    assert len(operator.calls) == (4 if "encoder, " in case else 2)
    assert all(call["is_causal"] is ("causal" in case) and call["attn_mask"] is None for call in operator.calls)


def test_inference_fast_path_is_off_inside_only(operator: Operator) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        expected = layer(x)
        assert not operator.calls
        with exact_attention():
            assert close(layer(x), expected, 1e-5)
        assert len(operator.calls) == 1
        exact_attention.enable()
        assert close(layer(x), expected, 1e-5)
        exact_attention.disable()
        assert len(operator.calls) == 2


# ---------------------------------------------------------------------- what the operator does not serve


def _wide(x: Tensor, times: int = 65) -> Tensor:
    """(…, 4) repeated to a width that no kernel takes."""
    return x.repeat_interleave(times, -1)


UNSERVED: dict[str, Callable[[Tensor], Tensor]] = {
    "wide heads": lambda q: F.scaled_dot_product_attention(_wide(q), _wide(q.sin()), q),
    "wide values": lambda q: F.scaled_dot_product_attention(q, q.sin(), _wide(q), is_causal=True)[..., ::65],
    "wide grouped heads": lambda q: F.scaled_dot_product_attention(
        _wide(q), _wide(q[:, :1].sin()), q[:, :1], enable_gqa=True
    ),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_fallback_is_exact_and_warns_once(operator: Operator, case: str) -> None:
    f = UNSERVED[case]
    x, weight = tensors(1, 2, 5, 4, count=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(lambda x: (f(x) * weight).sum(), x)
        check(lambda x: (f(x) * weight).sum(), x)
    assert not operator.calls
    (warning,) = caught
    text = str(warning.message)
    assert "scaled_dot_product_attention (query (1, 2, 5, " in text and "materialised attention" in text
    assert "widths must be between 1 and 256" in text
    assert f"{2 * 5 * 5 * 8 / 1e9:.3g} GB a matrix" in text and "sdpa_kernel" not in text
    assert warning.filename == __file__


def test_the_warning_points_at_the_users_line_from_inside_modules_and_transforms() -> None:
    layer = nn.TransformerEncoderLayer(260, 1, 16, dropout=0.0, batch_first=True)
    x, padding = torch.randn(2, 5, 260), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with warnings.catch_warnings(record=True) as caught, exact_attention():
        warnings.simplefilter("always")
        second_order(lambda x: layer(x, src_key_padding_mask=padding).sin().sum(), x, torch.ones_like(x))
    (warning,) = caught
    assert warning.filename == __file__ and "widths must be between 1 and 256" in str(warning.message)


def test_each_reason_warns() -> None:
    q, k, v = tensors(1, 2, 5, 4)
    wide = torch.randn(1, 1, 2, 300)
    with warnings.catch_warnings(record=True) as caught, exact_attention():
        warnings.simplefilter("always")
        for _ in range(2):
            F.scaled_dot_product_attention(wide, wide, wide)
            F.scaled_dot_product_attention(wide[..., :290], wide[..., :290], wide)
            F.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0])
    assert len(caught) == 2


@pytest.mark.parametrize("case", UNSERVED)
def test_strict_raises(case: str) -> None:
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    with exact_attention(strict=True), pytest.raises(NotImplementedError, match=r"strict=True.*widths"):
        UNSERVED[case](x)


def test_strict_inside_lenient_and_the_other_way() -> None:
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    with exact_attention(), exact_attention(strict=True), pytest.raises(NotImplementedError):
        UNSERVED["wide heads"](x)
    with exact_attention(strict=True), exact_attention(), pytest.warns(UserWarning, match="widths"):
        UNSERVED["wide heads"](x)


def test_bad_input_gets_torchs_own_error() -> None:
    q, k, v = tensors(1, 2, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with exact_attention(), pytest.raises(RuntimeError, match="dtype"):
            F.scaled_dot_product_attention(q, k.float(), v)


def test_a_mask_that_is_nearly_causal_is_not_taken_for_causal(operator: Operator) -> None:
    q, k, v = tensors(1, 2, 5, 4)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    weighted = causal.clone()
    weighted[3, 1] = -0.5
    finite = causal.clamp(min=-1e9)
    for mask in (weighted, finite, causal.T, causal.expand(1, 2, 5, 5)):
        expected = F.scaled_dot_product_attention(q, k, v, mask)
        with exact_attention():
            assert close(F.scaled_dot_product_attention(q, k, v, mask), expected)
        assert operator.calls[-1]["attn_mask"] is mask and not operator.calls[-1]["is_causal"]


@pytest.mark.parametrize("transform", [lambda f: f, grad, lambda f: lambda b: jvp(f, (b,), (b,))[1]])
def test_a_differentiated_bias_is_not_taken_for_a_constant(operator: Operator, transform: Any) -> None:
    q, k, v = tensors(1, 2, 5, 4)
    hidden = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)

    def f(bias: Tensor) -> Tensor:  # the mask is the causal one where bias is zero
        return F.scaled_dot_product_attention(q, k, v, hidden + bias * scale).square().sum()

    bias, scale = torch.ones(5, 5, dtype=torch.float64, requires_grad=True), 0.0
    with exact_attention():
        transform(f)(bias)
    assert operator.calls[-1]["attn_mask"] is not None and not operator.calls[-1]["is_causal"]


# ---------------------------------------------------------------------- transforms, autocast, threads, switch


def test_vmap_per_sample_gradients(operator: Operator) -> None:
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x.sin(), x, is_causal=True).square().sum()

    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.stack([grad(f)(row) for row in x])
    with exact_attention():
        assert close(vmap(grad(f))(x), expected)
    assert len(operator.calls) == 1


def test_autocast(operator: Operator) -> None:
    q, k, v = (x.float() for x in tensors(1, 2, 6, 8))
    with torch.autocast("cpu", torch.bfloat16), exact_attention():
        served = F.scaled_dot_product_attention(q, k, v)
        with pytest.warns(UserWarning):
            materialised = F.scaled_dot_product_attention(_wide(q), _wide(k), v, scale=8**-0.5 / 65)
    assert len(operator.calls) == 1
    assert served.dtype == materialised.dtype == torch.bfloat16
    assert close(served.double(), materialised.double(), 1e-2)


BACKWARDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "autograd.grad": lambda y, x: torch.autograd.grad(y, x, create_graph=True)[0],
    "autograd.backward": lambda y, x: torch.autograd.backward(y, inputs=[x], create_graph=True),
    "Tensor.backward": lambda y, x: y.backward(create_graph=True),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("call", NAMES)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_torch_checkpoint_recomputes_with_routing(operator: Operator, backward: str, call: str, device: str) -> None:
    """Recomputation runs inside the backward call: on CUDA, in a thread of the autograd engine."""
    value, v = (t.to(device) for t in tensors(1, 2, 5, 4, count=2))

    def f(x: Tensor) -> Tensor:
        return NAMES[call](x, x.sin(), x, is_causal=True).square()

    def product(checkpointed: bool) -> Tensor:
        x = value.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False) if checkpointed else f(x)
        returned = BACKWARDS[backward](y.sum(), x)
        gradient = x.grad if returned is None else returned
        assert gradient is not None
        return torch.autograd.grad((gradient * v).sum(), x)[0]

    with sdpa_kernel(SDPBackend.MATH):
        expected = product(False)
    with exact_attention(False), exact_attention():
        assert close(product(True), expected)
    assert len(operator.calls) >= 2  # forward, and again in backward


@pytest.mark.parametrize("module", [False, True])
def test_functional_checkpoint_recomputes_with_the_routing_of_the_call(operator: Operator, module: bool) -> None:
    mha = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    value, v = tensors(2, 5, 4, count=2)

    def f(x: Tensor) -> Tensor:
        if module:
            return mha(x, x, x, need_weights=False)[0].sin()
        return F.scaled_dot_product_attention(x, x.sin(), x).square()

    def product(f: Callable[[Tensor], Tensor]) -> Tensor:
        x = value.clone().requires_grad_()
        with exact_attention():
            y = f(x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)  # after the context has ended
        return torch.autograd.grad((gradient * v).sum(), x)[0]

    expected = product(f)
    calls = len(operator.calls)
    assert close(product(checkpoint(f)), expected)
    assert len(operator.calls) >= calls + 2


def test_a_context_holds_for_its_thread(operator: Operator) -> None:
    mha = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 5, 8)

    def elsewhere(call: Callable[[], Any]) -> int:
        before = len(operator.calls)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return len(operator.calls) - before

    def call() -> None:
        mha(x, x, x, need_weights=False)

    with exact_attention():
        assert elsewhere(call) == 0
        # Even while this thread is inside multi-head attention, with the name in torch.nn.functional replaced.
        with routing._lookup.replaced_for(exact_attention()):
            assert elsewhere(call) == 0
    exact_attention.enable()
    assert elsewhere(call) == 1


def test_threads_at_once_leave_everything_as_it_was(operator: Operator) -> None:
    mha = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 5, 8)
    expected = mha(x, x, x, need_weights=False)[0]
    wrong: list[object] = []

    def work(routed: bool) -> None:
        for _ in range(20):
            with exact_attention(routed):
                if not close(mha(x, x, x, need_weights=False)[0], expected, 1e-5):
                    wrong.append(routed)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(operator.calls) == 40


def test_switch(operator: Operator) -> None:
    q, k, v = tensors(1, 2, 5, 4)
    with exact_attention(False):
        exact_attention.enable()  # below the context, which ends as it began
        F.scaled_dot_product_attention(q, k, v)
        assert not operator.calls
    F.scaled_dot_product_attention(q, k, v)
    imported_earlier(q, k, v)
    assert len(operator.calls) == 2
    with exact_attention(False):
        F.scaled_dot_product_attention(q, k, v)
    exact_attention.enable(strict=True)
    with pytest.raises(NotImplementedError):
        F.scaled_dot_product_attention(_wide(q), _wide(k), v)
    exact_attention.disable()
    exact_attention.disable()
    F.scaled_dot_product_attention(q, k, v)
    imported_earlier(q, k, v)
    assert len(operator.calls) == 2


def test_a_decorator_without_parentheses_says_so() -> None:
    with pytest.raises(TypeError, match=r"@sorder.exact_attention\(\)"):
        exact_attention(lambda: None)  # type: ignore[arg-type]


def test_switched_off_by_another_thread(operator: Operator) -> None:
    q, k, v = tensors(1, 2, 5, 4)
    exact_attention.enable()
    thread = threading.Thread(target=exact_attention.disable)
    thread.start()
    thread.join()
    F.scaled_dot_product_attention(q, k, v)
    assert not operator.calls
    routing._set_stack([])


@pytest.mark.parametrize("n_q", [3, 5, 9])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("routed", [False, True])
def test_causal_biases_of_pytorch(make: Callable[[int, int], Tensor], n_q: int, routed: bool) -> None:
    """Tensors that mean a causal mask, whose memory holds nothing."""
    q, k, v = torch.randn(2, 3, n_q, 4).double(), *torch.randn(2, 2, 3, 5, 4).double()
    visible = torch.ones(n_q, 5, dtype=torch.bool).tril(0 if make is causal_upper_left else 5 - n_q)
    real = torch.arange(5) != 1

    def product(call: Callable[..., Tensor]) -> Tensor:
        return jvp(grad(lambda q: call(q).sin().sum()), (q,), (q.cos(),))[1]

    def call(q: Tensor) -> Tensor:
        return (F.scaled_dot_product_attention if routed else ATTENTION)(q, k, v, make(n_q, 5))

    with exact_attention(strict=True):
        assert close(product(call), product(lambda q: dense(q, k, v, visible=visible)[0]))
    mask = Mask(key_padding=real.expand(2, 5))
    got = product(lambda q: ATTENTION(q, k, v, make(n_q, 5), mask=mask))
    assert close(got, product(lambda q: dense(q, k, v, visible=visible & real)[0]))
