"""Training scripts as people write them, each run with torch alone and with `patch()`:
the same losses, state dicts and warnings, and stats() shows that kernels ran.

The scripts in `clients` know nothing of trainfast. Each trains a small model for a few
steps and ends with `torch.save({...}, "final.pt")`; what it saves is compared.
"""

import ast
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import trainfast
from tests.forks import Forks, Run
from trainfast.torch.optim.state import OPTIONS

HERE = Path(__file__).parent
CLIENTS = HERE / "clients"
# timm lies apart: torchvision, which it needs, has wheels for one torch only.
APART = HERE.parents[1] / "build" / "clients"
SECONDS = 200  # before a child is ended; alone on a machine none needs 20

# The runner as Python would run it, in a fork.
RUN = "import runpy, sys\nrunpy.run_path(sys.argv[0], run_name='__main__')"

# Kernels round the last bits of float32 differently, and each step carries that on.
# Adam divides a gradient by its own size, so where its terms nearly cancel it moves a
# weight differently by a part of the learning rate: small beside the largest weights.
TOLERANCE = 2e3 * torch.finfo(torch.float32).eps


class Client(NamedTuple):
    name: str
    packages: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ("adamw",)  # what stats() must count calls of
    fallbacks: tuple[str, ...] = ()  # the only ones, but for small calls
    processes: int = 1
    resumes: bool = False  # with --resume, from what a run has saved halfway
    noise: tuple[str, ...] = ()  # whose gradients are rounding errors: keys' biases
    may_warn: tuple[str, ...] = ()  # of what one run alone may warn, by a part of it


AMP = ("adamw", "amp", "clip")
CLIENTS_RUN = [
    Client("nanogpt.py", (), ("adamw", "clip", "attention"), resumes=True),
    Client("amp_loop.py", (), AMP, resumes=True),
    Client(
        "huggingface_trainer.py",
        ("transformers", "accelerate"),
        ("adamw", "clip", "attention"),
        resumes=True,
    ),
    Client("accelerate_loop.py", ("accelerate",), ("adamw", "clip"), resumes=True),
    Client("accelerate_scaler.py", ("accelerate",), ("adamw", "clip")),
    Client("lightning_module.py", ("lightning",), resumes=True),
    Client("lightning_bf16.py", ("lightning",), ("adamw", "clip")),
    Client("lightning_fp16.py", ("lightning",), AMP),
    Client("timm_vit.py", ("timm", "torchvision", "sklearn")),
    Client(
        "sentence_transformers_trainer.py",
        ("sentence_transformers", "datasets", "accelerate"),
        ("adamw", "clip"),
    ),
    Client("pyg_gat.py", ("torch_geometric",)),
    Client("lstm_text.py", (), ("adamw", "clip")),
    Client("ppo.py", (), ("adamw", "clip")),
    Client("compiled.py"),
    Client("ddp.py", (), ("adamw", "clip"), processes=2),
    Client("fsdp2.py", (), ("adamw", "clip"), processes=2),
    Client("notebook.ipynb", ("nbclient", "ipykernel", "sklearn"), ("adamw", "clip")),
    Client(
        "transformer_encoder.py",
        ("sklearn",),
        noise=("in_proj_bias",),
        # of torch's fused inference path, which patch() may turn off
        may_warn=("PyTorch API of nested tensors",),
    ),
    Client("diffusion_unet.py", (), ("adamw", "clip")),
    Client("recommender.py"),
    Client("gan.py"),
]


# The others are slow: `make test-all` runs them.
SMOKE = {"nanogpt.py"}


@pytest.fixture(
    params=[
        pytest.param(
            client,
            id=client.name.split(".")[0],
            marks=() if client.name in SMOKE else pytest.mark.slow,
        )
        for client in CLIENTS_RUN
    ]
)
def client(request):
    for package in request.param.packages:
        if importlib.util.find_spec(package) is None and not (APART / package).exists():
            pytest.skip(f"{package} is not installed; `make .venv/.clients` does that")
    return request.param


def environment_of(client):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(trainfast.__file__).parent.parent)]
            + [str(APART)] * ("timm" in client.packages)
        ),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def command(client, folder, mode, *arguments):
    """The runner's words for one run; creates the run's folder."""
    folder.mkdir(exist_ok=True)
    runner = [str(HERE / "client_runner.py"), mode, str(folder / "notes.json")]
    return [*runner, str(CLIENTS / client.name), *arguments]


def start(client, folder, command):
    """Starts the client in new interpreters; returns the process."""
    interpreter = [sys.executable]
    if client.processes > 1:
        # Again where one fails: now and then one of torch's threads aborts at exit.
        interpreter += ["-m", "torch.distributed.run", "--max-restarts=1"]
        interpreter += [f"--nproc-per-node={client.processes}"]
        interpreter += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    with open(folder / "output", "w", encoding="utf-8") as output:
        return subprocess.Popen(
            [*interpreter, *command],
            cwd=folder,
            env=environment_of(client) | cache_in(folder),
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that what it starts can be ended with it
        )


def cache_in(folder):
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def result(folder, status):
    """What the client saved and what was noted of its run."""
    output = output_of(folder)
    assert status == 0, f"{folder.name} run of the client failed:\n{output[-6000:]}"
    notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    final = torch.load(folder / "final.pt", map_location="cpu", weights_only=False)
    return final, notes


