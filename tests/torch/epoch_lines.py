"""What an EpochReport printed, and the numbers behind it."""

import re
from typing import NamedTuple

from trainfast.log import EpochReport

LINES = re.compile(
    r"Epoch \[(\d+)(?:/(\d+))?\] Average Train Loss: (nan|-?\d+\.\d{4})\n"
    r"  Epoch time: \d+\.\ds \| Throughput: (\d+) samples/sec\n"
)


class Line(NamedTuple):
    epoch: int
    epochs: int | None
    loss: float
    throughput: int


def lines_in(text):
    """The reports in a text that has nothing else."""
    assert LINES.sub("", text) == ""
    return [
        Line(int(epoch), int(of) if of else None, float(loss), int(throughput))
        for epoch, of, loss, throughput in LINES.findall(text)
    ]


def watch_epochs(monkeypatch):
    """A list of the epochs that reports end from now on, in this test."""
    found, end_epoch = [], EpochReport.end_epoch

    def watched(self):
        found.append(end_epoch(self))
        return found[-1]

    monkeypatch.setattr(EpochReport, "end_epoch", watched)
    return found
