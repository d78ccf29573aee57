""".ci/gpu PART: one part of what only a machine with a GPU can show.

    PYTHON=python3 OUT=folder .ci/gpu correctness

Parts: correctness, sanitize, attention, rest. Each ends within 560 s, its build for the
GPU at hand included, and needs no network: only the Python that PYTHON names, with
torch, pytest and pytest-xdist, and a CUDA toolkit's compute-sanitizer and ncu. NVRTC is
what TRAINFAST_NVRTC names, or is taken from a wheel of that Python. Images in
cuda/images/ (an sdist carries them) need none, but for the sm_75 path.

Each part leaves gpu-PART.tar in OUT (benchmarks/results), also where a step fails: the
steps' output and results, and about.json with commit, driver, clocks and registers.
--dry runs every step on the SIMT runner in the GPU's place, with the least of its work.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 560  # seconds of a part
PTX75 = ROOT / "build" / "ptx75"
LIBRARY = "trainfast/libtrainfast_cuda.so"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
QUERY = "name,compute_cap,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"


@dataclass(frozen=True)
class Step:
    name: str
    seconds: int  # at most; less where the part's time ends before
    command: list
    more: dict = field(default_factory=dict)  # of the environment; None: removed


# ---- Steps ---------------------------------------------------------------------------


class Plan:
    """The steps of the parts, for the GPU or, `dry`, for the SIMT runner."""

    def __init__(self, out, dry):
        self.out, self.dry = out, dry
        self.backend = "simt" if dry else "cuda"
        self.env = {"TRAINFAST_BACKEND": "simt"} if dry else {}

    def python(self, name, seconds, *words, **more):
        return Step(name, seconds, [sys.executable, *words], {**self.env, **more})

    def build(self):
        if self.dry:
            return self.python("build", 60, "-c", "import trainfast")
        words = ("setup.py", "-q", "build_ext", "--inplace")
        return self.python("build", 260, *words, TRAINFAST_CUDA="1", **nvrtc())

    def build_ptx75(self):
        """The oldest GPU's code as PTX, which the driver compiles for this one."""
        if self.dry:
            return self.python("build PTX 75", 60, "-c", "import trainfast")
        words = ("setup.py", "-q", "build", "--build-lib", str(PTX75))
        more = {"TRAINFAST_CUDA": "1", "TRAINFAST_CUDA_ARCHS": "75"}
        return self.python("build PTX 75", 150, *words, **more, **nvrtc())

    @property
    def ptx75(self):
        if self.dry:
            return {"TRAINFAST_SIMT_PTX": "75"}
        return {"TRAINFAST_CUDA_LIBRARY": str(PTX75 / LIBRARY)}

    def tests(self, name, seconds, *paths, **more):
        words = ["-m", "pytest", "-q", "-m", "not slow", *paths]
        chosen = f"{self.backend} or gpu"
        words += ["-k", chosen, *(["--collect-only"] if self.dry else ["-n", "8"])]
        if not self.dry:  # or the tests would build these, which the CPU can test
            more |= {f"TRAINFAST_{name}_LIBRARY": "" for name in ("SIMT", "WIDE")}
        return self.python(name, seconds, *words, TRAINFAST_BACKEND=None, **more)

    def bench(self, name, seconds, module, *words, **more):
        words = ["-m", f"benchmarks.{module}", *words]
        words += ["--json", str(self.out / f"{name}.json".replace(" ", "-"))]
        words += ["--smoke", "--device", "cpu"] if self.dry else ["--device", "cuda"]
        return self.python(name, seconds, *words, **more)

    def attention(self, name, seconds, *words, **more):
        words = [*words, "--within", str(seconds - 30)]
        if self.dry:
            words = ["--as-gpu", "--case", "f16-n512-d64", "f16-causal-n4096-d128"]
        return self.bench(name, seconds, "bench_attention", *words, **more)

    def under(self, tool, step):
        return Step(step.name, step.seconds, [*tool, *step.command], step.more)

    def parts(self):
        return {
            "correctness": self.correctness,
            "sanitize": self.sanitize,
            "attention": self.attention_part,
            "rest": self.rest,
        }

    def correctness(self):
        folders = [f"tests/torch/{name}" for name in ("optim", "amp", "attention")]
        everything = ["tests/core", "tests/numpy", *folders]
        everything += ["tests/torch/test_gpu.py", "tests/torch/memory/test_gpu.py"]
        everything += ["tests/neighbours/test_gpu.py"]
        everything += ["tests/simt/test_ptx.py"]
        again = ["tests/core/attention", "tests/torch/attention"]
        return [
            self.build(),
            self.tests("tests", 260, *everything),
            self.build_ptx75(),
            self.tests("attention tests on PTX 75", 150, *again, **self.ptx75),
        ]

    def sanitize(self):
        words = ("-m", "trainfast", "selftest", "--backend", self.backend)
        steps = [self.build()]
        for tool in TOOLS:
            step = self.python(tool, 150, *words, TRAINFAST_BACKEND=None)
            prefix = [toolkit("compute-sanitizer"), "--tool", tool]
            steps.append(self.under([*prefix, "--error-exitcode", "1"], step))
        return steps

    def estimates(self):
        """Memory estimates beside what torch's allocator counts."""
        report = ["--json", str(self.out / "estimates.json")]
        words = ["--dry", "mlp"] if self.dry else report
        return self.python("estimates", 120, "-m", "benchmarks.estimates.gpu", *words)

    def attention_part(self):
        return [self.build(), self.attention("attention", 500, "--seconds", "0.3")]

    def rest(self):
        profiled = self.python("ncu", 90, "-m", "benchmarks.gpu_kernels")
        if self.dry:
            profiled.command.append("--dry")
        report = self.out / "kernels.csv"
        ncu = [toolkit("ncu"), "--set", "full", "--csv", "--page", "raw"]
        ncu += ["--profile-from-start", "off", "--log-file", str(report)]
        return [
            self.build(),
            self.estimates(),
            self.bench("adamw", 110, "bench_adamw", "--seconds", "1"),
            self.bench("amp", 80, "bench_amp", "--seconds", "1"),
            self.under(ncu, profiled),
            self.bench("gemm", 40, "bench_gemm"),
            self.build_ptx75(),
            self.attention(
                *("attention PTX 75", 90, "--ptx75", "--seconds", "0.2"), **self.ptx75
            ),
        ]


