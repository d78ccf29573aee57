"""Whether `trainfast diagnose` names the planted fault, and what it predicts.

    python -m benchmarks.diagnose                  all scripts; goes on where it stopped
    python -m benchmarks.diagnose --rounds 5       until each was examined five times
    python -m benchmarks.diagnose yaml_anomaly     these scripts, anew
    python -m benchmarks.diagnose --mended         the mended twins
    python -m benchmarks.diagnose --clean --rounds 5    scripts without a fault

A round examines a script, then times it and its mended twin: where a machine's speed
drifts, the prediction and the truth drift alike. It takes more than a minute a script.
The results go to benchmarks/planted/diagnosed.json, and count for the scripts and the
probe that made them.
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
PAIRS = 1  # of a script and its twin in a round


def digest(name: str) -> str:
    """Of a script, its twins and the probe's source."""
    scripts = planted.scripts_of(name).values() if name in planted.FAULTS else [name]
    files = [planted.HERE / f"{script}.py" for script in scripts]
    for folder in PROBE:
        files += sorted((ROOT / folder).rglob("*.py"))
    texts = b"\0".join(file.read_bytes() for file in files)
    return hashlib.sha256(texts).hexdigest()[:16]


def examine(script: Path) -> dict[str, Any]:
    """The findings for one script, or the error."""
    try:
        report = diagnose(str(script))
    except ProbeError as error:
        return {"error": str(error)[-500:], "findings": []}
    full = report.to_dict()
    for finding in full["findings"]:
        finding["file"] = os.path.basename(finding["file"] or "")
    return {key: full[key] for key in ("findings", "notes", "seconds")}


def examine_all(results: dict[str, Any], names: list[str], rounds: int) -> None:
    """Examines scripts in turn, until each has `rounds` rounds of the present probe."""
    scripts = results["scripts"]
    for name in names:
        version = digest(name)
        if scripts.get(name, {}).get("digest") != version:
            scripts[name] = {"digest": version, "rounds": []}
    todo = [(name, number) for number in range(rounds) for name in names]
    for name, number in tqdm(todo, unit="script", disable=None):
        done = scripts[name]["rounds"]
        if number == len(done):
            done.append(examine(planted.HERE / f"{name}.py"))
            write(results)
        if name in planted.FAULTS:
            pairs = done[number].setdefault("mending", [])
            while len(pairs) < PAIRS:
                seconds, _ = planted.one_round(name, number * PAIRS + len(pairs))
                pairs.append(seconds)
                write(results)


def first_of(entry: dict[str, Any]) -> str:
    """The id of a round's first finding, "none" or "error"."""
    if entry["findings"]:
        return str(entry["findings"][0]["id"])
    return "error" if "error" in entry else "none"


def agreeing(rounds: list[dict[str, Any]]) -> int:
    """How many rounds name the commonest first cause and line."""
    places = [
        (first_of(entry), *[finding["line"] for finding in entry["findings"][:1]])
        for entry in rounds
    ]
    return Counter(places).most_common(1)[0][1]


def gains(rounds: list[dict[str, Any]], cure: str = "mended") -> list[float]:
    """What a cure gained in each pair of runs."""
    pairs = [pair for entry in rounds for pair in entry["mending"]]
    return [pair["slow"] / pair[cure] for pair in pairs]


