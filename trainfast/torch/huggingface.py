"""attn_implementation="trainfast" for models of transformers:

trainfast.torch.huggingface.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="trainfast")
"""

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainfast.torch.attention.dispatch import (
    MAX_DIM,
    count_once,
    has_flash_attention,
)
from trainfast.torch.attention.functional import attention
from trainfast.torch.private import constant_when_compiled

if TYPE_CHECKING:  # __getattr__ loads it
    from trainfast.torch.huggingface_callback import Callback

__all__ = ["NAME", "Callback", "register"]

NAME = "trainfast"


def __getattr__(name: str) -> object:
    if name != "Callback":  # needs transformers, as nothing else at import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainfast.torch.huggingface_callback import Callback

    return Callback


def register(name: str = NAME) -> None:
    """Makes transformers know these kernels as an attention implementation.

    Models take it as `attn_implementation=name`, or later by
    `model.set_attn_implementation(name)`. Masks are those that transformers makes for
    "sdpa". The name asks for these kernels on every device, also on a GPU where torch
    has flash attention, with a warning: there attn_implementation="sdpa" is torch's.
    Registering again changes nothing.

    Models with attention of their own (Bloom, MPT, RemBERT, ...) go on with it, counted
    in trainfast.stats() where they ask for a mask. Models that look the name up in a
    table of their own (Falcon, GPT-J, GPT-Neo, GIT, Bark, the vision parts of SAM and
    Data2Vec) raise KeyError. Where transformers supports "sdpa" for the model (Falcon),
    create the model with it and call trainfast.patch("attention").

    Args:
        name: the name of the attention implementation.

    Raises:
        ImportError: no transformers, or one that has no AttentionMaskInterface (before
            4.53).
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(
    *, config: Any = None, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | None:
    """What transformers calls for each kind of mask of a model; see its
    AttentionMaskInterface.

    Bool, [batch, 1, n_q, n_k], or None where is_causal says as much, as for "sdpa".
    Models that support neither "sdpa" nor flash attention add the mask to their scores,
    or have an is_causal that says nothing: they get the mask for "eager".
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    sdpa, flash = _supported(type(config).__module__)
    if not sdpa and not flash:
        kwargs["allow_is_bidirectional_skip"] = False
        return eager_mask(config=config, **kwargs)
    # None does not do for a decoder whose is_causal is False (PEGASUS-X), nor for last
    # layers that may be given the last few queries alone, whose diagonal it cannot tell
    # (Gemma 4, which looks out for that under the name "sdpa" only).
    allow_is_causal_skip &= not getattr(config, "num_kv_shared_layers", 0)
    allow_is_causal_skip &= sdpa or not getattr(config, "is_encoder_decoder", False)
    return sdpa_mask(config=config, allow_is_causal_skip=allow_is_causal_skip, **kwargs)


@constant_when_compiled
def _supported(configuration: str) -> tuple[bool, bool]:
    """Whether "sdpa" and flash attention are, by the models whose configuration is in
    this module; (True, True) where there are none."""
    from transformers import PreTrainedModel

    name = configuration.replace(".configuration_", ".modeling_")
    names = vars(sys.modules[name]) if name in sys.modules else {}
    models = [
        x
        for x in list(names.values())
        if isinstance(x, type)
        and issubclass(x, PreTrainedModel)
        and x.__module__ == name
    ]
    if not models:
        return True, True
    sdpa = any(x._supports_sdpa for x in models)
    flash = any(getattr(x, "_supports_flash_attn", False) for x in models)
    if not sdpa and not flash and "ALL_ATTENTION_FUNCTIONS" not in names:
        count_once(f"{name.rpartition('.')[2]}: models with attention of their own")
    return sdpa, flash


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
    sinks: Tensor | None = None,
    head_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; see its AttentionInterface.

    Args:
        query: [batch, heads, n_q, dim].
        key, value: [batch, kv_heads, n_k, dim]; never repeated.
        attention_mask: broadcasts to [batch, heads, n_q, n_k]; bool or additive. None
            with is_causal (or a module that is): query i sees keys 0 .. i, where there
            are several queries. It has the windows of layers with a sliding_window.
        position_bias: added to the scores (T5), with a gradient of its own shape.
        softcap: of the scores (Gemma 2).
        s_aux: [heads], sinks (gpt-oss).
        sinks: broadcasts to [batch, heads, n_q, 1]: a sink for each query (Inkling 2).
        head_mask: [heads] or [batch, heads, 1, 1], factors of the weights of each head
            (transformers 4).
        indices: [batch, n_q, k], the only keys that a query sees (DeepSeek V3.2).
        block_indices: the same in blocks, of which the module makes a mask (MiniMax
            M3).
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: lengths of items one
            after another in a batch of 1, where there is no mask that tells them apart.

    Returns:
        [batch, n_q, heads, dim], and None: there are no weights to return.

    Raises:
        NotImplementedError: a paged cache with softcap or sinks, or a head_mask that
            differs between queries or keys.
    """
    if kwargs.get("output_attentions"):
        _miss_weights()
    if head_mask is not None:
        value = _of_masked_heads(value, head_mask)
    if query.is_cuda:
        _say_where_torch_has_flash_attention(query.device)
    for_sdpa = all(x is None for x in (softcap, s_aux, sinks))
    refusal = _refusal(query, value, kwargs, for_sdpa)
    if refusal is not None:
        given = module, query, key, value, attention_mask, dropout, scaling, is_causal
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        return _by_sdpa(refusal, *given, **kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    how: dict[str, Any] = {
        "is_causal": bool(query.shape[2] > 1 and attention_mask is None and is_causal),
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout_p": dropout,
    }
    query, key, value = _of_one_batch(query, key, value)
    if attention_mask is not None:  # transformers 4 may make it longer than the keys
        attention_mask = attention_mask[..., : key.shape[2]]
    mask = _with_picked_keys(attention_mask, module, query, key, kwargs)
    plain = mask is position_bias is sinks is None
    if plain and _is_packed(query, key, kwargs):
        return _packed(query, key, value, kwargs, how), None
    return _attend(query, key, value, mask, position_bias, sinks, how), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    how: dict[str, Any],
) -> Tensor:
    """[batch, n_q, heads, dim]."""
    if mask is not None and mask.requires_grad:
        bias = mask if bias is None else mask + bias
        mask = None
    if sinks is None:
        out = attention(query, key, value, mask=mask, bias=bias, **how)
    else:
        out, lse = attention(
            query, key, value, mask=mask, bias=bias, return_lse=True, **how
        )
        # of all weights with the sink's, those without it have this share
        out = (out * torch.sigmoid(lse[..., None] - sinks)).to(out.dtype)
    return out.transpose(1, 2).contiguous()


def _of_masked_heads(value: Tensor, head_mask: Tensor) -> Tensor:
    """The values times the factor of their head: the result of weights times it."""
    factors = head_mask[:, None, None] if head_mask.dim() == 1 else head_mask
    if factors.shape[-2:] != (1, 1):
        raise NotImplementedError(
            "head_mask must have one factor for each head, got shape "
            f'{tuple(head_mask.shape)}; use attn_implementation="eager"'
        )
    return value * factors.to(value.dtype)


def _of_one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Learned queries have a batch of 1, which torch's own function broadcasts."""
    batch = max(x.shape[0] for x in tensors)
    return tuple(
        x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in tensors
    )


