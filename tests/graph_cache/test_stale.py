"""A build never gives graphs of other code, or of other inputs, without a word."""

import errno
import functools
import json
import subprocess
import sys
import textwrap
import threading
import types

import numpy as np
import pytest

from tests import graph_samples
from tests.graph_samples import environment, graph, numbers, quiet, run_python
from trainfast.graph_cache import StaleCacheError
from trainfast.graph_cache.digest import digest
from trainfast.graph_cache.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("stopped_clock")

SCRIPT = """
import functools
import numpy as np
from tests.graph_samples import graph
import own_helpers

SCALE = 2
TABLE = {"a": [1, 2], "b": {"x", "yy", "zzz"}}
ARRAY = np.arange(6.0)

def shifted(n):
    return n + 0

class Rule:
    offset = 0
    def __init__(self, width=1):
        self.width = width
    def __call__(self, n):
        return self.moved(graph(n))
    def moved(self, one):
        return one | {"w": np.full(3, self.width + self.offset)}

def factory(k):
    def make(n, d=1, *, e=2):
        names = {"p", "qq", "rrr"}
        inner = [value + k for value in (1, 2)]
        many = len(names) + sum(inner) + d + e + SCALE + len(TABLE["b"])
        return graph(shifted(n)) | {"z": np.array([many, ARRAY[0], own_helpers.one(n)])}
    return make

make = factory(3)
rule = Rule()
part = functools.partial(make, d=1)
by_method = Rule().__call__
"""
HELPERS = """
TEN = 10
def two(n):
    return n + TEN
def one(n):
    return two(n) - n
"""


def load(script=SCRIPT, helpers=HELPERS):
    """The names that a script, and a module of its own, define."""
    modules = []
    for name, source in (("own_helpers", helpers), ("own_script", script)):
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile(textwrap.dedent(source), f"/somewhere/{name}.py", "exec"),
             vars(module))  # fmt: skip
        modules.append(module)
    return modules[1]


