"""Models of transformers whose attention asks for more than q, k, v and a mask."""

import inspect

import pytest
import torch

import trainfast
from tests.torch.transformers_models import need

transformers = pytest.importorskip("transformers")

import trainfast.torch.huggingface as huggingface  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "d_ff": 48,
    "d_kv": 8,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "n_layer": 2,
    "n_layers": 2,
    "n_head": 4,
    "n_heads": 4,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "dropout": 0.0,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "index_topk": 3,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_block_size": 2,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "rel_extent": 16,
    "unpadded_vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
}
# Model, configuration, what is particular.
MODELS = {
    # attention of their own
    "bloom": ("BloomForCausalLM", "BloomConfig", {}),
    "mpt": ("MptForCausalLM", "MptConfig", {}),
    # is_causal is False in its decoder
    "bigbird": ("BigBirdPegasusForCausalLM", "BigBirdPegasusConfig", {}),
    # is_causal is missing in this encoder
    "splinter": ("SplinterForPreTraining", "SplinterConfig", {}),
    # last layers that are given some of the queries, with head dims of their own
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4),
    # each query picks its keys, or blocks of keys
    "deepseek": (
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {"num_key_value_heads": 4},
    ),
    "minimax": (
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        {"layer_types": ["minimax_m3_sparse", "full_attention"]},
    ),
    # a sink for each query
    "inkling2": ("Inkling2ForCausalLM", "Inkling2TextConfig", {}),
    # is_causal is False in its decoder, but flash attention is supported
    "pegasus_x": ("PegasusXForConditionalGeneration", "PegasusXConfig", {}),
    # the usual ones
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**MIXED, "use_sliding_window": True}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {}),
}
OWN = ("bloom", "mpt", "falcon")
DECODERS = [kind for kind in MODELS if kind not in ("pegasus_x", "splinter")]


@pytest.fixture(autouse=True)
def fresh():
    huggingface.register()
    trainfast.reset_stats()


def make(kind, implementation, **changes):
    """A model with the same random weights, of no small effect, for every
    implementation."""
    model_name, config_name, particular = MODELS[kind]
    need(model_name, attention=kind not in OWN)
    known = vars(getattr(transformers, config_name)())
    sizes = {name: value for name, value in SMALL.items() if name in known}
    config = getattr(transformers, config_name)(**{**sizes, **particular, **changes})
    model = getattr(transformers, model_name)._from_config(
        config, attn_implementation=implementation
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            noise = torch.randn(x.shape, generator=generator)
            if x.dim() > 1:
                x.copy_(noise / x.shape[-1] ** 0.5)
            else:
                x.add_(noise / 5)
    return model.eval()


def ids(n=12, seed=1, batch=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (batch, n), generator=generator)


def padded(side, n=12):
    mask = torch.ones(2, n, dtype=torch.int64)
    if side == "left":
        mask[0, :5] = 0
    elif side == "right":
        mask[0, -5:] = 0
    return mask


def calls():
    return sum(trainfast.stats().calls.get("attention", {}).values())


def logits_and_gradients(model, **inputs):
    logits = model(**inputs).logits
    mask = inputs.get("attention_mask")
    if mask is not None:
        logits = logits[mask.bool()]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad((logits * weights).sum(), params, allow_unused=True)
    return {"logits": logits, **dict(zip(names, grads, strict=True))}


def assert_same(mine, theirs):
    for name, wanted in theirs.items():
        if wanted is None:
            assert mine[name] is None
            continue
        size = wanted.abs().max().item() + 1e-3
        torch.testing.assert_close(
            mine[name], wanted, atol=1e-4 * size, rtol=1e-3, msg=name
        )


def compare(kind, function, **changes):
    """What `function` gives of a model on these kernels and on "eager"."""
    mine, theirs = (
        function(make(kind, implementation, **changes))
        for implementation in ("trainfast", "eager")
    )
    assert_same(mine, theirs)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind", DECODERS)
def test_model_agrees_with_eager(kind, side):
    inputs = {"input_ids": ids()}
    if side != "none":
        inputs["attention_mask"] = padded(side)
    compare(kind, lambda model: logits_and_gradients(model, **inputs))
    fallbacks = trainfast.stats().fallbacks.get("attention", {})
    assert (calls() == 0) == (kind in OWN)
    assert all("attention of their own" in reason for reason in fallbacks)
    modeling = inspect.getmodule(getattr(transformers, MODELS[kind][0]))
    asks = hasattr(modeling, "create_causal_mask")  # transformers 4 makes its own
    assert bool(fallbacks) == (kind in OWN and asks)


def test_decoder_beside_an_encoder_is_causal():
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(7, 2)}
    compare("pegasus_x", lambda model: logits_and_gradients(model, **inputs))
    assert calls() > 0