def _with_picked_keys(
    mask: Tensor | None, module: Any, query: Tensor, key: Tensor, kwargs: dict[str, Any]
) -> Tensor | None:
    """The mask with the choice of keys that a module makes for "eager" and "sdpa"
    itself, and passes on to every other implementation."""
    n_q, n_k = query.shape[2], key.shape[2]
    blocks = kwargs.get("block_indices")
    if blocks is not None:
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(n_k - n_q, n_k, device=query.device)
        positions = torch.atleast_2d(positions).expand(query.shape[0], -1)
        mask = module.indexer.build_block_mask(
            blocks, mask, n_k, query.dtype, query.device, positions
        )
    indices = kwargs.get("indices")
    if indices is None:
        return mask
    picked = indices.new_zeros((*indices.shape[:2], n_k), dtype=torch.bool)
    picked = picked.scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return picked
    if mask.dtype == torch.bool:
        return mask & picked
    return mask.masked_fill(~picked, -torch.inf)


def _is_packed(query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> bool:
    given = (kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"))
    same = query.shape[0] == 1 and query.shape[2] == key.shape[2]  # no earlier keys
    return same and all(x is not None for x in given)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
    how: dict[str, Any],
) -> Tensor:
    """[1, n_q, heads, dim] of items one after another."""
    out = attention(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        cu_seqlens_q=kwargs["cu_seq_lens_q"],
        cu_seqlens_k=kwargs["cu_seq_lens_k"],
        max_seqlen_q=kwargs.get("max_length_q"),
        max_seqlen_k=kwargs.get("max_length_k"),
        **how,
    )
    return out[None]


@constant_when_compiled
def _say_where_torch_has_flash_attention(device: torch.device) -> None:
    if has_flash_attention(device):
        _warn_of_flash_attention(device)


@functools.cache  # once for each device
def _warn_of_flash_attention(device: torch.device) -> None:
    warnings.warn(
        f'{device} has torch\'s flash attention; attn_implementation="{NAME}" runs '
        "trainfast's kernels, which were slower on an H200. "
        'Use attn_implementation="sdpa" for torch\'s.',
        stacklevel=2,
    )


@constant_when_compiled
def _miss_weights() -> None:
    reason = "output_attentions=True of transformers: no weights are returned"
    warnings.warn(f'{reason}; attn_implementation="eager" has them', stacklevel=2)
    count_once(reason)


def _refusal(
    query: Tensor, value: Tensor, kwargs: dict[str, Any], for_sdpa: bool
) -> str | None:
    """Why transformers' own function shall run; it knows neither softcap nor sinks."""
    if kwargs.get("cache") is not None:  # is updated inside attention
        if not for_sdpa:
            raise NotImplementedError(
                "cache must not be a paged one with softcap or sinks, got both"
            )
        return "a paged cache of transformers"
    if for_sdpa and max(query.shape[-1], value.shape[-1]) > MAX_DIM:
        return f"a head dim above {MAX_DIM}"
    return None


def _by_sdpa(reason: str, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    count_once(reason)
    return sdpa_attention_forward(*args, **kwargs)
