"""Makes .venv ready: `python3 .ci/venv.py build test` creates it where it is missing
and installs what those groups of pyproject.toml lack ("build": what the build needs,
NVRTC among it where CUDA is to be built).

Where the interpreter already has torch, .venv sees the interpreter's packages and those
count whatever their version: a torch that matches the machine's GPU is worth more than
one that matches ours. It starts with code that old Pythons can parse, to say so.
"""

import os
import shutil
import subprocess
import sys

VENV = ".venv"
PYTHON = os.path.join(VENV, "bin", "python")
OLDEST = (3, 11)
HAS_TORCH = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
TOOLS = ("dev", "wheel", "docs")  # groups of programs, which are run from .venv/bin
# Without these nothing can be built or tested; anything else can be missing offline.
ESSENTIAL = ("numpy", "pytest", "setuptools", "torch")


def create():
    """Creates .venv from the interpreter that runs this file."""
    if sys.version_info < OLDEST:
        got = ".".join(str(part) for part in sys.version_info[:3])
        sys.exit(
            f"python must be 3.11 or newer, got {got} at {sys.executable}\n"
            "(another one: make PYTHON=python3.12)"
        )
    inherit = subprocess.call([sys.executable, "-c", HAS_TORCH]) == 0
    inside_venv = sys.prefix != sys.base_prefix
    print(f"trainfast: creating {VENV} from {sys.executable}", flush=True)
    if inherit:
        print("trainfast: it sees that interpreter's packages, torch among them")
    command = [sys.executable, "-m", "venv", VENV]
    if inherit and not inside_venv:
        command.append("--system-site-packages")
    failed = subprocess.call(command) != 0
    if failed and inherit:  # Debian splits off ensurepip, but that pip is visible too
        failed = subprocess.call([*command, "--clear", "--without-pip"]) != 0
    if failed:
        shutil.rmtree(VENV, ignore_errors=True)
        sys.exit("python -m venv must work, got a failure (Debian: python3-venv)")
    if inherit and inside_venv:
        see_packages_of_venv()


def see_packages_of_venv():
    """A venv made inside a venv can inherit from the base interpreter only, so name the
    outer one's packages in a .pth file."""
    import site
    import sysconfig

    paths = {"base": VENV, "platbase": VENV}
    inner = sysconfig.get_path("purelib", "venv", vars=paths)
    with open(os.path.join(inner, "outer_venv.pth"), "w") as pth:
        pth.write("\n".join(site.getsitepackages()) + "\n")


def requirements(groups):
    """What the groups ask for, without what the interpreter's own packages satisfy."""
    import tomllib
    from importlib import metadata

    from pip._vendor.packaging.requirements import Requirement

    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    sys.path.insert(0, "cuda")
    import nvrtc

    wanted = {"nvrtc": nvrtc.requirements()}
    wanted["build"] = project["build-system"]["requires"] + wanted["nvrtc"]
    wanted.update(project["project"]["optional-dependencies"])
    missing = []
    for group in groups:
        for text in wanted[group]:
            need = Requirement(text)
            try:
                found = metadata.distribution(need.name)
            except metadata.PackageNotFoundError:
                missing.append(text)
                continue
            own = os.path.realpath(found.locate_file("")).startswith(
                os.path.realpath(VENV) + os.sep
            )
            # Of NVRTC only the very version is used.
            inherited = not own and group not in TOOLS and need.name != nvrtc.NAME
            if not inherited and not (own and found.version in need.specifier):
                missing.append(text)
    return list(dict.fromkeys(missing))


def importable(name):
    import importlib.util

    return importlib.util.find_spec(name) is not None


def install(groups):
    """Installs what is missing; offline it goes on without what is not essential."""
    missing = requirements(groups)
    if not missing:
        return
    print("trainfast: installing", ", ".join(missing), "(this can take minutes)")
    sys.stdout.flush()
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", *missing]
    if set(groups) <= set(TOOLS):
        pip += ["--ignore-installed"]  # or pip is content with an outer package
    if subprocess.call(pip) == 0:
        return
    from pip._vendor.packaging.requirements import Requirement

    names = [Requirement(text).name for text in missing]
    lacking = [name for name in names if name in ESSENTIAL and not importable(name)]
    if lacking:
        sys.exit("pip must reach a package index to install " + ", ".join(lacking))
    print("trainfast: pip failed, going on without", ", ".join(names), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        install(sys.argv[2:])
    else:
        if not os.path.exists(PYTHON):
            create()
        os.execv(PYTHON, [PYTHON, os.path.abspath(__file__), "--inside", *sys.argv[1:]])
