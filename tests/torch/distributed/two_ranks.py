"""Cases for two processes, which worlds.py runs."""

import copy
import math

import torch
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import trainfast
from trainfast.torch import Accumulator, Adam, AdamW, GradScaler
from trainfast.torch.optim import clip

PLACES = ((7, 3, Shard(0)), (1, 5, Shard(0)), (4, 6, Shard(1)), (3, 2, Replicate()))


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes or (distributed.get_world_size(),))


def whole_params(dtype=torch.float32, shapes=PLACES):
    generator = torch.Generator().manual_seed(3)
    return [
        nn.Parameter(torch.randn(n, m, generator=generator).to(dtype))
        for n, m, *_ in shapes
    ]


def sharded(params, mesh, places=PLACES):
    return [
        nn.Parameter(distribute_tensor(p.detach().clone(), mesh, place[2:]))
        for p, place in zip(params, places, strict=True)
    ]


def set_grads(whole, shards, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p, q in zip(whole, shards, strict=True):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = grad
        q.grad = distribute_tensor(grad.clone(), q.device_mesh, q.placements)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(ours, theirs, check=torch.equal):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = full(a.detach()), full(b.detach())
        assert check(a, b), f"{i}: {a} is not {b}"


def is_close(a, b):
    return torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def no_fallbacks():
    found = trainfast.stats().fallbacks
    assert found == {}, found


# ---- The step ------------------------------------------------------------------------


def case_bits_do_not_depend_on_sharding(folder):
    options = (
        {},
        {"amsgrad": True, "ema_decay": 0.9, "zero_grad": True},
        {"maximize": True, "state_dtype": torch.bfloat16},
    )
    for cls in (AdamW, Adam):
        for kind in options:
            trainfast.reset_stats()
            whole = whole_params()
            shards = sharded(whole, mesh_of())
            plain = cls(whole, lr=0.1, weight_decay=0.1, **kind)
            spread = cls(shards, lr=0.1, weight_decay=0.1, **kind)
            for step in range(3):
                set_grads(whole, shards, step)
                plain.step()
                spread.step()
            no_fallbacks()
            assert_same(shards, whole)
            assert_same([p.grad for p in shards], [p.grad for p in whole])
            for p, q in zip(whole, shards, strict=True):
                assert spread.state[q].keys() == plain.state[p].keys()
                for name, value in spread.state[q].items():
                    assert torch.equal(full(value), plain.state[p][name]), name
                    if name != "step":
                        assert value.placements == q.placements


def case_masters_are_sharded(folder):
    whole = whole_params(torch.bfloat16)
    shards = sharded(whole, mesh_of())
    plain, spread = (AdamW(p, master_weights=True) for p in (whole, shards))
    for step in range(2):
        set_grads(whole, shards, step)
        plain.step()
        spread.step()
    assert_same(shards, whole)
    masters = [spread.state[p]["master_param"] for p in shards]
    assert all(m.dtype == torch.float32 for m in masters)
    assert_same(masters, [plain.state[p]["master_param"] for p in whole])


HALVES = (
    {"rounding": "stochastic"},
    {"compensation": "kahan"},
    {"master_weights": "split"},
)


def check_halves(mesh, places):
    """Half parameters have the bits of whole ones, also what rounding has cut off."""
    for options in HALVES:
        trainfast.reset_stats()
        whole = whole_params(torch.bfloat16, places)
        shards = sharded(whole, mesh, places)
        plain, spread = (AdamW(p, lr=1e-3, **options) for p in (whole, shards))
        torch.manual_seed(distributed.get_rank())  # the seed is that of rank 0
        for step in range(3):
            set_grads(whole, shards, step)
            spread.step()
            if "rounding" in options:
                seed = spread.param_groups[0]["rounding_seed"]
                plain.param_groups[0]["rounding_seed"] = seed
            plain.step()
        no_fallbacks()
        assert_same(shards, whole)
        for p, q in zip(whole, shards, strict=True):
            assert spread.state[q].keys() == plain.state[p].keys()
            for name, value in spread.state[q].items():
                here = full(value).view(torch.uint8) if value.ndim else value
                there = plain.state[p][name]
                there = there.view(torch.uint8) if there.ndim else there
                assert torch.equal(here, there), name


def case_rounding_does_not_depend_on_sharding(folder):
    check_halves(mesh_of(), (*PLACES, (2, 9, Shard(1)), (16, 300, Shard(0))))


def case_replicas_round_alike(folder):
    """As with DDP: tensors that are no DTensors, and gradients that are equal."""
    whole = whole_params(torch.bfloat16)
    optimizer = AdamW(whole, lr=1e-3, rounding="stochastic")
    torch.manual_seed(distributed.get_rank())
    for step in range(100):
        set_grads(whole, sharded(whole, mesh_of()), step)
        optimizer.step()
    for p in whole:
        copies = [torch.empty_like(p) for _ in range(distributed.get_world_size())]
        distributed.all_gather(copies, p.detach())
        assert torch.equal(*copies)


def case_making_state_draws_no_seed(folder):
    model = model_of(shard_fully).to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), rounding="stochastic")
    before = torch.get_rng_state()
    checkpoints.get_optimizer_state_dict(model, optimizer)
    assert "rounding_seed" not in optimizer.param_groups[0]
    assert torch.equal(torch.get_rng_state(), before)


