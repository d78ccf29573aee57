"""Builds, inspects, checks and converts graph caches."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainfast import _core
from trainfast.graph_cache.build import build
from trainfast.graph_cache.job import BuildError
from trainfast.graph_cache.schema import Schema
from trainfast.graph_cache.writer import REFUSED
from trainfast.report import Report, Table
from trainfast.tools import _cache_export, _cache_import
from trainfast.tools._objects import object_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action=_help, print_help=parser.print_help)
    verbs = parser.add_subparsers(metavar="<action>", title="actions")
    for name, (action, add) in _ACTIONS.items():
        text = " ".join((action.__doc__ or "").partition("\n\n")[0].split())
        verb = verbs.add_parser(name, help=text, description=text)
        unless_before = argparse.SUPPRESS  # `cache --json stat` is right, too
        verb.add_argument(
            "--json", action="store_true", default=unless_before, help="print JSON"
        )
        add(verb)
        verb.set_defaults(action=action)


def run(args: argparse.Namespace) -> int:
    """Runs one action. What goes wrong is one line on stderr, and exit status 1."""
    try:
        return args.action(args)
    except (OSError, IndexError, BuildError, *REFUSED) as error:
        text = " ".join(str(error).splitlines())  # a path may have several
        print(f"trainfast cache: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("trainfast cache: interrupted", file=sys.stderr)
        return 130


class CacheReport(Report):
    """Facts about a cache: what JSON has, and tables for people."""

    def __init__(self, facts: dict[str, Any], tables: Sequence[Table]) -> None:
        self.facts = facts
        self._tables = list(tables)

    def to_dict(self) -> dict[str, Any]:
        return self.facts

    def tables(self) -> list[Table]:
        return self._tables


def _help(args: argparse.Namespace) -> int:
    args.print_help()
    return 0


def _show(args: argparse.Namespace, report: Report) -> None:
    print(report.for_terminal(args.json))


# ---- build ---------------------------------------------------------------------------


def _build(args: argparse.Namespace) -> int:
    """Builds a cache from a function of a Python module, or goes on building it."""
    inputs = object_of(args.inputs)
    report = build(
        args.path,
        inputs() if callable(inputs) else inputs,
        object_of(args.make) if args.make else None,
        key=object_of(args.key) if args.key else None,
        transform_id=args.transform_id,
        workers=args.workers,
        progress=not args.quiet,
        rebuild=args.rebuild,
    )
    _show(args, report)
    return 0


def _add_build(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    where = "module:name"
    text = "a function without arguments that returns the inputs, or the inputs"
    parser.add_argument("inputs", metavar=where, help=text)
    text = "makes a graph of an input; without it the inputs are graphs"
    parser.add_argument("--make", metavar=where, help=text)
    text = "tells an input's key; without it its place is the key"
    parser.add_argument("--key", metavar=where, help=text)
    text = "another one makes all graphs again"
    parser.add_argument("--transform-id", metavar="TEXT", help=text)
    parser.add_argument("--workers", type=int, default=0, help="processes (0: none)")
    text = "make all graphs again, or keep those that a changed --make has made"
    action = argparse.BooleanOptionalAction
    parser.add_argument("--rebuild", action=action, default=None, help=text)
    _add_quiet(parser)


# ---- inspect and stat ----------------------------------------------------------------


def _inspect(args: argparse.Namespace) -> int:
    """Shows what the graphs of a cache look like, and one of them."""
    cache, schema = _open(args.path)
    facts: dict[str, Any] = {"path": args.path, "graphs": len(cache)}
    tables = []
    if schema is not None:
        table = schema.table()
        facts["fields"] = [_fact(schema, i) for i in range(len(schema.fields))]
        tables = [Table(f"{args.path}: {table.title}", table.columns, table.rows)]
    if schema is not None and len(cache):
        at = args.graph + len(cache) if args.graph < 0 else args.graph
        if not 0 <= at < len(cache):
            allowed = f"{-len(cache)} .. {len(cache) - 1}"
            raise IndexError(f"graph must be in {allowed}, got {args.graph}")
        values = cache.get(at)
        rows = [(str(key), _look(value)) for key, value in zip(schema.keys, values)]
        facts["graph"] = dict(rows)
        tables.append(Table(f"graph {at} of {len(cache)}", ("key", "value"), rows))
    _show(args, CacheReport(facts, tables or [_empty(args.path)]))
    return 0


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    parser.add_argument("--graph", type=int, default=0, help="its number (default 0)")


def _fact(schema: Schema, i: int) -> dict[str, Any]:
    field = schema.fields[i]
    sizes = [d if d >= 0 else schema.count_name(-1 - d) for d in field.dims]
    return {
        "key": str(schema.keys[i]),
        "dtype": field.dtype,
        "shape": sizes,
        "cat_dim": field.cat_dim,
        "adds": [schema.count_name(count) for count in field.add],
        "optional": field.optional,
        "scalar": field.scalar,
    }


def _look(value: Any) -> str:
    """A value in few words."""
    if value is None:
        return "not there"
    if not isinstance(value, np.ndarray):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    first = " ".join(map(str, value.reshape(-1)[:4].tolist()))
    return f"{value.dtype} {value.shape}: {first}{' ...' if value.size > 4 else ''}"


def _stat(args: argparse.Namespace) -> int:
    """Counts graphs, nodes, edges and bytes, from the index alone."""
    cache, schema = _open(args.path)
    columns = {}
    if schema is not None and len(cache):
        names = [schema.count_name(i) for i in range(len(schema.counts))]
        columns = {"bytes": cache.counts(-1)}
        columns |= {name: cache.counts(i) for i, name in enumerate(names)}
    facts: dict[str, Any] = {
        "path": args.path,
        "graphs": len(cache),
        "segments": cache.segments,
        "file_bytes": cache.file_bytes,
    }
    pairs = [(key, facts[key]) for key in ("graphs", "segments", "file_bytes")]
    rows = [(name, *_spread(column)) for name, column in columns.items()]
    facts["counts"] = {
        row[0]: dict(zip(("total", "smallest", "mean", "largest"), row[1:]))
        for row in rows
    }
    header = ("of each graph", "total", "smallest", "mean", "largest")
    tables = [Table(args.path, ("what", "value"), pairs)]
    tables += [Table("counts", header, rows)] if rows else []
    _show(args, CacheReport(facts, tables))
    return 0


def _spread(column: np.ndarray[Any, Any]) -> tuple[int, int, float, int]:
    total, smallest, largest = int(column.sum()), int(column.min()), int(column.max())
    return total, smallest, total / len(column), largest


def _empty(path: str) -> Table:
    return Table(path, (), [], empty="no graphs")


def _open(path: str) -> tuple[_core.GraphCache, Schema | None]:
    cache = _core.GraphCache(path)
    return cache, None if cache.schema is None else Schema.decode(cache.schema)


# ---- verify and repair ---------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    """Checks every byte of a cache; exit status 1 if a graph is damaged."""
    cache = _core.GraphCache(args.path, verify=0)
    damaged = cache.verify(0, len(cache), args.values)
    facts = {
        "path": args.path,
        "graphs": len(cache),
        "damaged": [{"graph": i, "message": text} for i, text in damaged],
    }
    title = f"{args.path}: {len(damaged)} of {len(cache)} graphs damaged"
    columns = ("graph", "what is wrong")
    fine = f"all {len(cache)} graphs are intact"
    table = Table(title if damaged else args.path, columns, damaged, empty=fine)
    _show(args, CacheReport(facts, [table]))
    return 1 if damaged else 0


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    text = "floats must be finite, too"
    parser.add_argument("--values", action="store_true", help=text)


def _repair(args: argparse.Namespace) -> int:
    """Copies every committed graph that can be read into a new cache.

    Exit status 1 if something was lost.
    """
    lines: list[str] = []
    found = _core.graph_repair(args.path, args.target, lines.append)
    facts = {"path": args.path, "target": args.target, **found, "lines": lines}
    title = f"{args.path} -> {args.target}"
    tables = [Table("report", ("line",), [(line,) for line in lines])] if lines else []
    tables.append(Table(title, ("what", "value"), list(found.items())))
    _show(args, CacheReport(facts, tables))
    return 1 if found["damaged"] else 0


def _add_repair(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    parser.add_argument("target", help="the new cache")


# ---- import and export ---------------------------------------------------------------


def _import(args: argparse.Namespace) -> int:
    """Makes a cache of .pt and .npz files, or of a dataset that PyG has processed."""
    graphs = _cache_import.Graphs(args.sources, trust=args.trust)
    report = build(
        args.path,
        graphs,
        key=None,
        transform_id=graphs.identity,
        progress=not args.quiet,
    )
    _show(args, report)
    return 0


def _add_import(parser: argparse.ArgumentParser) -> None:
    text = "a file, or a directory of them (sorted by name)"
    parser.add_argument("sources", nargs="+", metavar="source", help=text)
    parser.add_argument("path", help="the cache, last as with cp")
    text = "load any pickle: this runs what is in the files"
    parser.add_argument("--trust", action="store_true", help=text)
    _add_quiet(parser)


def _export(args: argparse.Namespace) -> int:
    """Writes each graph of a cache to an .npz file of its own."""
    cache, schema = _open(args.path)
    keys = () if schema is None else schema.keys
    written = _cache_export.export(cache, keys, Path(args.target), not args.quiet)
    facts = {"path": args.path, "target": args.target, **written}
    rows = [(name, value) for name, value in written.items()]
    _show(args, CacheReport(facts, [Table(args.target, ("what", "value"), rows)]))
    return 0


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    parser.add_argument("target", help="a new directory")
    _add_quiet(parser)


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the cache")


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


_Add = Callable[[argparse.ArgumentParser], None]
_ACTIONS: dict[str, tuple[Callable[[argparse.Namespace], int], _Add]] = {
    "build": (_build, _add_build),
    "inspect": (_inspect, _add_inspect),
    "stat": (_stat, _add_path),
    "verify": (_verify, _add_verify),
    "repair": (_repair, _add_repair),
    "import": (_import, _add_import),
    "export": (_export, _add_export),
}
