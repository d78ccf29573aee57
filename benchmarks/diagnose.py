"""Whether `trainfast diagnose` names the planted fault, and what it predicts.

    python -m benchmarks.diagnose                  all scripts; goes on where it stopped
    python -m benchmarks.diagnose yaml_anomaly     these scripts, anew
    python -m benchmarks.diagnose --mended         the mended twins: nothing to find

Takes a minute a script. The results go to benchmarks/planted/diagnosed.json; an entry
counts for the script and the probe that made it.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import machine
from benchmarks.planted import __main__ as planted
from trainfast.probe.diagnosis import diagnose
from trainfast.probe.run import ProbeError

ROOT = Path(__file__).resolve().parent.parent
PATH = planted.HERE / "diagnosed.json"
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
        first = ids[0] if ids else "error" if "error" in entry else "none"
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
    return "\n".join([score, "", *lines])


def _interval(entry: dict[str, Any]) -> str:
    if not entry["findings"]:
        return ""
    first = entry["findings"][0]
    return f"{first['gain']:.2f} ({first['low']:.2f}-{first['high']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.diagnose")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--mended", action="store_true", help="their mended twins")
    args = parser.parse_args()
    results = json.loads(PATH.read_text()) if PATH.exists() else {"scripts": {}}
    names = args.names or list(planted.FAULTS)
    if args.mended:
        names = [f"{name}_mended" for name in names]
    for name in tqdm(names, unit="script", disable=None):
        script = planted.HERE / f"{name}.py"
        known = results["scripts"].get(name)
        if known and known["digest"] == digest(script) and not args.names:
            continue
        results["scripts"][name] = examine(script)
        results["machine"] = machine.describe()
        results["run"] = machine.describe_run(os.cpu_count() or 1, "none")
        PATH.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results["scripts"]))


if __name__ == "__main__":
    main()
