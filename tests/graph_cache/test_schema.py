"""Schemas of graphs: their bytes, and how they are made from graphs and widened."""

import pickle
import struct
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph_samples import assert_same, read
from trainfast.graph_cache import Counted, Rule, Schema, Writer
from trainfast.graph_cache.fit import Counter, generalise
from trainfast.graph_cache.infer import infer
from trainfast.graph_cache.schema import DTYPES, Count, Field

HETERO = Schema(
    (
        Count("nodes", "paper"),
        Count("nodes", "author"),
        Count("edges", "author|writes|paper", 1, 0),
        Count("size"),
        Count("increment"),
    ),
    (
        Field("x", 0, "float32", (-1, 16), 0),
        Field("edge_index", 2, "int64", (2, -3), 1, (1, 0)),
        Field("y", None, "bfloat16", (1,), None),
        Field("text", None, "string", (-4,), 0, optional=True),
        Field("part_batch", None, "int32", (-4,), 0, (4,)),
        Field("n", None, "int64", scalar=True),
    ),
)
WRITES = ("author", "writes", "paper")


def graph(n, e, **more):
    """A homogeneous graph with n nodes and e edges."""
    return {
        "x": np.zeros((n, 4), np.float32),
        "edge_index": np.zeros((2, e), np.int64),
        **more,
    }


def dims(schema):
    return dict(zip(schema.keys, (field.dims for field in schema.fields)))


# ---- Bytes ---------------------------------------------------------------------------


def test_a_schema_comes_back_from_its_bytes():
    data = HETERO.encode()
    assert Schema.decode(data) == HETERO
    assert len(data) % 16 == 0
    assert struct.unpack_from("<HHI", data) == (5, 6, 57)
    assert data[16 + 5 * 16 + 6 * 64 :].startswith(
        b"paperauthorauthor|writes|paperxedge"
    )


@st.composite
def schemas(draw):
    names = st.text(st.characters(exclude_characters="|\0", codec="utf-8"), max_size=9)
    kinds = draw(st.lists(names, unique=True, max_size=3))
    counts = [Count("nodes", kind) for kind in kinds]
    counts += [Count("edges", "", 0, len(kinds) - 1)] if kinds else []
    counts += [Count("size")] * draw(st.integers(0, 2))
    limit = len(counts)
    dim = st.integers(-limit, 2**31 - 1)
    fields = []
    for name in draw(st.lists(names.filter(bool), unique=True, max_size=4)):
        shape = tuple(draw(st.lists(dim, max_size=8)))
        cat_dim = draw(st.sampled_from([None, *range(len(shape))]))
        dtype = draw(st.sampled_from(DTYPES[1:-2]))
        fields.append(Field(name, None, dtype, shape, cat_dim, (), draw(st.booleans())))
    return Schema(tuple(counts), tuple(fields))


@given(schemas())
def test_any_schema_comes_back_from_its_bytes(schema):
    assert Schema.decode(schema.encode()) == schema


def test_any_changed_byte_is_another_schema_or_an_error():
    data = HETERO.encode()
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 0x41
        try:
            found = Schema.decode(bytes(damaged))
        except ValueError:
            continue
        assert found != HETERO and found.encode() == damaged


@pytest.mark.parametrize("size", [0, 1, 15, 16, 100, -1])
def test_bytes_cut_short_are_no_schema(size):
    with pytest.raises(ValueError, match="data must be a schema"):
        Schema.decode(HETERO.encode()[:size])


