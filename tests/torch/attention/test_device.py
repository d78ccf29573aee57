"""What trainfast.torch's attention asks of a GPU: its current stream, memory from
torch's allocator, and nothing that waits. Tensors here only say that they are on one.
"""

from types import SimpleNamespace

import pytest
import torch

import trainfast
from trainfast import _core, sequence_lengths
from trainfast.torch import attention, private
from trainfast.torch.attention import autograd, fast_path


@pytest.fixture
def seen(monkeypatch):
    """The arguments of the core's calls, none of which computes; every tensor says that
    it is on a GPU, whose current stream is number 1234."""
    calls = []

    def record(*args, **kwargs):
        calls.append((args, kwargs))

    core = SimpleNamespace(attention=record, attention_backward=record)
    monkeypatch.setattr(autograd, "_core", core)
    monkeypatch.setattr(fast_path, "_core", core)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(private, "cuda_stream", lambda index: 1234)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    trainfast.reset_stats()
    return calls


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


def lengths(kv_lens):
    q = rows(2, 3, 5, 8)
    return attention(q, q, q, kv_lens=torch.tensor(kv_lens))


def boundaries(*at, most=5):
    q = rows(9, 3, 8)
    at = torch.tensor(at, dtype=torch.int32)
    options = dict(cu_seqlens_q=at, cu_seqlens_k=at)
    return attention(q, q, q, max_seqlen_q=most, max_seqlen_k=most, **options)


def test_calls_are_launched_on_the_current_stream(seen):
    q = rows(1, 2, 5, 8).requires_grad_()
    attention(q, q, q).sum().backward()
    assert [kwargs["stream"] for _, kwargs in seen] == [1234, 1234]
    assert trainfast.stats().calls["attention"] == {"cuda": 2}


def test_scratch_comes_from_torchs_allocator_on_qs_device(seen):
    attention(*[rows(1, 2, 5, 8)] * 3)
    scratch = seen[0][1]["scratch"](12)
    assert (scratch.shape, scratch.dtype) == ((12,), torch.float32)
    meta = rows(1, 2, 5, 8).to("meta")
    make = autograd._keywords(
        autograd.Inputs(meta, meta, meta),
        autograd.Extras(),
        autograd.Options(1.0),
    )["scratch"]
    assert make(3).device.type == "meta"


def test_rows_of_no_item_are_filled_without_a_look_at_lengths(seen):
    out = boundaries(0, 3, 5)
    assert (out == 0).all()  # the whole, since nobody computes here


LIES = [
    (lambda: lengths([6, 1]), "kv_lens.0. must be 0 to 5, its item's keys, got 6"),
    (
        lambda: boundaries(0, 6, 10, most=6),
        "cu_seqlens_q must end within the 9 rows, got 10",
    ),
    (lambda: boundaries(0, 6, 9), "max_seqlen_q must be at least the longest item's 6"),
]


@pytest.mark.parametrize("call, message", LIES)
def test_lengths_are_checked_only_when_asked(monkeypatch, seen, call, message):
    call()
    assert len(seen) == 1
    monkeypatch.setattr(sequence_lengths, "CHECK_ON_DEVICE", True)
    with pytest.raises(ValueError, match=message):
        call()
    assert len(seen) == 1


def test_lengths_of_the_gradients_are_checked_too(monkeypatch, seen):
    q, ends = rows(9, 3, 8).requires_grad_(), torch.tensor([0, 4, 9])
    options = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=5)
    out = attention(q, q, q, max_seqlen_k=5, **options)
    monkeypatch.setattr(sequence_lengths, "CHECK_ON_DEVICE", True)
    out.sum().backward()
    ends.data[1] = 10
    out = autograd.Inputs(q, q, q)
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease"):
        autograd._keywords(
            out,
            autograd.Extras(cu_seqlens_q=ends, cu_seqlens_k=ends),
            autograd.Options(1.0),
        )


def test_captured_calls_are_not_looked_at(monkeypatch, seen):
    monkeypatch.setattr(sequence_lengths, "CHECK_ON_DEVICE", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    lengths([6, 1])
    assert len(seen) == 1


def test_right_lengths_pass_the_check(monkeypatch, seen):
    monkeypatch.setattr(sequence_lengths, "CHECK_ON_DEVICE", True)
    lengths([5, 0])
    boundaries(0, 3, 5)
    q = rows(2, 5, 3, 8)
    attention(q, q, q, kv_lens=torch.tensor([5, 0]), layout="bshd")
    attention(q, q, q)
    assert len(seen) == 4


def test_the_core_itself_trusts_nothing_on_the_cpu():
    assert not sequence_lengths.CHECK_ON_DEVICE
    with pytest.raises(ValueError, match="kv_lens"):
        lengths([6, 1])
    assert _core is autograd._core
