"""Builds the small C libraries that the benchmarks measure bounds with."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = "-std=c11 -O3 -march=native -ffp-contract=off -fopenmp -shared -fPIC"
WARNINGS = "-Wall -Wextra"


def build(source: Path) -> ctypes.CDLL:
    """Compile and load a C file. Raises RuntimeError where that cannot be done.

    torch must be imported before, so that the OpenMP runtime found is its own.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise RuntimeError(f"{source.name} needs a C compiler (cc), and none was found")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / f"{source.stem}.so"
        flags = [*FLAGS.split(), *WARNINGS.split()]
        command = [*compiler.split(), *flags, str(source), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        return ctypes.CDLL(str(built))
