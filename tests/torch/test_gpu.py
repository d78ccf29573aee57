"""What depends on the driver and torch's allocator: graphs, side streams, memory taken
again. On the SIMT runner the same calls run without streams."""

import contextlib
import itertools

import pytest

torch = pytest.importorskip("torch")

import trainfast  # noqa: E402
import trainfast.torch  # noqa: E402


@pytest.fixture(params=["cuda", "simt"])
def gpu(request):
    """Where tensors live: a GPU, or the CPU with the kernels for GPUs."""
    reasons = {backend["name"]: backend["reason"] for backend in trainfast.backends()}
    if reasons[request.param] is not None:
        pytest.skip(reasons[request.param])
    trainfast.use_backend(request.param)
    yield "cuda" if request.param == "cuda" else "cpu"
    trainfast.use_backend(None)


class Loop:
    """A step of attention, backward and AdamW on its own tensors."""

    def __init__(self, device, seed=0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1, 2, 48, 64, generator=generator).half()
        weight = torch.randn(64, 64, generator=generator).half() / 8
        self.x, self.weight = x.to(device), torch.nn.Parameter(weight.to(device))
        self.optimizer = trainfast.torch.AdamW(
            [self.weight], lr=0.01, master_weights=True, max_grad_norm=1.0
        )

    def step(self):
        self.optimizer.zero_grad(set_to_none=False)
        q = self.x @ self.weight
        out = trainfast.torch.attention(q, self.x, self.x, is_causal=True)
        out.float().square().mean().backward()
        self.optimizer.step()

    def result(self):
        state = self.optimizer.state[self.weight]
        return [self.weight.detach().clone(), *(v.clone() for v in state.values())]


def assert_same(ours, theirs):
    for one, other in zip(ours.result(), theirs.result(), strict=True):
        assert torch.equal(one, other)


def side_stream(device):
    if device == "cpu":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def test_captured_steps_are_the_eager_ones(gpu):
    captured, eager = Loop(gpu), Loop(gpu)
    for _ in range(6):
        eager.step()
    with side_stream(gpu):
        captured.step()
        captured.step()
    wait(gpu)
    if gpu == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.step()
        again = graph.replay
    else:
        again = captured.step
    for _ in range(4):
        again()
    wait(gpu)
    assert_same(captured, eager)


def test_side_streams_do_not_wait_for_each_other_or_mix(gpu):
    loops, alone = [Loop(gpu, seed) for seed in (1, 2)], [Loop(gpu, s) for s in (1, 2)]
    for loop in alone:
        for _ in range(3):
            loop.step()
    wait(gpu)
    streams = [side_stream(gpu) for _ in loops]
    side = 4096 if gpu == "cuda" else 8
    for _ in range(3):
        for stream, loop in zip(streams, loops, strict=True):
            with stream:
                busy = torch.ones(side, side, device=gpu)
                for _ in range(4):  # the step is queued behind it
                    busy = busy @ busy
                loop.step()
    wait(gpu)
    for loop, other in zip(loops, alone, strict=True):
        assert_same(loop, other)


def test_memory_that_is_taken_again_changes_nothing(gpu):
    """Outputs and scratch come from blocks that held NaN, at changing sizes."""
    generator = torch.Generator().manual_seed(0)
    loop, other = Loop(gpu), Loop(gpu)
    for i in range(30 if gpu == "cuda" else 6):
        n = int(torch.randint(1, 70, (), generator=generator))
        held = [torch.full((k * 512,), torch.nan, device=gpu) for k in (1, n, 7 * n)]
        del held
        q, k, v = torch.randn(3, 1, 2, n, 64, generator=generator).half().to(gpu)
        q.requires_grad_()
        out = trainfast.torch.attention(q, k, v)
        (grad,) = torch.autograd.grad(out.float().sum(), q)
        assert out.isfinite().all() and grad.isfinite().all()
        right = (q.double() @ k.double().mT / 8).softmax(-1) @ v.double()
        torch.testing.assert_close(out.double(), right, rtol=0.01, atol=0.01)
        if i % 3 == 0:
            loop.step()
            other.step()
    wait(gpu)
    assert_same(loop, other)


@pytest.mark.parametrize("lengths", [[5, 0, 33], [0, 0]])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_items_whose_longest_is_not_told(gpu, lengths, with_bias):
    ends = torch.tensor([0, *lengths]).cumsum(0).to(gpu)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths), 2, 16, generator=generator).to(gpu)
    longest = max(lengths)
    bias = torch.randn(2, longest, longest, generator=generator).to(gpu)
    bias = bias if with_bias and longest else None
    out = trainfast.torch.attention(
        q, q, q, bias=bias, cu_seqlens_q=ends, cu_seqlens_k=ends, layout="thd"
    )
    assert out.shape == q.shape
    for begin, end in itertools.pairwise(ends.tolist()):
        item = q[begin:end].double().transpose(0, 1)
        scores = item @ item.mT / 4
        if bias is not None:
            scores = scores + bias[:, : end - begin, : end - begin].double()
        right = (scores.softmax(-1) @ item).transpose(0, 1)
        torch.testing.assert_close(out[begin:end].double(), right, rtol=1e-4, atol=1e-5)
