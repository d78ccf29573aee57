"""The search where the points are on a GPU: on a fake one (fake_device.py), which the
SIMT runner serves, and on a real one where there is one."""

import os

import numpy as np
import pytest

import trainfast
from tests.fake_device import TENSORS, run
from tests.neighbours.clouds import FEATURES, lattice
from trainfast.numpy import knn_graph, radius, radius_graph

# ---- The core ------------------------------------------------------------------------

on_fake = pytest.mark.skipif(
    not os.environ.get("TRAINFAST_SIMT_LIBRARY"), reason="no SIMT library"
)

CALLS = """
import trainfast
from trainfast import _core

rng = np.random.default_rng(0)
points = rng.standard_normal((90, 3)).astype("f")
ptr = np.array([0, 40, 40, 90])
simt = ctypes.CDLL(os.environ["TRAINFAST_CUDA_LIBRARY"])

def make(n):
    rows = [OnDevice(np.empty(n, np.int64)) for _ in range(2)]
    made.extend(row.array for row in rows)
    return (*rows, None, None, None)

def scratch(n):
    return OnDevice(np.empty(n, np.float32))

def search(points, ptr=ptr, *, r=1.0, scratch=scratch, **options):
    made.clear()
    _core.neighbours(points, None, ptr, None, make, r=r, scratch=scratch, **options)
    return np.stack(made)

made = []
"""


def good(code):
    done = run(CALLS + code)
    assert done.code == 0, done.err
    return done.out.split()


def refused(code, message):
    done = run(CALLS + code)
    assert done.code == 1 and message in done.err.splitlines()[-1], done.err


@on_fake
def test_points_on_a_gpu_have_the_edges_of_the_cpu():
    good(
        """
for options in ({}, {"most": 4}, {"most": 4, "first": True, "loop": True}):
    mine = search(OnDevice(points), **options)
    theirs = trainfast.numpy.radius_graph(
        points, r=1.0, ptr=ptr, loop="loop" in options,
        max_num_neighbors=options.get("most"),
        selection="first" if "first" in options else "nearest")
    assert mine.tolist() == theirs.tolist()
"""
    )


@on_fake
def test_search_waits_for_the_gpu_and_allocates_nothing():
    """For two copies, whose memory is not pinned, and once by itself: the driver need
    not wait for such copies."""
    out = good(
        """
search(OnDevice(points))
simt.tfast_simt_reset()
search(OnDevice(points))
three = (ctypes.c_int64 * 3)()
simt.tfast_simt_counts(three)
print(*three)
"""
    )
    assert out == ["3", "0", "4"]


@on_fake
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("OnDevice(points), OnDevice(ptr)", "ptr must be on cpu, got cuda:0"),
        ("OnDevice(points), scratch=None", "scratch must be a function"),
        (
            "OnDevice(points), scratch=lambda n: np.empty(n, np.float32)",
            "scratch's array must be on cuda:0 as points, got cpu",
        ),
        (
            "OnDevice(points), scratch=lambda n: OnDevice(np.empty(n - 1, np.float32))",
            "scratch's array must have shape",
        ),
        (
            "OnDevice(np.where(points == points[[7]], np.nan, points))",
            "ValueError: points must be finite, got NaN or infinity in row 7",
        ),
        ("OnDevice(points), np.array([0, 91])", "must end with the number of points"),
    ],
)
def test_what_cannot_be_searched_is_an_error(call, message):
    refused(f"search({call})", message)


@on_fake
def test_capture_is_an_error():
    refused(
        "simt.tfast_simt_capture_begin(); search(OnDevice(points))",
        "ValueError: stream must not capture",
    )


@on_fake
def test_first_bad_row_is_named_of_points_and_of_centres():
    refused(
        """
bad = np.ones((3000, 2)); bad[[17, 1800, 2999], 1] = np.inf
two = np.array([0, 3000])
_core.neighbours(OnDevice(np.ones((3000, 2))), OnDevice(bad), two, two, make,
                 scratch=scratch, r=1.0)
""",
        "centres must be finite, got NaN or infinity in row 17",
    )


# ---- Tensors -------------------------------------------------------------------------


