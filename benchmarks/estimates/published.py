"""Memory of training steps on GPUs that others have published, beside the estimate.

    python -m benchmarks.estimates.published            all; writes published.json
    python -m benchmarks.estimates.published ViT GPT-2  those, without writing

The list was fixed before the first comparison, by one rule: model, batch, precision and
loop are told, and so is what was measured. bert-large at batch 4 stays in it. Nothing
here runs on a GPU. Models of transformers are those of the time, because the tensors
that they keep have changed; pip installs these versions into build/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from benchmarks import machine

PATH = Path(__file__).parent / "published.json"
_BUILD = Path(__file__).parents[2] / "build"
_PINS = {
    "4.43.4": ("tokenizers==0.19.1", "huggingface_hub==0.25.2", "numpy==1.26.4"),
    "4.46.3": ("tokenizers==0.20.3", "huggingface_hub==0.25.2"),
}
MB, GB, MIB, GIB = 10**6, 10**9, 1 << 20, 1 << 30
_SDPA_TABLES = "transformers, PyTorch SDPA tables"
_VIT = "github.com/rasbt/pytorch-memory-optim, f6eddcd, logs.md"
_V100 = "transformers 4.21, perf_train_gpu_one; less 1,343 MiB of context"
_MOSAIC = "PyTorch tutorial on Mosaic; with 0.464 GiB of weights"
_OPTIMUM = "datasets/optimum-benchmark/rocm"


class _Zeroed(torch.optim.AdamW):
    """torch 1: zero_grad() writes zeros, so that gradients live through the forward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


class _Adam20(torch.optim.Adam):
    """The foreach step of torch 2.0, which has two temporaries of all weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        grads = [p.grad for p in params]
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        torch._foreach_mul_(means, 0.9)
        torch._foreach_add_(means, grads, alpha=0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, grads, grads, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, 0.03)
        divisors = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(params, means, divisors, -5e-5)


class _Kept(_Adam20):
    """For loops that call zero_grad between the forward and the backward pass."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class _NoStep(torch.optim.SGD):
    """For loops without an optimizer."""

    def step(self, closure: Any = None) -> None:
        pass


class Figure(NamedTuple):
    """A published peak.

    Attributes:
        name: model, precision, batch.
        source: where it is published.
        size: bytes.
        measure: the estimate's attribute: "allocated" or "reserved".
        gpu: as for `estimate_memory`.
        make: gives (builder of the model, batch, other arguments).
        transformers: the version whose models it takes.
    """

    name: str
    source: str
    size: float
    measure: str
    gpu: str
    make: Callable[[], tuple[Any, Any, dict[str, Any]]]
    transformers: str = "4.46.3"


def _sum_of_logits(config: str, model: str, attention: str, shape: tuple[int, int]):
    """The loop of the SDPA tables: no optimizer; the last output lives on."""

    def make() -> tuple[Any, Any, dict[str, Any]]:
        import transformers

        configuration = _config(config)
        kept: dict[str, Any] = {}

        def build() -> torch.nn.Module:
            kind = getattr(transformers, model)
            torch.set_default_dtype(torch.float16)  # as from_pretrained(torch_dtype=)
            try:
                made = kind._from_config(configuration, attn_implementation=attention)
            finally:
                torch.set_default_dtype(torch.float32)
            return made.train()

        def step(net: Any, batch: Any) -> torch.Tensor:
            out = net(input_ids=batch)
            kept["out"] = out
            return out.logits.sum()

        batch = torch.randint(100, configuration.vocab_size - 1, shape)
        return build, batch, {"step": step, "optimizer": lambda p: _NoStep(p, lr=0.0)}

    return make


def _config(name: str) -> Any:
    import transformers as t

    makers: dict[str, Callable[[], Any]] = {
        "distilbert": t.DistilBertConfig,
        "bert": t.BertConfig,
        "pythia-410m": lambda: t.GPTNeoXConfig(
            vocab_size=50304,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
        ),
        "opt-350m": lambda: t.OPTConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            ffn_dim=4096,
            word_embed_proj_dim=512,
            do_layer_norm_before=False,
        ),
    }
    return makers[name]()


