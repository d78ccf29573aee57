"""A file system that is full: what was there stays, and what failed can be tried again
where there is room. Needs the right to mount one.
"""

import errno
import subprocess

import numpy as np
import pytest

from tests.graph_samples import assert_same, graph, numbers, quiet, read
from trainfast import cli
from trainfast.graph_cache import Writer

pytestmark = pytest.mark.usefixtures("stopped_clock")

PAGE = 4096
MOUNT = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs"]


@pytest.fixture
def disk(tmp_path):
    """An empty file system of 64 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run([*MOUNT, place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk, room):
    """Leaves so many bytes."""
    filler = disk / "filler"
    with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(PAGE))
    with open(filler, "r+b") as file:
        file.truncate(max(0, filler.stat().st_size - room))
    return filler


def graph_of(n):
    return graph(n % 12)


@pytest.mark.parametrize("room", range(0, 12 * PAGE, PAGE))
def test_a_build_on_a_full_disk_goes_on_when_there_is_room(disk, room):
    filler = fill(disk, room)
    with pytest.raises(OSError) as caught:
        quiet(disk / "cache", range(400), graph_of, commit_every=8)
    assert caught.value.errno == errno.ENOSPC
    filler.unlink()
    report = quiet(disk / "cache", range(60), graph_of)
    assert report.graphs == report.made + report.reused == 60
    assert_same(read(disk / "cache"), [graph_of(n) for n in range(60)])


@pytest.mark.parametrize("room", range(4 * PAGE, 12 * PAGE, PAGE))
def test_a_writer_on_a_full_disk_keeps_what_was_committed(disk, room):
    filler = fill(disk, room)
    with (
        pytest.raises(OSError) as caught,
        Writer(disk / "cache", commit_every=8) as writer,
    ):
        for n in range(400):
            writer.append(graph_of(n))
    assert caught.value.errno == errno.ENOSPC
    safe = writer.committed
    filler.unlink()
    with Writer(disk / "cache") as after:
        after.append(graph_of(1))
    found = read(disk / "cache")
    kept = len(found) - 1
    assert_same(found, [*map(graph_of, range(kept)), graph_of(1)])
    assert kept >= safe and (safe or room < 8 * PAGE)


@pytest.mark.parametrize("room", range(0, 5 * PAGE, PAGE))
@pytest.mark.parametrize("action", ["repair", "export"])
def test_copies_on_a_full_disk_fail_and_can_be_made_again(
    disk, tmp_path, capsys, action, room
):
    source = tmp_path / "source"
    quiet(source, range(1, 60), graph)
    filler = fill(disk, room)
    command = ["cache", action, str(source), str(disk / "copy")]
    command += ["--quiet"] if action == "export" else []
    assert cli.main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line
    assert numbers(source) == list(range(1, 60))
    filler.unlink()
    for left in (file for file in disk.rglob("*") if file.is_file()):
        left.unlink()
    quiet(source, range(1, 12), graph)
    command[3] = str(disk / "other")
    assert cli.main(command) == 0
    if action == "repair":
        assert numbers(disk / "other") == list(range(1, 12))
    else:
        made = sorted((disk / "other").iterdir())
        assert [int(np.load(file)["y"][0]) for file in made] == list(range(1, 12))
