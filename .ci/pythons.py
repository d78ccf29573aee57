"""Interpreters of other Python versions on this machine.

A name on PATH proves nothing: a version manager puts a `python3.12` there that fails
until the user selects that version. So every candidate is asked for its version.
"""

import os
import re
import subprocess
from pathlib import Path

ASK = "import sys; print('%d.%d' % sys.version_info[:2])"


def candidates():
    """{"3.12": [paths of files named python3.12]}, on PATH and of pyenv."""
    folders = [*Path.home().glob(".pyenv/versions/*/bin")]
    folders += map(Path, os.environ.get("PATH", "").split(os.pathsep))
    found = {}
    for path in (path for folder in folders for path in folder.glob("python3.*")):
        if re.fullmatch(r"python3\.\d+", path.name):
            found.setdefault(path.name.removeprefix("python"), []).append(path)
    return found


def runs(path, version):
    """Whether the file is an interpreter of that version."""
    try:
        done = subprocess.run(
            [path, "-I", "-c", ASK], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def find(version):
    """The first interpreter of the version that runs, or None."""
    paths = candidates().get(version, [])
    return next((path for path in paths if runs(path, version)), None)
