"""Scripts in interpreters of their own that need not import what takes seconds: each is
a fork of one that has done it.

Run by itself, this file is that one: it reads lists of runs, one a line of stdin, and
prints the exit statuses of each list.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import types
from typing import NamedTuple


class Run(NamedTuple):
    folder: str  # where it runs
    output: str  # the file that gets its stdout and stderr
    code: (
        str  # what it runs as `__main__`; at its end it finalizes like any interpreter
    )
    file: str = "<run>"  # as which a traceback names the code,
    lines: int = 0  # after so many lines of it
    arguments: tuple[str, ...] = ("",)  # its sys.argv
    environment: tuple[tuple[str, str], ...] = ()  # in addition to the forks' own
    seconds: int = 240  # before SIGALRM ends it


class Forks(subprocess.Popen):
    """Args:
    imports: statements that import what the runs share.
    options: of the interpreter: `cwd` and `env`.
    """

    def __init__(self, imports, **options):
        # -P: the folders here are named like packages, numpy and torch among them.
        command = [sys.executable, "-P", "-W", "error::SyntaxWarning", __file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__([*command, imports], **pipes, **options)

    def run(self, *runs):
        """Runs them at the same time; returns their exit statuses, minus the signal's
        number where a signal ended one."""
        print(json.dumps(runs), file=self.stdin, flush=True)
        return json.loads(self.stdout.readline())


def next_run():
    """Returns in each fork; does not return in the interpreter that makes them."""
    for line in sys.stdin:
        children = []
        for run in json.loads(line):
            children.append(os.fork())
            if children[-1] == 0:
                return Run(*run)
        ended = [os.waitpid(child, 0)[1] for child in children]
        print(json.dumps([os.waitstatus_to_exitcode(end) for end in ended]), flush=True)
    sys.exit()


def prepare(run):
    signal.alarm(run.seconds)
    os.environ.update(run.environment)
    os.chdir(run.folder)
    output = os.open(run.output, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = list(run.arguments)
    sys.path.insert(0, run.folder)


if __name__ == "__main__":
    exec(sys.argv[1], {})
    gc.freeze()  # what the forks share
    run = next_run()
    prepare(run)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile("\n" * run.lines + run.code, run.file, "exec"), main.__dict__)
