"""Trains with all that rides on the optimizer step, and goes on after a stop.

A small GPT learns Python from Python's own standard library, with gradient
accumulation, autocast and a loss scale, clipping, an EMA and a learning rate schedule.
Every so often all of it goes into a checkpoint: a run that was stopped (by Ctrl-C, a
crash, a time limit) and resumed ends with the same bits as one that was not.

    python examples/amp_resume.py                          # about a minute
    python examples/amp_resume.py --resume                 # from the last checkpoint on
    python examples/amp_resume.py --state-dtype bfloat16   # half the optimizer's memory
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_gpt import GPT, Corpus
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

import trainfast

CONTEXT, LAYERS, WIDTH, HEADS, BATCH = 32, 2, 64, 4, 8
RATE = 2e-3
GROWTH_INTERVAL = 200  # steps without overflow until the loss scale doubles
# What AdamW does in the step's own pass over memory.
OPTIONS = {"max_grad_norm": 1.0, "ema_decay": 0.98, "zero_grad": True}


class Training:
    """Everything that a run consists of; `options` are AdamW's, beside `OPTIONS`."""

    def __init__(
        self, corpus: Corpus, args: argparse.Namespace, **options: Any
    ) -> None:
        self.corpus, self.args = corpus, args
        torch.manual_seed(args.seed)
        model = GPT(len(corpus.alphabet), CONTEXT, LAYERS, WIDTH, HEADS)
        self.model = model.to(args.device)
        self.optimizer = trainfast.torch.AdamW(
            self.model.parameters(),
            lr=RATE,
            state_dtype=getattr(torch, args.state_dtype),
            **{**OPTIONS, **options},
        )
        # bfloat16 does without a scale; then this only skips steps that are not finite
        self.scaler = trainfast.torch.GradScaler(
            args.device.type, growth_interval=GROWTH_INTERVAL
        )
        # clips, scales, steps, updates, zeroes and schedules, in the right order
        self.accumulator = trainfast.torch.Accumulator(
            self.optimizer,
            args.accumulate,
            scaler=self.scaler,
            scheduler=CosineAnnealingLR(self.optimizer, args.steps),
        )
        self.generator = torch.Generator().manual_seed(args.seed)
        self.losses: list[Tensor] = []  # of each step; only reading one waits for a GPU
        self.checkpoint = args.out / "checkpoint.pt"

    # ---- Training ------------------------------------------------------------------

    def crops(self, text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random pieces of the text, and what comes after each of their characters."""
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        pieces = text[starts + torch.arange(CONTEXT + 1)].to(self.args.device)
        return pieces[:, :-1], pieces[:, 1:]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        dtype = getattr(torch, self.args.dtype)
        with torch.autocast(self.args.device.type, dtype):
            scores = self.model(x)
        return F.cross_entropy(scores.float().flatten(0, 1), y.flatten())

    def step(self) -> None:
        """One step of the optimizer, after several backward passes."""
        losses = []
        for _ in range(self.args.accumulate):
            loss = self.loss(*self.crops(self.corpus.train, self.generator))
            self.accumulator.backward(loss)
            losses.append(loss.detach())
        self.losses.append(torch.stack(losses).mean())

    @torch.no_grad()
    def validate(self, batches: int = 32) -> float:
        """The loss on the same unseen text each time; nothing of the run moves."""
        generator = torch.Generator().manual_seed(0)
        crops = [self.crops(self.corpus.validation, generator) for _ in range(batches)]
        return statistics.fmean(self.loss(*crop).item() for crop in crops)

    def train(self) -> None:
        args = self.args
        while (done := len(self.losses)) < args.steps:
            self.step()
            done += 1
            if done % args.save_every == 0 or done == args.steps:
                self.save()
                print(self.report(), flush=True)

    def report(self) -> str:
        recent = torch.stack(self.losses[-self.args.save_every :]).mean().item()
        norm = float(self.optimizer.grad_norm)  # before clipping
        return (
            f"step {len(self.losses):5}  loss {recent:.3f}  "
            f"gradients' norm {norm:.3f}  loss scale {self.scaler.get_scale():g}"
        )

    # ---- Checkpoints ---------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """What has a state; the EMA is in the optimizer's."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "schedule": self.accumulator.scheduler,
            "accumulator": self.accumulator,
        }

    def save(self) -> None:
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state["generator"] = self.generator.get_state()
        state["losses"] = torch.stack(self.losses)
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)  # whatever happens, one checkpoint is whole

    def load(self) -> None:
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.losses = list(state["losses"].to(self.args.device))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    halves = ["bfloat16", "float16"]
    parser.add_argument(
        "--dtype", choices=halves, default="bfloat16", help="autocast's"
    )
    parser.add_argument(
        "--state-dtype",
        choices=["float32", *halves],
        default="float32",
        help="of the optimizer's two moments",
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--accumulate", type=int, default=2, help="batches to a step")
    parser.add_argument("--save-every", type=int, default=100, help="so many steps")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, default=Path("build/amp_resume"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="with the same arguments")
    args = parser.parse_args(arguments)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    return args


def main(arguments: list[str] | None = None, **options: Any) -> Training:
    """Trains, saves and validates; `options` as in Training."""
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    training = Training(Corpus(), args, **options)
    if args.resume and training.checkpoint.exists():
        training.load()
        print(f"goes on after step {len(training.losses)}", flush=True)
    try:
        training.train()
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; the same command with --resume goes on") from None
    print(f"validation loss {training.validate():.4f}", end="")
    with training.optimizer.ema_weights():
        print(f", of the EMA {training.validate():.4f}")
    return training


if __name__ == "__main__":
    main()