def case_the_step_is_torchs(folder):
    ours, theirs = (sharded(whole_params(), mesh_of()) for _ in range(2))
    mine, torchs = AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(3):
        set_grads(ours, ours, step)
        set_grads(theirs, theirs, step)
        mine.step()
        torchs.step()
    assert_same(ours, theirs, is_close)
    ours_step, theirs_step = (
        mine.state[ours[0]]["step"],
        torchs.state[theirs[0]]["step"],
    )
    assert type(ours_step) is type(theirs_step) is torch.Tensor
    assert_same(
        [mine.state[p]["exp_avg_sq"] for p in ours],
        [torchs.state[p]["exp_avg_sq"] for p in theirs],
        is_close,
    )


def case_gradients_are_redistributed(folder):
    trainfast.reset_stats()
    mesh, rank = mesh_of(), distributed.get_rank()
    whole = whole_params()
    shards = sharded(whole, mesh)
    plain, spread = (AdamW(p, max_grad_norm=1.0) for p in (whole, shards))
    set_grads(whole, shards, 0)
    shards[0].grad = distribute_tensor(whole[0].grad, mesh, [Replicate()])
    part = whole[3].grad / 2 if rank else whole[3].grad * 0.5
    shards[3].grad = DTensor.from_local(part, mesh, [Partial()])
    plain.step()
    spread.step()
    assert_same(shards, whole, is_close)
    (reason, count), *others = trainfast.stats().fallbacks["adamw"].items()
    assert "redistributed" in reason and count == 2 and not others
    assert shards[0].grad.placements == (Shard(0),)


def case_replaced_state_is_used(folder):
    whole = whole_params()
    shards = sharded(whole, mesh_of())
    plain, spread = AdamW(whole), AdamW(shards)
    for step in range(3):
        set_grads(whole, shards, step)
        plain.step()
        spread.step()
        for p, q in zip(whole, shards, strict=True):
            plain.state[p]["exp_avg"] = plain.state[p]["exp_avg"] * 2
            spread.state[q]["exp_avg"] = spread.state[q]["exp_avg"] * 2
    for q in shards[:1]:  # placed in another way
        spread.state[q]["exp_avg"] = spread.state[q]["exp_avg"].redistribute(
            q.device_mesh, [Replicate()]
        )
    set_grads(whole, shards, 9)
    plain.step()
    spread.step()
    assert_same(shards, whole)


# ---- Clipping and the scaler ---------------------------------------------------------


def ulps(a, b):
    a, b = torch.as_tensor(a).float(), torch.as_tensor(b).float()
    return abs(a.view(torch.int32).item() - b.view(torch.int32).item())


def case_the_norm_is_that_of_all_shards(folder):
    for p in (2.0, 1.0, 3.0, 0.5, -1.0, math.inf, -math.inf):
        whole = whole_params()
        mixed = [*sharded(whole, mesh_of())[:3], nn.Parameter(whole[3].detach())]
        set_grads(whole[:3], mixed[:3], 1)
        whole[3].grad, mixed[3].grad = torch.ones(3, 2), torch.ones(3, 2)
        grads = [q.grad.double() for q in whole]
        want = torch.nn.utils.get_total_norm(grads, p)
        got = clip.clip_grad_norm_(mixed, 0.5, p)
        assert ulps(got, want) <= (1 if p in (1.0, 2.0, math.inf, -math.inf) else 4), p
        torch.nn.utils.clip_grad_norm_(whole, 0.5, p)
        assert_same([q.grad for q in mixed], [q.grad for q in whole], is_close)