class _VitBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (torch.nn.LayerNorm(1024, eps=1e-6) for _ in range(2))
        self.attention = torch.nn.MultiheadAttention(1024, 16, batch_first=True)
        self.mlp = torch.nn.Sequential(
            *(torch.nn.Linear(1024, 4096), torch.nn.GELU()),
            torch.nn.Linear(4096, 1024),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        x = self.attention(y, y, y, need_weights=False)[0] + x
        return x + self.mlp(self.ln_2(x))


class _Vit(torch.nn.Module):
    """vit_l_16 of torchvision, with ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 1024, 16, 16)
        self.token = torch.nn.Parameter(torch.zeros(1, 1, 1024))
        self.positions = torch.nn.Parameter(torch.zeros(1, 197, 1024))
        self.blocks = torch.nn.Sequential(*(_VitBlock() for _ in range(24)))
        self.ln = torch.nn.LayerNorm(1024, eps=1e-6)
        self.head = torch.nn.Linear(1024, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.ln(self.blocks(x))[:, 0])


def _vit(batch: int, precision: str, accumulate: int = 1, adam: bool = True):
    """ViT-L/16 of torchvision at 224 pixels; zero_grad comes after the forward pass,
    or after the step where gradients are accumulated."""

    def make() -> tuple[Any, Any, dict[str, Any]]:
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32

        def build() -> torch.nn.Module:
            return _Vit().to(dtype)

        kept: dict[str, Any] = {}

        def step(net: Any, batch: Any) -> torch.Tensor:
            for _ in range(accumulate - 1):
                kept["out"] = net(batch[0])
                functional.cross_entropy(kept["out"], batch[1]).backward()
            kept["out"] = net(batch[0])
            loss = functional.cross_entropy(kept["out"], batch[1])
            if accumulate == 1:
                net.zero_grad()
            return loss

        kind = _Kept if accumulate == 1 else _Adam20
        options: dict[str, Any] = {"step": step, "steps": 3}
        options["optimizer"] = lambda p: kind(p, lr=5e-5)
        if not adam:
            options["optimizer"] = lambda p: torch.optim.SGD(p, lr=0.01, foreach=True)
        if precision == "16-mixed":
            options["amp"] = "fp16"
        images = torch.randn(batch, 3, 224, 224, dtype=dtype)
        return build, (images, torch.randint(10, (batch,))), options

    return make


def _gpt2(batch: tuple[int, int], checkpointed: bool = False):
    def make() -> tuple[Any, Any, dict[str, Any]]:
        import transformers

        def build() -> torch.nn.Module:
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
            if checkpointed:
                model.gradient_checkpointing_enable()
            return model.train()

        tokens = torch.randint(50257, batch)
        return build, {"input_ids": tokens, "labels": tokens}, {}

    return make


def _bert_base() -> tuple[Any, Any, dict[str, Any]]:
    import transformers

    tokens = torch.randint(1000, 30000, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    return lambda: transformers.BertForMaskedLM(transformers.BertConfig()), batch, {}


def _bert_large(batch: int, checkpointed: bool = False, accumulate: int = 1):
    """transformers' own AdamW of the time steps through a loop, without foreach."""

    def make() -> tuple[Any, Any, dict[str, Any]]:
        import transformers

        config = transformers.BertConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        )

        def build() -> torch.nn.Module:
            kind = transformers.BertForSequenceClassification
            model = kind._from_config(config, attn_implementation="eager")
            if checkpointed:
                model.gradient_checkpointing_enable()
            return model.train()

        def step(net: Any, batch: Any) -> torch.Tensor:
            for _ in range(accumulate - 1):
                net(**batch).loss.backward()
            return net(**batch).loss

        tokens = torch.randint(1000, 30000, (batch, 512))
        labels = torch.zeros(batch, dtype=torch.int64)
        options = {
            "step": step,
            "optimizer": lambda p: _Zeroed(p, lr=5e-5, foreach=False),
            "steps": 3,
        }
        return build, {"input_ids": tokens, "labels": labels}, options

    return make


def _tables() -> list[Figure]:
    rows = [
        ("distilbert", "DistilBertForMaskedLM", "eager", (8, 256), 983.450, "8GB"),
        ("distilbert", "DistilBertForMaskedLM", "sdpa", (8, 256), 798.480, "8GB"),
        ("bert", "BertLMHeadModel", "eager", (4, 256), 939.213, "A100 80GB"),
        ("bert", "BertLMHeadModel", "eager", (16, 512), 6964.659, "A100 80GB"),
        ("bert", "BertLMHeadModel", "sdpa", (16, 512), 3961.013, "A100 80GB"),
        ("pythia-410m", "GPTNeoXForCausalLM", "eager", (1, 2048), 13484.1, "RTX 3090"),
        ("pythia-410m", "GPTNeoXForCausalLM", "sdpa", (4, 2048), 12705.1, "RTX 3090"),
        ("opt-350m", "OPTForCausalLM", "eager", (1, 1024), 4867.113, "L40S"),
        ("opt-350m", "OPTForCausalLM", "sdpa", (1, 1024), 1698.35, "L40S"),
    ]
    return [
        Figure(
            f"{config} fp16 {attention} {shape[0]} x {shape[1]}",
            *(_SDPA_TABLES, size * MB, "allocated", gpu),
            _sum_of_logits(config, model, attention, shape),
            "4.43.4" if config.startswith("pythia") else "4.46.3",
        )
        for config, model, attention, shape, size, gpu in rows
    ]