def table(scripts: dict[str, dict[str, Any]]) -> str:
    """The score of the scripts with a fault, and one row each."""
    lines = ["| script | fault | gain of mending | named first | its gain | s |"]
    lines.append("|---|---|---:|---|---:|---:|")
    right, same, total = 0, 0, 0
    for name, script in sorted(scripts.items()):
        rounds, fault = script["rounds"], planted.FAULTS[name]
        firsts = Counter(first_of(entry) for entry in rounds)
        right, same = right + firsts[fault], same + agreeing(rounds)
        total += len(rounds)
        told = [e["findings"][0]["gain"] for e in rounds if e["findings"]]
        cells = (
            name,
            fault,
            _range(gains(rounds)),
            ", ".join(f"{which} {n} of {len(rounds)}" for which, n in firsts.items()),
            _range(told),
            f"{statistics.median(e.get('seconds', 0) for e in rounds):.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    score = f"Fault named first: {right} of {total} runs. "
    score += f"The same cause and line: {same} of {total}."
    return "\n".join([score, *_errors(scripts), "", *lines])


def _errors(scripts: dict[str, dict[str, Any]]) -> list[str]:
    """How far the gains that were told are from those of mending.

    Each run is compared with the median gain over all rounds of its script. An exact
    gain is that of the cure which the probe tried: it is compared with the script that
    has this cure. A bound holds if mending gains no more than the upper end of its
    interval.
    """
    errors, bounds = [], []
    for name, script in scripts.items():
        rounds = script["rounds"]
        cure = "advised" if "advised" in planted.scripts_of(name) else "mended"
        for entry in rounds:
            if first_of(entry) != planted.FAULTS[name]:
                continue
            first = entry["findings"][0]
            if first["exact"]:
                truth = statistics.median(gains(rounds, cure))
                errors.append(abs(first["gain"] / truth - 1))
            else:
                bounds.append(statistics.median(gains(rounds)) <= first["high"])
    if not errors or not bounds:
        return []
    errors.sort()
    most = errors[math.ceil(0.9 * len(errors)) - 1]
    return [
        f"Exact gains: {len(errors)}, median error {statistics.median(errors):.0%}, "
        f"90th percentile {most:.0%}. Bounds that hold: {sum(bounds)} of {len(bounds)}."
    ]


def verdicts(scripts: dict[str, dict[str, Any]]) -> str:
    """What was found in each round of scripts without a planted fault.

    A mended twin may be slow for further reasons, so that a finding in it is no false
    alarm by itself; that the mended fault is still found is the weaker result.
    """
    lines = ["| script | findings | first, its line and gain |", "|---|---:|---|"]
    found, total = 0, 0
    for name, script in sorted(scripts.items()):
        rounds = script["rounds"]
        with_one = sum(bool(entry["findings"]) for entry in rounds)
        found, total = found + with_one, total + len(rounds)
        text = "; ".join(verdict_of(entry) for entry in rounds)
        lines.append(f"| {name} | {with_one} of {len(rounds)} | {text} |")
    return "\n".join([f"With a finding: {found} of {total} runs.", "", *lines])


def verdict_of(entry: dict[str, Any]) -> str:
    """The first finding of a round, its line and its gain; or "none" or "error"."""
    if not entry["findings"]:
        return first_of(entry)
    first = entry["findings"][0]
    gain = f"{first['gain']:.2f} ({first['low']:.2f}-{first['high']:.2f})"
    return f"{first['id']}, line {first['line']}: {gain}"


def _range(values: list[float]) -> str:
    """The median, the least and the most."""
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def write(results: dict[str, Any]) -> None:
    results["machine"] = machine.describe()
    results["run"] = machine.describe_run(os.cpu_count() or 1, "none")
    PATH.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.diagnose")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--mended", action="store_true", help="the mended twins")
    parser.add_argument("--clean", action="store_true", help="scripts without a fault")
    parser.add_argument("--rounds", type=int, default=1, help="of each script (1)")
    args = parser.parse_args()
    results = json.loads(PATH.read_text()) if PATH.exists() else {"scripts": {}}
    clean = [f"clean/{path.stem}" for path in sorted(CLEAN.glob("*.py"))]
    names = args.names or (clean if args.clean else list(planted.FAULTS))
    if args.mended:
        names = [f"{name}_mended" for name in names]
    for name in names if args.names else ():
        results["scripts"].pop(name, None)
    examine_all(results, names, args.rounds)
    chosen = {name: results["scripts"][name] for name in names}
    print(verdicts(chosen) if args.clean or args.mended else table(chosen))


if __name__ == "__main__":
    main()