@pytest.fixture(autouse=True)
def _no_modules_left():
    yield
    for name in ("own_helpers", "own_script"):
        sys.modules.pop(name, None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


def edited(old, new, source=SCRIPT):
    assert old in source
    return source.replace(old, new)


EDITS = {
    "constant": ("make", {"script": edited("(1, 2)", "(1, 3)")}, "the code of `make`"),
    "set": ("make", {"script": edited('"rrr"', '"sss"')}, "the code of `make`"),
    "closure": (
        *("make", {"script": edited("factory(3)", "factory(4)")}),
        "the closure value `k`",
    ),
    "default": ("make", {"script": edited("d=1, *", "d=2, *")}, "the default of `d`"),
    "keyword": ("make", {"script": edited("e=2", "e=3")}, "the default of `e`"),
    "global": ("make", {"script": edited("SCALE = 2", "SCALE = 3")}, "global `SCALE`"),
    "table": ("make", {"script": edited('"zzz"', '"z"')}, "the global `TABLE`"),
    "array": ("make", {"script": edited("6.0", "7.0")}, "the global `ARRAY`"),
    "function": ("make", {"script": edited("n + 0", "n - 0")}, "function `shifted`"),
    "module": ("make", {"helpers": edited("- n", "- 1", HELPERS)}, "function `one`"),
    "deeper": ("make", {"helpers": edited("n + TEN", "n", HELPERS)}, "function `two`"),
    "its global": ("make", {"helpers": edited("10", "11", HELPERS)}, "global `TEN`"),
    "attribute": (
        "rule",
        {"script": edited("width=1", "width=2")},
        "`width` of `make`",
    ),
    "method": (
        *("rule", {"script": edited("np.full(3", "np.full(4")}),
        "the method `Rule.moved`",
    ),
    "class": ("rule", {"script": edited("offset = 0", "offset = 1")}, "class `Rule`"),
    "of a method": (
        *("by_method", {"script": edited("width=1", "width=2")}),
        "the attribute `width` of `make`",
    ),
    "partial": (
        *("part", {"script": edited("partial(make, d=1)", "partial(make, d=5)")}),
        "the argument `d` of `make`",
    ),
    "in a partial": (
        *("part", {"script": edited("+ d + e", "- d + e")}),
        "the code of `make`",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_an_error_that_names_it(path, edit, recwarn):
    name, sources, what = EDITS[edit]
    quiet(path, range(50), getattr(load(), name))
    assert quiet(path, range(50), getattr(load(), name)).reused == 50
    assert not recwarn.list
    make = getattr(load(**sources), name)
    with pytest.raises(
        StaleCacheError, match=f"changed: .*{what}.*rebuild=True"
    ) as got:
        quiet(path, range(50), make)
    assert len(got.value.changed) <= 2 and "transform_id=" in str(got.value)
    assert quiet(path, range(50), getattr(load(), name)).made == 0  # nothing was lost
    assert quiet(path, range(50), make, rebuild=True).made == 50
    assert quiet(path, range(50), make).made == 0
    with pytest.raises(StaleCacheError):
        quiet(path, range(50), getattr(load(), name))
    assert quiet(path, range(50), make, transform_id="v1").made == 50
    assert quiet(path, range(50), getattr(load(), name), transform_id="v1").made == 0
    assert not recwarn.list


HARMLESS = [
    {"script": "# moved\n\n\n" + SCRIPT},
    {"script": edited("        names =", '        "A docstring."\n        names =')},
    {"script": edited("        names =", "        # a comment\n\n        names =")},
    {"script": edited("inner", "other_name_for_it")},
    {"script": SCRIPT.replace("factory", "another_name")},
    {"script": SCRIPT + "\ndef unused():\n    return make\n"},
    {"script": edited('"yy", "zzz"', '"zzz", "yy"')},
    {"helpers": "import json\n" + HELPERS + "\nUNUSED = 5\n"},
]  # fmt: skip


@pytest.mark.parametrize("sources", HARMLESS)
@pytest.mark.parametrize("name", ["make", "rule", "part"])
def test_what_changes_no_graph_changes_nothing(path, sources, name, recwarn):
    quiet(path, range(20), getattr(load(), name))
    assert quiet(path, range(20), getattr(load(**sources), name)).made == 0
    assert not recwarn.list


def test_fingerprints_are_the_same_in_every_process(tmp_path):
    (tmp_path / "own_helpers.py").write_text(HELPERS)
    (tmp_path / "own_script.py").write_text(SCRIPT)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import own_script as s, re, numpy as np\n"
        "from trainfast.graph_cache.digest import digest\n"
        "from trainfast.graph_cache.fingerprint import fingerprint\n"
        "for name in ('make', 'rule', 'part', 'by_method'):\n"
        "    print(fingerprint({'make': getattr(s, name)}))\n"
        "print(digest([s.TABLE, re.compile('a'), np.float32(3), {1: None}, range(3)]))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment() | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(runs) == 1 and "object at" not in runs.pop()


def test_digests_tell_values_apart():
    values = [1, True, 1.0, "1", b"1", None, (1,), [1], {1}, {1: 1}, [[1]], [1, 1]]
    values += [np.arange(3), np.arange(3.0), np.zeros((2, 3)), np.zeros((3, 2)), 2**70]
    values += [np.arange(3)[::-1], float("nan"), "\udcff", graph(3), graph(4), range(3)]
    values += [np.zeros(3 << 20), np.append(np.zeros((3 << 20) - 1), 1), {1: [1]}, int]
    made = [digest(value) for value in values]
    assert None not in made and len(set(made)) == len(values)
    loop = [1]
    loop.append(loop)
    assert digest(loop) == digest(loop) is not None
    assert digest((1, (2, 3), (2, 3))) == digest((1, *[(2, 3)] * 2))
    assert digest(threading.Lock()) is digest([lambda: 1]) is None
    assert digest([[n] for n in range(200_000)]) is None  # would take too long


# ---- Inputs --------------------------------------------------------------------------


def arrays(n):
    return [np.full(3, float(i)) for i in range(n)]


def of_array(array):
    return graph(int(array[0])) | {"s": np.array([array.sum()])}


@pytest.mark.parametrize("key", [None, lambda array: int(array[0])])
def test_changed_inputs_are_named(path, key, recwarn):
    inputs = arrays(40)
    quiet(path, inputs, of_array, key=key)
    assert quiet(path, inputs, of_array, key=key).made == 0
    assert quiet(path, inputs[:30], of_array, key=key).made == 0
    assert quiet(path, inputs, of_array, key=key).made == 10  # not wanted in between
    assert not recwarn.list
    inputs[16][2] = 7  # its key is the same
    for named in ({}, {"transform_id": 1}):
        if named:
            quiet(path, arrays(40), of_array, key=key, **named)
        with pytest.raises(StaleCacheError, match="changed: input 16; "):
            quiet(path, inputs, of_array, key=key, **named)


@pytest.mark.parametrize("n", [3, 40, 1000])
def test_inputs_that_were_filtered_or_shuffled_are_found(path, n):
    inputs = list(range(n))
    quiet(path, inputs, graph)
    rng = np.random.default_rng(n)
    for gone in {0, 1, n // 2, n - 2}:
        with pytest.raises(StaleCacheError):
            quiet(path, inputs[:gone] + inputs[gone + 1 :], graph)
    for _ in range(3):
        with pytest.raises(StaleCacheError):
            quiet(path, (rng.permutation(n - 1) + 1).tolist(), graph)
    assert quiet(path, inputs, graph).made == 0


def test_inputs_that_are_appended_are_made_alone(path, recwarn):
    for n, made in ((50, 50), (80, 30), (1000, 920), (90, 0)):
        assert quiet(path, range(n), graph).made == made
        assert numbers(path)[-1] == n - 1
    assert not recwarn.list


def test_iterators_are_compared_as_they_come(path, recwarn):
    quiet(path, iter(range(100)), graph)
    assert quiet(path, iter(range(120)), graph).made == 20
    assert not recwarn.list
    with pytest.raises(StaleCacheError, match="changed: input 0"):
        quiet(path, iter(range(1, 120)), graph)
    shifted = [*range(70), *range(71, 120)]
    with pytest.raises(StaleCacheError, match="changed: input 72"):
        quiet(path, iter(shifted), graph)
    with pytest.raises(StaleCacheError, match="changed: the code of `make`"):
        quiet(path, iter(range(120)), lambda n: graph(n + 1))
    with pytest.raises(StaleCacheError, match="changed: graph 0, which made again"):
        quiet(path, iter(range(120)), lambda n: graph(n + 1), rebuild=False)
    assert quiet(path, iter(range(120)), graph).made == 0


def test_graphs_that_are_given_are_compared(path, recwarn):
    graphs = [graph(n) for n in range(40)]
    quiet(path, graphs)
    assert quiet(path, graphs).made == quiet(path, iter(graphs)).made == 0
    assert not recwarn.list
    for others in (graphs[::-1], graphs[1:], [*graphs[:20], *graphs[21:]]):
        for given in (others, iter(others)):
            with pytest.raises(StaleCacheError, match=r"graph \d+, which made again"):
                quiet(path, given)
    assert quiet(path, graphs[::-1], rebuild=True).made == 40


# ---- What cannot be hashed -----------------------------------------------------------


def test_what_make_reads_is_found_by_making_graphs_again(path, tmp_path):
    file = tmp_path / "number"

    def make(n):
        return graph(n) | {"z": np.array([float(file.read_text())])}

    file.write_text("1")
    quiet(path, range(20), make)
    assert quiet(path, range(20), make).made == 0
    file.write_text("2")
    what = "graph 0, which made again differs in 'z', graph 19, .*, graph 9, "
    with pytest.raises(StaleCacheError, match=what):
        quiet(path, range(20), make)
    assert quiet(path, range(20), make, rebuild=True).made == 20


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.forks)])
def test_a_make_that_draws_needs_a_name(path, workers):
    def make(n):
        return graph(n) | {"z": np.random.rand(2)}

    quiet(path, range(20), make, workers=workers)
    with pytest.raises(StaleCacheError, match=r"graph 0 .'z' differs.*transform_id="):
        quiet(path, range(20), make, workers=workers)
    for made in (20, 0):
        report = quiet(path, range(20), make, transform_id=1, workers=workers)
        assert report.made == made


def call(function):
    return graph(function())


def test_what_cannot_be_hashed_is_said(path, recwarn):
    file = open(__file__)  # noqa: SIM115

    def make(n):
        return graph(n) | {"open": not file.closed}

    with file:
        quiet(path, range(20), make)
        assert not recwarn.list
        with pytest.warns(UserWarning, match="value `file` .* 3 of its graphs") as said:
            assert quiet(path, range(20), make).made == 0
        assert said[0].filename == graph_samples.__file__
        assert quiet(path, range(20), make, transform_id=1).made == 20
    quiet(path, [lambda: 3] * 9, call)
    with pytest.warns(UserWarning, match="the inputs cannot be hashed"):
        quiet(path, [lambda: 3] * 9, call)
    with pytest.raises(StaleCacheError, match="graph 0, which made again differs"):
        quiet(path, [lambda: 4] * 9, call)


def test_what_make_changes_itself_is_said(path):
    seen = {}

    def make(n):
        return graph(seen.setdefault(n, n))

    quiet(path, range(20), make)
    with pytest.warns(UserWarning, match="`seen` changes while graphs are made"):
        assert quiet(path, range(20), make).made == 0


def test_an_older_cache_is_compared_by_sample(path, recwarn):
    quiet(path, range(20), graph)
    (path / "made.json").unlink()
    with pytest.raises(StaleCacheError, match="graph 0, which made again differs in"):
        quiet(path, range(20), lambda n: graph(n + 1))
    with pytest.warns(UserWarning, match="was not stored .* 3 of its graphs were made"):
        assert quiet(path, range(20), graph).made == 0
    recwarn.clear()
    assert quiet(path, range(20), graph).made == 0
    assert not recwarn.list


@pytest.mark.parametrize("note", [b"", b"[]", b'{"a": 1}', b"\xff", b'{"a": {"b": 1}}'])
def test_a_damaged_note_is_none(path, note):
    quiet(path, range(20), graph)
    (path / "made.json").write_bytes(note)
    with pytest.warns(UserWarning, match="was not stored"):
        assert quiet(path, range(20), graph).made == 0


def test_another_python_makes_a_sample_again(path, recwarn):
    make = load().make
    quiet(path, range(20), make)
    file = path / "made.json"
    (said,) = (notes := json.loads(file.read_bytes())).values()
    said["python"] = "3.99"
    said["code"] = dict.fromkeys(said["code"], "0" * 32)
    file.write_text(json.dumps(notes))
    stale = load(edited("+ d + e", "- d + e")).make
    with pytest.raises(StaleCacheError, match="graph 0, which made again differs"):
        quiet(path, range(20), stale)
    with pytest.raises(StaleCacheError, match="the global `SCALE`"):
        quiet(path, range(20), load(edited("SCALE = 2", "SCALE = 3")).make)
    assert quiet(path, range(20), load().make).made == 0
    assert "3.99" not in file.read_text() and not recwarn.list
    with pytest.raises(StaleCacheError, match="the code of `make`"):
        quiet(path, range(20), stale)


def test_a_cache_that_cannot_be_written_to_is_enough(path, monkeypatch, recwarn):
    quiet(path, range(20), graph)
    (path / "made.json").unlink()

    def refuse(*args, **options):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr("trainfast.graph_cache.origin.Origins._write", refuse)
    with pytest.warns(UserWarning, match="was not stored"):
        assert quiet(path, range(20), graph).made == 0
    with pytest.raises(OSError, match="read-only"):
        quiet(path, range(21), graph)


# ---- Builds that do not end ----------------------------------------------------------

KILLED = """
    import os, signal
    from tests.graph_samples import graph, quiet
    def make(n):
        if n == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
        return graph(n + {more})
    quiet({path!r}, range(60), make, commit_every=8, commit_seconds=1e9,
          rebuild={rebuild}, workers={workers})
"""


def killed(path, at, more, rebuild=None, workers=0):
    code = KILLED.format(
        path=str(path), at=at, more=more, rebuild=rebuild, workers=workers
    )
    return run_python(code)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.forks)])