def test_encoder_sees_all():
    compare("splinter", lambda model: {"out": model.splinter(ids())[0]})
    assert calls() == 2


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("kind", DECODERS)
def test_generation_gives_the_scores_of_eager(kind, cache):
    how = {"use_cache": False} if cache is None else {"cache_implementation": cache}

    def function(model):
        out = model.generate(
            ids(),
            attention_mask=padded("left"),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=True,
            **how,
        )
        return {"sequences": out.sequences.float(), "logits": torch.stack(out.logits)}

    if kind == "bigbird" and cache == "static":
        pytest.skip("a model without static caches")
    compare(kind, function)


@pytest.mark.parametrize("kind", ["bloom", "gemma4", "deepseek", "minimax", "inkling2"])
def test_prompt_goes_on_where_the_cache_ends(kind):
    def function(model):
        past, logits = None, {}
        for n, seed in ((12, 1), (5, 2), (1, 3)):
            out = model(ids(n, seed), past_key_values=past, use_cache=True)
            past, logits[str(n)] = out.past_key_values, out.logits
        return logits

    compare(kind, function)


@pytest.mark.parametrize("keep", [1, 3])
def test_last_queries_alone_see_what_they_may(keep):
    def function(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            static = model(ids(), past_key_values=cache, logits_to_keep=keep).logits
        return {
            "static": static,
            **logits_and_gradients(model, input_ids=ids(), logits_to_keep=keep),
        }

    compare("gemma4", function)


def test_head_dim_above_the_kernels_is_torchs():
    compare(
        "gemma4",
        lambda model: logits_and_gradients(model, input_ids=ids()),
        global_head_dim=264,
    )
    assert trainfast.stats().fallbacks == {"attention": {"a head dim above 256": 2}}


def test_mask_that_is_longer_than_the_keys_is_cut():
    """As transformers 4 makes it for generation without a cache."""
    module, q = torch.nn.Module(), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 1, 5, 7) > 0.3
    out, _ = huggingface.attention_forward(module, q, q, q, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask[..., :5])
    torch.testing.assert_close(out, wanted.transpose(1, 2))


def test_head_dim_above_the_kernels_has_sinks_too():
    module, q = torch.nn.Module(), torch.randn(1, 2, 5, 264)
    sinks = torch.randn(2)
    out, _ = huggingface.attention_forward(module, q, q, q, None, s_aux=sinks)
    scores = q @ q.mT / 264**0.5
    scores = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(1, 2, 5, 1)], -1)
    wanted = scores.softmax(-1)[..., :-1] @ q
    torch.testing.assert_close(out, wanted.transpose(1, 2))
    assert trainfast.stats().fallbacks == {"attention": {"a head dim above 256": 1}}


@pytest.mark.parametrize("kind", ["bloom", "qwen3", "deepseek"])
def test_packed_sequences_do_not_see_each_other(kind):
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    inputs = {"position_ids": positions, "use_cache": False}
    compare(
        kind,
        lambda model: logits_and_gradients(model, input_ids=ids(batch=1), **inputs),
    )


