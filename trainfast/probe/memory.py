"""Estimates of scripts, which run unchanged in a sandbox."""

import time
from collections.abc import Sequence

from trainfast.machine import available_memory
from trainfast.memory.estimate import MIB, Estimate, estimate_of
from trainfast.memory.gpus import gpu_of
from trainfast.memory.trace import Replay
from trainfast.probe.headline import headline
from trainfast.probe.run import ProbeError, estimated

_BASE = 400 * MIB  # of a process that has imported torch
_TWO_LINES = """pass the model and a batch instead:
    import trainfast
    print(trainfast.estimate_memory(model, batch, loss_fn=loss_fn{gpu}))"""


def estimate_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    device: str = "cuda",
    gpu: str | int | None = None,
    steps: int = 2,
    expandable_segments: bool = False,
) -> Estimate:
    """The memory of a script's training step on a GPU that it does not have.

    The script runs on the CPU up to its first batch; from there on its own loop goes
    on with fake tensors. It is told that it has the GPU, so that it takes its path for
    one, autocast included. Where fakes cannot run the loop, two of its steps run
    really, on the CPU.

    Raises:
        ProbeError: the script failed, or has no training loop that torch shows.
    """
    started, card = time.monotonic(), gpu_of(gpu) if device == "cuda" else None
    job = {
        "gpu": card,
        "steps": steps,
        "expandable": expandable_segments,
    }
    notes, method = [], "the script on fake tensors"
    try:
        found = estimated(script, arguments, job | {"fake": True})
    except ProbeError as error:
        reason = headline(str(error))
        try:
            found = estimated(script, arguments, job | {"fake": False})
        except ProbeError as second:
            known = "" if gpu is None else f", gpu={gpu!r}"
            raise ProbeError(f"{second}\n{_TWO_LINES.format(gpu=known)}") from None
        method = "the script on the CPU, really"
        notes.append(f"fake tensors cannot run this script ({reason})")
        if card:
            notes.append("the CPU's kernels keep other tensors than CUDA's would")
    if found["guesses"]:
        names = ", ".join(f"{name} ({n})" for name, n in found["guesses"].items())
        notes.append(f"values that only a real step knows were guessed: {names}")
    if card:
        notes.append(
            f"{card.context / MIB:.0f} MiB of the total are CUDA's context: a "
            "constant, not measured here"
        )
    if found["recurrent"]:
        notes.append(
            "what recurrent layers keep inside of their kernels is approximate"
        )
    notes.append("validation and what comes after the second step are not included")
    done = Replay(**found["replay"])
    return estimate_of(
        done,
        device=card.name if card else "the CPU",
        total=done.reserved + (card.context if card else _BASE),
        capacity=card.memory if card else available_memory(),
        exact=method == "the script on fake tensors" and not found["guesses"],
        method=method,
        seconds=time.monotonic() - started,
        batch_size=found["batch_size"],
        notes=notes,
    )
