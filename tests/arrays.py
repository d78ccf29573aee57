"""Arrays for tests: framed by canaries, misaligned on demand, on any device."""

import ml_dtypes
import numpy as np

DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
EDGES = [0, 1, 7, 8, 9, 15, 16, 17, 255, 256, 257, 5000]  # around vectors and tiles
FRAME = 64  # canary elements on either side


class Framed:
    """An array inside a larger one whose other elements must not change.

    `offset` moves its start, in elements, away from 64-byte alignment. On CUDA the
    whole frame lies on the device; `array` is what to pass, `get()` the values.
    """

    def __init__(self, values, dtype="float32", *, offset=0, device="cpu"):
        values = np.asarray(values)
        self.dtype = DTYPES.get(dtype) or np.dtype(dtype)
        self.whole = np.full(values.size + 2 * FRAME + offset + 64, 7, self.dtype)
        skew = (
            -self.whole.ctypes.data // self.dtype.itemsize % (64 // self.dtype.itemsize)
        )
        self.start = FRAME + skew + offset
        self.shape, self.size = values.shape, values.size
        self.inside(self.whole)[...] = values.astype(self.dtype)
        if device == "cpu":
            self.array = self.inside(self.whole)
        else:
            import torch

            bits = torch.from_numpy(self.whole.view(f"i{self.dtype.itemsize}"))
            self.torch = bits.to(device).view(getattr(torch, dtype))
            self.array = self.inside(self.torch)
        self.on_device = device != "cpu"

    def inside(self, whole):
        return whole[self.start : self.start + self.size].reshape(self.shape)

    def get(self):
        """The values now, as float64; fails if a canary has changed."""
        if self.on_device:
            import torch

            integer = getattr(torch, f"int{8 * self.dtype.itemsize}")
            bits = self.torch.view(integer).cpu().numpy()
            self.whole = bits.view(self.dtype)
        outside = np.concatenate(
            [self.whole[: self.start], self.whole[self.start + self.size :]]
        )
        assert (outside == 7).all(), "wrote outside the array"
        with np.errstate(invalid="ignore"):  # NaNs that signal: any bits are tested
            return self.inside(self.whole).astype(np.float64)

    def bits(self):
        self.get()
        return self.inside(self.whole).tobytes()


class Slot:
    """A parameter, its gradient and state."""

    def __init__(
        self,
        rng,
        shape,
        *,
        param="float32",
        grad=None,
        state=None,
        amsgrad=False,
        offsets=(0, 0, 0, 0, 0),
        device="cpu",
        step=None,
        grad_factor=1.0,
    ):
        def framed(values, dtype, offset):
            return Framed(values, dtype, offset=offset, device=device)

        normal = rng.standard_normal
        self.param = framed(normal(shape), param, offsets[0])
        self.grad = framed(normal(shape) * grad_factor, grad or param, offsets[1])
        self.exp_avg = framed(0.1 * normal(shape), state or param, offsets[2])
        self.exp_avg_sq = framed(0.1 * normal(shape) ** 2, state or param, offsets[3])
        self.max_exp_avg_sq = None
        if amsgrad:
            top = 0.1 * normal(shape) ** 2
            self.max_exp_avg_sq = framed(top, state or param, offsets[4])
        self.step = None if step is None else framed(np.array(step), "float32", 0)

    def framed_arrays(self):
        return [
            a
            for a in (
                self.param,
                self.grad,
                self.exp_avg,
                self.exp_avg_sq,
                self.max_exp_avg_sq,
                self.step,
            )
            if a is not None
        ]

    def bits(self):
        return [a.bits() for a in self.framed_arrays()]


def lists(slots):
    """The positional lists and the keywords of adamw_step for these slots."""
    keywords = {}
    if slots and slots[0].max_exp_avg_sq is not None:
        keywords["max_exp_avg_sqs"] = [s.max_exp_avg_sq.array for s in slots]
    if slots and slots[0].step is not None:
        keywords["step"] = [s.step.array for s in slots]
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    return [[getattr(s, n).array for s in slots] for n in names], keywords