@pytest.mark.parametrize("shape", [(4,), (1, 4, 1, 1)])
def test_head_mask_scales_the_weights_of_each_head(shape):
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    factors = torch.tensor([1.0, 0.0, 0.5, 2.0]).view(shape)
    out, _ = huggingface.attention_forward(
        torch.nn.Module(), q, k, v, None, is_causal=False, head_mask=factors
    )
    weights = (q @ k.mT / 8**0.5).softmax(-1) * factors.view(4, 1, 1)
    torch.testing.assert_close(out, (weights @ v).transpose(1, 2))


def test_head_mask_that_differs_between_keys_is_refused():
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(NotImplementedError, match="one factor for each head"):
        huggingface.attention_forward(
            torch.nn.Module(), q, q, q, None, head_mask=torch.ones(2, 4, 5, 5)
        )


def test_head_mask_of_a_model_agrees_with_eager():
    need("GPT2LMHeadModel")
    forward = transformers.GPT2LMHeadModel.forward
    if "head_mask" not in inspect.signature(forward).parameters:
        pytest.skip("this transformers has no head_mask")
    mask = torch.tensor([[1.0, 0.0, 0.5, 2.0]] * 2)
    compare(
        "gpt2",
        lambda model: logits_and_gradients(model, input_ids=ids(), head_mask=mask),
    )


def test_lengths_of_packed_sequences_hold_where_no_mask_does():
    """With a cache transformers makes no mask for them."""
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    lengths = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 7,
        "max_length_k": 7,
    }
    model = make("llama4", "trainfast", attention_chunk_size=64)
    x = ids(batch=1)
    out = model(x, position_ids=positions, use_cache=True, **lengths).logits
    alone = [model(part).logits for part in (x[:, :5], x[:, 5:])]
    torch.testing.assert_close(out, torch.cat(alone, 1), atol=1e-5, rtol=1e-4)


def test_queries_of_one_batch_item_are_shared():
    module, q, k = torch.nn.Module(), torch.randn(1, 2, 5, 8), torch.randn(3, 2, 7, 8)
    for query, key in ((q, k), (k, q)):
        out, _ = huggingface.attention_forward(
            module, query, key, key, None, is_causal=False
        )
        wanted = (query @ key.mT / 8**0.5).softmax(-1) @ key
        torch.testing.assert_close(out, wanted.transpose(1, 2))


def test_weights_that_are_asked_for_are_missed_aloud():
    with pytest.warns(UserWarning, match="no weights"):
        make("qwen3", "trainfast")(ids(), output_attentions=True)
    (reason,) = trainfast.stats().fallbacks["attention"]
    assert reason.startswith("output_attentions=True")


def test_arguments_that_change_the_result_are_all_known():
    """Of what models pass by name, all that their own function for "eager" takes."""
    parameters = inspect.signature(huggingface.attention_forward).parameters
    known = set(parameters) | {"query_states", "key_states", "value_states"}
    known.add("sliding_window")  # which is in the mask
    models = [getattr(transformers, name, None) for name, _, _ in MODELS.values()]
    taken = set()
    for model in filter(None, models):  # each transformers lacks some of them
        function = getattr(inspect.getmodule(model), "eager_attention_forward", None)
        if function is not None:
            taken |= set(inspect.signature(function).parameters)
    assert {"dropout", "scaling"} <= taken <= known
    if None not in models:
        assert {"softcap", "position_bias", "sinks"} <= taken


# ---- Names that models do not take ---------------------------------------------------


def test_model_with_a_table_of_its_own_refuses_and_is_patched(monkeypatch):
    kind = ("FalconForCausalLM", "FalconConfig", {})
    monkeypatch.setitem(MODELS, "falcon", kind)
    with pytest.raises(KeyError, match="trainfast"):
        make("falcon", "trainfast")
    inputs = {"input_ids": ids(), "attention_mask": padded("left")}
    model = make("falcon", "sdpa")
    wanted = logits_and_gradients(model, **inputs)
    with trainfast.patch("attention"):
        assert_same(logits_and_gradients(model, **inputs), wanted)
    assert calls() == 4  # two layers, and back


def test_names_that_nobody_registered_are_still_refused():
    with pytest.raises(ValueError, match="not supported"):
        make("gpt2", "slowfast")
