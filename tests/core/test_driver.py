"""The CUDA library that is shipped, on a driver that runs nothing: tests/driver_stub.c
stands in for libcuda.so.1, so that its own code is loaded, every kernel is found in it
and is launched as that kernel must be."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import trainfast
from tests.fake_device import run
from trainfast.cuda_library import code_for, library_code

ROOT = Path(__file__).parents[2]
LIBRARY = Path(trainfast.__file__).parent / "libtrainfast_cuda.so"
COMPILED = ROOT / "build" / "objects" / "cuda.json"
IMAGES = ROOT / "build" / "objects" / "images.json"

pytestmark = pytest.mark.skipif(
    not (LIBRARY.exists() and COMPILED.exists()), reason="built without CUDA"
)

CALLS = """
import torch
from trainfast import _core


class OnGpu:
    "A torch tensor that says it lies on a GPU."

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def __dlpack_device__(self):
        return DLPACK_CUDA, 0

    def __dlpack__(self):
        return claimed(self.tensor.__dlpack__())


def on_gpu(*shape, dtype=torch.float32):
    return OnGpu(torch.zeros(shape, dtype=dtype))


def scratch(n):
    return on_gpu(n)


def adamw(*dtypes, state=None):
    columns = [[on_gpu(300, dtype=dtype) for dtype in dtypes] for _ in range(2)]
    columns += [[on_gpu(300, dtype=state or of) for of in dtypes] for _ in range(2)]
    scales = [on_gpu(3, 3) for _ in dtypes] if state is torch.uint8 else None
    options = dict(scales=scales)
    options |= dict(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    options |= dict(maximize=False, decoupled_weight_decay=True, lr=0.1)
    _core.adamw(*columns, None, 1, _core.Workspace(), **options)


def scaling(dtype):
    grads, options = [on_gpu(300, dtype=dtype)], dict(found_inf=on_gpu(1))
    _core.amp_grads(grads, _core.Workspace(), total_norm=on_gpu(1), **options)
    count = OnGpu(torch.zeros(1, dtype=torch.int32))
    options = dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=10)
    _core.amp_update(on_gpu(1), count, [on_gpu(1)], **options)


def attend(dtype, dim, n_q=3, n_k=5, heads=2, backward=True, **options):
    number = torch.float64 if dtype is torch.float64 else torch.float32
    q, out, dout, dq = (on_gpu(1, heads, n_q, dim, dtype=dtype) for _ in range(4))
    k, v, dk, dv = (on_gpu(1, 2, n_k, dim, dtype=dtype) for _ in range(4))
    lse = on_gpu(1, heads, n_q, dtype=number)
    options |= dict(scale=0.5, scratch=scratch)
    gradients = [None, None, None]
    if options.pop("all_options", False):
        options["bias"] = on_gpu(1, heads, n_q, n_k, dtype=dtype)
        options["alibi_slopes"] = on_gpu(heads, dtype=number)
        options["sinks"] = on_gpu(heads, dtype=number)
        gradients = [on_gpu(1, heads, n_q, n_k, dtype=number)]
        gradients += [on_gpu(heads, dtype=number) for _ in range(2)]
    _core.attention(q, k, v, out, lse, **options)
    if backward:
        args = dout, q, k, v, out, lse, None, dq, dk, dv, *gradients
        _core.attention_backward(*args, **options)


def search(dtype, **options):
    points, ptr = on_gpu(70, 3, dtype=dtype), torch.tensor([0, 70])

    def make(n):
        rows = [OnGpu(torch.zeros(n, dtype=torch.int64)) for _ in range(2)]
        return (*rows, None, None, None)

    _core.neighbours(points, None, ptr, None, make, scratch=scratch, **options)


def measure(dtype):
    pred, target = on_gpu(70, 3, 20, 2, dtype=dtype), on_gpu(70, 20, 2)
    _core.trajectory(pred, target, on_gpu(2, 7, dtype=torch.float64), scratch=scratch)
"""

ALL = """
f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
adamw(f32), adamw(bf16), adamw(f16), adamw(f64), adamw(f32, state=torch.uint8)
for dtype in (f32, f64):
    scaling(dtype)
    attend(dtype, 16), attend(dtype, 16, all_options=True)
for dtype in (f16, bf16):
    for dim in (32, 64, 96, 128, 192, 256):
        attend(dtype, dim), attend(dtype, dim, all_options=True)
        attend(dtype, dim, n_q=1, n_k=600, heads=4, backward=False)
    attend(dtype, 64, n_q=300, n_k=300, all_options=True)
