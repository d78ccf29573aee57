"""Turns the switches on and runs a script or module as `python` would.

    python start.py JOB script|module TARGET ARGUMENTS...

This file is run by its path, in an interpreter of its own. JOB is JSON.
"""

import builtins
import io
import json
import os
import runpy
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any


def main() -> None:
    """Runs what the command line names; the script's exceptions pass through."""
    _, job, kind, target, *arguments = sys.argv
    # First of all, so that every later import finds what it finds for the script.
    if not sys.flags.safe_path:
        sys.path[0] = _first_folder(kind, target)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    root = os.path.dirname(package)
    if root not in sys.path:
        sys.path.append(root)
    own = sys.modules["__main__"]  # kept: its functions are still running
    # Before any import: multiprocessing keeps the __main__ that it finds.
    sys.modules["__main__"] = module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    _turn_on(json.loads(job))
    sys.argv = [target, *arguments]
    try:
        _run(module, kind, target)
    except SystemExit:
        raise
    except BaseException as error:
        # The traceback begins in the script. Python then ends as after any exception:
        # status 1, or by SIGINT.
        error.__traceback__ = _of_the_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = _print_nothing
        raise
    finally:
        del own


def _first_folder(kind: str, target: str) -> str:
    if kind == "module":
        return os.getcwd()
    if _is_archive(target):
        return os.path.abspath(target)
    return os.path.dirname(os.path.realpath(target))


def _is_archive(target: str) -> bool:
    """A folder or zip file with a __main__.py, which `python` runs too."""
    return os.path.isdir(target) or zipfile.is_zipfile(target)


def _turn_on(job: dict[str, Any]) -> None:
    from trainfast.launch.switches import turn_on

    on, notes = turn_on(**job["switches"])
    on, notes = on + job["on"], notes + job["notes"]
    if job["show"] == "json":
        print(json.dumps({"on": on, "notes": notes}), file=sys.stderr)
    elif job["show"] == "text":
        lines = [f"\u2713 {line}" for line in on] + [f"- {note}" for note in notes]
        for line in lines:  # stderr replaces what its encoding lacks
            print(line, file=sys.stderr)


def _run(module: ModuleType, kind: str, target: str) -> None:
    # `python` calls _run_module_as_main too. run_module() takes __main__ away at the
    # end, before functions of atexit and threads that need it.
    if kind == "module":
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    elif _is_archive(target):
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    else:
        from trainfast.notebook import is_notebook, read_script

        path = os.path.abspath(target)
        module.__package__ = None
        if is_notebook(path):  # where it runs, `__main__` has no file
            code = compile(read_script(path), path, "exec", dont_inherit=True)
        else:
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            module.__loader__ = SourceFileLoader("__main__", path)
            module.__dict__.update(__file__=path, __cached__=None)
        exec(code, module.__dict__)


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _print_nothing(*exception: object) -> None:
    """The traceback has been printed."""


if __name__ == "__main__":
    main()
