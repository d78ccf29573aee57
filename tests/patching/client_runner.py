"""Runs a client's script as Python would, or a notebook as Jupyter would, after
`trainfast.patch()` if asked to, and writes down what was warned of and what trainfast
did.

    python client_runner.py plain|patched NOTES SCRIPT [ARGUMENT...]

Of several processes (torchrun) the first writes; the others only run the script.
"""

import importlib.util
import json
import logging
import os
import re
import runpy
import sys
import warnings

seen = set()  # warnings, and logged ones, with where they come from


def begin(mode):
    """Records warnings from now on; patches if `mode` says so."""

    def show(message, category, filename, lineno, file=None, line=None):
        seen.add((category.__name__, steady(str(message))))

    def record(*args, **options):
        made = log_record(*args, **options)
        if made.levelno >= logging.WARNING:
            seen.add((made.name, steady(made.getMessage())))
        return made

    warnings.showwarning = show
    log_record = logging.getLogRecordFactory()
    logging.setLogRecordFactory(record)
    if mode == "patched":
        import trainfast

        trainfast.patch()


def steady(text):
    """`text` without what differs between any two runs: addresses and folders."""
    return re.sub(r"0x[0-9a-f]+", "0x", re.sub(r"/[^\s'\"]*/", "/", text))


def let_torchvision_load():
    """timm needs of torchvision only what is Python, whose import fails where its C++
    part was built for another torch: it registers details of two C++ operators."""
    import torch

    found = importlib.util.find_spec("torchvision").submodule_search_locations[0]
    try:
        torch.ops.load_library(os.path.join(found, "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float x) -> Tensor")
        sys.modules["torchvision.operators"] = library  # it undoes them when it goes


def end(mode, notes):
    found = {"warnings": sorted(seen)}
    if mode == "patched":
        found |= sys.modules["trainfast"].stats().to_dict()
    elif "trainfast" in sys.modules:
        raise RuntimeError("the plain run must not import trainfast")
    with open(notes, "w", encoding="utf-8") as file:
        json.dump(found, file)


def run_script(mode, notes, script):
    begin(mode)
    if os.path.basename(script).startswith("timm"):
        let_torchvision_load()
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        end(mode, notes)


def run_notebook(mode, notes, script):
    """With a cell before the notebook's own and one behind them."""
    import nbclient
    import nbformat

    notebook = nbformat.read(script, as_version=4)
    find = f"import sys; sys.path.append({os.path.dirname(__file__)!r})\n"
    first = f"{find}import client_runner; client_runner.begin({mode!r})"
    last = f"client_runner.end({mode!r}, {notes!r})"
    cell = nbformat.v4.new_code_cell
    notebook.cells = [cell(first), *notebook.cells, cell(last)]
    nbclient.NotebookClient(notebook, timeout=100).execute()


if __name__ == "__main__":
    mode, notes, script = sys.argv[1:4]
    del sys.argv[:3]  # the script's own are left
    run = run_notebook if script.endswith(".ipynb") else run_script
    run(mode, notes, script)
