"""attn_implementation="sorder" in models of transformers: loss, gradient and Hessian product are those of "eager"."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.overrides import TorchFunctionMode

import sorder
from sorder.integrations.huggingface import NAME, attention_forward, register

transformers = pytest.importorskip("transformers", minversion="4.53")

SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=40,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GROUPED = SHAPE | {"num_key_value_heads": 2}
GPT2 = dict(
    n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=64, bos_token_id=1, eos_token_id=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama, one key head": ("LlamaForCausalLM", SHAPE | {"num_key_value_heads": 1}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 12}),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "gemma2": (
        "Gemma2ForCausalLM",
        GROUPED | dict(head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", SHAPE),
    "gpt-oss": (
        "GptOssForCausalLM",
        GROUPED | dict(head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    ),
    "bert": ("BertForMaskedLM", SHAPE | NO_DROPOUT),
    "vit": ("ViTForImageClassification", SHAPE | NO_DROPOUT | dict(image_size=8, patch_size=2, num_labels=5)),
}
BOUND = 1e-12

Params = dict[str, Tensor]


class Float64(TorchFunctionMode):
    """Models cast to float32 in places (norms, rotations, softmax); inside this mode to float64 instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{k: wide(x) for k, x in (kwargs or {}).items()})


def build(name: str, implementation: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The model with weights large enough for attention to matter, the same for both implementations."""
    register()
    kind, options = MODELS[name]
    cls = getattr(transformers, kind)
    if not hasattr(sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"{kind} takes no attention function in transformers {transformers.__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls._from_config(cls.config_class(**options | changes), attn_implementation=implementation)
    if name == "gpt-oss" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model.to(dtype)


def inputs(name: str, padding: str | None = None) -> dict[str, Any]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8).double(), "labels": torch.tensor([0, 3])}
    tokens = torch.randint(3, 40, (2, 11))
    mask = torch.ones_like(tokens)
    if padding == "right":
        mask[1, 7:] = 0
    elif padding == "left":
        mask[1, :4] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if padding == "left":
        labels[1, 4] = -100  # would be predicted from a padded position
    batch = {"input_ids": tokens, "labels": labels}
    return batch if padding is None else batch | {"attention_mask": mask}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Callable[[Params], Tensor]:
    return lambda params: functional_call(model, params, (), batch).loss


def second_order(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    params = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    v = {name: torch.randn(p.shape, generator=generator).to(p) for name, p in params.items()}
    loss = loss_of(model, batch)
    trees = {"gradient": grad(loss)(params), "hvp": sorder.func.hvp(loss, (params,), v, argnums=0)}
    # Its layer norm gives a 16-bit output a float32 tangent on CUDA, over which PyTorch's own next product raises.
    if not any(p.is_cuda and p.dtype is torch.bfloat16 for p in params.values()):
        trees["jvp of grad"] = jvp(grad(loss), (params,), (v,))[1]
    flat = {k: torch.cat([x.flatten() for x in tree.values()]) for k, tree in trees.items()}
    return {"loss": loss(params), **flat}


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


CASES = [(name, padding) for name in MODELS for padding in (None, "right", "left") if name != "vit" or padding is None]


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_equals_eager(name: str, padding: str | None) -> None:
    batch = inputs(name, padding)
    with Float64():
        want = second_order(build(name, "eager"), batch)
        got = second_order(build(name, NAME), batch)
    for key, x in got.items():
        assert error(x, want[key]) <= BOUND, key
        assert want[key].norm() > 0


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]])


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_packed_sequences_equal_eager(name: str) -> None:
    batch = inputs(name) | {"position_ids": PACKED, "use_cache": False}
    with Float64():
        want = second_order(build(name, "eager"), batch)
        got = second_order(build(name, NAME), batch)
        alone = second_order(build(name, NAME), inputs(name))
    assert all(error(got[key], want[key]) <= BOUND for key in want)
    assert error(got["loss"], alone["loss"]) > 1e-6  # the documents do not see one another


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_close_as_eager(name: str, device: str) -> None:
    padding = None if name == "vit" else "right"
    batch = inputs(name, padding)
    with Float64():
        want = {key: x.to(device) for key, x in second_order(build(name, "eager"), batch).items()}
    batch = {k: (x.bfloat16() if x.is_floating_point() else x).to(device) for k, x in batch.items()}
    theirs = second_order(build(name, "eager", torch.bfloat16).to(device), batch)
    ours = second_order(build(name, NAME, torch.bfloat16).to(device), batch)
    for key, x in ours.items():
        assert error(x, want[key]) <= 1.5 * error(theirs[key], want[key]) + 2e-2, key


def tokens_of(model: nn.Module, batch: dict[str, Any], **options: Any) -> Tensor:
    given = {k: x for k, x in batch.items() if k != "labels"}
    with Float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(**given, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache_equals_eager(name: str, cache: str) -> None:
    batch = inputs(name, "left")
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    want = tokens_of(build(name, "eager").eval(), batch, **options)
    assert torch.equal(tokens_of(build(name, NAME).eval(), batch, **options), want)
    assert want.shape == (2, 19)


def test_one_description_of_the_mask_reaches_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from sorder.integrations import huggingface

    seen: list[Any] = []

    def watch(*args: Any, **options: Any) -> Tensor:
        seen.append((args[3], options["mask"], options["is_causal"]))
        return sorder.attention(*args, **options)

    monkeypatch.setattr(huggingface, "attention", watch)

    def masks(name: str, padding: str | None, **more: Any) -> list[Any]:
        seen.clear()
        build(name, NAME)(**inputs(name, padding) | more)
        assert len(seen) == 2
        assert all(bias is None for bias, *_ in seen)  # nothing is Nq × Nk
        assert not any(causal for *_, causal in seen)  # the mask says it
        return [mask for _, mask, _ in seen]

    for name in ("llama", "gpt2"):
        first, second = masks(name, None)
        assert first is second and first.causal and first.window is first.key_start is first.documents is None
    window, full = masks("gpt-oss", None)
    assert window.causal and window.window == (3, None) and full.causal and full.window is None
    first, second = masks("llama", "left")
    assert first is second and first.causal and first.key_start.tolist() == [0, 4] and first.key_padding is None
    first, _ = masks("llama", None, position_ids=PACKED, use_cache=False)
    assert first.causal and torch.equal(first.documents, (PACKED == 0).cumsum(-1) - 1)
    seen.clear()
    second_order(build("llama", NAME), inputs("llama", "left"))  # under transforms, too
    assert all(mask.key_padding is None and mask.key_start.tolist() == [0, 4] for _, mask, _ in seen)
    assert masks("bert", None) == [None] * 2
    first, second = masks("bert", "right")
    assert first is second and not first.causal and first.key_stop.tolist() == [11, 7] and first.key_start is None


def test_dropout_is_that_of_training() -> None:
    model = build("llama", NAME, attention_dropout=0.5)
    batch = inputs("llama")
    losses = set()
    for _ in range(3):
        loss = model(**batch).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert all(g.isfinite().all() for g in gradients)
        losses.add(loss.item())
    assert len(losses) == 3
    with torch.no_grad():
        assert len({model.eval()(**batch).loss.item() for _ in range(2)}) == 1
        # One seed, one mask: so that a Hessian product sees one function.
        assert len({(torch.manual_seed(3), model.train()(**batch).loss.item())[1] for _ in range(2)}) == 1


class Layer(nn.Module):
    """What attention_forward reads of an attention layer."""

    is_causal = False


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    p, n = 0.3, 64
    query, key = torch.randn(2, 4, 2, n, 8).double()
    values = torch.eye(n).double().expand(4, 2, n, n)
    weights = attention_forward(Layer(), query, key, values, None)[0]
    dropped = attention_forward(Layer(), query, key, values, None, dropout=p)[0]
    share = (dropped == 0).double().mean().item()
    assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / dropped.numel())
    kept = dropped != 0
    assert error(dropped[kept], weights[kept] / (1 - p)) <= BOUND


def test_to_register_twice_is_harmless() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    before = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)
    register()
    assert (dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)) == before
    assert before[0][NAME] is attention_forward


def test_a_model_can_be_switched() -> None:
    batch = inputs("llama")
    model = build("llama", "eager")
    with Float64():
        want = model(**batch).loss
        model.set_attn_implementation(NAME)
        assert error(model(**batch).loss, want) <= BOUND


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing() -> None:
    batch = inputs("mistral", "left")
    model = build("mistral", NAME).train()

    def product() -> Tensor:
        parameters = list(model.parameters())
        gradient = torch.autograd.grad(model(**batch, use_cache=False).loss, parameters, create_graph=True)
        products = torch.autograd.grad(gradient, parameters, [torch.ones_like(g) for g in gradient])
        return torch.cat([x.flatten() for x in products])

    want = product()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert error(product(), want) <= BOUND


@pytest.mark.filterwarnings("ignore")  # what the compiler says of itself
def test_a_compiled_model_trains() -> None:
    """With a graph break where the mask is described, and none in the layers."""
    batch = inputs("mistral", "left") | {"use_cache": False}
    model = build("mistral", NAME)
    parameters = list(model.parameters())
    want = torch.autograd.grad(model(**batch).loss, parameters)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    got = torch.autograd.grad(compiled(**batch).loss, parameters)
    breaks = torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    assert all(error(a, b) <= BOUND for a, b in zip(got, want, strict=True) if b.norm() > 0)
    assert len(breaks) == 1 and "huggingface_masks" in next(iter(breaks))


TENSOR_MASKS = {
    "boolean": lambda mask: mask,
    "additive": lambda mask: torch.zeros(mask.shape).double().masked_fill(~mask, torch.finfo(torch.float64).min),
}


@pytest.mark.parametrize("kind", TENSOR_MASKS)
@pytest.mark.parametrize("bias", [False, True])
def test_tensors_for_masks_and_position_biases(kind: str, bias: bool) -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 8).double()
    shown = torch.rand(2, 1, 6, 9) < 0.7
    shown[..., 0] = True
    position_bias = torch.randn(1, 4, 6, 6).double() if bias else None
    got, weights = attention_forward(
        Layer(), query, key, value, TENSOR_MASKS[kind](shown), scaling=0.3, position_bias=position_bias
    )
    scores = 0.3 * query @ key.mT + (0 if position_bias is None else position_bias)
    want = scores.masked_fill(~shown[..., :6], -torch.inf).softmax(-1) @ value
    assert weights is None
    assert error(got, want.transpose(1, 2)) <= BOUND


@pytest.mark.parametrize("padding", [None, "left"])
def test_a_model_that_computes_its_attention_itself_says_so(padding: str | None) -> None:
    register()
    config = transformers.BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation=NAME)
    with pytest.raises(NotImplementedError, match=r'this model passes it to add: .*attn_implementation="eager"'):
        model(**inputs("llama", padding))


def test_a_description_is_no_tensor() -> None:
    from sorder.integrations.huggingface_masks import PreparedMask

    description = PreparedMask(causal=True)
    with pytest.raises(AttributeError, match="this model asks for its dtype"):
        description.dtype  # noqa: B018
    with pytest.raises(NotImplementedError, match="this model indexes it"):
        description[..., :2]
    assert copy.deepcopy(description).causal and not hasattr(description, "shape")


def test_what_is_not_served_is_named() -> None:
    query, key, value = torch.randn(3, 1, 2, 3, 4)
    for name in ("sinks", "block_indices", "head_mask"):
        with pytest.raises(NotImplementedError, match=f'Layer passes {name} .*"eager" does'):
            attention_forward(Layer(), query, key, value, None, **{name: torch.zeros(1)})


def test_weights_asked_for_are_missed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from sorder.integrations import huggingface

    monkeypatch.setattr(huggingface, "_warned", set())
    model = build("llama", NAME)
    with pytest.warns(UserWarning, match="no attention weights"):
        model(**inputs("llama"), output_attentions=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**inputs("llama"), output_attentions=True)
    assert not [w for w in caught if "no attention weights" in str(w.message)]
