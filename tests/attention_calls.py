"""Attention calls for tests: inputs of a dtype and layout, the core's results and the
reference's, and how far apart they may be."""

import numpy as np

import trainfast
from tests import reference_attention
from tests.arrays import DTYPES
from trainfast import _core

# Half a unit in the last place, relative.
ROUNDING = {"float64": 1.2e-16, "float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3}
# What arithmetic in float32 (float64) adds, relative to the largest number around.
NOISE = {"float64": 1e-14, "float32": 2e-6, "float16": 2e-6, "bfloat16": 2e-6}
OPTION_GRADIENTS = ("bias", "alibi_slopes", "sinks")


def on_device(array, device):
    """The array where the backend looks for it."""
    if isinstance(array, np.generic):
        array = np.asarray(array)
    if array is None or device == "cpu" or not isinstance(array, np.ndarray):
        return array
    import torch

    if array.dtype.name == "bfloat16":
        bits = torch.from_numpy(array.view(np.int16).copy())
        return bits.to(device).view(torch.bfloat16)
    return torch.from_numpy(array.copy()).to(device)


def to_float64(array):
    """NumPy's float64 of any array."""
    if array is None or isinstance(array, np.ndarray):
        return None if array is None else array.astype(np.float64)
    return array.detach().double().cpu().numpy()


def for_reference(options):
    """The public options as the reference (and the core) names them."""
    options = {k: v for k, v in options.items() if v is not None}
    left, right = options.pop("window_size", (None, None))
    options["window_left"] = -1 if left is None else left
    options["window_right"] = -1 if right is None else right
    options["bottom_right"] = options.pop("causal_align", "") == "lower_right"
    options["bnhd"] = options.pop("layout", "bhsd") == "bshd"
    return options


def scratch_on(device):
    """Where a call of the core gets its scratch from."""
    if device == "cpu":
        return lambda n: np.empty(n, "float32")
    import torch

    return lambda n: torch.empty(n, device=device)


class Problem:
    """Normally distributed inputs and the public options of one call."""

    def __init__(
        self, rng, shape=(2, 4, 33, 49, 16), *, kv_heads=None, dim_v=None, **options
    ):
        batch, heads, n_q, n_k, dim = shape
        kv_heads, dim_v = kv_heads or heads, dim_v or dim
        self.dtype = options.pop("dtype", "float32")
        self.device = options.pop("device", "cpu")
        self.rng, self.options = rng, options
        options.setdefault("scale", dim**-0.5)
        sizes = {"q": (heads, n_q, dim), "k": (kv_heads, n_k, dim)}
        sizes |= {"v": (kv_heads, n_k, dim_v), "dout": (heads, n_q, dim_v)}
        for name, (h, n, d) in sizes.items():
            if options.get("cu_seqlens_q") is not None:
                size = (n, h, d)
            else:
                middle = (n, h) if options.get("layout") == "bshd" else (h, n)
                size = (batch, *middle, d)
            setattr(self, name, self.normal(size))
        lse_shape = (batch, heads, n_q)
        if options.get("cu_seqlens_q") is not None:
            lse_shape = (heads, n_q)
        self.dlse = rng.standard_normal(lse_shape).astype(self.wide)

    @property
    def wide(self):
        return np.float64 if self.dtype == "float64" else np.float32

    def normal(self, size):
        return self.rng.standard_normal(size).astype(DTYPES[self.dtype])

    def moved(self, *arrays):
        return [on_device(array, self.device) for array in arrays]

    def moved_options(self):
        return {k: on_device(v, self.device) for k, v in self.options.items()}

    def forward(self):
        """(out, lse) by the core, where the backend leaves them."""
        arrays = self.moved(self.q, self.k, self.v)
        options = self.moved_options()
        return trainfast.numpy.attention(*arrays, return_lse=True, **options)

    def backward(self, dlse=True):
        """All gradients by the core, from its own out and lse."""
        self.wanted = ["q", "k", "v"]
        self.wanted += [n for n in OPTION_GRADIENTS if self.options.get(n) is not None]
        return trainfast.numpy.attention_backward(
            *self.moved(self.dout, self.q, self.k, self.v),
            *self.forward(),
            dlse=on_device(self.dlse, self.device) if dlse else None,
            wanted=self.wanted,
            **self.moved_options(),
        )

    def expected(self):
        options = for_reference(self.options)
        return reference_attention.attention(self.q, self.k, self.v, **options)

    def expected_gradients(self, dlse=True):
        return reference_attention.attention_backward(
            self.dout,
            self.q,
            self.k,
            self.v,
            dlse=self.dlse if dlse else None,
            **for_reference(self.options),
        )

    # ---- Checks ----------------------------------------------------------------------

    def noise_of_rounded_weights(self):
        """Tensor cores take weights in the dtype of the values; so do processors that
        multiply pairs of bfloat16."""
        rounds = "cuda" in (self.device, _core.backend_in_use())
        rounds |= _core.backend_in_use() == "simt"
        halves = ("float16", "bfloat16") if rounds else ("bfloat16",)
        rounds |= _core.backend_in_use() in ("avx512", "wide")
        if not rounds or self.dtype not in halves:
            return 0
        return ROUNDING[self.dtype] / 4 / (1 - self.options.get("dropout_p", 0))

    def check_forward(self, factor=1.0, expected=None):
        out, lse = (to_float64(x) for x in self.forward())
        true_out, true_lse = expected or self.expected()
        empty = np.isneginf(true_lse)
        np.testing.assert_array_equal(np.isneginf(lse), empty)
        rows = true_out
        if self.options.get("cu_seqlens_q") is not None:
            empty = empty.T
        elif self.options.get("layout") == "bshd":
            empty = empty.swapaxes(1, 2)
        assert (out[empty] == 0).all(), "a row without a key must have output 0"
        noise = factor * NOISE[self.dtype]
        rounded = self.noise_of_rounded_weights()
        close(out, rows, self.dtype, (noise + rounded) * largest(self.v))
        finite = np.isfinite(true_lse)
        bound = noise * (1 + abs(true_lse[finite]))
        assert (abs(lse[finite] - true_lse[finite]) <= bound).all()

    def check_backward(self, factor=1.0, dlse=True, true_out=None):
        found, expected = self.backward(dlse), self.expected_gradients(dlse)
        relative = factor * 20 * NOISE[self.dtype]
        absolute = self.noise_of_rounded_out(true_out)
        for name, mine, true in zip(found._fields, found, expected):
            assert (mine is None) == (true is None), name
            if true is not None:
                mine = to_float64(mine)
                assert mine.shape == true.shape, name
                dtype = self.dtype if name in ("dq", "dk", "dv") else self.wide
                noise = relative * largest(true) + absolute
                if name == "dalibi_slopes":  # summed with distances as weights
                    noise *= max(self.dout.shape[-3:-1] + self.k.shape[-3:-1])
                close(mine, true, np.dtype(dtype).name, noise, name)

    def noise_of_rounded_out(self, true_out):
        """What the gradients cannot know better than: the scores' are differences with
        dout * out, summed, and out has been rounded."""
        if true_out is None:
            true_out, _ = self.expected()
        products = to_float64(self.dout) * true_out
        row = np.sqrt(np.nansum(products**2, -1)).max(initial=0)
        weight = abs(self.options["scale"]) * max(largest(self.q), largest(self.k))
        ends = self.options.get("cu_seqlens_q")
        batch = len(self.k) if ends is None else len(ends) - 1
        rows = self.q.size / self.q.shape[-1] / batch if self.q.size else 1
        return 2 * ROUNDING[self.dtype] * row * max(1.0, weight) * rows**0.5

    def check(self, factor=1.0, dlse=True):
        expected = self.expected()
        self.check_forward(factor, expected)
        self.check_backward(factor, dlse, expected[0])


def largest(array):
    """The largest finite magnitude, at least 1."""
    values = abs(to_float64(array))
    return max(1.0, values.max(initial=0, where=np.isfinite(values)))


def close(found, true, dtype, noise, name="out"):
    """Asserts equality but for rounding to the dtype, and this much noise."""
    assert found.shape == true.shape, name
    with np.errstate(invalid="ignore"):
        error = abs(found - true) - ROUNDING[dtype] * abs(true)
    error = np.where(np.isnan(true) & np.isnan(found), 0, error)
    worst = error.max(initial=0)
    assert worst <= noise, f"{name} is off by {worst:.3g}, more than {noise:.3g}"
