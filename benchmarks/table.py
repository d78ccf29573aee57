"""Markdown tables, made from benchmarks/results/*.json.

python -m benchmarks.table                                     print the tables
python -m benchmarks.table --page docs/benchmarks.md           write them into a page
python -m benchmarks.table --page docs/benchmarks.md --check   is the page up to date?
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness

RESULTS = Path(__file__).resolve().parent / "results"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
TITLES = {
    "adamw": "AdamW, a whole `optimizer.step()`",
    "amp": "AMP, loss scaling with clipping, step and update",
    "attention": "Attention, forward and backward alone",
    "attention-cuda": "Attention on a GPU, forward and backward alone",
    "attention-memory": "Attention, growth of the peak memory",
    "gemm": "Products of matrices",
    "graph-cache": "Graph cache, batches of 32 graphs",
    "muon": "Muon, a whole `optimizer.step()`",
    "neighbours": "Graphs of neighbours",
    "trajectory": "Trajectory metrics",
}
NOTES = {
    "attention": "A causal case counts half of the operations, a backward 2.5 times "
    "those of its forward. The bound is the same number of float32 multiply-adds on "
    "registers, at the vector width of the backend; for bf16, of pairwise bfloat16 "
    "multiply-adds where the CPU has AVX512_BF16; for one query, a read of k and v.",
    "attention-cuda": "Rates are in TFLOP/s. A causal case counts half of the "
    "operations, a backward 2.5 times those of its forward. In brackets: the "
    "contender's time divided by trainfast's. The roof is the rate of cuBLAS for a "
    "product of 8,192 x 8,192 matrices.",
    "graph-cache": "A small graph has 20 nodes, 4 edges a node and 16 features, a mid "
    "one 200, 8 and 32. Hot: batches follow each other directly; cold: a training step "
    "runs before each batch. The bound is a copy of the batch's bytes inside the CPU's "
    "caches; for writing, `write()` of the same bytes; for verifying, one read of the "
    "bytes; for a step, the step without a loader.",
    "neighbours": "Graphs lie on a field of 105 x 68, the radius is 30. trainfast sorts"
    " its edges; scipy's are unsorted. Small graphs: batches that differ follow each"
    " other, as in a loop over a dataset. The bound is a copy of the edges' bytes."
    " pyg-lib must be built from its source and was not installed in this run. In a run"
    " with it on the same day it took 22, 7.6, 3.3 and 16 times as long as trainfast.",
    "trajectory": "All seven metrics at once; the rivals' are vectorised code of NumPy "
    "and torch. The bound is a read of the predictions and targets. For 10,000 agents "
    "torch takes 9.0 ms where NumPy has no turns.",
}


def load(path: Path) -> dict:
    """Return the report in a file; one that must not be published is an error."""
    report = json.loads(path.read_text())
    if report.get("schema") != harness.SCHEMA:
        raise ValueError(
            f"{path.name}: schema must be {harness.SCHEMA}, got {report.get('schema')}"
        )
    if report["run"].get("smoke"):
        raise ValueError(f"{path.name}: run must not be a smoke test, got one")
    return report


def _time(summary: dict | None) -> str:
    """Return a median in us or ms."""
    if summary is None:
        return "-"
    us = summary["median"]
    return f"{us / 1000:.1f} ms" if us >= 1000 else f"{us:.0f} us"


def _ratio(summary: dict | None, form: str = "{:.2f}") -> str:
    """Return "median (p10-p90)"."""
    if summary is None:
        return "-"
    median, between = harness.spread(summary, form.format)
    return f"{median} ({between})"


def _bound(lines: Sequence[dict]) -> str:
    """Return the bound that was measured, in its own unit."""
    bound = next((line for line in lines if line["role"] == "bound"), None)
    if bound is None:
        return "-"
    unit = "GB/s" if bound["bytes"] else "GF/s"
    return f"{bound['gb_per_s' if bound['bytes'] else 'gf_per_s']:.0f} {unit}"


def _rates(ours: dict | None, lines: Sequence[dict], computes: bool) -> list[str]:
    """Return the cells between the times and the share of the bound."""
    if computes:
        return [f"{ours['gf_per_s']:.0f}" if ours else "-", _bound(lines)]
    if ours is None:
        return ["-", "-"]
    return [f"{ours['ns_per_param']:.2f}", f"{ours['gb_per_s']:.0f}"]


def _row(case: dict, on_gpu: bool) -> list[str]:
    """Return a case's row: ours, the bound, the best rival, the others."""
    lines = case["lines"]
    named = {line["contender"]: line for line in lines}
    ours = next((line for line in lines if line["role"] == "ours"), None)
    best = named.get(case["best_rival"])
    others = [
        f"{line['contender']} {line['times_ours']['median']:.1f}"
        if line["times_ours"]
        else f"{line['contender']} {_time(line['us'])}"
        for line in lines
        if line["role"] != "bound" and line is not best and line is not ours
    ]
    row = [case["title"], _time(ours["us"] if ours else None)]
    if on_gpu:
        row.append(_time(ours["host_us"] if ours else None))
    row += _rates(ours, lines, bool(case.get("flops")))
    row.append(_ratio(ours["percent_of_bound"] if ours else None, "{:.0f}"))
    row.append(f"{best['contender']} {_time(best['us'])}" if best else "-")
    row.append(_ratio(ours["ahead_of_best_rival"] if ours else None))
    row.append(", ".join(others) or "-")
    return row