def toolkit(name):
    """A program of the CUDA toolkit, which is often not in PATH."""
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/local/cuda/bin"
    return shutil.which(name, path=path) or name


def nvrtc():
    """The variable that names NVRTC, where the build would not find it: any version's
    wheel beside torch."""
    if os.environ.get("TRAINFAST_NVRTC"):
        return {}
    found = [
        (path.name, str(wheel.locate_file(path)))
        for wheel in metadata.distributions()
        if (wheel.metadata["Name"] or "").startswith("nvidia-cuda-nvrtc")
        for path in wheel.files or ()
        if re.fullmatch(r"libnvrtc\.so\.\d+", path.name)
    ]
    return {"TRAINFAST_NVRTC": min(found)[1]} if found else {}


# ---- Running them --------------------------------------------------------------------


def run_step(step, out, seconds):
    """Runs a step for at most so many seconds; returns what is known about it."""
    start, status = time.monotonic(), "not started, the time is up"
    if seconds >= 1:
        print(f"\n==== {step.name} (at most {seconds:.0f} s)", flush=True)
        status = output_of(step, out / f"{step.name}.log".replace(" ", "-"), seconds)
    taken = round(time.monotonic() - start, 1)
    print(f"==== {step.name}: {status} after {taken} s", flush=True)
    return {"step": step.name, "status": status, "seconds": taken, "gpu": gpu()}


def output_of(step, log, seconds):
    """The exit status of a step, or a sentence; its output goes to the file `log`."""
    env = {k: v for k, v in {**os.environ, **step.more}.items() if v is not None}
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                step.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=ROOT,
                start_new_session=True,
            )
        except OSError as error:
            return str(error)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print("\n".join(log.read_text(errors="replace").splitlines()[-20:]), flush=True)
    return status


def said(*command):
    """What a command prints; "" where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout.strip()


def gpu():
    return said("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv")


def run_part(part, steps, out):
    """Runs the steps, and writes about.json after each; returns those that failed."""
    end = time.monotonic() + LIMIT - 10  # for the tar
    about = {"part": part, "commit": said("git", "rev-parse", "HEAD"), "gpu": gpu()}
    about |= {"changed": said("git", "status", "--short"), "python": sys.version}
    done = about["steps"] = []
    for step in steps:
        done.append(run_step(step, out, min(step.seconds, end - time.monotonic())))
        registers = ROOT / "build" / "objects" / "cuda.json"
        if registers.exists():
            about["registers"] = json.loads(registers.read_text())
        (out / "about.json").write_text(json.dumps(about, indent=1))
        if step.name == "build" and done[-1]["status"] != 0:
            break  # the others would run what was built before
    return [step["step"] for step in done if step["status"] != 0]


def main():
    parser = argparse.ArgumentParser(".ci/gpu", None, __doc__.splitlines()[0])
    parser.add_argument("part", choices=list(Plan(Path(), False).parts()))
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    os.environ.pop("TRAINFAST_BACKEND", None)
    kept = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    kept.mkdir(parents=True, exist_ok=True)
    if not args.dry and not gpu():
        raise SystemExit("a GPU that nvidia-smi finds must be here, got none")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        try:
            failed = run_part(args.part, Plan(out, args.dry).parts()[args.part](), out)
        finally:
            tar = kept / f"gpu-{args.part}.tar"
            with tarfile.open(tar, "w") as archive:
                archive.add(out, f"gpu-{args.part}")
            print(f"wrote {tar}", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