@pytest.mark.parametrize(
    ("counts", "fields", "message"),
    [
        ([Count("size"), Count("nodes")], [], "counts must be sorted by role"),
        ([Count("cats")], [], "role must be one of"),
        ([Count("nodes"), Count("nodes")], [], "must have different names"),
        ([Count("nodes"), Count("edges", "a|b", 0, 0)], [], "'source|relation|target'"),
        (
            [Count("nodes"), Count("edges", "", 0, 1)],
            [],
            "ends must be counts of nodes",
        ),
        ([Count("size", "a")], [], "must have no name"),
        ([Count("nodes", "a" * 256)], [], "at most 255 bytes"),
        ([], [Field("", None, "bool")], "must not be empty"),
        ([], [Field("a", None, "str")], "dtype must be a dtype, got 'str'"),
        ([], [Field("a", None, "bool", (1,) * 9)], "at most 8 dims, got 9"),
        ([], [Field("a", None, "bool", (-1,))], "a count's place must be in"),
        ([], [Field("a", None, "bool", (), 0)], "cat_dim must be None or in"),
        ([Count("size")], [Field("a", 0, "bool")], "type must be nodes or edges"),
        ([Count("nodes")], [Field("a", None, "int8", (3,), 0, (0, 0))], "two rows"),
        ([], [Field("a", None, "string")], "must have rank 1 as a string"),
        ([], [Field("a", None, "int8", scalar=True)], "as a scalar"),
        ([], [Field("a", None, "bool")] * 2, "different keys, got 'a' twice"),
    ],
)
def test_a_schema_that_breaks_a_rule_is_refused(counts, fields, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        Schema(tuple(counts), tuple(fields))


def test_keys_are_those_of_graphs():
    assert HETERO.keys == (
        *(("paper", "x"), (WRITES, "edge_index")),
        *("y", "text", "part_batch", "n"),
    )
    assert HETERO.field_of((WRITES, "edge_index")) == 1
    assert HETERO.nodes == {"paper": 0, "author": 1}
    assert HETERO.edges == {WRITES: 2}
    assert HETERO.increments("part_batch") == (4,) and HETERO.increments("y") == ()
    with pytest.raises(KeyError):
        HETERO.field_of("x")


def test_a_schema_prints_as_a_table():
    text = str(HETERO)
    assert "(nodes of paper, 16)" in text and "nodes of author, nodes of paper" in text
    assert text.splitlines()[0] == "6 fields, 5 counts a graph"


# ---- From graphs ---------------------------------------------------------------------


def test_well_known_names_share_the_counts_of_nodes_and_edges():
    sample = graph(3, 5, pos=np.zeros((3, 2)), edge_attr=np.zeros(5, np.int8))
    schema = infer([sample])
    assert schema.counts == (Count("nodes"), Count("edges", "", 0, 0))
    found = dims(schema)
    assert found == {
        **{"x": (-1, 4), "edge_index": (2, -2), "pos": (-1, 2), "edge_attr": (-2,)}
    }
    assert [field.cat_dim for field in schema.fields] == [0, 1, 0, 0]
    assert [field.add for field in schema.fields] == [(), (0,), (), ()]
    assert [field.type for field in schema.fields] == [0, 1, 0, 1]


def test_other_names_share_a_count_only_with_two_sizes_as_evidence():
    same = [graph(3, 5, y=np.zeros(3)) for _ in range(4)]
    assert dims(infer(same))["y"] == (3,)
    differ = [graph(n, 5, y=np.zeros(n), z1=np.zeros(1)) for n in (3, 4)]
    schema = infer(differ)
    assert dims(schema)["y"] == (-1,) and dims(schema)["z1"] == (1,)
    assert schema.fields[schema.field_of("y")].type == 0


def test_sizes_that_differ_are_counts_of_their_own():
    schema = infer([graph(3, 5, a=np.zeros((k, 7 - k))) for k in (1, 2)])
    assert dims(schema)["a"] == (-3, -4)
    assert [count.role for count in schema.counts] == ["nodes", "edges", "size", "size"]
    assert dims(infer([{"a": np.zeros((0, 2))}]))["a"] == (-1, 2)


def test_a_well_known_name_with_another_size_keeps_its_own():
    schema = infer([graph(3, 5, pos=np.zeros((2, 3)))])
    assert dims(schema)["pos"] == (2, 3)


def test_values_of_python_are_scalars_and_text():
    sample = {"a": True, "b": 3, "c": 0.5, "d": "ä", "e": b"", "f": np.float32(1)}
    schema = infer([sample])
    assert [field.dtype for field in schema.fields] == [
        *("bool", "int64", "float64", "string", "bytes", "float32")
    ]
    assert [field.scalar for field in schema.fields] == [True] * 3 + [False] * 3
    assert list(dims(schema).values()) == [(), (), (), (-1,), (-2,), ()]
    assert [f.cat_dim for f in schema.fields] == [None, None, None, 0, 0, None]


def test_hetero_graphs_count_by_type():
    sample = {
        ("paper", "x"): np.zeros((4, 2)),
        ("paper", "y"): np.zeros(4),
        ("paper", "year"): np.zeros(1),
        (WRITES, "edge_index"): np.zeros((2, 6), np.int64),
        (WRITES, "edge_attr"): np.zeros((6, 3)),
        "index": np.zeros(2, np.int64),
    }
    schema = infer([sample])
    assert schema.counts[:2] == (Count("nodes", "paper"), Count("nodes", "author"))
    assert schema.counts[2] == Count("edges", "author|writes|paper", 1, 0)
    assert list(dims(schema).values()) == [(-1, 2), (-1,), (1,), (2, -3), (-3, 3), (2,)]
    assert schema.fields[3].add == (1, 0) and schema.fields[5].add == ()


@pytest.mark.parametrize(
    ("name", "value", "cat_dim", "roles"),
    [
        ("face", np.zeros((3, 9), np.int64), 1, ["nodes"]),
        ("my_index_map", np.zeros((4, 9), np.int32), 1, ["nodes"]),
        ("minibatch_id", np.zeros(9, np.int64), 0, ["increment"]),
        ("adj", np.zeros((4, 4), np.float32), 0, []),
        ("index", np.zeros((), np.int64), None, []),
        ("index_weight", np.zeros(4, np.float32), 0, []),
        ("edge_index", np.zeros((9, 2), np.int64), 0, ["nodes"]),
    ],
)
def test_names_tell_rules_as_pyg_has_them(name, value, cat_dim, roles):
    schema = infer([{name: value}])
    field = schema.fields[0]
    assert field.cat_dim == cat_dim
    assert [schema.counts[i].role for i in field.add] == roles


def test_rules_take_precedence_over_names():
    rules = {
        "edge_index": Rule(add=None),
        "y": Rule(cat_dim=None, belongs=None, optional=True),
        "pair": Rule(cat_dim=-1, add="increments"),
    }
    sample = graph(3, 5, y=np.zeros(3), pair=np.zeros((2, 7), np.int64))
    schema = infer([sample, graph(4, 5, y=np.zeros(4), pair=sample["pair"])], rules)
    fields = {field.name: field for field in schema.fields}
    assert fields["edge_index"].add == () and fields["edge_index"].cat_dim == 1
    assert fields["y"] == Field("y", None, "float64", (-3,), None, optional=True)
    assert fields["pair"].cat_dim == 1 and schema.increments("pair") == (3, 4)


def test_what_some_graphs_lack_is_optional():
    schema = infer([graph(3, 5), graph(4, 5, y=1.0)])
    assert [field.optional for field in schema.fields] == [False, False, True]


@pytest.mark.parametrize(
    ("samples", "rules", "error", "message"),
    [
        ([], {}, ValueError, "at least one"),
        ([{"a": [1]}], {}, TypeError, "'a': a value must be .* got list"),
        (
            [{"a": np.zeros(1, "O")}],
            {},
            TypeError,
            "dtype must be one of .* got object",
        ),
        ([{"a|": 1, 3: 2}], {}, ValueError, "a key must be a name, .* got 3"),
        ([{(("a", "b|", "c"), "x"): 1}], {}, ValueError, "a key must be"),
        (
            [{"a": 1}, {"a": 1.0}],
            {},
            ValueError,
            "'a': its dtype must be int64",
        ),
        ([{"a": 1}, {"a": np.int64(1)}], {}, ValueError, "must be int64 scalar"),
        (
            [{"a": np.zeros(1)}, {"a": np.zeros((1, 1))}],
            *({}, ValueError, r"'a': it must have 1 dim.* got shape \(1, 1\)"),
        ),
        ([{"a": 1}], {"b": Rule()}, ValueError, "rules must be for keys .* got 'b'"),
        ([{"a": np.zeros(1)}], {"a": Rule(cat_dim=1)}, ValueError, "cat_dim must be"),
        ([{"a": np.zeros(1)}], {"a": Rule(add="x")}, ValueError, "add must be one of"),
        ([{"a": 1}], {"a": Rule(belongs="x")}, ValueError, "belongs must be"),
        (
            [{"a": 1}],
            {"a": Rule(add=())},
            ValueError,
            r"add must be one of .* got \(\)",
        ),
    ],
)
def test_graphs_that_make_no_schema_are_refused(samples, rules, error, message):
    with pytest.raises(error, match=message):
        infer(samples, rules)


@pytest.mark.parametrize(
    ("name", "value", "kinds"),
    [
        *[("cat_dim", value, 'an int, None or "auto"') for value in (1.5, "x", [0])],
        ("add", 5, "a str, a tuple of str or None"),
        ("add", 0, "a str, a tuple of str or None"),
        ("add", ["nodes", "paper"], "a str, a tuple of str or None"),
        ("add", ("nodes", 5), "a str, a tuple of str or None"),
        ("add", ("rows", "a", ("b",)), "a str, a tuple of str or None"),
        ("belongs", ("nodes",), "a str or None"),
        ("optional", "no", "a bool"),
    ],
)
def test_parts_of_a_rule_that_are_of_another_kind_are_named(name, value, kinds):
    with pytest.raises(TypeError) as caught:
        Rule(**{name: value})
    assert str(caught.value) == f"{name} must be {kinds}, got {value!r}"


# ---- Counts and widening -------------------------------------------------------------


def test_counts_that_no_shape_tells_come_from_the_graph():
    schema = infer([{"edge_index": np.array([[0, 1], [4, 2]])}])
    counter = Counter(schema)
    assert counter.needed
    indices = {"edge_index": np.array([[0, 1], [4, 2]])}
    assert counter.counts(indices, {}) == [5, -1]
    assert counter.counts(indices, {("nodes", ""): 9}) == [9, -1]
    assert counter.counts({**indices, "num_nodes": 7}, {}) == [7, -1]
    assert counter.counts({"edge_index": np.zeros((2, 0), np.int64)}, {}) == [0, -1]
    assert not Counter(infer([graph(3, 5)])).needed
    assert Counter(infer([graph(3, 5, num_nodes=3)])).needed


def test_hetero_counts_are_of_each_end():
    edges = np.array([[0, 7], [4, 2]])
    counter = Counter(infer([{(WRITES, "edge_index"): edges}]))
    assert counter.counts({(WRITES, "edge_index"): edges}, {}) == [8, 5, -1]


def test_increments_come_with_the_graph_or_from_the_values():
    sample = {"part_batch": np.array([0, 0, 3])}
    counter = Counter(infer([sample]))
    assert counter.counts(sample, {}) == [4]
    assert counter.counts(sample, {("increment", "part_batch"): 10}) == [10]
    pair = {"pair": np.array([[1, 2], [5, 0]])}
    counter = Counter(infer([pair], {"pair": Rule(add="increments")}))
    assert counter.counts(pair, {("increment", "pair", 0): 8}) == [8, 6]


def test_a_graph_keeps_the_counts_given_with_it():
    counted = pickle.loads(pickle.dumps(Counted({"a": 1}, {("nodes", ""): 3})))
    assert type(counted) is Counted
    assert counted == {"a": 1} and counted.counts == {("nodes", ""): 3}


def test_a_fixed_size_that_changes_becomes_a_count():
    schema = infer([graph(3, 5, y=np.zeros(3), key_batch=np.zeros(2, np.int64))])
    wider = generalise(
        schema, graph(4, 5, y=np.zeros(9), key_batch=np.zeros(1, int)), 2
    )
    assert dims(wider)["y"] == (-3,) and dims(wider)["key_batch"] == (-4,)
    roles = [count.role for count in wider.counts]
    assert roles == ["nodes", "edges", "size", "size", "increment"]
    assert wider.fields[3].add == (4,)
    assert dims(wider)["x"] == (-1, 4)


def test_a_shared_count_stays_with_the_most_telling_name():
    samples = [{"y": np.zeros(n), **graph(n, 5)} for n in (3, 4)]
    schema = infer(samples)
    assert dims(schema)["y"] == (-1,)
    wider = generalise(schema, {"y": np.zeros(1), **graph(4, 5)}, 1)
    assert dims(wider) == {"y": (-3,), "x": (-1, 4), "edge_index": (2, -2)}


def test_a_field_that_is_missing_becomes_optional():
    wider = generalise(infer([graph(3, 5, y=1.0)]), graph(3, 5), 2)
    assert [field.optional for field in wider.fields] == [False, False, True]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": np.zeros(3, np.float32)}, "'x' must have 2 dimensions, got shape"),
        ({"edge_index": np.zeros((3, 5), np.int64)}, "must have two rows"),
        ({}, "'x' must fit the schema"),
    ],
)
def test_what_cannot_be_widened_is_an_error(changed, message):
    sample = {
        ("a", "x"): np.zeros((3, 4), np.float32),
        (("a", "b", "a"), "edge_index"): np.zeros((2, 5), np.int64),
    }
    schema = infer([sample])
    names = {"x": ("a", "x"), "edge_index": (("a", "b", "a"), "edge_index")}
    bad = sample | {names[name]: value for name, value in changed.items()}
    with pytest.raises(ValueError, match=message.replace("'x'", ".*'x'.*")):
        generalise(schema, bad, 0)