def _caption(report: dict) -> str:
    """Return the paragraph that names the machine, the versions and the conditions."""
    machine, run = report["machine"], report["run"]
    wide = "AVX-512" if "avx512f" in machine["flags"] else "AVX2"
    if "avx2" not in machine["flags"]:
        wide = "no AVX2"
    where = f"{machine['cpu']} ({machine['cores']} cores, {wide})"
    if machine["gpu"]:
        where = f"{machine['gpu']} (driver {machine['driver']}) in {where}"
    torch = f"torch {machine['torch']}"
    if wide == "AVX-512" and machine["torch_cpu"] == "AVX2":
        torch += " held to AVX2, as on a CPU without AVX-512"
    shares = [case.get("others_cpu_share") or 0.0 for case in report["cases"]]
    busy = max(shares, default=0.0)
    caption = (
        f"{where}, {run['threads']} threads, {torch}, "
        f"backend `{run['backend']}`, {run['conditions']}, {run['date'][:10]}, "
        f"commit {(run['commit'] or 'unknown')[:9]}."
    )
    if busy > harness.BUSY_SHARE:
        caption += f" Other processes used up to {100 * busy:.0f} % of the CPU."
    return " ".join([caption, *filter(None, [NOTES.get(report["bench"])])])


def _timed(report: dict) -> list[list[str]]:
    """Return the head and the rows of a report of times."""
    on_gpu = any(line["host_us"] for c in report["cases"] for line in c["lines"])
    head = ["case", "trainfast", *(["host time"] if on_gpu else [])]
    computes = any(case.get("flops") for case in report["cases"])
    head += ["GF/s", "bound"] if computes else ["ns/param", "GB/s"]
    head += ["% of bound", "best rival"]
    head += ["best rival / trainfast", "others / trainfast"]
    return [head, *(_row(case, on_gpu) for case in report["cases"])]


def _memory(report: dict) -> list[list[str]]:
    """Return the head and the rows of a report of memory."""
    rows = [["case", "output and gradients", "trainfast", "rivals"]]
    for case in report["cases"]:
        row = [case["title"], f"{case['results_bytes'] / 2**20:.0f} MiB"]
        each = [(line, f"{line['bytes'] / 2**20:.0f} MiB") for line in case["lines"]]
        row.append(next((mib for line, mib in each if line["role"] == "ours"), "-"))
        rivals = [(li["contender"], mib) for li, mib in each if li["role"] == "rival"]
        row.append(", ".join(f"{name} {mib}" for name, mib in rivals) or "-")
        rows.append(row)
    return rows


def _fine_time(summary: dict | None) -> str:
    """Return a median, with decimals where it is but a few us."""
    few = summary is not None and summary["median"] < 100
    return f"{summary['median']:.1f} us" if few else _time(summary)