@on_fake
def test_tensors_on_a_gpu_stay_there():
    good(
        TENSORS
        + """
features = "distance", "unit_vector"
mine, found = trainfast.numpy.radius_graph(
    Tensor(points), r=1.0, ptr=ptr, features=features)
edges, want = trainfast.numpy.radius_graph(points, r=1.0, ptr=ptr, features=features)
assert isinstance(mine, Tensor) and mine.array.tolist() == edges.tolist()
for name in features:
    assert found[name].array.tobytes() == want[name].tobytes()
mine = trainfast.numpy.knn_graph(Tensor(points), k=3, index_dtype="int32")
assert mine.array.tolist() == trainfast.numpy.knn_graph(points, k=3).tolist()
assert not trainfast.stats().fallbacks, trainfast.stats()
"""
    )


@on_fake
def test_centres_go_where_the_points_are():
    good(
        TENSORS
        + """
Tensor.to = lambda self, device: self
centres = torch.from_numpy(points[:9] + 0.1)
mine = trainfast.numpy.radius(Tensor(points), centres, r=1.0)
want = trainfast.numpy.radius(points, points[:9] + 0.1, r=1.0)
assert isinstance(mine, Tensor) and mine.array.tolist() == want.tolist()
"""
    )


@on_fake
def test_arrays_of_cupy_are_searched_on_its_stream():
    good(
        """
import sys
stream = SimpleNamespace(ptr=0)
sys.modules["cupy"] = SimpleNamespace(
    cuda=SimpleNamespace(get_current_stream=lambda: asked.append(1) or stream))
asked = []
OnDevice.__module__ = "cupy"
OnDevice.__len__ = lambda self: len(self.array)
OnDevice.__getitem__ = lambda self, i: OnDevice(self.array[i])
space = OnDevice.__array_namespace__
OnDevice.__array_namespace__ = lambda self: SimpleNamespace(
    **vars(space(self)), int64=np.int64)
mine = trainfast.numpy.radius_graph(OnDevice(points), r=1.0, ptr=ptr)
want = trainfast.numpy.radius_graph(points, r=1.0, ptr=ptr)
assert asked and mine.array.tolist() == want.tolist()
"""
    )


@on_fake
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("neighbours._MOST_PAIRS = 4099", "graphs so large"),
        ("os.environ['TRAINFAST_SIMT_DEVICE'] = '60'", "sm_75 or newer, got sm_60"),
    ],
)
def test_what_a_gpu_leaves_is_searched_on_the_cpu_and_counted(what, reason):
    good(
        TENSORS
        + f"""
from trainfast.numpy import neighbours
{what}
edges = trainfast.numpy.radius_graph(Tensor(points), r=1.0, ptr=ptr)
want = trainfast.numpy.radius_graph(points, r=1.0, ptr=ptr)
assert edges.array.tolist() == want.tolist()
(counted,) = trainfast.stats().fallbacks["neighbours"]
assert {reason!r} in counted, counted
"""
    )


# ---- All backends --------------------------------------------------------------------


def bits_of_calls(rng):
    """What a few calls return, in bytes: also features, whose last bit may differ."""
    pos, other = rng.standard_normal((700, 3)).astype("f"), lattice(rng, 60, 3)
    made = [*radius_graph(pos, r=0.8, features=FEATURES)]
    made += knn_graph(pos[:, :2], k=6, loop=True, features=FEATURES)
    made += radius(
        other, other[:9] + 0.5, r=2.0, max_num_neighbors=5, features=FEATURES
    )
    made += [knn_graph(pos.astype(np.float16), k=9, cosine=True)]
    flat = [
        x for item in made for x in (item.values() if type(item) is dict else [item])
    ]
    return [np.asarray(x).tobytes() for x in flat]


def test_every_backend_gives_the_same_bits(backend):
    mine = bits_of_calls(np.random.default_rng(5))
    trainfast.use_backend("scalar")
    assert mine == bits_of_calls(np.random.default_rng(5))


def test_real_gpu_has_the_edges_of_the_cpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    trainfast.reset_stats()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        pos = torch.randn(3000, 3, generator=generator).to(dtype)
        batch = torch.arange(3000) // 700
        for options in ({}, {"max_num_neighbors": 7, "loop": True}):
            options |= {"r": 0.5, "features": FEATURES}
            mine, found = radius_graph(pos.cuda(), batch=batch.cuda(), **options)
            edges, want = radius_graph(pos, batch=batch, **options)
            assert mine.is_cuda and mine.tolist() == edges.tolist()
            assert all((found[name].cpu() == want[name]).all() for name in FEATURES)
        assert knn_graph(pos.cuda(), k=9).tolist() == knn_graph(pos, k=9).tolist()
    assert not trainfast.stats().fallbacks
