"""The one benchmark harness: measures cases, summarises their rounds, and reports.

`trainfast.bench.turns` measures: contenders take turns in one process. Every ratio is
formed within a round, then summarised over the rounds. A bound (the same bytes, moved
as plainly as possible) is one more contender.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from trainfast.bench.load import OtherLoad
from trainfast.bench.turns import (
    Budget,
    Case,
    Contender,
    cpu_clock,
    measure,
)
from trainfast.bench.turns import cuda_clock as cuda_clock

SCHEMA = 1
# Above these a report says that the machine was busy: the share of its cores that other
# processes used during a case, and the load average before the first one.
BUSY_SHARE = 0.05
BUSY_LOAD = 0.3


def queued_clock(run: Callable[[], object]) -> tuple[float, float]:
    """Time a call behind what the current stream has still to do, by events around it.

    As in training the host is ahead, so the first number is the GPU's time alone, as
    long as the host enqueues the call while that earlier work runs. The second is how
    long it took to.
    """
    import torch

    before = torch.cuda.Event(enable_timing=True)
    after = torch.cuda.Event(enable_timing=True)
    before.record()
    start = time.perf_counter_ns()
    run()
    host = time.perf_counter_ns() - start
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) * 1e6, host


def summarize(samples: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return median, p10 and p90 of samples / scale, linearly interpolated."""
    if len(samples) == 0:
        raise ValueError("samples must not be empty, got 0 of them")
    p10, median, p90 = np.percentile(np.asarray(samples, float) / scale, (10, 50, 90))
    return {"median": float(median), "p10": float(p10), "p90": float(p90)}


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrapped 95 % interval of the median."""
    chosen = np.random.default_rng(0).choice(samples, (10_000, len(samples)))
    low, high = np.quantile(np.median(chosen, axis=1), (0.025, 0.975))
    return float(low), float(high)


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return the summary of over / under, formed round by round."""
    if len(over) != len(under):
        raise ValueError(
            f"over must have one time per round of under, got {len(over)} and "
            f"{len(under)}"
        )
    return summarize(np.asarray(over, float) / np.asarray(under, float))


def _first(contenders: Sequence[Contender], role: str) -> str | None:
    return next((c.name for c in contenders if c.role == role), None)


def best_rival(
    contenders: Sequence[Contender], times: Mapping[str, Sequence[float]]
) -> str | None:
    """Return the name of the rival with the smallest median."""
    rivals = [c.name for c in contenders if c.role == "rival"]
    return min(rivals, key=lambda name: float(np.median(times[name])), default=None)


def make_lines(
    case: Case,
    contenders: Sequence[Contender],
    times: Mapping[str, Sequence[float]],
    hosts: Mapping[str, Sequence[float]],
) -> list[dict]:
    """Return one JSON-ready line per contender.

    percent_of_bound: the bound's time / this one's. ahead_of_best_rival: the best
    rival's time / this one's (above 1: this one is faster). times_ours: this one's time
    / ours. Each is null where it has no meaning.
    """
    bound, ours = _first(contenders, "bound"), _first(contenders, "ours")
    best = best_rival(contenders, times)
    lines = []
    for contender in contenders:
        own = times[contender.name]
        host = hosts.get(contender.name)
        nbytes = contender.nbytes or case.nbytes
        median = float(np.median(own))
        percent = ratio(times[bound], own) if bound else None
        if percent:
            percent = {key: 100 * value for key, value in percent.items()}
        compares = contender.role != "bound"
        lines.append(
            {
                "case": case.name,
                "dtype": case.dtype,
                "contender": contender.name,
                "role": contender.role,
                "us": summarize(own, 1e3),
                "host_us": summarize(host, 1e3) if host else None,
                "ns_per_param": median / case.params if case.params else None,
                "bytes": nbytes,
                "gb_per_s": nbytes / median if nbytes else None,
                "gf_per_s": case.flops / median if case.flops else None,
                "percent_of_bound": percent,
                "ahead_of_best_rival": ratio(times[best], own)
                if best and compares
                else None,
                "times_ours": ratio(own, times[ours]) if ours and compares else None,
                "note": contender.note,
            }
        )
    return lines


def run_case(
    case: Case,
    contenders: Sequence[Contender],
    budget: Budget,
    clock: Callable = cpu_clock,
    skipped: Mapping[str, str] | None = None,
) -> dict:
    """Measure one case and return its part of the report."""
    with OtherLoad() as others:
        times, hosts = measure(contenders, budget, clock)
    return report_case(case, contenders, times, hosts, others.share, skipped)