@pytest.fixture
def run_all(client, tmp_path):
    """run_all(folders) runs the client in all folders at once, and returns a dict that
    maps a folder's name to its result()."""
    if client.name in SMOKE or client.processes > 1 or client.name.endswith(".ipynb"):
        yield lambda folders: run_anew(client, folders)
        return

    def run_forks(folders):
        runs = [
            Run(
                *(str(at), str(at / "output"), RUN),
                arguments=command(client, at, *how),
                environment=list(cache_in(at).items()),
                seconds=SECONDS,
            )
            for at, how in folders.items()
        ]
        return {
            at.name: result(at, status)
            for at, status in zip(folders, forks.run(*runs), strict=True)
        }

    imports = "import torch._dynamo\n"  # what a first optimizer imports
    if "timm" not in client.packages:  # whose runner prepares torchvision first
        imports += imports_of(CLIENTS / client.name)
    with Forks(imports, cwd=tmp_path, env=environment_of(client)) as forks:
        yield run_forks


def imports_of(script):
    kinds = ast.Import | ast.ImportFrom
    body = ast.parse(script.read_text(encoding="utf-8")).body
    return "\n".join(ast.unparse(node) for node in body if isinstance(node, kinds))


def run_anew(client, folders):
    """Runs the client in new interpreters, in which patch() precedes every import."""
    commands = {at: command(client, at, *how) for at, how in folders.items()}
    running = {at: start(client, at, commands[at]) for at in folders}
    finished = {}
    try:
        for at in folders:
            try:
                status = running[at].wait(SECONDS)
            except subprocess.TimeoutExpired:
                if client.processes == 1:
                    raise
                status = None
            if status is None or (status != 0 and could_not_connect(at)):
                # Once more: now and then gloo does not connect its processes, or hangs.
                end(running[at])
                running[at] = start(client, at, commands[at])
                status = running[at].wait(SECONDS)
            finished[at.name] = result(at, status)
        return finished
    finally:
        for process in running.values():
            end(process)


def could_not_connect(folder):
    """Whether gloo failed to connect the processes of a run."""
    return "Gloo connectFullMesh failed" in output_of(folder)


def output_of(folder):
    return (folder / "output").read_text(encoding="utf-8", errors="replace")


def end(process):
    """Ends it and what it has started; torchrun ends its processes by itself."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(40)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def flatten(value, path=""):
    """(path, leaf) pairs of nested dicts and lists, whose own types and keys are leaves
    too; without trainfast's options of param groups, which are at their defaults."""
    if isinstance(value, dict):
        keys = [key for key in value if key not in OPTIONS]
        for key, plain in OPTIONS.items():
            assert value.get(key, plain) == plain, f"{path}.{key}: {value[key]}"
        yield path, (type(value), keys)
        for key in keys:
            yield from flatten(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        yield path, (type(value), len(value))
        for i, part in enumerate(value):
            yield from flatten(part, f"{path}[{i}]")
    else:
        yield path, value


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def kind(path):
    """Of tensors that are of one size: weights, first moments, second moments."""
    moment = path.rpartition(".")[2]
    return moment if moment in MOMENTS else ".".join(path.split(".")[:2])


def check_same(client, got, want):
    """The same structure, types and, within the tolerance, numbers."""
    got, want = list(flatten(got)), list(flatten(want))
    assert [path for path, _ in got] == [path for path, _ in want]
    largest = {}
    for path, value in want:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            size = value.nan_to_num(0, 0, 0).abs().max().item() if value.numel() else 0
            largest[kind(path)] = max(largest.get(kind(path), 0), size)
    wrong = []
    for (path, mine), (_, theirs) in zip(got, want, strict=True):
        atol = TOLERANCE * largest.get(kind(path), 0)
        with_values = not path.endswith(client.noise or ("no name",))
        try:
            check_leaf(mine, theirs, atol, with_values)
        except AssertionError as error:
            wrong.append(f"{path}: {error}")
    assert not wrong, f"{len(wrong)} differ:\n" + "\n".join(wrong[:20])


def check_leaf(got, want, atol, with_values):
    assert type(got) is type(want), f"{type(got)}, not {type(want)}"
    if isinstance(want, torch.Tensor):
        same = (got.dtype, got.shape, got.stride(), got.requires_grad)
        assert same == (want.dtype, want.shape, want.stride(), want.requires_grad)
    if not isinstance(want, torch.Tensor | float):
        assert got == want
    elif with_values:
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=atol, equal_nan=True)


def check_pair(client, patched, plain):
    """Of what finish() returns for both."""
    (got, after), (want, before) = patched, plain
    check_same(client, got, want)
    for warned, other in ((after, before), (before, after)):
        for _, text in (w for w in warned["warnings"] if w not in other["warnings"]):
            assert any(part in text for part in client.may_warn), text
    for kernel in client.kernels:
        assert sum(after["calls"].get(kernel, {}).values()) > 0, after
    for kernel, reasons in after["fallbacks"].items():
        small = ("a small ", "small gradients", "a plain update")
        by_size = all(reason.startswith(small) for reason in reasons)
        assert by_size or kernel in client.fallbacks, after


def test_patch_changes_no_result(client, run_all, tmp_path):
    folders = {mode: tmp_path / mode for mode in ("plain", "patched")}
    runs = run_all({at: (mode,) for mode, at in folders.items()})
    check_pair(client, runs["patched"], runs["plain"])
    if not client.resumes:
        return
    # Either goes on from the other's checkpoint to the same end.
    resumed = {}
    for mode, other in (("plain", "patched"), ("patched", "plain")):
        folder = tmp_path / f"{mode}-resumed"
        shutil.copytree(
            folders[other],
            folder,
            ignore=shutil.ignore_patterns("final.pt", "notes.json", "output"),
        )
        resumed[folder] = (mode, "--resume")
    again = run_all(resumed)
    check_pair(client, again["patched-resumed"], again["plain-resumed"])
    check_same(client, again["plain-resumed"][0], runs["plain"][0])
