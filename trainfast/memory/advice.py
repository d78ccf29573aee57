"""What to do when memory ran out, ranked by what it saves and costs."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainfast.diagnosis.settings import Setting, Settings
from trainfast.memory.batch_size import BatchSizeReport
from trainfast.memory.estimate import Estimate
from trainfast.memory.out_of_memory import (
    FRAGMENTATION,
    HOST,
    NEED,
    OTHERS,
    SHARED,
    OutOfMemory,
    parse,
)
from trainfast.report import Report, Table

MIB = 1 << 20
_SMALLER = 0.75  # the next batch size, at most
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch starts"
# (what to do, what it saves and costs), the best first.
_BY_CAUSE = {
    FRAGMENTATION: [
        (_EXPANDABLE, "all that is reserved without a tensor becomes usable; free"),
        (
            "batches of one length, such as padding to a multiple of 64",
            "the allocator finds blocks of the size that it needs again",
        ),
    ],
    OTHERS: [
        (
            "nvidia-smi, then end the other processes",
            "a notebook's kernel keeps its memory until it is restarted",
        ),
    ],
    NEED: [],
    HOST: [
        ("fewer workers: trainfast find-workers", "each has its own copy of the data"),
        (
            "read data from a file mapping, such as np.load(..., mmap_mode='r')",
            "processes share it, and the system can drop it",
        ),
        ("prefetch_factor=2", "batches that wait take memory in every worker"),
    ],
    SHARED: [
        ("docker run --shm-size=8g, or --ipc=host", "batches come through /dev/shm"),
        ("fewer workers: trainfast find-workers", "fewer batches wait there"),
        (
            "torch.multiprocessing.set_sharing_strategy('file_system')",
            "files instead of descriptors; still in shared memory",
        ),
    ],
}
_AFTER = [
    ("validation under torch.no_grad()", "its activations are not kept"),
    ("loss.item() for logs", "a kept loss keeps the graph of its step"),
    (
        "trainfast.AdamW",
        'no temporaries in its step; with state_dtype="int8" a quarter of the state; '
        "with release_gradients() never all gradients at once",
    ),
    ("a smaller model, or shorter inputs", "the last resort"),
]


@dataclass(repr=False)
class OutOfMemoryAdvice(Report):
    """What ran out, why, and the remedies, the best first.

    Attributes:
        failure: the numbers of the message; its `cause` tells need from fragmentation.
        remedies: (what to do, what it saves and costs).
        batch: (batch size, accumulation) that keep the effective batch; None where the
            batch size is unknown.
        keys: the configuration's settings for these two.
    """

    failure: OutOfMemory
    remedies: list[tuple[str, str]]
    batch: tuple[int, int] | None = None
    keys: dict[str, Setting] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        batch = None
        if self.batch is not None:
            batch = dict(zip(("batch_size", "accumulation"), self.batch, strict=True))
        return {
            "failure": vars(self.failure),
            "remedies": [
                dict(zip(("do", "effect"), remedy, strict=True))
                for remedy in self.remedies
            ],
            "batch": batch,
        }

    def tables(self) -> list[Table]:
        failure = self.failure
        names = ("requested", "free", "capacity", "allocated", "unallocated", "others")
        sizes = [
            (name, f"{getattr(failure, name) / MIB:,.0f} MiB")
            for name in names
            if getattr(failure, name) is not None
        ]
        cause = f"Out of memory: {failure.cause}"
        columns = ("do", "effect")
        return [
            Table(cause, ("", ""), sizes, empty=failure.line[:200]),
            Table("What helps, the best first", columns, self.remedies),
        ]

    def to_yaml(self) -> str:
        """The batch size and accumulation under the configuration's own keys."""
        if self.batch is None:
            return ""
        lines: list[str] = []
        size, steps = self.batch
        for name, value in (("batch_size", size), ("accumulate", steps)):
            found = self.keys.get(name)
            plain = "batch_size" if name == "batch_size" else "accumulation_steps"
            parts = (found.key if found else plain).split(".")
            for depth, part in enumerate(parts):
                line = "  " * depth + json.dumps(part).strip('"') + ":"
                last = depth == len(parts) - 1
                line += f" {value}" if last else ""
                if last or line not in lines:
                    lines.append(line)
        return "\n".join(lines) + "\n"


