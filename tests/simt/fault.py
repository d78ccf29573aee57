"""What can be planted: a change of text, or a barrier that is left out."""

import bisect
import re
from pathlib import Path
from typing import NamedTuple

CUDA = Path(__file__).resolve().parent.parent.parent / "cuda"

RACE, BOUNDS = "data race", "heap-buffer-overflow"
MISALIGNED, DIFFERS = "misaligned address|must be aligned", "differs"


class Fault(NamedTuple):
    """What lies between two @ of `text`, which occurs once, becomes `replacement`: one
    or more whole statements, or an expression. Without @ it is all of the text. Any
    white space is as good as any other."""

    file: str
    text: str
    replacement: str | tuple[str, ...]
    mode: str  # of the build that sees it
    words: str  # what its program says, a regular expression
    runs: str = ""  # the program, where the file's name does not say

    @property
    def harness(self):
        return self.runs or harness_of(self.file)

    def places(self, source):
        """(begin, end, replacement) for each place in the file."""
        parts = [
            r"\s+".join(map(re.escape, x.split(" "))) for x in self.text.split("@")
        ]
        found = list(re.finditer("".join(f"({part})" for part in parts), source))
        assert len(found) == 1, (
            f"{self.file}: {self.text!r} is there {len(found)} times"
        )
        new = self.replacement
        new = (new,) if isinstance(new, str) else new
        groups = (
            range(1, len(parts) + 1) if len(parts) == 1 else range(2, len(parts), 2)
        )
        return [
            (*found[0].span(group), x) for group, x in zip(groups, new, strict=True)
        ]


class Missing(NamedTuple):
    """A barrier that is left out; of one with a vote, a thread's own is the result."""

    file: str
    number: int  # of the file's barriers
    mode: str = "thread"
    words: str = f"{RACE}|{DIFFERS}|SEGV|never waited for|after a thread left"

    @property
    def harness(self):
        return harness_of(self.file)

    def places(self, source):
        found = list(BARRIER.finditer(source))[self.number]
        end = found.end()
        if not found[0].endswith("("):
            return [(found.start(), end, "")]
        while source.count("(", found.start(), end) > source.count(
            ")", found.start(), end
        ):
            end += 1
        return [(found.start(), end, f"({source[found.end() : end - 1]}) ? 1 : 0")]


BARRIER = re.compile(
    r"(?:__syncthreads|__syncwarp|__threadfence|tile_barrier<S>|cp_async_wait<[^;]*>)"
    r"\(\);|(?:__syncthreads_(?:or|and|count)|tile_vote<S>)\("
)
FUNCTION = re.compile(r"^(?:    (?:__device__|DEVICE)[^(;]*?)?(\w+)\(", re.MULTILINE)


def harness_of(file):
    """The program that runs the file's kernels."""
    word = re.match(r"[a-z]+", file)[0]
    return {"rows": "adamw"}.get(word, word)


def barriers():
    """All of the kernels' barriers, by file and function."""
    found = {}
    for path in sorted(CUDA.glob("device/*.cu*")):
        if path.name == "ptx.cuh":  # which declares them
            continue
        source = path.read_text()
        functions = [
            (match.start(), match[1])
            for match in FUNCTION.finditer(source)
            if match[1] != "TFAST_KERNEL"
        ]
        for number, match in enumerate(BARRIER.finditer(source)):
            last = bisect.bisect(functions, (match.start(),)) - 1
            what = match[0].rstrip(";()")
            name = f"{path.name} {functions[last][1]} without {what} {number}"
            found[name] = Missing(path.name, number)
    return found