def case_the_norm_is_a_dtensor_where_torchs_is(folder):
    whole = whole_params()
    shards = sharded(whole, mesh_of())
    set_grads(whole, shards, 2)
    got = clip.get_total_norm([p.grad for p in shards])
    want = torch.nn.utils.get_total_norm([p.grad for p in shards])
    assert type(got) is type(want) is DTensor
    assert torch.allclose(got.full_tensor(), want.full_tensor())
    before = [p.grad._version for p in shards]
    clip.clip_grad_norm_(shards, 0.5)
    assert all(p.grad._version > v for p, v in zip(shards, before, strict=True))
    clip.clip_grad_value_(shards, 0.01)
    assert max(p.grad.full_tensor().abs().max() for p in shards) <= 0.01


def case_infinite_norms_see_nan_and_inf(folder):
    for bad, p in ((math.nan, math.inf), (math.nan, 2.0), (math.inf, -math.inf)):
        whole = whole_params()
        shards = sharded(whole, mesh_of())
        set_grads(whole, shards, 3)
        local = shards[0].grad.to_local()
        if distributed.get_rank() == 1:
            local[-1, -1] = bad
        norm = clip.get_total_norm([q.grad for q in shards], p).full_tensor()
        assert bool(norm.isnan()) == math.isnan(bad), (bad, p, norm)


def case_the_step_clips_as_plain_tensors_do(folder):
    for max_norm in (0.5, 1e6):
        whole = whole_params()
        shards = sharded(whole, mesh_of())
        plain, spread = (AdamW(p, max_grad_norm=max_norm) for p in (whole, shards))
        for step in range(3):
            set_grads(whole, shards, step)
            plain.step()
            spread.step()
            assert ulps(spread.grad_norm, plain.grad_norm) <= 1
        same = torch.equal if max_norm == 1e6 else is_close
        assert_same(shards, whole, same)


def case_one_infinity_skips_every_rank(folder):
    for explicit in (False, True):
        whole = whole_params()
        shards = sharded(whole, mesh_of())
        spread, scaler = AdamW(shards), GradScaler("cpu", init_scale=4.0)
        for step, bad in enumerate((False, True, False)):
            set_grads(whole, shards, step)
            scaler.scale(torch.ones(()))
            if bad and distributed.get_rank() == 1:
                shards[0].grad.to_local().fill_(math.inf)
            before = [full(p.detach()).clone() for p in shards]
            if explicit:
                scaler.unscale_(spread)
            scaler.step(spread)
            assert scaler.step_was_skipped(spread) == bad
            same = all(map(torch.equal, map(full, shards), before))
            assert same == bad
            scaler.update()
        assert spread.state[shards[0]]["step"] == 2
        assert scaler.get_scale() == 2.0


def case_reductions_are_one_a_mesh(folder):
    whole = whole_params()
    shards = sharded(whole, mesh_of())
    spread, scaler = AdamW(shards, max_grad_norm=1.0), GradScaler("cpu")
    calls, all_reduce = [], distributed.all_reduce
    set_grads(whole, shards, 0)
    scaler.scale(torch.ones(()))

    def spy(*args, **kwargs):
        calls.append(args)
        return all_reduce(*args, **kwargs)

    distributed.all_reduce = spy
    try:
        scaler.step(spread)
    finally:
        distributed.all_reduce = all_reduce
    assert len(calls) == 1


# ---- Models --------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(6),
            nn.Linear(6, 10),
            nn.Linear(10, 6),
        )

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def model_of(prepare):
    torch.manual_seed(11)
    model = nn.Sequential(Block(), Block())
    prepare(model)
    return model


def train(model, optimizer, steps=3, clip_norm=None, batch=4):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(batch, 6, generator=generator)
        model(x).square().mean().backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()


def check_model(prepare):
    """Trains as torch's AdamW on the same shards; clipping, as on the whole model."""
    for clips, place in ((False, prepare), (True, lambda model: None)):
        trainfast.reset_stats()
        ours, theirs = model_of(prepare), model_of(place)
        norm = 0.1 if clips else None
        train(ours, AdamW(ours.parameters(), 0.01, max_grad_norm=norm))
        no_fallbacks()
        assert trainfast.stats().calls["adamw"]
        train(theirs, torch.optim.AdamW(theirs.parameters(), 0.01), clip_norm=norm)
        assert_same(ours.parameters(), theirs.parameters(), close_enough)


def close_enough(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def shard_fully(model, mesh=None, **options):
    for block in model:
        fully_shard(block, mesh=mesh or mesh_of(), **options)
    fully_shard(model, mesh=mesh or mesh_of(), **options)


def case_fsdp2_trains_as_with_torch(folder):
    check_model(shard_fully)


def parallel(model, mesh=None):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh or mesh_of(), plan)


def case_tensor_parallel_trains_as_with_torch(folder):
    check_model(parallel)


# ---- Checkpoints ---------------------------------------------------------------------


