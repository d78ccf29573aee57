"""The switches that a configuration can hold, and the settings that turn them on."""

import os
from dataclasses import dataclass

Setting = tuple[str, bool | int | str]  # a dotted name and its value

TRAINFAST, TORCH = "trainfast", "torch"


@dataclass(frozen=True)
class Candidate:
    """A switch of the probe that may go into a configuration.

    Attributes:
        name: the switch's.
        owner: whose code makes the difference.
        settings: of the configuration; none where `patch` is given.
        patch: the capability of `trainfast.patch` that does the same.
        changes: whether the model learns something else, beyond rounding.
        kind: of the candidates of one kind one is taken at most.
    """

    name: str
    owner: str
    settings: tuple[Setting, ...] = ()
    patch: str | None = None
    changes: bool = False
    kind: str = ""


def candidates() -> list[Candidate]:
    """All of them; how many workers and threads depends on this machine's cores."""
    cores = len(os.sched_getaffinity(0))
    half = ("trainer.use_mixed_precision", True)
    return [
        Candidate("trainfast optimizer", TRAINFAST, patch="adamw", kind="optimizer"),
        Candidate("trainfast attention", TRAINFAST, patch="attention"),
        Candidate("trainfast clip", TRAINFAST, patch="clip"),
        Candidate(
            "fused optimizer", TORCH, (("trainer.fused", True),), kind="optimizer"
        ),
        Candidate("threads", TORCH, (("threads", cores),), kind="threads"),
        Candidate("one thread", TORCH, (("threads", 1),), kind="threads"),
        Candidate("anomaly", TORCH, (("trainer.detect_anomaly", False),)),
        Candidate("cudnn benchmark", TORCH, (("cudnn_benchmark", True),)),
        Candidate("channels-last", TORCH, (("trainer.channels_last", True),)),
        Candidate(
            *("worker-restart", TORCH),
            (("trainer.persistent_workers", True),),
            kind="workers",
        ),
        *(
            Candidate(f"workers {n}", TORCH, _loader(n), kind="workers")
            for n in (0, 1, 2, 4, 8)
            if n <= cores
        ),
        Candidate("compile", TORCH, (("trainer.compile", True),)),
        Candidate("tf32", TORCH, (("float32_matmul_precision", "high"),), changes=True),
        Candidate(
            "deterministic", TORCH, (("trainer.deterministic", False),), changes=True
        ),
        Candidate(
            *("bfloat16", TORCH),
            (half, ("trainer.mixed_precision_dtype", "bfloat16")),
            changes=True,
            kind="precision",
        ),
        Candidate(
            *("float16", TORCH),
            (
                *(half, ("trainer.mixed_precision_dtype", "float16")),
                ("trainer.grad_scaler_enabled", True),
            ),
            changes=True,
            kind="precision",
        ),
    ]


def _loader(workers: int) -> tuple[Setting, ...]:
    settings: list[Setting] = [("trainer.num_workers", workers)]
    if workers:
        settings.append(("trainer.persistent_workers", True))
    return tuple(settings)


ALLOWED = tuple(c.name for c in candidates() if c.changes)
