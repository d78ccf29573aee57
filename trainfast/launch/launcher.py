"""Starts a fresh interpreter that runs the script: environment variables first."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from trainfast.launch import start
from trainfast.launch.environment import (
    changed_variables,
    torch_version,
)
from trainfast.launch.settings import Settings

_TF32 = 8.0  # compute capability of the first GPUs with TF32


def launch(
    settings: Settings,
    kind: str,
    target: str,
    arguments: Sequence[str],
    *,
    show: str,
    leaks: bool,
    cores: int | None,
    gpus: Sequence[dict[str, Any]],
) -> NoReturn:
    """Replaces this process by one that runs the script under the settings.

    Process id, standard streams and working directory stay.

    Args:
        settings: what to turn on.
        kind: "script" or "module".
        target: the script's path or the module's name.
        arguments: the script's own.
        show: start-up lines on stderr: "text", "json" or "none".
        leaks: whether to watch for memory that grows with every step.
        cores: of a CPU quota below the machine's cores, else None.
        gpus: of the machine, with their "capability", such as "8.6".

    Raises:
        OSError: the interpreter cannot be started.
    """
    changed, notes = changed_variables(settings, os.environ, torch_version(), cores)
    on = [f"Set {name}={text}" for name, text in changed.items() if text is not None]
    notes += [f"Removed {name}" for name, text in changed.items() if text is None]
    if settings.of_the_script:
        names = ", ".join(settings.of_the_script)
        notes.append(f"Left to the script, which must read them: {names}")
    job = {
        "switches": {
            "names": settings.patch,
            "precision": settings.float32_matmul_precision,
            "cudnn_benchmark": settings.cudnn_benchmark,
            "tf32": has_tf32(gpus),
            "leaks": leaks,
        },
        "on": on,
        "notes": notes,
        "show": show,
    }
    environment = {k: v for k, v in os.environ.items() if changed.get(k, v) is not None}
    environment |= {k: v for k, v in changed.items() if v is not None}
    command = [sys.executable, *interpreter_options(sys.orig_argv, sys.argv)]
    command += [start.__file__, json.dumps(job), kind, target, *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)


def interpreter_options(original: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Python's own options, such as -u or -W, that this process was started with.

    Args:
        original: `sys.orig_argv`: the interpreter, options, and what it runs.
        argv: `sys.argv`: what it runs, and the arguments.
    """
    count = len(original) - len(argv[1:])
    options = list(original[1:count])
    return options[:-2] if options[-2:-1] == ["-m"] else options[:-1]


def has_tf32(gpus: Sequence[dict[str, Any]]) -> bool:
    """Whether all GPUs have TF32: which of them the script takes is not known."""
    found = [gpu["capability"] for gpu in gpus]
    return bool(found) and all(
        text[:1].isdigit() and float(text) >= _TF32 for text in found
    )
