"""make compat: one wheel, beside many versions of torch.

    .venv/bin/python .ci/compat.py                    the versions of VERSIONS
    .venv/bin/python .ci/compat.py 2.6.0 2.12.0@3.13  these: torch, or torch@Python
    .venv/bin/python .ci/compat.py 2.8.0@3.12+numpy==1.26.4  with these packages too

For each version of torch it makes a fresh environment, installs torch from the package
index (several GB), the wheel that `make wheel` built, and what the tests need; runs
`pytest --quick` where the source tree cannot be imported; and removes the environment.
WORKERS=1 in the environment limits pytest to one process.
The results go to docs/compatibility.json, and as tables to docs/compatibility.md.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pythons

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "compat"
RESULTS = ROOT / "docs" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"

VERSIONS = ("2.6.0", "2.10.0", "2.12.0@3.13", "2.15.0")
VERSIONS += ("2.8.0@3.12+numpy==1.26.4+torch_geometric==2.6.1+transformers==4.53.0",)
NEEDED = ("expecttest", "hypothesis", "ml_dtypes", "packaging", "pytest", "setuptools")
NEEDED += ("pytest-timeout", "pytest-xdist", "torch_geometric==2.8.1", "tqdm")
MODELS = ("torch/test_huggingface", "torch/test_huggingface_models")
# Tests of this source tree and of its build, which no version of torch changes, and
# scripts whose other packages each need a torch of their own.
NOT_HERE = ("project/test_source", "project/test_packaging", "project/test_wheel")
NOT_HERE += ("project/test_ci", "project/test_docs", "project/test_gpu_parts")
NOT_HERE += ("simt/test_runner", *MODELS)
NOT_HERE += ("project/test_import_circles",)
NOT_HERE += ("patching/test_clients", "torch/test_lightning", "torch/test_accelerate")
NOT_HERE += ("torch/test_lightning_precision", "torch/test_lightning_callback")
NOT_HERE += ("torch/test_huggingface_trainer", "torch/test_huggingface_callback")
NOT_HERE += ("torch/test_accelerate_tracker",)
NOT_HERE += ("graph_cache/test_lightning", "core/test_output_hashes")
NOT_HERE += ("examples/test_char_transformer", "examples/test_graph_syntax_trees")
NOT_HERE += ("examples/test_amp_resume", "examples/test_quickstart")
NOT_HERE += ("examples/test_image_classifier", "examples/test_trajectories")
# Reasons for skips that come from the machine.
OF_THE_CPU = re.compile("avx-?512", re.IGNORECASE)

HEAD = """# Compatibility

One wheel, `cp311-abi3`, serves every row. Nothing in it is compiled against torch,
NumPy's C API is resolved at run time, and Python's stable ABI covers 3.11 and newer.
`make compat` creates a fresh environment for each row, installs torch from the package
index and this wheel, and runs the quick tests there (`pytest --quick`: the best backend
and the scalar one, a few cases of each test). A row that names a version of
transformers includes the tests of `attn_implementation="trainfast"`.

torch 2.6 to 2.15 is supported. The project's own tests run with torch 2.13. With an
older torch `import trainfast.torch` raises ImportError. Versions between two rows are
expected to work but were not run.

`make wheel` tags the wheel `manylinux_2_34`: it needs glibc 2.34 (Ubuntu 22.04,
Debian 12, RHEL 9) and no other library. auditwheel and abi3audit check it.

| torch | Python | NumPy | PyG | transformers | passed | failed | skipped | commit |
|---|---|---|---|---|---:|---:|---:|---|
"""

SKIPPED = """
## Skipped for a version of torch

The table leaves out reasons that all rows share (backends that the tests would have to
build, GPUs, packages that the environments lack) and instruction sets that the CPU of
the row's machine lacks.

| tests | torch | why |
|---:|---|---|
"""


def call(*command, **options):
    subprocess.run([str(word) for word in command], check=True, **options)


def make_tree():
    """A copy of what the tests read, without trainfast."""
    tree = BUILT / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", ".pytest_cache")
    for name in ("tests", "csrc", "cuda", "docs", "benchmarks", "examples", ".ci"):
        shutil.copytree(ROOT / name, tree / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "setup.py", "Makefile"):
        shutil.copy(ROOT / name, tree)
    return tree


def score(report):
    """Counts, failures and reasons for skips of one of pytest's XML reports."""
    counts, failed, skips = Counter(), [], Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        skip = case.find("skipped")
        counts["failed" if bad else "passed" if skip is None else "skipped"] += 1
        if bad:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        if skip is not None:
            skips[skip.get("message").splitlines()[0].split(": /")[0]] += 1
    return {**counts, "failures": failed, "skips": dict(skips.most_common())}


