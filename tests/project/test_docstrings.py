"""Docstrings of the public names and their methods: each argument is under `Args:`."""

import inspect
import re

import pytest

pytest.importorskip("torch_geometric", reason="some of the names are adapters'")

from tests.project.public_names import public_objects
from trainfast.report import Report


def parameters_of(function):
    """Names of a callable's arguments, without self, *args and **kwargs."""
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind not in variadic and p.name != "self"]


def arguments_in(docstring):
    """The names before the colons of the entries under `Args:`."""
    lines = [*docstring.splitlines(), "end"]
    if "Args:" not in lines:
        return []
    section = []
    for line in lines[lines.index("Args:") + 1 :]:
        if line and not line.startswith(" "):
            break
        section.append(line)
    # An entry has four spaces, and what continues it has eight.
    entries = "\n".join(section).replace("\n        ", " ").splitlines()
    heads = [entry.partition(":")[0] for entry in entries if entry]
    return [name for head in heads for name in re.findall(r"\w+", head)]


def undocumented(function):
    text = inspect.cleandoc(function.__doc__ or "")
    return [name for name in parameters_of(function) if name not in arguments_in(text)]


def is_made_by_user(value):
    """Not what trainfast makes: reports, errors, and tuples of results."""
    return not (
        inspect.isclass(value) and issubclass(value, (Report, Exception, tuple))
    )


def own_methods(kind):
    """The public methods of a class that are defined in trainfast, by name; without the
    hooks (on_...) that a framework calls and documents."""
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith(("_", "on_")) and function.__module__.startswith(
            "trainfast"
        ):
            yield name, function


def public_callables():
    found = {}
    for value, name in public_objects().items():
        if not inspect.isbuiltin(value) and is_made_by_user(value):
            found[name] = value
            for method, function in (
                own_methods(value) if inspect.isclass(value) else ()
            ):
                found[f"{name}.{method}"] = function
    return found


CALLABLES = public_callables()


@pytest.mark.parametrize("name", CALLABLES)
def test_each_argument_stands_under_args(name):
    assert undocumented(CALLABLES[name]) == []


def test_argument_without_an_entry_is_found():
    def function(first, second, third=3, *rest, fourth):
        """Does it.

        Args:
            first, second: named together: with a colon, and
                third: not here.

        Raises:
            fourth: no argument's section.
        """

    assert undocumented(function) == ["third", "fourth"]
    assert undocumented(lambda x: x) == ["x"]