def test_a_killed_build_does_not_go_on_with_other_code(path, workers):
    killed(path, 40, 0, workers=workers)
    done = killed(path, -1, 5, workers=workers)
    assert "StaleCacheError" in done.stderr and "constants" not in done.stderr
    assert "the code of `make`" in done.stderr
    done = killed(path, -1, 5, rebuild=False, workers=workers)
    assert "graph 0, which made again differs in" in done.stderr
    assert killed(path, -1, 5, rebuild=True, workers=workers).returncode == 0
    assert numbers(path) == list(range(5, 65))


def test_a_killed_rebuild_goes_on_and_never_mixes(path):
    assert killed(path, -1, 0).returncode == 0
    killed(path, 40, 5, rebuild=True)
    done = killed(path, -1, 0)
    assert "StaleCacheError" in done.stderr  # the rebuild was of other code
    make = functools.partial(_more, 5)
    report = quiet(path, range(60), make, rebuild=False)
    assert 0 < report.reused < 60 and report.made + report.reused == 60
    assert numbers(path) == list(range(5, 65))


def _more(more, n):
    return graph(n + more)


def test_inputs_of_another_key_do_not_make_old_code_new(path):
    def fails(n):
        if n == 30:
            raise ValueError("no graph")
        return graph(n)

    with pytest.raises(Exception, match="no graph"):
        quiet(path, range(40), fails, key=int, commit_every=8)
    with pytest.raises(Exception, match="no graph"):
        quiet(path, range(100, 140), lambda n: fails(n - 100), key=int)
    make = load().make
    with pytest.raises(StaleCacheError):
        quiet(path, [*range(100, 140), *range(40)], make, key=int)
    quiet(path, range(200, 210), make, key=int)
    assert quiet(path, range(40), make, key=int).made == 40


def test_fingerprint_goes_through_decorators_and_imports():
    def wrapping(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    for helpers, same in ((HELPERS, True), (edited("- n", "- 1", HELPERS), False)):
        found = []
        for source in (HELPERS, helpers):
            load(helpers=source)

            @wrapping
            @functools.lru_cache
            def make(n):
                from own_helpers import one

                return one(n)

            @wrapping
            def other(n):
                import own_helpers

                return own_helpers.one(n)

            found.append([fingerprint({"make": make}), fingerprint({"make": other})])
        for first, second in zip(*found):
            assert (first == second) is same and not first.unknown