def oom_advice(
    error: BaseException | str,
    *,
    batch_size: int | None = None,
    accumulation: int = 1,
    settings: Settings | None = None,
    estimate: Estimate | None = None,
) -> OutOfMemoryAdvice:
    """Reads an out-of-memory error, and ranks what helps.

    Args:
        error: the exception, its message, or a log.
        batch_size: of one forward pass.
        accumulation: forward passes an optimizer step.
        settings: a configuration, for both and for the keys of `to_yaml()`.
        estimate: of the step: then each remedy has what it would save.

    Raises:
        ValueError: the text has no out-of-memory error.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    failure = parse(text)
    if failure is None:
        raise ValueError(
            "no out-of-memory error is in the text; pass the whole message or log"
        )
    keys = {}
    if settings is not None:
        names = ("batch_size", "accumulate")
        keys = {name: s for name in names if (s := settings.find(name)) is not None}
        batch_size = batch_size or settings.number("batch_size")
        accumulation = settings.number("accumulate") or accumulation
    if estimate is not None:
        batch_size = batch_size or estimate.batch_size
    batch = _smaller(batch_size, accumulation)
    remedies = list(_BY_CAUSE[failure.cause])
    if failure.cause not in (HOST, SHARED):
        remedies += _savings(estimate) if estimate else _certain(batch_size, batch)
        remedies += _AFTER
    return OutOfMemoryAdvice(failure, remedies, batch, keys)


def _smaller(size: int | None, accumulation: int) -> tuple[int, int] | None:
    """The next smaller batch, and the accumulation that keeps the effective one."""
    if size is None or size < 2:
        return None
    effective = size * max(1, accumulation)
    most = max(1, int(size * _SMALLER))
    return BatchSizeReport(most, [], 0, 0.0).accumulation(effective)


def _certain(size: int | None, batch: tuple[int, int] | None) -> list[tuple[str, str]]:
    """Remedies with the relation that holds for every model."""
    smaller = "a smaller batch, and more accumulation"
    effect = "activations shrink with the batch"
    if size is not None and batch is not None:
        smaller = f"batch {batch[0]} with accumulation {batch[1]}"
        effect = f"{1 - batch[0] / size:.0%} of the activations; the same gradient"
    return [
        ("autocast to bfloat16 or float16", "about half of the activations; faster"),
        (smaller, effect),
        (
            "trainfast.auto_micro_batch(model) on the function that gives the loss",
            "parts of the batch where it does not fit; the same gradient",
        ),
        (
            "trainfast.enable_checkpointing(model)",
            "most activations; a step takes about a third longer",
        ),
        (
            "trainfast.patch('attention') where torch has no flash attention",
            "the scores of attention are not kept",
        ),
    ]


def _savings(estimate: Estimate) -> list[tuple[str, str]]:
    from trainfast.memory.knobs import savings

    found = savings(estimate)
    rows = []
    for name, other in sorted(found.items(), key=lambda item: item[1].total):
        saved = (estimate.total - other.total) / MIB
        rows.append((name, f"saves {saved:,.0f} MiB; then it {_fits(other)}"))
    return rows


def _fits(estimate: Estimate) -> str:
    words = {"fits": "fits", "does not fit": "does not fit", "undecided": "may fit"}
    return words[estimate.verdict]


@contextlib.contextmanager
def oom_help(**known: Any) -> Iterator[None]:
    """Prints advice where memory runs out inside the block; the error goes on.

    Args:
        **known: arguments of `oom_advice`: `batch_size`, `accumulation`, `estimate`.
    """
    try:
        yield
    except Exception as error:
        failed = parse(f"{type(error).__name__}: {error}")
        if failed is not None:
            _show(oom_advice(error, **known))
        raise


def _show(advice: OutOfMemoryAdvice) -> None:
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None and "IPKernelApp" in shell.config:
            from IPython.display import display

            display(advice)
            return
    print(advice, file=sys.stderr)