def report_case(
    case: Case,
    contenders: Sequence[Contender],
    times: Mapping[str, Sequence[float]],
    hosts: Mapping[str, Sequence[float]],
    others_cpu_share: float | None,
    skipped: Mapping[str, str] | None = None,
) -> dict:
    """Return the part of the report of a case that has been measured."""
    return {
        "name": case.name,
        "title": case.title,
        "dtype": case.dtype,
        "tensors": case.tensors,
        "params": case.params,
        "bytes": case.nbytes,
        "flops": case.flops,
        "rounds": len(next(iter(times.values()))),
        "others_cpu_share": others_cpu_share,
        "best_rival": best_rival(contenders, times),
        "lines": make_lines(case, contenders, times, hosts),
        "skipped": dict(skipped or {}),
    }


# ---- Reporting -----------------------------------------------------------------------


def make_report(bench: str, machine: dict, run: dict, cases: Sequence[dict]) -> dict:
    """Return the whole report, as it is written to JSON."""
    return {
        "schema": SCHEMA,
        "bench": bench,
        "machine": machine,
        "run": run,
        "cases": list(cases),
    }


def write_json(report: dict, path: Path) -> None:
    """Write the report; NaN and infinity have no place in JSON and are an error."""
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def microseconds(value: float) -> str:
    """Return a time in us with about four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def spread(summary: dict | None, form: Callable[[float], str]) -> tuple[str, str]:
    """Return the median and the "p10-p90" text of a summary, or two dashes."""
    if summary is None:
        return "-", ""
    return form(summary["median"]), f"{form(summary['p10'])}-{form(summary['p90'])}"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text columns, the first one left-aligned, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    texts = []
    for first, *rest in rows:
        cells = [c.rjust(width) for c, width in zip(rest, widths[1:], strict=True)]
        texts.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(texts)


# The heads of a case's rates, and the keys of its lines that hold them.
RATES = {
    "ns/param": ("ns_per_param", "{:.3f}"),
    "GB/s": ("gb_per_s", "{:.1f}"),
    "GF/s": ("gf_per_s", "{:.1f}"),
}


def amount(case: dict) -> str:
    """Return how much one call does, in words."""
    if case["params"]:
        return f"{case['params']:,} parameters in {case['tensors']:,}"
    if case["flops"]:
        return f"{case['flops'] / 1e9:,.3g} GF"
    return f"{case['bytes']:,} bytes" if case["bytes"] else "one call"


def case_text(case: dict) -> str:
    """Return one case as a headline, an aligned table and its notes."""
    share = case["others_cpu_share"]
    busy = "unknown" if share is None else f"{100 * share:.0f} %"
    title = (
        f"{case['title']}: {amount(case)}, {case['rounds']} rounds, "
        f"CPU used by others {busy}"
    )
    if share is not None and share > BUSY_SHARE:
        title += " (NOISY)"
    on_gpu = any(line["host_us"] for line in case["lines"])
    rates = {
        head: rate
        for head, rate in RATES.items()
        if any(line[rate[0]] is not None for line in case["lines"])
    }
    head = ["", "median us", "p10-p90", *rates, "% of bound", "p10-p90"]
    head += ["best rival/it", "p10-p90", "it/ours", "p10-p90"]
    rows = [head + (["host us", "p10-p90"] if on_gpu else [])]
    notes = [f"  {name}: not run, {why}" for name, why in case["skipped"].items()]
    for line in case["lines"]:
        row = [line["contender"], *spread(line["us"], microseconds)]
        row += [
            "-" if line[key] is None else form.format(line[key])
            for key, form in rates.values()
        ]
        row += spread(line["percent_of_bound"], "{:.0f}".format)
        row += spread(line["ahead_of_best_rival"], "{:.2f}".format)
        row += spread(line["times_ours"], "{:.2f}".format)
        if on_gpu:
            row += spread(line["host_us"], microseconds)
        rows.append(row)
        if line["note"]:
            notes.append(f"  {line['contender']}: {line['note']}")
    return "\n".join([title, align(rows), *notes])


def heading(bench: str, machine: dict, run: dict) -> str:
    """Return the lines that say what ran where."""
    where = f"{machine['cpu']} ({machine['cores']} cores, {' '.join(machine['flags'])})"
    if machine["gpu"]:
        where += f", {machine['gpu']} (driver {machine['driver']})"
    lines = [
        f"{bench}: {where}",
        f"torch {machine['torch']}, {run['threads']} threads, "
        f"backend {run['backend']}, {run.get('conditions', '')}".rstrip(", "),
    ]
    load = run["load_average_at_start"]
    if load is not None:
        lines.append(
            f"load average at start {load}"
            + (": the machine was BUSY" if load > BUSY_LOAD else "")
        )
    return "\n".join(lines)
