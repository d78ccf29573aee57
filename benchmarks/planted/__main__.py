"""Measures what mending each planted fault gains.

    python -m benchmarks.planted                  every pair; goes on where it stopped
    python -m benchmarks.planted yaml_anomaly     one pair, measured anew

Each NAME.py is a training script as people write them, with one fault planted, and
NAME_mended.py is the same script without the fault. NAME_advised.py, where there is
one, has the cure that the probe tries, if that is another. All do the same training.
They run in turns, each in a fresh process and an empty folder. The time is from the end
of the first optimizer step to the end of the script, so imports and the preparation of
data do not count. The results go to benchmarks/planted/measured.json; `id` is the kind
of the fault.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from benchmarks import machine

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "measured.json"
LEAST_GAIN = 1.3  # of a fault that is worth finding

FAULTS = {
    "accumulation_micro_batch": "batch",
    "attention_weights": "attention",
    "audio_features": "data",
    "bert_padding": "padding",
    "best_checkpoint": "save",
    "dcgan_detach": "statement",
    "ema_state_dict": "statement",
    "gcn_full_graph": "evaluation",
    "gin_transform": "data",
    "gpt2_evaluation": "evaluation",
    "gradient_histograms": "logging",
    "hand_written_optimizer": "optimizer",
    "image_folder": "data",
    "lightning_validation": "evaluation",
    "next_iter": "worker-restart",
    "notebook_plot": "logging",
    "ppo_advantages": "statement",
    "recommender_embeddings": "optimizer",
    "simclr_augment": "workers",
    "sklearn_metrics": "statement",
    "tabular_double": "dtype",
    "yaml_anomaly": "anomaly",
}

# The clock starts at the end of the first optimizer step.
CHILD = """
import runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
ends = []
register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
end = time.perf_counter()
with open("seconds.txt", "w") as file:
    file.write(f"{end - ends[0]} {len(ends)}")
"""


def scripts_of(name: str) -> dict[str, str]:
    """The script with the fault and those without, by "slow", "mended", "advised"."""
    found = {"slow": name, "mended": f"{name}_mended"}
    if (HERE / f"{name}_advised.py").exists():
        found["advised"] = f"{name}_advised"
    return found


def digest(name: str) -> str:
    """Of the scripts of a fault: a measurement counts for these alone."""
    texts = [
        (HERE / f"{script}.py").read_bytes() for script in scripts_of(name).values()
    ]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def run(name: str) -> tuple[float, int]:
    """Runs a script; returns its seconds of training and its optimizer steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CHILD, str(HERE / f"{name}.py")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}.py must end well, got\n{done.stderr[-2000:]}")
        seconds, steps = (Path(folder) / "seconds.txt").read_text().split()
        return float(seconds), int(steps)


def one_round(name: str, number: int) -> tuple[dict[str, float], int]:
    """Runs the scripts of a fault, in odd rounds the last first.

    Returns the seconds of each, and the steps that each took.
    """
    scripts = scripts_of(name)
    order = list(scripts) if number % 2 == 0 else list(scripts)[::-1]
    seconds, steps = {}, {}
    for which in order:
        took, steps[which] = run(scripts[which])
        seconds[which] = round(took, 3)
    if len(set(steps.values())) > 1:
        raise RuntimeError(f"the scripts must take the same steps, got {steps}")
    return seconds, steps["slow"]


def measure(name: str, rounds: int) -> dict:
    """The gain of mending NAME.py."""
    scripts = scripts_of(name)
    seconds: dict[str, list[float]] = {which: [] for which in scripts}
    for number in range(rounds):
        took, steps = one_round(name, number)
        for which in scripts:
            seconds[which].append(took[which])
    medians = {which: round(statistics.median(s), 2) for which, s in seconds.items()}
    row = {
        "id": FAULTS[name],
        **_gain(seconds["slow"], seconds["mended"]),
        "seconds": medians,
        "steps": steps,
        "sha256": digest(name),
    }
    if "advised" in scripts:
        row["advised"] = _gain(seconds["slow"], seconds["advised"])
    return row


def _gain(slow: list[float], mended: list[float]) -> dict[str, float]:
    """The median gain of pairs of runs, the least and the most."""
    gains = [a / b for a, b in zip(slow, mended, strict=True)]
    found = {"gain": statistics.median(gains), "low": min(gains), "high": max(gains)}
    return {name: round(gain, 2) for name, gain in found.items()}


def table(scripts: dict) -> str:
    lines = ["| script | fault | gain (least-most) | slow | mended |"]
    lines += ["|---|---|---:|---:|---:|"]
    for name, row in sorted(scripts.items(), key=lambda item: -item[1]["gain"]):
        gain = f"{row['gain']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
        slow, mended = row["seconds"]["slow"], row["seconds"]["mended"]
        lines.append(f"| {name} | {row['id']} | {gain} | {slow} s | {mended} s |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.planted")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAULTS))
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (3)")
    args = parser.parse_args()
    unknown = set(args.names) - set(FAULTS)
    if unknown:
        parser.error(f"NAME must be one of {', '.join(FAULTS)}, got {min(unknown)}")
    results = json.loads(MEASURED.read_text()) if MEASURED.exists() else {"scripts": {}}
    scripts = results["scripts"]
    done = {name for name, row in scripts.items() if row["sha256"] == digest(name)}
    wanted = args.names or [name for name in FAULTS if name not in done]
    for name in tqdm(wanted, unit="pair", disable=None):
        scripts[name] = measure(name, args.rounds)
        results["machine"] = machine.describe()
        results["run"] = machine.describe_run(os.cpu_count() or 1, "none")
        results["scripts"] = scripts = dict(sorted(scripts.items()))
        MEASURED.write_text(json.dumps(results, indent=1) + "\n")
    print(table(scripts))


if __name__ == "__main__":
    main()
