"""The probe's sandbox: what a command does in it is gone afterwards."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainfast.probe import run, sandbox

KINDS = {"namespaces": run.NAMESPACES, "system calls": run.SYSTEM_CALLS}


@pytest.fixture(params=KINDS)
def kind(request):
    if not run.has(KINDS[request.param]):
        pytest.skip(f"no sandbox by {request.param} here")
    return KINDS[request.param]


def snapshot(folder):
    """Names, modes, times and contents of everything in a folder."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        state = path.lstat()
        text = path.read_bytes() if path.is_file() else b""
        digest = hashlib.sha256(text).hexdigest()
        found[str(path)] = (state.st_mode, state.st_mtime_ns, state.st_size, digest)
    return found


def in_sandbox(kind, code, stage, *arguments, cwd=None):
    command = [*kind, str(stage), sys.executable, "-c", code, *map(str, arguments)]
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


HARM = {  # what a script does, and then sees
    "rmtree": (
        "shutil.rmtree(folder); assert not os.path.exists(folder); "
        "os.makedirs(folder, exist_ok=False); assert os.listdir(folder) == []"
    ),
    "overwrite": (
        "open(f'{folder}/step1.pt', 'wb').write(b'new'); "
        "assert open(f'{folder}/step1.pt').read() == 'new'"
    ),
    "append": (
        "open(f'{folder}/log.txt', 'a').write('step 2'); "
        "assert open(f'{folder}/log.txt').read() == 'step 1\\nstep 2'"
    ),
    "rename": (
        "os.replace(f'{folder}/step1.pt', f'{folder}/step2.pt'); "
        "assert sorted(os.listdir(folder)) == ['log.txt', 'step2.pt']; "
        "assert open(f'{folder}/step2.pt', 'rb').read() == bytes([1]) * 1000"
    ),
    "move a folder": (
        "shutil.move(folder, folder + '.old'); assert not os.path.exists(folder); "
        "assert len(os.listdir(folder + '.old')) == 3"
    ),
    "chmod": (
        "os.chmod(f'{folder}/step1.pt', 0); "
        "assert os.stat(f'{folder}/step1.pt').st_mode & 0o777 == 0; "
        "assert os.path.getsize(f'{folder}/step1.pt') == 1000"
    ),
    "times": (
        "os.utime(f'{folder}/step1.pt', (0, 0)); "
        "assert os.path.getmtime(f'{folder}/step1.pt') == 0"
    ),
    "truncate": (
        "os.truncate(f'{folder}/step1.pt', 10); "
        "assert os.path.getsize(f'{folder}/step1.pt') == 10"
    ),
    "hard link": (
        "os.link(f'{folder}/step1.pt', f'{folder}/best.pt'); "
        "open(f'{folder}/best.pt', 'r+b').write(b'new'); "
        "assert open(f'{folder}/step1.pt', 'rb').read(4) == b'new\\x01'"
    ),
    "a new current folder": (
        "os.makedirs('outputs/1'); os.chdir('outputs/1'); open('x', 'w').write('x'); "
        "assert os.getcwd() == f'{folder}/outputs/1'; assert os.listdir() == ['x']; "
        "assert subprocess.check_output(['cat', 'x']) == b'x'; "
        "os.chdir('../..'); assert os.getcwd() == folder; "
        "assert os.listdir('outputs/1') == ['x']"
    ),
    "relative to a descriptor": (
        "at = os.open(folder, os.O_RDONLY); os.mkdir('sub', dir_fd=at); "
        "os.unlink('log.txt', dir_fd=at); "
        "assert sorted(os.listdir(folder)) == ['step1.pt', 'step2.pt', 'sub']"
    ),
    "map a file": (
        "import mmap; file = open(f'{folder}/step1.pt', 'r+b'); "
        "mmap.mmap(file.fileno(), 0)[:3] = b'new'; "
        "assert open(f'{folder}/step1.pt', 'rb').read(3) == b'new'"
    ),
    "temporary files": (
        "import tempfile; open(f'{tempfile.mkdtemp()}/x', 'w').write('x'); "
        "open('/tmp/trainfast-test', 'w').write('x'); os.remove('/tmp/trainfast-test')"
    ),
    "replace from the temporary folder": (
        "import tempfile; new = tempfile.NamedTemporaryFile('w', delete=False); "
        "new.write('new'); new.close(); "
        "try_(lambda: os.replace(new.name, f'{folder}/step1.pt')) or "
        "shutil.move(new.name, f'{folder}/step1.pt'); "
        "assert open(f'{folder}/step1.pt').read() == 'new'"
    ),
    "link from the temporary folder": (
        "import tempfile; new = tempfile.NamedTemporaryFile('w', delete=False); "
        "try_(lambda: os.link(new.name, f'{folder}/new.pt'))"
    ),
    "write through a link in the temporary folder": (
        "import tempfile; link = tempfile.mkdtemp() + '/link'; "
        "try_(lambda: os.link(f'{folder}/step1.pt', link)) and "
        "open(link, 'w').write('new')"
    ),
    "move into the temporary folder": (
        "import tempfile; shutil.move(f'{folder}/step1.pt', tempfile.mkdtemp()); "
        "assert not os.path.exists(f'{folder}/step1.pt')"
    ),
    "open a descriptor again to write": (
        "file = open(f'{folder}/step1.pt', 'rb'); "
        "try_(lambda: open(f'/proc/self/fd/{file.fileno()}', 'r+b').write(b'new')); "
        "try_(lambda: open(f'/dev/fd/{file.fileno()}', 'r+b').write(b'new'))"
    ),
    "errors are the usual ones": (
        "import contextlib\n"
        "for kind, call in ((FileExistsError, lambda: os.mkdir(folder)), "
        "(FileExistsError, lambda: open(f'{folder}/log.txt', 'x')), "
        "(FileNotFoundError, lambda: os.remove(f'{folder}/none')), "
        "(FileNotFoundError, lambda: open(f'{folder}/none/x', 'w')), "
        "(OSError, lambda: os.rmdir(folder)), "
        "(IsADirectoryError, lambda: open(folder, 'w'))):\n"
        "    try: call()\n"
        "    except kind: continue\n"
        "    raise AssertionError(kind)\n"
    ),
    "sqlite": (
        "base = sqlite3.connect(f'{folder}/runs.db'); "
        "base.execute('create table t (x)'); "
        "base.execute('insert into t values (3)'); base.commit(); base.close(); "
        "base = sqlite3.connect(f'{folder}/runs.db'); "
        "assert base.execute('select x from t').fetchall() == [(3,)]"
    ),
    "another program": (
        "subprocess.run(['rm', '-r', folder], check=True); "
        "assert not os.path.exists(folder)"
    ),
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


PREPARE = """
import glob, os, shutil, sqlite3, subprocess, sys
folder = sys.argv[1]

def try_(call):  # a sandbox may refuse it
    try:
        call()
    except OSError:
        return False
    return True
"""


@pytest.mark.parametrize("harm", HARM)
def test_nothing_outside_of_the_sandbox_changes(kind, harm, stage, output):
    if harm == "safetensors":
        pytest.importorskip("safetensors")
    before = snapshot(output.parent)
    done = in_sandbox(kind, PREPARE + HARM[harm], stage, output, cwd=output)
    assert done.returncode == 0, done.stderr
    assert snapshot(output.parent) == before


@pytest.mark.parametrize("seed", range(8))
def test_files_behave_as_without_the_sandbox(kind, seed, stage, tmp_path):
    """A random history of operations has the same results, errors and final tree."""
    program = Path(__file__).with_name("file_operations.py")
    folder, copy = tmp_path / "1" / "tree", tmp_path / "2" / "tree"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "c").write_text("one")
    (folder / "b").write_text("two")
    (folder / "c").symlink_to("a")
    shutil.copytree(folder, copy, symlinks=True)
    before = snapshot(folder)
    command = [sys.executable, str(program), str(seed), "400"]
    expected = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, check=True
    )
    found = subprocess.run(
        [*kind, str(stage), *command], cwd=folder, capture_output=True, text=True
    )
    assert found.stdout.splitlines() == expected.stdout.splitlines(), found.stderr
    assert snapshot(folder) == before


