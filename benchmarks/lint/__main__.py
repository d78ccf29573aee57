"""`trainfast lint` on the scripts of others, each alarm judged by a reader.

    python -m benchmarks.lint FOLDER            compares with judged.json
    python -m benchmarks.lint FOLDER --write    new alarms have the verdict "open"

FOLDER holds the repositories that judged.json names, each at its commit and in a folder
of its name, such as pytorch/examples. Verdicts: "fault" for an alarm of a rule that is
right, "slow" for a hint that is right, "false" for either that is wrong.
"""

import argparse
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from trainfast.lint import lint
from trainfast.lint.loops import Script

PATH = Path(__file__).parent / "judged.json"


def read(folder: Path, files: list[str]) -> dict[str, Any]:
    """Hashes and alarms of scripts; those with a training loop are counted."""
    hashes, alarms, loops = {}, [], 0
    for name in files:
        source = (folder / name).read_text(encoding="utf-8")
        hashes[name] = hashlib.sha256(source.encode()).hexdigest()[:16]
        loops += bool(Script(source).step_loops)
        for finding in lint(source, name, hints=True):
            alarms.append({"path": name, "line": finding.line, "rule": finding.id})
    return {"with training loops": loops, "files": hashes, "alarms": alarms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    judged = json.loads(PATH.read_text())
    names = list(judged["files"])
    if args.write:
        roots = [args.folder / name for name in judged["commits"]]
        found = [p for root in roots for p in root.rglob("*.py") if p.stat().st_size]
        names = sorted(str(path.relative_to(args.folder)) for path in found)
    now = read(args.folder, names)
    changed = [n for n in names if now["files"][n] != judged["files"].get(n)]
    verdicts = {(a["path"], a["line"], a["rule"]): a for a in judged["alarms"]}
    for alarm in now["alarms"]:
        old = verdicts.get((alarm["path"], alarm["line"], alarm["rule"]))
        said = old or {"verdict": "open", "reason": ""}
        alarm |= {"verdict": said["verdict"], "reason": said["reason"]}
        print(f"{alarm['path']}:{alarm['line']}: {alarm['rule']}: {alarm['verdict']}")
    counts = Counter(alarm["verdict"] for alarm in now["alarms"])
    print(
        f"{len(names)} files, {now['with training loops']} with training loops; "
        + "".join(f"{counts[v]} {v}, " for v in ("fault", "slow", "false", "open"))
        + f"{len(changed)} files changed"
    )
    if args.write:
        text = json.dumps({"commits": judged["commits"], **now}, indent=1)
        PATH.write_text(text + "\n")


if __name__ == "__main__":
    main()
