"""A chart of how many times as fast as torch trainfast is, from benchmarks/results/.

python -m benchmarks.chart                      write docs/images/speed.svg
python -m benchmarks.chart --output speed.png   write another file or format
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import table

MACHINE = "amd-epyc-avx512-2c"  # prefix of its files in benchmarks/results/
OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "speed.svg"
SLOWER = "#9a9a9a"
COLORS = {
    "adamw": "#3b6fb6",
    "amp": "#2a9d8f",
    "attention": "#d9822b",
    "graph-cache": "#8a5fb0",
}
# bench, case and contender in the results; the bar's label, the rival's name
ROWS = (
    ("adamw", "gpt2-f32", "torch foreach", "AdamW, GPT-2 small", "torch, foreach"),
    ("adamw", "gpt2-f32", "torch fused", "AdamW, GPT-2 small", "torch, fused"),
    ("amp", "gpt2", "torch fused", "unscale, clip, step, GPT-2 small", "torch, fused"),
    ("amp", "gpt2-clip", "torch foreach", "clip_grad_norm_, GPT-2 small", "torch"),
    ("attention", "f32-causal-n1024-forward", "torch", "causal, forward", "torch"),
    ("attention", "f32-causal-n1024-backward", "torch", "causal, backward", "torch"),
    ("attention", "bf16-n2048-d64-backward", "torch", "bfloat16, backward", "torch"),
    (
        "attention",
        "f32-window-forward",
        "torch FlexAttention",
        "window of 256, forward",
        "torch, FlexAttention",
    ),
    ("attention", "f32-dropout-forward", "torch", "dropout, forward", "torch"),
    ("attention", "f32-small-forward", "torch", "8 tokens, forward", "torch"),
    (
        "graph-cache",
        "mid-loader",
        "DataLoader",
        "loader, 200 nodes a graph",
        "PyG, DataLoader",
    ),
    (
        "graph-cache",
        "small-hot",
        "objects in RAM",
        "batch, 20 nodes a graph",
        "PyG, graphs in RAM",
    ),
)
GROUPS = {"attention": "attention, ", "graph-cache": "graph "}


class Bar(NamedTuple):
    """One row of the chart."""

    bench: str
    label: str
    rival: str
    ratio: float  # the rival's time divided by trainfast's

    def __str__(self) -> str:
        return f"{self.label}: {many(self.ratio)} ({self.rival})"


def many(ratio: float) -> str:
    """Return a ratio with two or three digits."""
    digits = 0 if ratio >= 20 else 1 if ratio >= 1.5 else 2
    return f"{ratio:.{digits}f}\N{MULTIPLICATION SIGN}"


def bars(reports: dict[str, dict]) -> list[Bar]:
    """Return the rows, from the reports by the name of their bench."""
    found = []
    for bench, name, contender, label, rival in ROWS:
        case = next(c for c in reports[bench]["cases"] if c["name"] == name)
        line = next(li for li in case["lines"] if li["contender"] == contender)
        ratio = line["times_ours"]["median"]
        found.append(Bar(bench, GROUPS.get(bench, "") + label, rival, ratio))
    return found


def caption(reports: dict[str, dict]) -> str:
    """Return the line below the chart: machine, versions and dates."""
    machine = reports["adamw"]["machine"]
    dates = sorted({report["run"]["date"][:10] for report in reports.values()})
    dates = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    backend, torch = reports["adamw"]["run"]["backend"], machine["torch"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {backend}, torch {torch}"
    return f"{where}, {dates}. Medians, log scale. All cases: docs/benchmarks.md"


def load() -> dict[str, dict]:
    """Return the published reports that the chart shows."""
    return {
        bench: table.load(table.RESULTS / f"{MACHINE}_{bench}.json")
        for bench in dict.fromkeys(row[0] for row in ROWS)
    }


def description(reports: dict[str, dict]) -> str:
    """Return the chart as text; the SVG carries it for screen readers and the test."""
    return "; ".join([*map(str, bars(reports)), caption(reports)])


def draw(reports: dict[str, dict], path: Path) -> None:
    """Write the chart; the same reports and matplotlib give the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plain = {"svg.hashsalt": "trainfast", "svg.fonttype": "none"}
    with plt.rc_context(plain):
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        rows = bars(reports)
        groups = list(COLORS)
        places = [y + 0.4 * groups.index(bar.bench) for y, bar in enumerate(rows)]
        for y, bar in zip(places, rows, strict=True):
            color = SLOWER if bar.ratio < 1 else COLORS[bar.bench]
            axes.barh(y, bar.ratio - 1, left=1, height=0.66, color=color)
            at = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
            end = axes.annotate(
                many(bar.ratio), (max(bar.ratio, 1), y), weight="bold", **at
            )
            axes.annotate(bar.rival, (1, 0.5), xycoords=end, color="#555555", **at)
        axes.set_yticks(places, [bar.label for bar in rows])
        axes.set_xscale("log")
        axes.set_xlim(0.38, 1300)
        ticks = [0.5, 1, 2, 5, 10, 20, 50, 100]
        axes.set_xticks(ticks, [f"{tick:g}\N{MULTIPLICATION SIGN}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_ylim(places[-1] + 0.6, -0.6)
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.axvline(1, color="#333333", linewidth=1)
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
        figure.suptitle(
            "How many times as fast as torch and PyTorch Geometric, on a CPU",
            x=0.01,
            ha="left",
            size=12,
            weight="bold",
        )
        figure.supxlabel(caption(reports), x=0.01, ha="left", size=8, color="#555555")
        metadata = {"Date": None, "Creator": None, "Description": description(reports)}
        figure.savefig(path, metadata=metadata if path.suffix == ".svg" else None)
        plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the chart; return the exit status."""
    summary = (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser("python -m benchmarks.chart", None, summary)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: the docs")
    args = parser.parse_args(argv)
    draw(load(), args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
