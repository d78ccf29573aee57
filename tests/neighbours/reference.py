"""What is right: neighbours by brute force in float64, one centre at a time."""

import functools

import numpy as np


def computed_once(function):
    """Every backend compares the same inputs with the same result, which takes longer
    than the kernels."""
    known = {}

    def frozen(value):
        if hasattr(value, "__array__") or isinstance(value, list):
            array = np.asarray(value)
            return array.dtype.str, array.shape, array.tobytes()
        return value

    @functools.wraps(function)
    def call(*inputs, **options):
        key = (
            *map(frozen, inputs),
            *((n, frozen(options[n])) for n in sorted(options)),
        )
        if key not in known:
            known[key] = function(*inputs, **options)
        return known[key].copy()

    return call


def squared_distances(center, points):
    """Sums over the dimensions in their order, each product and sum rounded."""
    total = np.zeros(len(points))
    for d in range(points.shape[1]):
        difference = center[d] - points[:, d]
        total = total + difference * difference
    return total


def cosine_distances(center, points):
    """1 - cos of the angle; not to the last bit, unlike the squared distances."""
    norms = np.sqrt(center @ center) * np.sqrt((points * points).sum(1))
    return 1 - points @ center / norms


def widened(array):
    array = np.asarray(array).astype(np.float64)
    return array[:, None] if array.ndim == 1 else array


def items_of(n, batch):
    return np.zeros(n, int) if batch is None else np.asarray(batch).astype(int)


def nearest(candidates, distances, count):
    """`count` candidates with the smallest distances; of equal ones the lower index."""
    order = np.lexsort((candidates, distances))[:count]
    return np.sort(candidates[order])


def pairs(x, y, batch_x, batch_y, choose, distances=squared_distances):
    """[2, E]: for each y, in order, what `choose` takes of the x of its item."""
    x, y = widened(x), widened(y)
    of_x, of_y = items_of(len(x), batch_x), items_of(len(y), batch_y)
    centers, found = [], []
    for i in range(len(y)):
        candidates = np.flatnonzero(of_x == of_y[i])
        chosen = choose(i, candidates, distances(y[i], x[candidates]))
        centers += [i] * len(chosen)
        found += list(chosen)
    return np.array([centers, found], np.int64).reshape(2, -1)


def chooser_within(r, boundary, cap, selection, itself):
    """`itself`: "keep", "omit", or "free": kept and not counted by the cap."""
    limit = float(r) * float(r)

    def choose(i, candidates, distances):
        inside = distances <= limit if boundary == "<=" else distances < limit
        own = inside & (candidates == i) & (itself != "keep")
        others = inside & ~own
        candidates, own = candidates[others], candidates[own]
        if cap is not None and selection == "nearest":
            candidates = nearest(candidates, distances[others], cap)
        elif cap is not None:
            candidates = candidates[:cap]
        return np.sort(np.append(candidates, own)) if itself == "free" else candidates

    return choose


def chooser_of(k, omit_itself):
    def choose(i, candidates, distances):
        kept = candidates != i if omit_itself else np.ones(len(candidates), bool)
        return nearest(candidates[kept], distances[kept], k)

    return choose


def turned(edges, flow):
    """From (centre, neighbour) to the rows of `flow`."""
    return edges[::-1] if flow == "source_to_target" else edges


@computed_once
def radius(
    x,
    y,
    r,
    *,
    batch_x=None,
    batch_y=None,
    max_num_neighbors=None,
    boundary="<=",
    selection="nearest",
):
    choose = chooser_within(r, boundary, max_num_neighbors, selection, "keep")
    return pairs(x, y, batch_x, batch_y, choose)


@computed_once
def radius_graph(
    pos,
    r,
    *,
    batch=None,
    loop=False,
    max_num_neighbors=None,
    flow="source_to_target",
    boundary="<=",
    selection="nearest",
):
    itself = "free" if loop else "omit"
    choose = chooser_within(r, boundary, max_num_neighbors, selection, itself)
    return turned(pairs(pos, pos, batch, batch, choose), flow)


@computed_once
def knn(x, y, k, *, batch_x=None, batch_y=None, cosine=False):
    distances = cosine_distances if cosine else squared_distances
    return pairs(x, y, batch_x, batch_y, chooser_of(k, False), distances)


@computed_once
def knn_graph(pos, k, *, batch=None, loop=False, flow="source_to_target", cosine=False):
    distances = cosine_distances if cosine else squared_distances
    choose = chooser_of(k, not loop)
    return turned(pairs(pos, pos, batch, batch, choose, distances), flow)


def features(pos, edges):
    """Of edges (neighbour, centre): distance and relative position, as float64."""
    pos = widened(pos)
    neighbour, center = edges
    relative = pos[neighbour] - pos[center]
    total = np.zeros(len(neighbour))
    for d in range(pos.shape[1]):
        total = total + relative[:, d] * relative[:, d]
    return {"distance": np.sqrt(total), "relative_position": relative}


def is_clear_of(x, y, r, ulps=4):
    """Whether no pair of points is within some ulp of float64 from the distance r."""
    x, y = widened(x), widened(y)
    for center in y:
        distances = np.sqrt(squared_distances(center, x))
        if (np.abs(distances - r) <= ulps * np.spacing(r)).any():
            return False
    return True
