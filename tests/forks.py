"""Runs each script in a fork of an interpreter that has imported large packages.

This file, run as a script, is that interpreter: it reads one list of runs from each
line of stdin, and prints the exit statuses of each list.
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
    folder: str  # the working directory
    output: str  # the file for stdout and stderr
    code: str  # runs as `__main__`; the fork then exits as an interpreter does
    file: str = "<run>"  # the code's file name in tracebacks
    lines: int = 0  # lines of that file before the code
    arguments: tuple[str, ...] = ("",)  # sys.argv
    environment: tuple[tuple[str, str], ...] = ()  # variables to add
    seconds: int = 240  # SIGALRM ends the run after that time


class Forks(subprocess.Popen):
    """The interpreter that forks.

    Args:
        imports: import statements, executed once.
        options: `cwd` and `env` of the interpreter.
    """

    def __init__(self, imports, **options):
        # -P: the folders here are named like packages, numpy and torch among them.
        command = [sys.executable, "-P", "-W", "error::SyntaxWarning", __file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__([*command, imports], **pipes, **options)

    def run(self, *runs):
        """Starts all runs at once, waits, and returns their exit statuses; -N: signal N
        ended the run."""
        print(json.dumps(runs), file=self.stdin, flush=True)
        return json.loads(self.stdout.readline())


def next_run():
    """Returns a run in each fork. Never returns in the interpreter that forks."""
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
    gc.freeze()  # or a fork's first collection would copy every page
    run = next_run()
    prepare(run)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile("\n" * run.lines + run.code, run.file, "exec"), main.__dict__)
