"""The probe's sandbox: what a command does in it is gone afterwards."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainfast.probe import run, sandbox

needs_sandbox = pytest.mark.skipif(
    not run.has_sandbox(), reason="no unprivileged user namespaces here"
)


def snapshot(folder):
    """Names, modes, times and contents of everything in a folder."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        state = path.lstat()
        text = path.read_bytes() if path.is_file() else b""
        digest = hashlib.sha256(text).hexdigest()
        found[str(path)] = (state.st_mode, state.st_mtime_ns, state.st_size, digest)
    return found


def in_sandbox(code, stage, *arguments, cwd=None):
    command = [sys.executable, sandbox.__file__, str(stage)]
    command += [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "stage").mkdir()
    return tmp_path / "stage"


@pytest.fixture
def output(tmp_path):
    """A folder as a training script leaves it."""
    folder = tmp_path / "runs" / "7"
    folder.mkdir(parents=True)
    for step in (1, 2):
        (folder / f"step{step}.pt").write_bytes(bytes([step]) * 1000)
    (folder / "log.txt").write_text("step 1\n")
    return folder


HARM = {
    "rmtree": "shutil.rmtree(folder); os.makedirs(folder, exist_ok=False)",
    "overwrite": "open(f'{folder}/step1.pt', 'wb').write(b'new')",
    "append": "open(f'{folder}/log.txt', 'a').write('step 2')",
    "rename": "os.replace(f'{folder}/step1.pt', f'{folder}/step2.pt')",
    "chmod": "os.chmod(f'{folder}/step1.pt', 0)",
    "times": "os.utime(f'{folder}/step1.pt', (0, 0))",
    "sqlite": "sqlite3.connect(f'{folder}/runs.db').execute('create table t (x)')",
    "another program": "subprocess.run(['rm', '-r', folder], check=True)",
    "resume from the newest": (
        "newest = max(glob.glob(f'{folder}/*.pt')); text = open(newest, 'rb').read(); "
        "assert text == bytes([2]) * 1000; open(newest, 'wb').write(text + b'x'); "
        "assert open(newest, 'rb').read() == text + b'x'"
    ),
    "safetensors": (
        "import numpy, safetensors.numpy as s; s.save_file({'w': numpy.ones(3)}, "
        "f'{folder}/step1.pt'); assert s.load_file(f'{folder}/step1.pt')['w'][2] == 1"
    ),
    "a file in the current folder": (
        "open('here.txt', 'w').write('x'); os.stat('here.txt')"
    ),
    "a link out of the folder": (
        "os.symlink('/etc/passwd', f'{folder}/link'); open(f'{folder}/link', 'a')"
    ),
}


@needs_sandbox
@pytest.mark.parametrize("harm", HARM)
def test_nothing_outside_of_the_sandbox_changes(harm, stage, output):
    if harm == "safetensors":
        pytest.importorskip("safetensors")
    code = "import glob, os, shutil, sqlite3, subprocess, sys; folder = sys.argv[1]\n"
    before = snapshot(output.parent.parent)
    done = in_sandbox(code + HARM[harm], stage, output, cwd=output)
    assert done.returncode == 0, done.stderr
    assert snapshot(output.parent.parent) == before


@needs_sandbox
def test_harm_is_done_without_the_sandbox(output):
    """The cases above are no proof if they do nothing."""
    code = "import glob, os, shutil, sqlite3, subprocess, sys; folder = sys.argv[1]\n"
    for harm in ("rmtree", "overwrite", "sqlite", "another program"):
        copy = output.parent / harm
        shutil.copytree(output, copy)
        before = snapshot(copy)
        subprocess.run([sys.executable, "-c", code + HARM[harm], copy], check=True)
        assert snapshot(copy) != before, harm


@needs_sandbox
def test_network_is_the_loopback_alone(stage):
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 5)
try:
    socket.create_connection(("192.0.2.1", 9), 5)
except OSError as error:
    print(error.strerror)
"""
    done = in_sandbox(code, stage)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Network is unreachable\n"


@needs_sandbox
def test_processes_end_with_the_command(stage):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print(os.getpid())
"""
    done = in_sandbox(code, stage, "a-mark-that-no-other-process-has")
    assert done.returncode == 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        own = int(folder.name) == os.getpid()
        assert own or b"a-mark-that-no-other-process-has" not in words


@needs_sandbox
def test_exit_status_is_that_of_the_command(stage):
    assert in_sandbox("raise SystemExit(3)", stage).returncode == 3


@needs_sandbox
def test_without_namespaces_nothing_is_run(stage, output):
    """Inside of a user namespace that allows none below it."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare program")
    script = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh"]
    command += [
        sys.executable,
        sandbox.__file__,
        str(stage),
        "/bin/rm",
        "-r",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == sandbox.CANNOT
    assert output.exists()
    assert "unshare: " in done.stderr
