"""Every Python snippet of README.md runs, and its shell lines name what exists."""

import argparse
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from trainfast.tools import cache as cache_tool

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
OPTIONAL = ("torch_geometric", "transformers")
SHELL = re.findall(r"```sh\n(.*?)```", TEXT, re.S)


def test_there_are_snippets():
    assert len(SNIPPETS) >= 4


@pytest.mark.parametrize("code", SNIPPETS, ids=lambda c: c.splitlines()[-1][:40])
def test_snippet_runs(code, tmp_path):
    for package in OPTIONAL:
        if f"from {package}" in code and not find_spec(package):
            pytest.skip(f"needs {package}")
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def verb(words):
    """A verb, and the verb inside `cache`."""
    return words if words[0] == "cache" else words[:1]


@pytest.mark.parametrize(
    "line", [x for block in SHELL for x in block.splitlines() if x.strip()]
)
def test_shell_line_names_what_exists(line):
    makefile = (ROOT / "Makefile").read_text()
    for command in line.split("#")[0].split("&&"):
        words = command.split()
        if words[0] == "trainfast":  # the installed command is the module
            words = ["python", "-m", *words]
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M)
        else:
            assert words[:2] == ["python", "-m"]
            if words[2] == "trainfast":
                done = subprocess.run(
                    [sys.executable, "-m", "trainfast", *verb(words[3:5]), "--help"],
                    capture_output=True,
                )
                assert done.returncode == 0
            else:
                assert (ROOT / (words[2].replace(".", "/") + ".py")).exists()


def test_shell_lines_of_the_cache_parse_and_name_the_cache():
    parser = argparse.ArgumentParser()
    cache_tool.add_arguments(parser)
    paths = set()
    for line in "".join(SHELL).splitlines():
        if line.startswith("trainfast cache "):
            paths.add(parser.parse_args(line.split("#")[0].split()[2:]).path)
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


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("**/*.md")), ids=lambda page: page.name
)
def test_page_names_files_that_exist(page):
    assert missing_paths(page) == []


def test_missing_file_and_link_in_a_page_are_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A b\n`csrc/tfast.h` `csrc/no.h` [x](b.md) [y](#a-b) [z](#c)\n")
    assert missing_paths(page) == ["csrc/no.h", "b.md", "#c"]
