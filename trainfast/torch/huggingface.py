"""attn_implementation="trainfast" for models of transformers:

trainfast.torch.huggingface.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="trainfast")
"""

from typing import Any

import torch
from torch import Tensor

from trainfast.torch.attention import attention
from trainfast.torch.attention_route import count_once

NAME = "trainfast"


def register(name: str = NAME) -> None:
    """Makes transformers know these kernels as an attention implementation.

    Models take it as `attn_implementation=name`, or later by
    `model.set_attn_implementation(name)`. Masks are those that transformers makes for
    "sdpa". Registering again changes nothing.

    Raises:
        ImportError: no transformers, or one that has no AttentionMaskInterface (before
            4.53).
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; see its AttentionInterface.

    Args:
        query: [batch, heads, n_q, dim].
        key, value: [batch, kv_heads, n_k, dim]; never repeated.
        attention_mask: broadcasts to [batch, heads, n_q, n_k]; bool or additive. None
            with is_causal (or a module that is): query i sees keys 0 .. i, where there
            are several queries.
        position_bias: added to the scores (T5), with a gradient of its own shape.
        softcap: of the scores (Gemma 2).
        s_aux: [heads], sinks (gpt-oss).

    Returns:
        [batch, n_q, heads, dim], and None: there are no weights to return.
    """
    if kwargs.get("output_attentions"):
        count_once("output_attentions=True of transformers: no weights are returned")
    if kwargs.get("cache") is not None:
        return _by_sdpa(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if query.shape[0] != key.shape[0]:  # learned queries of a batch of 1
        query = query.expand(key.shape[0], -1, -1, -1)
    mask, bias = attention_mask, position_bias
    if mask is not None and mask.requires_grad:
        bias = mask if bias is None else mask + bias
        mask = None
    out = attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        is_causal=bool(query.shape[2] > 1 and attention_mask is None and is_causal),
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _by_sdpa(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """transformers' own function, for a cache that is updated inside attention."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    count_once("a paged cache of transformers")
    return sdpa_attention_forward(*args, **kwargs)
