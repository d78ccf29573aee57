"""Whether `trainfast diagnose` names the planted fault, and what it predicts.

    python -m benchmarks.diagnose                  all scripts; goes on where it stopped
    python -m benchmarks.diagnose yaml_anomaly     these scripts, anew
    python -m benchmarks.diagnose --mended         the mended twins: nothing to find
    python -m benchmarks.diagnose --repeats 5      whether five runs say the same
    python -m benchmarks.diagnose --clean --repeats 5   scripts without a fault

Takes a minute a script. The results go to benchmarks/planted/diagnosed.json; an entry
counts for the script and the probe that made it.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import machine
from benchmarks.planted import __main__ as planted
from trainfast.probe.diagnosis import diagnose
from trainfast.probe.run import ProbeError

ROOT = Path(__file__).resolve().parent.parent
PATH = planted.HERE / "diagnosed.json"
CLEAN = planted.HERE / "clean"  # scripts in which nothing is known to be slow
PROBE = ("trainfast/probe", "trainfast/torch/probe")


def digest(script: Path) -> str:
    """Of a script and of the probe's source."""
    files = [script]
    for folder in PROBE:
        files += sorted((ROOT / folder).rglob("*.py"))
    texts = b"\0".join(file.read_bytes() for file in files)
    return hashlib.sha256(texts).hexdigest()[:16]


def examine(script: Path) -> dict[str, Any]:
    """The findings for one script, or the error."""
    try:
        report = diagnose(str(script))
    except ProbeError as error:
        return {"error": str(error)[-500:], "findings": [], "digest": digest(script)}
    full = report.to_dict()
    for finding in full["findings"]:
        finding["file"] = os.path.basename(finding["file"] or "")
    kept = {key: full[key] for key in ("findings", "tried", "notes", "seconds")}
    return {**kept, "digest": digest(script)}


def table(entries: dict[str, dict[str, Any]]) -> str:
    """The score, and one row a script.

    A mended twin may be slow for further reasons, so that a finding in it is no false
    alarm by itself; that the mended fault is still found is the weaker result.
    """
    faults = json.loads(planted.MEASURED.read_text())["scripts"]
    lines = ["| script | fault | gain of mending | first finding | its gain | s |"]
    lines.append("|---|---|---:|---|---:|---:|")
    right, twins, again = 0, 0, 0
    for name, entry in sorted(entries.items()):
        twin = name.endswith("_mended")
        planted_fault = planted.FAULTS[name.removesuffix("_mended")]
        ids = [finding["id"] for finding in entry["findings"]]
        first = _first(entry)
        twins += twin
        again += twin and planted_fault in ids
        right += not twin and first == planted_fault
        fault = "mended" if twin else planted_fault
        gain = "" if twin else f"{faults[name]['gain']:.2f}"
        seconds = f"{entry.get('seconds', 0):.0f}"
        cells = (name, fault, gain, first, _interval(entry), seconds)
        lines.append("| " + " | ".join(cells) + " |")
    score = f"Fault named first: {right} of {len(entries) - twins}. "
    score += f"Mended twins in which it is still found: {again} of {twins}."
    return "\n".join([score, *_errors(entries, faults), "", *lines])


def _errors(entries: dict[str, dict[str, Any]], faults: dict[str, Any]) -> list[str]:
    """How far the gains of the findings are from those of mending.

    An exact gain is that of the cure which the probe tried: it is compared with the
    script that has this cure. A bound holds if mending's median gain is not above the
    upper end of its interval.
    """
    errors, bounds = [], []
    for name, entry in entries.items():
        if name not in faults or _first(entry) != planted.FAULTS[name]:
            continue
        first, row = entry["findings"][0], faults[name]
        if first["exact"]:
            errors.append(abs(first["gain"] / row.get("advised", row)["gain"] - 1))
        else:
            bounds.append(row["gain"] <= first["high"])
    if not errors or not bounds:
        return []
    errors.sort()
    most = errors[math.ceil(0.9 * len(errors)) - 1]
    return [
        f"Exact gains: {len(errors)}, median error {statistics.median(errors):.0%}, "
        f"90th percentile {most:.0%}. Bounds that hold: {sum(bounds)} of {len(bounds)}."
    ]