def case_the_probing_step_changes_nothing(folder):
    for cls in (AdamW, Adam):
        model = model_of(shard_fully)
        before = [full(p.detach()).clone() for p in model.parameters()]
        optimizer = cls(model.parameters(), 0.1, weight_decay=0.3, ema_decay=0.5)
        state = checkpoints.get_optimizer_state_dict(model, optimizer)
        assert_same(model.parameters(), before)
        for name, value in state["state"]["0.up.weight"].items():
            if name == "step":
                assert value == 0
            elif name == "ema":
                assert torch.equal(value.full_tensor(), before[2])
            else:
                assert value.full_tensor().count_nonzero() == 0, name
        assert optimizer.grad_norm is None


def case_state_dicts_resume(folder):
    straight, halves = model_of(shard_fully), model_of(shard_fully)
    options = {"amsgrad": True, "ema_decay": 0.9}
    optimizer = AdamW(straight.parameters(), **options)
    train(straight, optimizer, 2)
    for full_state in (False, True):
        first = AdamW(halves.parameters(), **options)
        kind = checkpoints.StateDictOptions(full_state_dict=full_state)
        weights, state = checkpoints.get_state_dict(straight, optimizer, options=kind)
        checkpoints.set_state_dict(
            halves,
            first,
            model_state_dict=weights,
            optim_state_dict=copy.deepcopy(state),  # load_state_dict() shares tensors
            options=checkpoints.StateDictOptions(
                full_state_dict=full_state, broadcast_from_rank0=full_state
            ),
        )
        for model, each in ((straight, optimizer), (halves, first)):
            train(model, each, 1)
        assert_same(halves.parameters(), straight.parameters())
        for p, q in zip(halves.parameters(), straight.parameters(), strict=True):
            mine, want = first.state[p], optimizer.state[q]
            assert mine.keys() == want.keys()
            assert_same(mine.values(), want.values())
            assert mine["ema"].placements == p.placements


def case_a_checkpoint_is_saved(folder):
    from tests.torch.distributed.resume import save_first

    save_first(folder)


# ---- Accumulation and offload --------------------------------------------------------


def case_offloaded_parameters_train_as_with_torch(folder):
    policy = CPUOffloadPolicy(pin_memory=False)
    check_model(lambda model: shard_fully(model, offload_policy=policy))


def wrap(model, kind):
    if kind is None:
        shard_fully(model)
        return model
    return kind(model)


def case_accumulated_passes_are_one_batch(folder):
    """Seven passes of each rank, by three, against all their rows at once."""
    rank = distributed.get_rank()
    generator = torch.Generator().manual_seed(21)
    rows = [
        [torch.randn(2 + (i + r) % 3, 6, generator=generator) for i in range(7)]
        for r in range(2)
    ]
    for kind in (None, nn.parallel.DistributedDataParallel):
        model = wrap(model_of(lambda model: None), kind)
        optimizer = AdamW(model.parameters(), 0.01)
        accumulator = Accumulator(optimizer, 3, model=model, max_grad_norm=0.1)
        for x in accumulator.batches(rows[rank]):
            loss = model(x).square().mean()
            accumulator.backward(loss, tokens=len(x))
        assert accumulator.steps_done == 3
        whole = model_of(lambda model: None)
        torchs = torch.optim.AdamW(whole.parameters(), 0.01)
        for at in (slice(0, 3), slice(3, 6), slice(6, 7)):
            whole(torch.cat(rows[0][at] + rows[1][at])).square().mean().backward()
            nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            torchs.step()
            torchs.zero_grad()
        assert_same(model.parameters(), whole.parameters(), close_enough)


def case_passes_before_the_last_reduce_nothing(folder):
    for kind in (None, nn.parallel.DistributedDataParallel):
        model = wrap(model_of(lambda model: None), kind)
        accumulator = Accumulator(AdamW(model.parameters()), 2, model=model)
        for i, x in enumerate(accumulator.batches(torch.randn(4, 3, 6))):
            accumulator.backward(
                model(x).square().mean() * (distributed.get_rank() + 1)
            )
            first = next(model.parameters())
            if i % 2 == 0 and kind is None:
                assert first.grad is None
            elif i % 2 == 0:
                both = [torch.empty_like(first) for _ in range(2)]
                distributed.all_gather(both, first.grad)
                assert not torch.allclose(*both)
            if i == 2:
                break
        for refused in (accumulator.flush, accumulator.discard)[: 1 if kind else 2]:
            try:
                refused()
            except RuntimeError as error:
                assert "reduce" in str(error)
            else:
                raise AssertionError(refused)
