"""Does random operations on files in the current folder and prints what came of each.

    python file_operations.py SEED COUNT

Run twice, as it is and in a sandbox, it must print the same.
"""

import contextlib
import errno
import os
import random
import shutil
import stat
import sys

NAMES = ("a", "b", "c")


def operations(choose: random.Random) -> list:
    """Operations on random paths."""

    def path():
        return "/".join(choose.choices(NAMES, k=choose.choice((1, 1, 2, 2, 3))))

    def write(mode):
        with open(path(), mode) as file:
            return file.write(choose.choice("xyz") * 5)

    def read():
        with open(path()) as file:
            return file.read()

    def inside(call):
        """A call with a name in a folder, by the folder's descriptor."""
        folder = os.open(os.path.dirname(path()) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            return call(choose.choice(NAMES), dir_fd=folder)
        finally:
            os.close(folder)

    def move():
        source, target = path(), path()
        if not os.path.isdir(source):
            os.rename(source, target)
        elif f"{os.path.realpath(target)}/".startswith(f"{os.path.realpath(source)}/"):
            raise shutil.Error("into itself")
        else:  # a sandbox may want a folder copied and removed
            shutil.move(source, target)

    return [
        lambda: write("w"),
        lambda: write("a"),
        lambda: write("x"),
        lambda: write("r+"),
        read,
        read,
        lambda: sorted(os.listdir(os.path.dirname(path()) or ".")),
        lambda: os.mkdir(path()),
        lambda: os.makedirs(path(), exist_ok=True),
        lambda: os.rmdir(path()),
        lambda: os.remove(path()),
        lambda: shutil.rmtree(path()),
        move,
        move,
        lambda: os.symlink(choose.choice(("a", "../b", "c/a", "none")), path()),
        lambda: os.readlink(path()),
        lambda: os.link(path(), path()),
        lambda: os.chmod(path(), choose.choice((0o755, 0o700))),
        lambda: os.truncate(path(), choose.randrange(8)),
        lambda: kind(os.stat(path())),
        lambda: kind(os.lstat(path())),
        lambda: os.path.relpath(os.path.realpath(path())),
        lambda: inside(os.mkdir),
        lambda: inside(os.unlink),
        lambda: kind(inside(os.stat)),
    ]


def main(seed: int, count: int) -> None:
    choose = random.Random(seed)
    calls = operations(choose)
    for _ in range(count):
        number = choose.randrange(len(calls))
        try:
            result = calls[number]()
        except shutil.Error as problem:
            result = type(problem).__name__
        except OSError as problem:
            result = errno.errorcode.get(problem.errno, "no number")
        print(number, result)
    for folder, folders, files in sorted(os.walk(".")):
        print(folder, sorted(folders), sorted(files))
        for name in sorted(files):
            with contextlib.suppress(OSError), open(f"{folder}/{name}") as file:
                print(f"{folder}/{name}", file.read())


def kind(state: os.stat_result) -> str:
    size = state.st_size if stat.S_ISREG(state.st_mode) else ""
    return f"{stat.filemode(state.st_mode)} {size}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
