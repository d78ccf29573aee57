"""The small GPT of char_transformer.py on several processes, killed and resumed.

Each process sees its own crops of the text. DDP keeps the whole model on each; FSDP2
keeps a shard of parameters, gradients and optimizer state. A checkpoint is one folder
that any number of processes can load.

    torchrun --nproc-per-node 2 examples/distributed.py --kind fsdp2
    torchrun --nproc-per-node 2 examples/distributed.py --kind ddp --preset tiny
    torchrun --nproc-per-node 2 examples/distributed.py --resume   # after a kill
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from char_transformer import PRESETS
from small_gpt import GPT, Corpus
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainfast


def wrap(model: nn.Module, kind: str, device: torch.device) -> nn.Module:
    model.to(device)
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Run:
    """One process's part of the training."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.preset = args, PRESETS[args.preset]
        self.rank = distributed.get_rank()
        self.corpus = Corpus()
        torch.manual_seed(args.seed)  # the same model on every process
        shape = (self.preset.context, self.preset.layers, self.preset.width)
        model = GPT(len(self.corpus.alphabet), *shape, self.preset.heads)
        self.model = wrap(model, args.kind, args.device)
        self.optimizer = trainfast.torch.AdamW(
            self.model.parameters(), lr=2e-3, max_grad_norm=1.0, ema_decay=0.98
        )
        self.accumulator = trainfast.torch.Accumulator(
            self.optimizer, args.accumulate, model=self.model
        )
        self.done = 0
        if args.resume and self.saved():
            self.load(self.saved()[-1])

    def crops(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This process's crops of a step: a resumed run sees the same ones."""
        size, text = self.preset.context + 1, self.corpus.train
        seed = (self.args.seed * 1_000_003 + step) * 1_009 + self.rank
        generator = torch.Generator().manual_seed(seed)
        shape = (self.args.accumulate, self.preset.batch, 1)
        starts = torch.randint(len(text) - size, shape, generator=generator)
        crops = text[starts + torch.arange(size)].to(self.args.device)
        return [(crop[:, :-1], crop[:, 1:]) for crop in crops]

    def step(self) -> Tensor:
        losses = []
        for x, y in self.accumulator.batches(self.crops(self.done)):
            loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
            self.accumulator.backward(loss, tokens=y.numel())
            losses.append(loss.detach())
        self.done += 1
        mean = torch.stack(losses).mean() / distributed.get_world_size()
        distributed.all_reduce(mean)
        return mean

    def train(self) -> None:
        while self.done < self.args.steps:
            loss = self.step()
            if self.done % self.args.save_every == 0 or self.done == self.args.steps:
                self.save()
                if self.rank == 0:
                    norm = float(self.optimizer.grad_norm)
                    print(
                        f"step {self.done:5}  loss {float(loss):.4f}  norm {norm:.4f}",
                        flush=True,
                    )

    # ---- Checkpoints ---------------------------------------------------------------

    def saved(self) -> list[Path]:
        """The complete checkpoints: a folder gets its name when all is in it."""
        return sorted(self.args.out.glob("step-*"))

    def state(self) -> dict:
        weights, state = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": state, "done": torch.tensor(self.done)}

    def save(self) -> None:
        place = self.args.out / f"step-{self.done:06}"
        unfinished = self.args.out / "unfinished"
        if self.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        distributed.barrier()
        checkpoint.save(self.state(), checkpoint_id=unfinished)
        if self.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            unfinished.rename(place)
        distributed.barrier()

    def load(self, place: Path) -> None:
        state = self.state()
        checkpoint.load(state, checkpoint_id=place)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.done = int(state["done"])
        if self.rank == 0:
            print(f"resumed from {place}", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=["ddp", "fsdp2"], default="fsdp2")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, default=Path("build/distributed"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--resume", action="store_true", help="from the last checkpoint"
    )
    args = parser.parse_args(arguments)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    args = parse()
    backend = {"cpu": "gloo", "cuda": "nccl"}[args.device]
    args.device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    else:
        args.device = torch.device("cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    distributed.init_process_group(backend)
    Run(args).train()
    if distributed.get_rank() == 0:
        print(trainfast.stats())
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