def _interval(entry: dict[str, Any]) -> str:
    if not entry["findings"]:
        return ""
    first = entry["findings"][0]
    return f"{first['gain']:.2f} ({first['low']:.2f}-{first['high']:.2f})"


def _first(entry: dict[str, Any]) -> str:
    """The id of the first finding, "none" or "error"."""
    if entry["findings"]:
        return str(entry["findings"][0]["id"])
    return "error" if "error" in entry else "none"


def verdict_of(entry: dict[str, Any]) -> str:
    """The first finding, its line and its gain; or "none" or "error"."""
    if not entry["findings"]:
        return _first(entry)
    line = entry["findings"][0]["line"]
    return f"{_first(entry)}, line {line}: {_interval(entry)}"


def repeat(results: dict[str, Any], names: list[str], runs: int) -> None:
    """Examines scripts in turn, until each has `runs` verdicts of the present probe.

    What the table of all scripts holds of it counts as the first one.
    """
    repeats = results.setdefault("repeats", {})
    for name in names:
        version = digest(planted.HERE / f"{name}.py")
        if repeats.get(name, {}).get("digest") != version:
            known = results["scripts"].get(name, {})
            first = [verdict_of(known)] if known.get("digest") == version else []
            repeats[name] = {"digest": version, "verdicts": first}
    todo = [n for i in range(runs) for n in names if len(repeats[n]["verdicts"]) <= i]
    for name in tqdm(todo, unit="run", disable=None):
        entry = examine(planted.HERE / f"{name}.py")
        repeats[name]["verdicts"].append(verdict_of(entry))
        write(results)


def same_text(repeats: dict[str, dict[str, Any]]) -> str:
    """The verdicts of each script, and how many runs agree on finding and line."""
    lines = ["| script | runs | same verdict | verdicts |", "|---|---:|---:|---|"]
    same, total = 0, 0
    for name, entry in sorted(repeats.items()):
        verdicts = entry["verdicts"]
        counts = Counter(verdict.partition(":")[0] for verdict in verdicts)
        most = counts.most_common(1)[0][1] if counts else 0
        same, total = same + most, total + len(verdicts)
        text = "; ".join(verdicts)
        lines.append(f"| {name} | {len(verdicts)} | {most} | {text} |")
    return "\n".join([f"Same verdict: {same} of {total} runs.", "", *lines])


def write(results: dict[str, Any]) -> None:
    results["machine"] = machine.describe()
    results["run"] = machine.describe_run(os.cpu_count() or 1, "none")
    PATH.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.diagnose")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--mended", action="store_true", help="their mended twins")
    parser.add_argument("--clean", action="store_true", help="scripts without a fault")
    parser.add_argument("--repeats", type=int, help="runs of each script")
    args = parser.parse_args()
    results = json.loads(PATH.read_text()) if PATH.exists() else {"scripts": {}}
    clean = [f"clean/{path.stem}" for path in sorted(CLEAN.glob("*.py"))]
    names = args.names or (clean if args.clean else list(planted.FAULTS))
    if args.mended:
        names = [f"{name}_mended" for name in names]
    if args.repeats or args.clean:
        repeat(results, names, args.repeats or 1)
        print(same_text({name: results["repeats"][name] for name in names}))
        return
    for name in tqdm(names, unit="script", disable=None):
        script = planted.HERE / f"{name}.py"
        known = results["scripts"].get(name)
        if known and known["digest"] == digest(script) and not args.names:
            continue
        results["scripts"][name] = examine(script)
        write(results)
    print(table(results["scripts"]))


if __name__ == "__main__":
    main()
