"""Models whose training step is estimated and then run on the CPU.

Each function returns (model, batch, arguments of `estimate_memory`). They are as large
as a step of a few seconds allows, and cover what fakes and trackers stumble over.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Case = tuple[Any, Any, dict[str, Any]]
Loss = functional.cross_entropy


def mlp() -> Case:
    layers = [nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(2048, 10))
    batch = torch.randn(256, 784), torch.randint(10, (256,))
    return model, batch, {"loss_fn": Loss}


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, use_checkpoint: bool) -> None:
        super().__init__()
        self.heads, self.use_checkpoint = heads, use_checkpoint
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        parts = self.qkv(self.ln1(x)).view(*shape[:2], 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(shape))
        return x + self.mlp(self.ln2(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_checkpoint and self.training:
            return checkpoint(self._inner, x, use_reentrant=False)  # type: ignore
        return self._inner(x)


class Gpt(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(4000, 256), nn.Embedding(256, 256)
        self.blocks = nn.ModuleList(_Block(256, 8, checkpointed) for _ in range(6))
        self.ln, self.head = nn.LayerNorm(256), nn.Linear(256, 4000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def _tokens_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return Loss(logits.flatten(0, 1), target.flatten())


def _text(batch: int = 8, length: int = 256, words: int = 4000) -> Any:
    tokens = torch.randint(words, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt() -> Case:
    return Gpt(), _text(), {"loss_fn": _tokens_loss}


def gpt_bf16() -> Case:
    return Gpt(), _text(), {"loss_fn": _tokens_loss, "amp": "bf16"}


def gpt_checkpointed() -> Case:
    return Gpt(checkpointed=True), _text(), {"loss_fn": _tokens_loss}


class _Residual(nn.Module):
    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        out = narrow * 4
        self.main = nn.Sequential(
            *(nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow)),
            nn.ReLU(inplace=True),
            nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(narrow), nn.ReLU(inplace=True)),
            *(nn.Conv2d(narrow, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or wide != out:
            conv = nn.Conv2d(wide, out, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.main(x) + self.short(x), inplace=True)


def resnet_of(depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50 as torchvision has it."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    wide = 64
    for stage, depth in enumerate(depths):
        narrow = 64 * 2**stage
        for i in range(depth):
            layers.append(_Residual(wide, narrow, 2 if stage and not i else 1))
            wide = narrow * 4
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 1000)]
    return nn.Sequential(*layers)


def resnet50() -> Case:
    batch = torch.randn(8, 3, 224, 224), torch.randint(1000, (8,))
    return (
        resnet_of(),
        batch,
        {"loss_fn": Loss, "optimizer": ("sgd", {"momentum": 0.9})},
    )


class _UNet(nn.Module):
    """A diffusion model's U-Net: residual blocks with a time embedding, attention at
    the lowest resolution, skips that concatenate."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU())
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up, self.shifts = (nn.ModuleList() for _ in range(3))
        have = width
        for w in widths:
            self.down.append(self._block(have, w))
            self.shifts.append(nn.Linear(width, w))
            have = w
        self.attention = nn.MultiheadAttention(have, 4, batch_first=True)
        for w in reversed(widths):
            self.up.append(self._block(have + w, w))
            have = w
        self.head = nn.Conv2d(have, 3, 3, padding=1)

    @staticmethod
    def _block(wide: int, out: int) -> nn.Module:
        return nn.Sequential(
            *(nn.GroupNorm(8, wide) if wide % 8 == 0 else nn.Identity(), nn.SiLU()),
            *(nn.Conv2d(wide, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU()),
            nn.Conv2d(out, out, 3, padding=1),
        )

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        waves = t[:, None] * torch.exp(-torch.arange(32, device=t.device) / 4)
        shift = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        x, skips = self.stem(x), []
        for block, linear in zip(self.down, self.shifts, strict=True):
            x = block(x) + linear(shift)[:, :, None, None]
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        size = x.shape
        flat = x.flatten(2).transpose(1, 2)
        flat = flat + self.attention(flat, flat, flat)[0]
        x = flat.transpose(1, 2).reshape(size)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], 1))
        return self.head(x)


def unet() -> Case:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        images, t, noise = batch
        return functional.mse_loss(
            model(images + noise * t[:, None, None, None], t), noise
        )

    images = torch.randn(8, 3, 64, 64)
    return _UNet(), (images, torch.rand(8), torch.randn_like(images)), {"step": step}


class _Experts(nn.Module):
    """A mixture of experts: the two best of eight for each token."""

    def __init__(self, width: int = 256, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 1024), nn.GELU(), nn.Linear(1024, width))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            part = expert(flat[rows]) * weights[rows, place, None]
            out = out.index_add(0, rows, part.to(out.dtype))
        return out.view_as(x)


