"""The README and the pages in docs/: every Python snippet runs, shell lines name what
exists, links and paths lead somewhere, and the site builds."""

import functools
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import table
from tests.forks import Forks, Run
from trainfast.cli import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Pages for owners, whose code is not for users to run.
OWNERS = ("docs/design/", "docs/graph_cache_format.md")
OPTIONAL = (
    *("accelerate", "lightning", "torch_geometric", "torchmetrics", "transformers"),
)
IMPORT = r"^(?:from|import) {}\b"


def blocks(language):
    """(page, line before the code, code) of all code blocks in the language on the
    pages for users."""
    return [
        pytest.param(
            str(page),
            text.count("\n", 0, block.start(1)),
            block[1],
            id=f"{name}: {block[1].strip().splitlines()[-1][:40]}",
        )
        for page, name in zip(PAGES, NAMES)
        if not name.startswith(OWNERS)
        for text in [page.read_text()]
        for block in re.finditer(rf"```{language}\n(.*?)```", text, re.S)
    ]


SNIPPETS = blocks("python")
SHELL = [block.values[-1] for block in blocks("sh")]


def test_there_are_snippets():
    assert len(SNIPPETS) >= 15 and len(SHELL) >= 5


@pytest.fixture(scope="module")
def run_snippet(tmp_path_factory):
    """Runs a snippet in a process and a folder of its own: exit status, output."""
    folders = tmp_path_factory.mktemp

    def run(page, line, code):
        folder = folders("snippet")
        output = folder.with_suffix(".txt")
        (status,) = forks.run(Run(str(folder), str(output), code, page, line))
        return status, output.read_text()

    # Beside torch, what a first optimizer imports.
    imports = "import torch._dynamo, trainfast.torch"
    with Forks(imports, cwd=folders("run")) as forks:
        yield run


@pytest.mark.parametrize("page, line, code", SNIPPETS)
def test_snippet_runs(run_snippet, page, line, code):
    for package in OPTIONAL:
        if re.search(IMPORT.format(package), code, re.M) and not find_spec(package):
            pytest.skip(f"needs {package}")
    status, output = run_snippet(page, line, code)
    assert status == 0, output


def test_snippet_that_fails_is_named_by_page_and_line(run_snippet):
    status, output = run_snippet("docs/page.md", 6, "import torch\n\ntorch.no\n")
    assert status == 1
    assert 'File "docs/page.md", line 9, in <module>' in output
    assert "AttributeError" in output
    assert run_snippet("docs/page.md", 1, "torch")[0] == 1  # nothing of it is left
    assert run_snippet("docs/page.md", 1, "import os\nos.kill(os.getpid(), 9)")[0] == -9


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def cells(line):
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def unfounded(readme, results):
    """The rows of the README's numbers that are in no row of the benchmarks' tables."""
    rows = [cells(line) for line in results.splitlines() if line.startswith("| ")]
    numbers = readme.split("\n## Numbers\n")[1].split("\n## ")[0]
    claims = [cells(line) for line in numbers.splitlines() if line.startswith("| ")]
    return [
        claim
        for claim in claims[1:]
        if not any(
            row[:2] == claim[1:3]
            and claim[3] in row
            and any(cell.startswith(f"{claim[4]} (") for cell in row)
            for row in rows
        )
    ]


def test_numbers_of_the_readme_are_in_the_results():
    results = table.tables(sorted(table.RESULTS.glob("*.json")))
    assert unfounded((ROOT / "README.md").read_text(), results) == []


def test_number_that_is_in_no_result_is_found():
    head = "\n## Numbers\n\n| what | case | ours | rival | ratio |\n|---|---|\n"
    rows = ("A | a | 1 ms | torch 2 ms | 2.0", "A | a | 1 ms | torch 2 ms | 3.0")
    readme = head + "".join(f"| {row} |\n" for row in rows)
    results = "| a | 1 ms | - | torch 2 ms | 2.0 (1.9-2.1) |\n"
    assert unfounded(readme, results) == [cells(rows[1])]


@functools.cache
def pip_options():
    command = [sys.executable, "-m", "pip", "install", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "line", dict.fromkeys(x for block in SHELL for x in block.splitlines() if x.strip())
)
def test_shell_line_names_what_exists(line):
    makefile = (ROOT / "Makefile").read_text()
    for command in re.split("#|>", line)[0].split("&&"):
        words = re.sub(r"^(\w+=\S+ )+", "", command.strip()).split()
        if words[0] == "trainfast":  # the installed command is the module
            words = ["python", "-m", *words]
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M)
        elif words[:2] == ["pip", "install"]:
            for option in (word for word in words if word.startswith("-")):
                assert option in pip_options()
        elif words[0] == "torchrun":
            (script,) = (word for word in words if word.endswith(".py"))
            assert (ROOT / script).exists()
        elif words[0] == ".ci/gpu":
            assert f'"{words[1]}": self.' in (ROOT / ".ci" / "gpu.py").read_text()
        else:
            assert words[:2] == ["python", "-m"]
            if words[2] == "trainfast":
                make_parser().parse_args(words[3:])
            else:
                module = ROOT / words[2].replace(".", "/")
                assert (
                    module.with_suffix(".py").exists()
                    or (module / "__main__.py").exists()
                )


def test_shell_line_with_an_option_that_is_none_is_found():
    with pytest.raises(SystemExit):
        test_shell_line_names_what_exists("trainfast lint --hint-all train.py")


def test_shell_lines_of_the_cache_name_the_cache():
    paths = set()
    for line in "".join(SHELL).splitlines():
        if line.startswith("trainfast cache "):
            paths.add(make_parser().parse_args(line.split("#")[0].split()[1:]).path)
    assert paths == {"my.cache"}


def missing_paths(page):
    """Paths in backticks, links and anchors of a page that name nothing in the tree."""
    text = page.read_text()
    paths = re.findall(r"`((?:\.?\w+/)+[\w.*]*)`", text)
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    gone = [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]
    for link in links:
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        heads = (
            re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            if target.exists()
            else []
        )
        if not target.exists() or anchor not in ("", *(slug(head) for head in heads)):
            gone.append(link)
    return gone


def slug(head):
    return re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_page_names_files_that_exist(page):
    assert missing_paths(page) == []


def test_missing_file_and_link_in_a_page_are_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A b\n`csrc/tfast.h` `csrc/no.h` [x](b.md) [y](#a-b) [z](#c)\n")
    assert missing_paths(page) == ["csrc/no.h", "b.md", "#c"]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("mkdocs"), reason="needs mkdocs: `make docs`")
def test_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