FIGURES = [
    *_tables(),
    *(
        Figure(f"ViT-L/16 {name}", _VIT, size * GB, "reserved", "A100", make)
        for name, size, make in [
            ("fp32 64", 26.79, _vit(64, "32")),
            ("fp16 autocast 64", 18.21, _vit(64, "16-mixed")),
            ("bf16 64", 13.82, _vit(64, "bf16-true")),
            ("bf16 16", 5.69, _vit(16, "bf16-true")),
            ("bf16 4, accumulation 4", 3.91, _vit(4, "bf16-true", 4)),
            ("bf16 4, accumulation 4, SGD", 2.02, _vit(4, "bf16-true", 4, False)),
        ]
    ),
    *(
        Figure(f"GPT-2 fp32 4 x 512{name}", _MOSAIC, size * GIB, "allocated", gpu, make)
        for name, size, gpu, make in [
            ("", 4.62 + 0.464, "A100", _gpt2((4, 512))),
            (", checkpointed", 2.55 + 0.464, "A100", _gpt2((4, 512), True)),
        ]
    ),
    *(
        Figure(f"bert-large fp32 {name}", _V100, size * MIB, "reserved", "V100", make)
        for name, size, make in [
            ("4 x 512", 14949 - 1343, _bert_large(4)),
            ("1 x 512, accumulation 4", 8681 - 1343, _bert_large(1, accumulate=4)),
            (
                "1 x 512, accumulation 4, checkpointed",
                *(6775 - 1343, _bert_large(1, True, 4)),
            ),
        ]
    ),
    Figure(
        "bert-base fp32 2 x 16",
        *(_OPTIMUM, 2195.345408 * MB, "allocated", "A100", _bert_base),
    ),
    Figure(
        "GPT-2 fp32 2 x 16",
        *(_OPTIMUM, 2506.73664 * MB, "allocated", "A100", _gpt2((2, 16))),
    ),
]


def estimated(figure: Figure) -> dict[str, Any]:
    from trainfast.torch.memory import estimate_memory

    torch.manual_seed(0)
    build, batch, options = figure.make()
    found = estimate_memory(build, batch, gpu=figure.gpu, **options)
    ours = getattr(found, figure.measure)
    return {
        "name": figure.name,
        "source": figure.source,
        "measure": figure.measure,
        "published": round(figure.size),
        "estimate": ours,
        "error": ours / figure.size - 1,
        "seconds": found.seconds,
    }


def in_child(figure: Figure) -> dict[str, Any]:
    """The estimate in a process that has the figure's transformers."""
    folder = _BUILD / f"transformers-{figure.transformers}"
    if not folder.exists():
        pins = _PINS[figure.transformers]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        wanted = [str(folder), f"transformers=={figure.transformers}", *pins]
        subprocess.run([*pip, *wanted], check=True)
    command = [sys.executable, "-m", __spec__.name, "--one", figure.name]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="parts of names")
    args = parser.parse_args()
    if args.one:
        figure = next(f for f in FIGURES if f.name == args.one)
        print(json.dumps(estimated(figure)))
        return
    print("| step | measured | published MiB | estimate MiB | error | s |")
    print("|---|---|---:|---:|---:|---:|")
    rows = []
    for figure in FIGURES:
        if args.names and not any(name in figure.name for name in args.names):
            continue
        row = in_child(figure)
        rows.append(row)
        print(
            f"| {row['name']} | {row['measure']} | {row['published'] / MIB:,.0f} | "
            f"{row['estimate'] / MIB:,.0f} | {row['error']:+.1%} | "
            f"{row['seconds']:.1f} |",
            flush=True,
        )
    errors = [abs(row["error"]) for row in rows]
    missed = [row["name"] for row in rows if abs(row["error"]) > 0.1]
    print(f"\nmedian {statistics.median(errors):.1%}, beyond 10 %: {missed or 'none'}")
    if not args.names:
        text = json.dumps({"machine": machine.describe(), "figures": rows}, indent=1)
        PATH.write_text(text + "\n")


if __name__ == "__main__":
    main()
