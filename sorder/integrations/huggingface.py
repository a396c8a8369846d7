"""``attn_implementation="sorder"`` for Hugging Face's transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sorder.func._user_warning import warn_user
from sorder.integrations.huggingface_masks import mask
from sorder.ops.attention import attention
from sorder.ops.mask import Mask

NAME = "sorder"

# What changes the result of attention in some models of transformers and has no counterpart here.
_NOT_SERVED = ("sinks", "block_indices", "head_mask", "layer_head_mask", "attention_bias")

_warned: set[str] = set()


def register() -> None:
    """Make ``attn_implementation="sorder"`` known to transformers, for every model that takes an attention function.

    (Those are nearly all of transformers 5, and most decoders of 4.53 and later.)

    Then ``AutoModelForCausalLM.from_config(config, attn_implementation="sorder")`` (or ``from_pretrained``, or
    ``model.set_attn_implementation("sorder")``) runs :func:`sorder.attention`: exact curvature products in linear
    memory. Causal, sliding-window, padding and packed masks stay descriptions and are never written out as Nq × Nk
    tensors; grouped heads, dropout, soft caps (Gemma 2), sinks (gpt-oss) and position biases are served. A row that
    sees nothing, such as the first of a sequence padded on the left, gives zeros; ``"eager"`` gives it the average of
    all values. Attention weights are not returned (``output_attentions=True`` warns). To call it again is harmless.

    Documents packed in one row, told apart by ``position_ids`` that begin at 0 again, need ``use_cache=False`` and no
    ``attention_mask``. That is transformers' own rule: given a cache or a mask it does not look for documents, and
    tokens see those before their own.

    Mixtures of experts need ``experts_implementation="eager"`` where a product runs in forward mode, because PyTorch's
    grouped matrix product has no forward derivative.

    Raises:
        ImportError: transformers is not installed, or older than 4.53, which has no interface for masks.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sorder.integrations.huggingface.register()
        >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        ...                      num_attention_heads=2, num_key_value_heads=1)
        >>> model = LlamaForCausalLM._from_config(config, attn_implementation="sorder")
        >>> tokens = torch.randint(16, (2, 5))
        >>> params = {name: p.detach() for name, p in model.named_parameters()}
        >>> loss = lambda p: torch.func.functional_call(model, p, (tokens,), {"labels": tokens}).loss
        >>> product = sorder.func.hvp(loss, (params,), params, argnums=0)
        >>> product["lm_head.weight"].shape
        torch.Size([16, 8])
    """
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            'sorder.integrations.huggingface needs transformers 4.53 or later: pip install "transformers>=4.53"'
        ) from error
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function on :func:`sorder.attention`.

    Args:
        module: the attention layer; its ``is_causal`` (default True) holds where there is no mask.
        query: (B, Hq, Nq, d).
        key: (B, Hk, Nk, d), with Hk a divisor of Hq.
        value: (B, Hk, Nk, dv).
        attention_mask: what :func:`sorder.integrations.huggingface_masks.mask` made, or a tensor (B, 1 or Hq, Nq, Nk),
            boolean (True: visible) or additive.
        dropout: probability; 0 outside training.
        scaling: factor of the scores; default 1/√d.
        is_causal: overrules the layer's.
        softcap: κ of κ·tanh(scores/κ).
        s_aux: (Hq,), logits of the attention sinks.
        position_bias: additive, broadcastable to (B, Hq, Nq, Nk).
        kwargs: what else models hand to attention functions.

    Returns:
        (B, Nq, Hq, dv), and ``None`` in place of the weights.

    Raises:
        NotImplementedError: the model passes what has no counterpart here.
    """
    for name in _NOT_SERVED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f'{type(module).__name__} passes {name} to its attention, which attn_implementation="sorder" does not '
                'serve; "eager" does'
            )
    if kwargs.get("output_attentions") and "weights" not in _warned:
        _warned.add("weights")
        warn_user(
            'attn_implementation="sorder" holds no attention weights to return: they are None; "eager" has them',
            UserWarning,
        )
    n_q, n_k = query.shape[-2], key.shape[-2]
    description, bias = None, position_bias
    if isinstance(attention_mask, Mask):
        description = attention_mask
    elif attention_mask is not None:
        bias = _merged(attention_mask[..., :n_k], position_bias)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = attention(
        query,
        key,
        value,
        bias,
        dropout_p=dropout,
        # A single query stands at the end of its keys, not at their start.
        is_causal=bool(attention_mask is None and causal and n_q > 1),
        scale=scaling,
        enable_gqa=query.shape[-3] != key.shape[-3],
        mask=description,
        softcap=softcap,
        sinks=s_aux,
    )
    return output.transpose(1, 2).contiguous(), None


def _merged(mask: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return mask
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
