"""attn_implementation="trainfast" in models of transformers, built from configs."""

import copy

import pytest
import torch

import trainfast
from tests.torch.transformers_models import need
from tests.torch_version import TORCH

transformers = pytest.importorskip("transformers")

import trainfast.torch.huggingface  # noqa: E402

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def fresh():
    trainfast.torch.huggingface.register()
    trainfast.reset_stats()


def calls():
    return sum(trainfast.stats().calls.get("attention", {}).values())


def make(kind, implementation, **changes):
    """A model with the same random weights for every implementation."""
    names = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
        "bert": ("BertConfig", "BertForMaskedLM", SMALL),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GROUPED),
        "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED),
        "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", GROUPED),
    }
    config_name, model_name, sizes = names[kind]
    need(model_name)
    config = getattr(transformers, config_name)(**{**sizes, **changes})
    config = copy.deepcopy(config)
    torch.manual_seed(0)
    model = getattr(transformers, model_name)._from_config(
        config, attn_implementation=implementation
    )
    assert model.config._attn_implementation == implementation
    return model.eval()


def batch(padding="none", n=13):
    torch.manual_seed(1)
    ids, mask = torch.randint(1, 61, (3, n)), torch.ones(3, n, dtype=torch.int64)
    if padding == "left":
        mask[0, :5] = 0
    elif padding == "right":
        mask[0, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits_and_gradients(model, inputs):
    logits = model(**inputs).logits[inputs["attention_mask"].bool()]
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)) % 61)
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return {"logits": logits, **dict(zip(names, grads, strict=True))}


CHANGES = {
    "llama": {},
    "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    "gemma2": {"attn_logit_softcapping": 1.0, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "gpt_oss": {
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("kind", CHANGES)
def test_model_agrees_with_eager(kind, padding):
    inputs = batch(padding)
    model = make(kind, "trainfast", **CHANGES[kind])
    mine = logits_and_gradients(model, inputs)
    theirs = logits_and_gradients(make(kind, "eager", **CHANGES[kind]), inputs)
    for name in theirs:
        torch.testing.assert_close(
            mine[name], theirs[name], atol=2e-5, rtol=1e-3, msg=name
        )
    assert calls() == 2 * model.config.num_hidden_layers
    assert trainfast.stats().fallbacks == {}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
def test_generation_with_a_cache_gives_the_same_tokens(kind):
    outs = []
    for implementation in ("trainfast", "eager"):
        model = make(kind, implementation, **CHANGES[kind])
        outs.append(
            model.generate(
                **batch("left"), max_new_tokens=12, do_sample=False, pad_token_id=0
            )
        )
    assert torch.equal(*outs)
    assert calls() == 12 * 2
    assert trainfast.stats().fallbacks == {}


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_training_reaches_the_same_loss(kind):
    losses = []
    for implementation in ("trainfast", "sdpa"):
        model = make(kind, implementation, **CHANGES[kind]).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        inputs = batch("right")
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        losses.append([])
        for _ in range(12):
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0] - 1
    torch.testing.assert_close(*map(torch.tensor, losses), atol=1e-3, rtol=1e-3)


VIT = {"image_size": 16, "patch_size": 8, "num_labels": 3}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}
GPT2 |= {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
SCRIPTS = {
    "bert": ("BertConfig", "BertForMaskedLM", {**SMALL, **CHANGES["bert"]}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "vit": ("ViTConfig", "ViTForImageClassification", {**SMALL, **VIT}),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_patched_script_trains_to_the_same_loss(kernels_at_any_size, kind):
    def train():
        torch.manual_seed(0)
        model = getattr(transformers, model_name)(config(**sizes)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = {**batch("right"), "labels": batch("right")["input_ids"]}
        if kind == "vit":
            inputs = {"pixel_values": torch.randn(3, 3, 16, 16)}
            inputs["labels"] = torch.arange(3)
        losses = []
        for _ in range(8):
            losses.append(model(**inputs).loss)
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        return torch.stack(losses).detach()

    config_name, model_name, sizes = SCRIPTS[kind]
    need(model_name, attention=False)
    config = getattr(transformers, config_name)
    wanted = train()
    assert calls() == 0 and (wanted[-1] - wanted[0]).abs() > 0.01
    with trainfast.patch("attention"):
        torch.testing.assert_close(train(), wanted, atol=1e-4, rtol=1e-4)
    assert calls() == 2 * 2 * 8 and trainfast.stats().fallbacks == {}


def test_position_bias_of_t5_has_its_gradient():
    need("T5ForConditionalGeneration")
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    found = []
    for implementation in ("trainfast", "eager"):
        config = transformers.T5Config(
            **sizes, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
        )
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration._from_config(
            config, attn_implementation=implementation
        )
        inputs = batch("right")
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        (name, table), *_ = (
            item for item in model.named_parameters() if "relative" in item[0]
        )
        found.append([loss, *torch.autograd.grad(loss, table)])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)
    assert name and calls() > 0


@pytest.mark.slow
@pytest.mark.skipif(TORCH < (2, 7), reason="torch 2.6 cannot compile transformers 5")
def test_model_switches_later_and_compiles_without_a_break():
    model = make("llama", "eager")
    if not hasattr(model, "set_attn_implementation"):
        pytest.skip("this transformers sets an implementation at the start only")
    inputs = {"input_ids": batch()["input_ids"]}
    wanted = model(**inputs).logits
    model.set_attn_implementation("trainfast")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits, wanted, atol=1e-5, rtol=1e-4)
    assert calls() == 2


def test_dropout_is_on_in_training_only():
    model = make("llama", "trainfast", attention_dropout=0.5)
    inputs = batch()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.train()
    torch.manual_seed(0)
    first, second = model(**inputs).logits, model(**inputs).logits
    torch.manual_seed(0)
    assert torch.equal(model(**inputs).logits, first)
    assert not torch.equal(first, second)


def test_a_gpu_with_torchs_flash_attention_is_warned_of_once(monkeypatch):
    device = torch.device("cuda", 0)
    where = trainfast.torch.huggingface
    where._warn_of_flash_attention.cache_clear()
    monkeypatch.setattr(where, "has_flash_attention", lambda device: False)
    where._say_where_torch_has_flash_attention(device)
    monkeypatch.setattr(where, "has_flash_attention", lambda device: True)
    with pytest.warns(UserWarning, match='^cuda:0 has torch.*implementation="sdpa"'):
        where._say_where_torch_has_flash_attention(device)
    where._say_where_torch_has_flash_attention(device)
    where._warn_of_flash_attention.cache_clear()


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}])
def test_paged_cache_with_an_option_that_sdpa_lacks_is_refused(option):
    module = torch.nn.Module()
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="paged one with softcap or sinks"):
        trainfast.torch.huggingface.attention_forward(
            module, q, q, q, None, cache=object(), **option
        )