def _many(ratio: float) -> str:
    """Return a ratio that may be in the thousands."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}"


def _graphs(report: dict) -> list[list[str]]:
    """Return the head and the rows of a report of one-call cases of several kinds."""
    rows = [["case", "trainfast", "bound", "% of bound", "best rival"]]
    rows[0] += ["best rival / trainfast", "others / trainfast"]
    for case in report["cases"]:
        lines = case["lines"]
        ours = next((line for line in lines if line["role"] == "ours"), None)
        bound = next((line for line in lines if line["role"] == "bound"), None)
        best = next((li for li in lines if li["contender"] == case["best_rival"]), None)
        row = [case["title"], _fine_time(ours["us"] if ours else None)]
        row.append(_fine_time(bound["us"] if bound else None))
        row.append(_ratio(ours["percent_of_bound"] if ours else None, "{:.0f}"))
        row.append(f"{best['contender']} {_fine_time(best['us'])}" if best else "-")
        row.append(_ratio(ours["ahead_of_best_rival"] if ours else None, "{:.1f}"))
        rest = [line for line in lines if line not in (ours, best)]
        others = [
            f"{line['contender']} {_many(line['times_ours']['median'])}"
            for line in rest
            if line["times_ours"]
        ]
        rows.append([*row, ", ".join(others) or "-"])
    return rows


def _disk(report: dict) -> list[list[str]]:
    """Return the head and the rows of what graphs take on the disk."""
    rows = [["bytes a graph", "arrays", "narrowed", "trainfast", "over narrowed"]]
    rows[0].append("others")
    for case in report["disk"]:
        count, sizes = case["graphs"], dict(case["bytes"])
        own = sizes.pop("trainfast", None)
        row = [case["title"], f"{case['arrays'] / count:,.0f}"]
        row.append(f"{case['narrowed'] / count:,.0f}")
        row.append(f"{own / count:,.0f}" if own else "-")
        row.append(f"{own / case['narrowed'] - 1:.1%}" if own else "-")
        others = [f"{name} {size / count:,.0f}" for name, size in sizes.items()]
        rows.append([*row, ", ".join(others) or "-"])
    return rows


def _tflops(line: dict | None) -> str:
    """Return a line's rate, and in brackets a rival's time over ours."""
    if line is None:
        return "-"
    rate = line["gf_per_s"] / 1000
    text = f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
    if line["times_ours"] and line["role"] == "rival":
        text += f" ({line['times_ours']['median']:.2f})"
    return text


def throughput(report: dict) -> list[list[str]]:
    """Return the head and the rows of a report of rates, in TFLOP/s."""
    lines = [line for case in report["cases"] for line in case["lines"]]
    rivals = dict.fromkeys(li["contender"] for li in lines if li["role"] == "rival")
    rows = [["case", "trainfast", "% of roof", *rivals, "roof"]]
    for case in report["cases"]:
        named = {line["contender"]: line for line in case["lines"]}
        ours, roof = (
            next((line for line in case["lines"] if line["role"] == role), None)
            for role in ("ours", "bound")
        )
        percent = ours["percent_of_bound"] if ours else None
        row = [case["title"], _tflops(ours), _ratio(percent, "{:.0f}")]
        row += [_tflops(named.get(name)) for name in rivals]
        rows.append([*row, _tflops(roof)])
    return rows


def reasons(report: dict) -> list[str]:
    """Return why contenders have no number, with how many cases that is so in."""
    found: dict[str, int] = {}
    for case in report["cases"]:
        for name, why in case["skipped"].items():
            found[f"{name}: {why}"] = found.get(f"{name}: {why}", 0) + 1
    return [f"- {text} ({count} cases)" for text, count in found.items()]


KINDS = {
    "attention-cuda": (throughput,),
    "attention-memory": (_memory,),
    "graph-cache": (_graphs, _disk),
    "neighbours": (_graphs,),
    "trajectory": (_graphs,),
}


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def table(report: dict) -> str:
    """Return one report as Markdown: a caption and a row per case."""
    parts = []
    for kind in KINDS.get(report["bench"], (_timed,)):
        head, *body = kind(report)
        parts.append(_markdown(head, body))
    title = TITLES.get(report["bench"], report["bench"])
    return "\n".join([f"### {title}\n\n{_caption(report)}\n", *parts])


def tables(paths: Sequence[Path]) -> str:
    """Return all reports as Markdown, and the commands that repeat them."""
    if not paths:
        return "No results yet.\n"
    # by stem: a bench's own results come before those of its variants
    reports = [load(path) for path in sorted(paths, key=lambda path: path.stem)]
    commands = sorted({report["run"]["command"] for report in reports})
    note = (
        "Where a caption does not say otherwise, the bound is a plain "
        "read-modify-write of the same bytes (on a GPU, a copy). The commands:\n\n"
        "```sh\n" + "\n".join(commands) + "\n```\n"
    )
    return "\n".join([*(table(report) for report in reports), note])


def replace_between_marks(text: str, new: str) -> str:
    """Return text with the part between the two marks replaced by `new`."""
    before, begin, rest = text.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must contain {BEGIN} and then {END}; add both")
    return f"{before}{BEGIN}\n{new}{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or write them into a page; return the exit status."""
    summary = (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser("python -m benchmarks.table", None, summary)
    parser.add_argument("results", nargs="*", type=Path, help="default: all of them")
    parser.add_argument("--page", type=Path, help=f"write between {BEGIN} and {END}")
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args(argv)
    if args.check and not args.page:
        parser.error("--check must come with --page")
    new = tables(args.results or sorted(RESULTS.glob("*.json")))
    if not args.page:
        print(new, end="")
        return 0
    old_text = args.page.read_text()
    new_text = replace_between_marks(old_text, new)
    if new_text != old_text and args.check:
        print(f"{args.page} is not what benchmarks.table makes", file=sys.stderr)
        return 1
    if new_text != old_text:
        args.page.write_text(new_text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
