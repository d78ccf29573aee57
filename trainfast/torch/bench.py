"""The cases of `trainfast bench` that need torch; see `trainfast.bench.cases`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfast.bench.cases import (
    BATCH,
    GRAPHS,
    Arrays,
    Made,
    Setup,
    Unavailable,
    build_cache,
    build_graph,
    concatenate,
    require_same,
)
from trainfast.bench.turns import Case, Contender
from trainfast.graph_cache import Loader
from trainfast.patching import patch, unpatch
from trainfast.torch import AdamW, GradScaler, clip_grad_norm_
from trainfast.torch import scaled_dot_product_attention as sdpa


def require(device: str) -> None:
    """Unavailable if torch cannot compute on the device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable("needs a torch that sees the GPU, see `trainfast env`")


# ---- AdamW and AMP -------------------------------------------------------------------


def _parameters(count: int, numel: int, device: str) -> list[nn.Parameter]:
    """Parameters with gradients; the same ones at each call."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for _ in range(count):
        p, grad = torch.randn(2, numel, device=device, generator=generator)
        made.append(nn.Parameter(p.clone()))
        made[-1].grad = grad.clone()
    return made


def _adamw(setup: Setup, count: int, numel: int, name: str) -> Made:
    if name == "adamw-large" and setup.device == "cuda":
        numel *= 4
    options: dict[str, tuple[Any, dict[str, bool]]] = {
        "trainfast": (AdamW, {}),
        "torch fused": (torch.optim.AdamW, {"fused": True}),
        "torch foreach": (torch.optim.AdamW, {"foreach": True}),
    }
    contenders, results = [], {}
    for who, (kind, more) in options.items():
        params = _parameters(count, numel, setup.device)
        optimizer = kind(params, lr=1e-3, weight_decay=0.01, **more)
        optimizer.step()
        results[who] = params[-1].detach().clone()
        contenders.append(Contender(who, optimizer.step, _role(who)))
    require_same(results)
    title = f"AdamW, optimizer.step(), {count:,} x {numel:,}"
    return Made(Case(name, title, "float32", nbytes=28 * count * numel), contenders)


def _role(name: str) -> str:
    return "ours" if name == "trainfast" else "rival"


def _amp_step(setup: Setup) -> Made:
    count, numel = 300, 10_000
    kinds: dict[str, tuple[Any, ...]] = {
        "trainfast": (AdamW, GradScaler, clip_grad_norm_),
        "torch fused": (
            partial(torch.optim.AdamW, fused=True),
            torch.amp.GradScaler,
            nn.utils.clip_grad_norm_,
        ),
    }
    loss = torch.ones((), device=setup.device)
    contenders, results = [], {}
    for who, (kind, scaler_kind, clip) in kinds.items():
        params = _parameters(count, numel, setup.device)
        values = [1024 * p.grad for p in params if p.grad is not None]
        optimizer = kind(params, lr=1e-3)
        scaler = scaler_kind(setup.device, 1024.0, growth_interval=10**9)
        prepare = partial(_write_grads, params, values)
        run = partial(_scaled_step, params, optimizer, scaler, clip, loss)
        prepare()
        run()
        results[who] = params[-1].detach().clone()
        contenders.append(Contender(who, run, _role(who), prepare))
    require_same(results)
    title = f"unscale, clip, AdamW step, update, {count} x {numel:,}"
    case = Case("amp-step", title, "float32", nbytes=32 * count * numel)
    return Made(case, contenders)


def _write_grads(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        assert param.grad is not None
        param.grad.copy_(value)


def _scaled_step(
    params: Sequence[Tensor], optimizer: Any, scaler: Any, clip: Any, loss: Tensor
) -> None:
    scaler.scale(loss)
    scaler.unscale_(optimizer)
    clip(params, 1.0)
    scaler.step(optimizer)
    scaler.update()


# ---- Attention -----------------------------------------------------------------------


def _attention(setup: Setup, name: str, what: str) -> Made:
    """Causal, or grouped-query with a key mask whose second half of sequences are
    shorter by a quarter."""
    on_gpu, gqa = setup.device == "cuda", "gqa" in name
    batch, heads, n, dim = (8, 16, 2048, 64) if on_gpu else (2, 8, 512, 64)
    dtype = torch.float16 if on_gpu else torch.float32
    kv_heads = heads // 4 if gqa else heads
    generator = torch.Generator(setup.device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(
            batch, h, n, dim, device=setup.device, dtype=dtype, generator=generator
        )
        for h in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    options: dict[str, Any] = {"is_causal": True}
    pairs = batch * heads * n * n / 2  # of a query and a key that it sees
    if gqa:
        mask = torch.ones(batch, 1, 1, n, dtype=torch.bool, device=setup.device)
        mask[batch // 2 :, ..., 3 * n // 4 :] = False
        options = {"attn_mask": mask, "enable_gqa": True}
        pairs = heads * n * float(mask.sum())

    def forward(function: Callable[..., Tensor]) -> Tensor:
        return function(*leaves, **options)

    def both(function: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(forward(function), leaves, dout)[0]

    run = forward if what == "forward" else both
    kinds: dict[str, Callable[..., Tensor]] = {
        "trainfast": sdpa,
        "torch": F.scaled_dot_product_attention,
    }
    results = {who: run(function).detach() for who, function in kinds.items()}
    require_same(results, 1e-2 if on_gpu else 1e-3)
    contenders = [
        Contender(who, partial(run, function), _role(who))
        for who, function in kinds.items()
    ]
    kind = "grouped-query attention, key mask" if gqa else "causal attention"
    title = f"{kind}, {what}, {batch} x {heads} heads, {n} x {dim}"
    flops = int(pairs * dim * 4 * (1 if what == "forward" else 3.5))
    return Made(
        Case(name, title, str(dtype).removeprefix("torch."), flops=flops), contenders
    )


# ---- A small GPT ---------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, n, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, n, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # Looked up at each call, as patch() replaces it.
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, n, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _gpt_step(setup: Setup, layers: int, width: int, batch: int, n: int) -> Any:
    """A training step of a GPT without weight tying, as a script writes it."""
    torch.manual_seed(0)
    words, device = 256, setup.device
    blocks = [_Block(width, width // 64) for _ in range(layers)]
    model = nn.Sequential(
        nn.Embedding(words, width), *blocks, nn.Linear(width, words, bias=False)
    ).to(device)
    tokens = torch.randint(words, (batch, n + 1), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def _train_gpt(setup: Setup) -> Made:
    """The same script with and without `trainfast.patch()`."""
    on_gpu = setup.device == "cuda"
    layers, width, batch, n = (8, 512, 16, 512) if on_gpu else (4, 128, 4, 128)
    setup.stack.callback(unpatch)
    contenders, losses = [], {}
    for who, prepare in (("torch", unpatch), ("trainfast.patch()", patch)):
        prepare()  # and before each step: the other one's has undone it
        step = _gpt_step(setup, layers, width, batch, n)
        losses[who] = step()
        role = "rival" if who == "torch" else "ours"
        contenders.append(Contender(who, step, role, prepare))
    require_same(losses, 1e-2)
    # 6 operations a weight and token; causal attention sees half of the pairs.
    weights = layers * 12 * width**2 + 256 * width
    flops = 6 * weights * batch * n + 6 * layers * batch * n * n * width
    title = f"GPT, {layers} layers of {width}, {batch} x {n} tokens"
    dtype = "float16" if on_gpu else "float32"
    return Made(Case("train-gpt", title, dtype, flops=flops), contenders)


# ---- A small graph network: the first guide's three rows -----------------------------


class _GNN(nn.Module):
    def __init__(self, width: int = 64, rounds: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(11, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.last = nn.Linear(width, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.first(batch["x"])
        source, target = batch["edge_index"]
        for own, messages in zip(self.own, self.messages, strict=True):
            sent = messages(x).index_select(0, source)
            got = torch.zeros_like(sent[: len(x)]).index_add(0, target, sent)
            x = F.relu(own(x) + got / 8)
        nodes = self.last(x).squeeze(1)
        sums = nodes.new_zeros(len(batch["y"]))
        return sums.index_add(0, batch["batch"], nodes) / 80


def _train_graphs(setup: Setup) -> Made:
    half = "float16" if setup.device == "cuda" else "bfloat16"  # slow on CPUs, or fast
    built = [build_graph(seed) for seed in range(GRAPHS)]
    cache = build_cache(built, setup.stack)

    def without_cache() -> Iterator[Arrays]:
        while True:
            for start in range(0, GRAPHS, BATCH):
                yield concatenate(
                    [build_graph(seed) for seed in range(start, start + BATCH)]
                )

    def with_cache() -> Iterator[Arrays]:
        loader = Loader(cache, BATCH)
        while True:
            yield from loader

    kinds = {
        "no cache": (without_cache, None),
        "cache": (with_cache, None),
        f"cache and {half}": (with_cache, getattr(torch, half)),
    }
    contenders, losses = [], {}
    for who, (batches, dtype) in kinds.items():
        step = _graph_step(setup.device, batches(), dtype)
        losses[who] = step()
        role = "rival" if who == "no cache" else "ours"
        contenders.append(Contender(who, step, role))
    require_same(losses, 0.05)
    title = f"graph network, {BATCH} graphs of 64 to 96 nodes"
    return Made(Case("train-graphs", title, "float32"), contenders)


def _graph_step(
    device: str, batches: Iterator[Arrays], dtype: torch.dtype | None
) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model = _GNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def step() -> Tensor:
        arrays = next(batches)
        batch = {
            key: torch.from_numpy(arrays[key]).to(device)
            for key in ("x", "edge_index", "y", "batch")
        }
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = F.mse_loss(model(batch).float(), batch["y"])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def pyg_loader(graphs: Sequence[Arrays], batch_size: int) -> Iterable[Any]:
    """PyG's DataLoader over objects in memory."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    objects = [
        Data(**{key: torch.from_numpy(array) for key, array in graph.items()})
        for graph in graphs
    ]
    return DataLoader(objects, batch_size=batch_size, shuffle=True)


CASES: dict[str, Callable[[Setup], Made]] = {
    "adamw-large": partial(_adamw, count=8, numel=1_000_000, name="adamw-large"),
    "adamw-small": partial(_adamw, count=2000, numel=64, name="adamw-small"),
    "amp-step": _amp_step,
    "attention-forward": partial(_attention, name="attention-forward", what="forward"),
    "attention-backward": partial(
        _attention, name="attention-backward", what="forward and backward"
    ),
    "attention-gqa-mask": partial(
        _attention, name="attention-gqa-mask", what="forward and backward"
    ),
    "train-gpt": _train_gpt,
    "train-graphs": _train_graphs,
}