# Prints the versions of a row; runs in the row's environment.
SEEN = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
row = dict(python=platform.python_version(), transformers="-")
import torch
row["torch"] = torch.__version__
for key, name in dict(numpy="", pyg="torch_geometric", transformers="").items():
    try:
        row[key] = version(name or key)
    except PackageNotFoundError:
        pass
print(json.dumps(row))
"""


def parse(entry):
    """torch's version, the interpreter and requirements of "2.8.0@3.12+numpy==1.26"."""
    words, *extra = entry.split("+")
    torch, _, python = words.partition("@")
    interpreter = pythons.find(python) if python else sys.executable
    if interpreter is None:
        sys.exit(f"python{python} must be installed and run, for {entry}; got none")
    given = {name_of(text) for text in extra}
    needed = [text for text in NEEDED if name_of(text) not in given]
    return torch, interpreter, [*needed, *extra]


def name_of(requirement):
    return re.split("[=<>!~]", requirement)[0]


def run(entry, wheel, tree, commit):
    torch, interpreter, needed = parse(entry)
    env, report = BUILT / "env", BUILT / "report.xml"
    shutil.rmtree(env, ignore_errors=True)
    report.unlink(missing_ok=True)
    try:
        begin = time.monotonic()
        call(interpreter, "-m", "venv", env)
        pip = [env / "bin" / "python", "-m", "pip", "-q", "install", "--no-cache-dir"]
        call(*pip, "--disable-pip-version-check", f"torch=={torch}", *needed, wheel)
        print(f"torch {entry}: installed in {time.monotonic() - begin:.0f} s")
        with_models = any(name_of(text) == "transformers" for text in needed)
        ignored = [
            f"--ignore=tests/{name}.py"
            for name in NOT_HERE
            if not (with_models and name in MODELS)
        ]
        command = [env / "bin" / "python", "-m", "pytest", "--quick", *ignored]
        command += [
            "-n",
            os.environ.get("WORKERS", "auto"),
            "-q",
            "--maxfail=500",
            "--timeout=600",  # one that hangs fails, in a new process for the others
            "--timeout-method=thread",
            f"--junitxml={report}",
        ]
        env_vars = {k: v for k, v in os.environ.items() if k[:9] != "TRAINFAST"}
        begin = time.monotonic()
        subprocess.run(list(map(str, command)), cwd=tree, env=env_vars)
        seconds = time.monotonic() - begin
        seen = subprocess.check_output([env / "bin" / "python", "-c", SEEN], text=True)
        return {
            **json.loads(seen.splitlines()[-1]),
            **score(report),
            "seconds": round(seconds),
            "commit": commit,
        }
    finally:
        shutil.rmtree(env, ignore_errors=True)


def write(results):
    """Both files; the page is made from the results alone."""
    results.sort(key=lambda r: [int(n) for n in r["torch"].split("+")[0].split(".")])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = HEAD
    for r in results:
        words = (r["torch"], r["python"], r["numpy"], r["pyg"])
        words += (r.get("transformers", "-"), r.get("passed", 0), r.get("failed", 0))
        words += (r.get("skipped", 0), r["commit"])
        text += "| " + " | ".join(map(str, words)) + " |\n"
    text += "\nThe stable ABI covers other versions of Python, which were not run.\n"
    for r in results:
        if r["failures"]:
            text += f"\n## Failures with torch {r['torch']}\n\n"
            text += "".join(f"- `{name}`\n" for name in r["failures"])
    text += SKIPPED
    everywhere = set.intersection(*(set(r["skips"]) for r in results))
    for r in results:
        for why, n in r["skips"].items():
            if why not in everywhere and not OF_THE_CPU.search(why):
                text += f"| {n} | {r['torch']} | {why.replace('|', '/')} |\n"
    PAGE.write_text(text, encoding="utf-8")


def main(versions):
    wheels = sorted((ROOT / "dist").glob("*.whl"), key=lambda p: p.stat().st_mtime)
    if not wheels:
        sys.exit("dist/ must hold a wheel, got none; run `make wheel`")
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.check_output(git, text=True).strip()
    tree = make_tree()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for version in versions or VERSIONS:
        result = run(version, f"{wheels[-1]}[tools]", tree, commit)
        key = (result["torch"], result["python"])
        results = [r for r in results if (r["torch"], r["python"]) != key]
        results.append(result)
        write(results)


if __name__ == "__main__":
    main(sys.argv[1:])