for dtype in (f32, f64):
    search(dtype, r=1.0), search(dtype, r=1.0, most=5), measure(dtype)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The folder of the stub."""
    folder = tmp_path_factory.mktemp("driver")
    compiler = shutil.which("cc") or shutil.which("gcc")
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{ROOT / 'cuda'}", "-o", folder / "libcuda.so.1"]
    subprocess.run([*command, ROOT / "tests" / "driver_stub.c"], check=True)
    return str(folder)


def on_driver(driver, code, **environment):
    return run(CALLS + code, LIBRARY, LD_LIBRARY_PATH=driver, **environment)


@pytest.fixture(scope="module")
def bytes_of(tmp_path_factory):
    """{struct of cuda/arguments.h: its bytes for the host}"""
    program = tmp_path_factory.mktemp("arguments") / "print"
    source = """
        #include "kernels.h"
        #include <stdio.h>
        #define PRINT(path, id, arguments, ...) \\
            printf("%s %zu\\n", #arguments, sizeof(arguments));
        #include "arguments.h"
        int main(void) { TFAST_KERNELS(PRINT) return 0; }
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    command = [compiler, "-x", "c", "-std=c11", f"-I{ROOT / 'cuda'}"]
    command += [f"-I{ROOT / 'csrc'}", "-o", program, "-"]
    subprocess.run(command, input=source, text=True, check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {name: int(size) for name, size in map(str.split, said.splitlines())}


def compiled():
    """{architecture: {id of a kernel: what ptxas said}}"""
    return {int(arch): of for arch, of in json.loads(COMPILED.read_text()).items()}


def loads_and_launches(done):
    """What was loaded, and the kernels that were launched, with their shapes."""
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    loaded = {line[1] for line in lines if line[0] == "load"}
    return loaded, {line[1]: line[2:] for line in lines if line[0] == "launch"}


def own_code(capability):
    """The architecture that a GPU should take, or "PTX"."""
    archs = [a for a in compiled() if a // 10 == capability // 10 and a <= capability]
    return f"sm_{max(archs)}" if archs else "PTX"


def kernels_in(code):
    """The ids of the kernels in the images of an architecture, or in the PTX."""
    return {
        id
        for image in json.loads(IMAGES.read_text())
        if code == ("PTX" if image["is_ptx"] else f"sm_{image['arch']}")
        for id in image["names"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 86, 87, 89, 90, 100, 120, 121])
def test_gpu_takes_the_newest_code_that_it_runs(driver, capability):
    code = "adamw(torch.float32)"
    done = on_driver(driver, code, STUB_CAPABILITY=str(capability))
    loaded, launched = loads_and_launches(done)
    assert loaded == {own_code(capability)}
    assert len(launched) == 1
    said, _ = code_for(capability, library_code(str(LIBRARY)))
    assert said.split()[0] == own_code(capability)  # as env tells it


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 100])
def test_every_kernel_is_found_and_launched(driver, bytes_of, capability):
    if capability not in compiled() and own_code(capability) != "PTX":
        pytest.skip(f"built without sm_{capability}")
    done = on_driver(driver, ALL, STUB_CAPABILITY=str(capability))
    loaded, launched = loads_and_launches(done)
    assert loaded == {own_code(capability)}
    assert len(launched) == len(kernels_in(own_code(capability)))
    for name, (grid, block, size, stream) in launched.items():
        assert int(grid) > 0 and int(block) >= 32 and stream == "(nil)", name
        # A name ends with that of its argument's type, behind how long that is.
        (struct,) = [of for of in bytes_of if name.endswith(f"{len(of)}{of}")]
        assert loaded == {"PTX"} or int(size) == bytes_of[struct], name


REASON = """
import trainfast
print(next(b["reason"] for b in trainfast.backends() if b["name"] == "cuda"))
"""


def reason(driver, **environment):
    done = on_driver(driver, REASON, **environment)
    assert done.code == 0, done.err
    return done.out.strip()


@pytest.mark.slow
def test_driver_that_cannot_serve_is_named(driver, tmp_path):
    old = "driver too old: it supports CUDA 11.8, this library needs 12.0; install "
    assert reason(driver, STUB_VERSION="11080") == old + "driver 525 or newer"
    assert reason(driver, STUB_DEVICES="0") == "no GPU is visible"
    assert reason(driver) == "None"


@pytest.mark.slow
def test_oldest_driver_serves_machine_code_but_not_ptx(driver):
    old, arch = {"STUB_VERSION": "12000"}, min(compiled())
    done = on_driver(driver, "adamw(torch.float32)", STUB_CAPABILITY=str(arch), **old)
    assert loads_and_launches(done)[0] == {own_code(arch)}
    done = on_driver(driver, "adamw(torch.float32)", STUB_CAPABILITY="100", **old)
    assert "does not read its PTX; install driver 575 or newer" in done.err


def test_gpu_without_code_is_named(driver):
    done = on_driver(driver, "adamw(torch.float32)", STUB_CAPABILITY="70")
    assert "NotImplementedError: the GPU must be sm_75 or newer, got sm_70" in done.err