# ---- Any graphs ----------------------------------------------------------------------

RANKS = {"x": 2, "target": 1, "y": 1, "edge_attr": 1, "other": 3, "part_batch": 1}


@st.composite
def graphs(draw):
    """Graphs with the same keys, dtypes and ranks (but what is missing), any sizes."""
    keys = draw(st.lists(st.sampled_from([*RANKS]), unique=True, min_size=1))
    sizes = st.integers(0, 3)
    found = []
    for _ in range(draw(st.integers(1, 14))):
        n, e = draw(sizes), draw(sizes)
        one = {}
        for key in keys:
            of_nodes = key == "x" or draw(st.booleans())
            shape = [draw(sizes) for _ in range(RANKS[key])]
            shape[0] = (e if key.startswith("edge") else n) if of_nodes else shape[0]
            one[key] = np.full(shape, len(found), np.int64)
        if draw(st.booleans()):
            one.pop(draw(st.sampled_from(keys)))
        if n and "x" in one and draw(st.booleans()):
            one["edge_index"] = np.zeros((2, e), np.int64)
        found.append(one)
    first = {key: np.zeros((0,) * RANKS[key], np.int64) for key in keys}
    return [first | {"edge_index": np.zeros((2, 0), np.int64)}, *found]


@settings(max_examples=60)
@given(graphs(), st.integers(1, 9))
def test_graphs_of_any_sizes_are_written_and_come_back(samples, known):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/cache"
        with Writer(path, samples=known, durable=False) as writer:
            for one in samples:
                writer.append(one)
        assert_same(read(path), samples)
