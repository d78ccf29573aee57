"""_core.attention and _core.attention_backward by the float64 reference, for layers
above the kernels while there are none: monkeypatch.setattr(_core, "attention", ...).
To be removed with the last test that needs it."""

import numpy as np
import reference_attention as reference


def _is_torch(array):
    return type(array).__module__.startswith("torch")


def _read(array):
    if array is None or not _is_torch(array):
        return array
    array = array.detach()
    return (array.double() if array.is_floating_point() else array).numpy()


def _write(array, values):
    if array is None or values is None:
        return
    if _is_torch(array):
        import torch

        array.detach().copy_(torch.from_numpy(np.ascontiguousarray(values)))
    else:
        array[...] = values


def _options(options):
    options.pop("stream", None)
    seed = options.get("seed", 0)
    options["seed"] = int(seed if isinstance(seed, int) else _read(seed).reshape(()))
    return {name: _read(value) for name, value in options.items()}


def attention(q, k, v, out, lse, **options):
    made = reference.attention(_read(q), _read(k), _read(v), **_options(options))
    for array, values in zip((out, lse), made):
        _write(array, values)


def attention_backward(
    dout, q, k, v, out, lse, dlse, dq, dk, dv, dbias, dalibi, dsinks, **options
):
    made = reference.attention_backward(
        *(_read(x) for x in (dout, q, k, v)), dlse=_read(dlse), **_options(options)
    )
    for array, values in zip((dq, dk, dv, dbias, dalibi, dsinks), made):
        _write(array, values)