def experts() -> Case:
    model = nn.Sequential(nn.Embedding(2000, 256), _Experts(), nn.Linear(256, 2000))
    return model, _text(8, 128, 2000), {"loss_fn": _tokens_loss}


def transformer_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(256, 100))
    batch = torch.randn(16, 128, 256), torch.randint(100, (16, 128))
    return model, batch, {"loss_fn": _tokens_loss}


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def lstm() -> Case:
    batch = torch.randn(64, 100, 64), torch.randint(10, (64,))
    return _Lstm(), batch, {"loss_fn": Loss}


def _graphs(count: int = 32) -> Any:
    from torch_geometric.data import Batch, Data

    graphs = [
        Data(
            x=torch.randn(200, 64),
            edge_index=torch.randint(200, (2, 2000)),
            y=torch.randint(10, (1,)),
        )
        for _ in range(count)
    ]
    return Batch.from_data_list(graphs)


class _Gnn(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        from torch_geometric import nn as pyg

        conv = getattr(pyg, kind)
        self.convs = nn.ModuleList([conv(64, 128), conv(128, 128), conv(128, 128)])
        self.head = nn.Linear(128, 10)

    def forward(self, data: Any) -> torch.Tensor:
        from torch_geometric.nn import global_mean_pool

        x = data.x
        for conv in self.convs:
            x = conv(x, data.edge_index).relu()
        return self.head(global_mean_pool(x, data.batch))


def _graph_loss(out: torch.Tensor, data: Any) -> torch.Tensor:
    return Loss(out, data.y)


def gcn() -> Case:
    return _Gnn("GCNConv"), _graphs(), {"loss_fn": _graph_loss}


def sage() -> Case:
    return _Gnn("SAGEConv"), _graphs(), {"loss_fn": _graph_loss}


def _hugging_face(name: str, config: str, batch: Any, **sizes: Any) -> Case:
    import transformers

    made = getattr(transformers, config)(**sizes)
    return getattr(transformers, name)(made), batch, {}


def _masked(batch: int = 8, length: int = 128, words: int = 2000) -> Any:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1:, length // 2 :] = 0
    tokens = torch.randint(words, (batch, length))
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


_SIZES = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
}


def bert() -> Case:
    return _hugging_face("BertForMaskedLM", "BertConfig", _masked(), **_SIZES)


def llama() -> Case:
    sizes = {**_SIZES, "num_key_value_heads": 2}
    return _hugging_face("LlamaForCausalLM", "LlamaConfig", _masked(), **sizes)


def t5() -> Case:
    sizes = {"vocab_size": 2000, "d_model": 256, "d_kv": 32, "d_ff": 1024}
    sizes |= {"num_layers": 3, "num_heads": 8, "decoder_start_token_id": 0}
    name = "T5ForConditionalGeneration"
    return _hugging_face(name, "T5Config", _masked(), **sizes)


def swin() -> Case:
    labels = torch.randint(2, (8,))
    batch = {"pixel_values": torch.randn(8, 3, 112, 112), "labels": labels}
    sizes = {"image_size": 112, "embed_dim": 48, "depths": [2, 2, 2]}
    sizes |= {"num_heads": [2, 4, 8], "window_size": 7}
    return _hugging_face("SwinForImageClassification", "SwinConfig", batch, **sizes)


def vit() -> Case:
    batch = {"pixel_values": torch.randn(16, 3, 96, 96)}
    batch["labels"] = torch.randint(2, (16,))
    sizes = {k: v for k, v in _SIZES.items() if k != "vocab_size"}
    return _hugging_face(
        "ViTForImageClassification", "ViTConfig", batch, image_size=96, **sizes
    )


def compiled() -> Case:
    model, batch, options = mlp()
    return torch.compile(model), batch, options


def enlarged(batch: Any, times: int) -> Any:
    """The same batch with this many times as many samples."""
    if times == 1:
        return batch
    if isinstance(batch, torch.Tensor):
        return torch.cat([batch] * times)
    if isinstance(batch, dict):
        return {key: enlarged(value, times) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(enlarged(value, times) for value in batch)
    return type(batch).from_data_list(batch.to_data_list() * times)  # PyG's


MODELS = {
    made.__name__: made
    for made in (
        *(mlp, gpt, gpt_bf16, gpt_checkpointed, resnet50, unet, experts),
        *(transformer_encoder, lstm, gcn, sage, bert, llama, t5, swin, vit, compiled),
    )
}
