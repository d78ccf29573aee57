"""Keys of graphs in a cache."""

import numpy as np

from trainfast.graph_cache.keys import key_maker, stable


def test_keys_by_place_hold_the_place():
    one, other = key_maker(None, None), key_maker(None, "v2")
    assert one(0, None)[:8] == b"\1" + bytes(7)
    assert one(258, None)[:8] == b"\3\1" + bytes(6)
    assert one(0, None)[8:] != other(0, None)[8:] and len(one(0, None)) == 16
    assert one(0, None) != key_maker(None, None, "salt")(0, None)


def test_different_keys_have_different_bytes():
    values = ["", "1", b"1", 1, -1, 2**70, (), ("1",), (("1",),), ("1", ""), ("", "1")]
    values += [(1, 2), (12,), "s1:1", ("a", "b"), ("ab",), (b"a", "b")]
    assert len({stable(value) for value in values}) == len(values)
    assert stable(np.int64(5)) == stable(5)
    made = [key_maker(lambda v: v, t)(0, v) for v in ("a", "b") for t in (None, "b", 1)]
    assert len(set(made)) == 6


def test_keys_are_the_same_in_every_process():
    assert key_maker(str, ("v", 1))(0, "a").hex() == "11c1c3086773d69e6ed00064814aeb55"