def test_harm_is_done_without_the_sandbox(output):
    """The cases above are no proof if they do nothing."""
    for harm in ("rmtree", "overwrite", "sqlite", "another program"):
        copy = output.parent / harm
        shutil.copytree(output, copy)
        before = snapshot(copy)
        subprocess.run([sys.executable, "-c", PREPARE + HARM[harm], copy], check=True)
        assert snapshot(copy) != before, harm


def test_network_is_the_loopback_alone(kind, stage):
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 5)
try:
    socket.create_connection(("192.0.2.1", 9), 5)
except OSError as error:
    print(error.strerror)
"""
    done = in_sandbox(kind, code, stage)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Network is unreachable\n"


def test_processes_end_with_the_command(kind, stage):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print(os.getpid())
"""
    done = in_sandbox(kind, code, stage, "a-mark-that-no-other-process-has")
    assert done.returncode == 0
    assert not processes_with("a-mark-that-no-other-process-has")


def processes_with(mark):
    """The processes with this word in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return [number for number in found if number != os.getpid()]


def test_processes_end_with_a_probe_that_is_killed(kind, stage):
    """As by a time limit: nobody is left to end the sandbox."""
    code = f"print('begun', flush=True); import time; time.sleep(1000)  # {stage}"
    command = [*kind, str(stage), sys.executable, "-c", code]
    starts = f"import subprocess, time; subprocess.Popen({command}); time.sleep(1000)"
    with subprocess.Popen(
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True
    ) as probe:
        assert probe.stdout.readline() == "begun\n"
        probe.terminate()
    left = processes_with(str(stage))
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = processes_with(str(stage))
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert not left


def test_exit_status_is_that_of_the_command(kind, stage):
    assert in_sandbox(kind, "raise SystemExit(3)", stage).returncode == 3


def test_without_namespaces_nothing_is_run(stage, output):
    """In a container that forbids them, or below a namespace that does."""
    command = [sys.executable, sandbox.__file__, str(stage), "/bin/rm", "-r"]
    command.append(str(output))
    if shutil.which("unshare") is None:
        pytest.skip("no unshare program")
    if subprocess.run(["unshare", "--user", "true"]).returncode == 0:
        script = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
        forbid = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh"]
        command = forbid + command
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == sandbox.CANNOT
    assert output.exists()
    assert "unshare: " in done.stderr
