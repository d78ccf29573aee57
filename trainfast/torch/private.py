"""The oldest torch that is supported, and every private name of torch that is used.

All of these names exist in torch 2.6 to 2.15 unless a comment says otherwise. What
happens where a later torch removes one stands beside it: a public function takes its
place, or the capability that needs it, and no other, stops with a sentence.
`private_names_of_torch` in tests/project/test_source.py keeps them here.
"""

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn import functional

__all__ = ["forward_ad"]  # modules read forward_ad._current_level, an int that changes

OLDEST = (2, 6)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _require_supported() -> None:
    """Raises ImportError where torch is too old; pre-releases count as the release."""
    major, minor = str(torch.__version__).split(".")[:2]
    if (int(major), int(minor)) < OLDEST:
        raise ImportError(
            f"torch must be at least {OLDEST[0]}.{OLDEST[1]}, got {torch.__version__}; "
            "upgrade torch, or use trainfast with NumPy arrays alone"
        )


_require_supported()

# torch 2.7 gave its Adam the argument, and the param groups of both the entry.
ADAM_DECOUPLES = (
    "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
)

_missing: list[str] = []


def _find(path: str) -> Any:
    """torch's private object of this dotted name, or None."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _needed(path: str) -> Any:
    """The same for what attention cannot do without."""
    found = _find(path)
    if found is None:
        _missing.append(path)
    return found


def _required(path: str, user: str) -> Any:
    """The same for what a public function of trainfast cannot do without."""
    found = _find(path)
    if found is not None:
        return found

    def refuse(*_: object, **__: object) -> Any:
        raise NotImplementedError(
            f"torch {torch.__version__} has no torch.{path}, which {user} needs; use "
            "torch's own class, or an older torch"
        )

    return refuse


def _always(*_: object) -> bool:
    return True


# ---- torch.compile and Python's side of a call --------------------------------------

# A compiled function breaks its graph at what this decorates, and goes on.
disable_dynamo: Callable[[Any], Any]
disable_dynamo = _find("_disable_dynamo") or torch.compiler.disable
increment_version: Callable[[Any], None]
increment_version = _find("_C._increment_version") or (
    torch.autograd.graph.increment_version
)

cuda_stream: Callable[[int], int]
cuda_stream = _find("_C._cuda_getCurrentRawStream") or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)

_n_function_modes: Callable[[], int] = _find("_C._len_torch_function_stack") or int


def outside_modes(function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
    """Calls a function of the core, which reads attributes of each tensor.

    Every read would go through a TorchFunctionMode that is active, as the one of
    torch.set_default_device() is: 7 us in torch 2.6.
    """
    if not _n_function_modes():
        return function(*args, **kwargs)
    return without_functions(function, *args, **kwargs)


def without_functions(function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
    """Calls a function to which __torch_function__ of modes and classes does not apply.

    It takes 100 ns to see that a DTensor has none, with each attribute that is read.
    """
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)


def _is_exporting_in_2_6() -> bool:
    """What torch.compiler.is_exporting() says in later versions.

    Only torch.export without `strict` sets torch's flag for compilers; with `strict` it
    traces by torch.compile's tracer, which knows what it is tracing for.
    """
    if getattr(torch.compiler, "_is_compiling_flag", False):
        return True
    tracing = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        return bool(tracing.InstructionTranslator.current_tx().export)  # type: ignore
    except AttributeError:  # nothing is traced
        return False


is_exporting: Callable[[], bool]
is_exporting = _find("compiler.is_exporting") or _is_exporting_in_2_6


def constant_when_compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A graph keeps what `function` returns when it is traced.

    This is torch.compiler.assume_constant_result, which takes a second to import
    torch's compiler.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def compile_as_torchs(ours: Any, torchs: Callable[..., Any]) -> None:
    """Makes torch.jit.script compile `torchs` where a script calls `ours`."""
    ours.__dict__["__script_if_tracing_wrapper"] = True
    ours.__dict__["__original_fn"] = torchs


def script_as_operator(ours: Any, operator: str) -> None:
    """Makes torch.jit.script call the operator where a script calls `ours`."""
    register = _find("jit._builtins._register_builtin")
    if register is not None:  # without: torch.jit.script refuses patched code
        register(ours, operator)


# ---- Optimizers, clipping and AMP ----------------------------------------------------

total_norm: Callable[..., torch.Tensor]
total_norm = _find("nn.utils.clip_grad._get_total_norm") or (
    torch.nn.utils.get_total_norm
)
unscale_and_check = _required(
    "_amp_foreach_non_finite_check_and_unscale_", "trainfast.GradScaler"
)
update_scale = _required("_amp_update_scale_", "trainfast.GradScaler")
new_optimizer_state = _required(
    "amp.grad_scaler._refresh_per_optimizer_state", "trainfast.GradScaler"
)


def _foreach(method: str) -> Callable[..., Any]:
    """torch's method of many tensors at once; without it, of one after another."""

    def one_by_one(tensors: list[Any], *args: Any, **kwargs: Any) -> None:
        for i, tensor in enumerate(tensors):
            each = (arg[i] if isinstance(arg, list) else arg for arg in args)
            getattr(tensor, method)(*each, **kwargs)

    return _find(f"_foreach_{method}") or one_by_one


foreach_add, foreach_lerp, foreach_mul = map(_foreach, ("add_", "lerp_", "mul_"))

_has_avx512_bf16: Callable[[], bool]
_has_avx512_bf16 = _find("cpu._is_avx512_bf16_supported") or bool


def has_bf16() -> bool:
    """True where the CPU has instructions for bfloat16, and torch uses them."""
    return _has_avx512_bf16() or has_amx()


def global_step_hooks() -> list[Any]:
    """The hooks that run around every optimizer's step, none where torch has no such
    dicts any more."""
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    found = (_find(f"optim.optimizer.{name}") for name in names)
    return [hook for hooks in found if hooks for hook in hooks.values()]


def post_accumulate_hooks(param: torch.Tensor) -> list[Any]:
    """The hooks of register_post_accumulate_grad_hook, none where torch hides them."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


# ---- DTensor -------------------------------------------------------------------------


def dtensor_class() -> Any:
    """torch's DTensor; None while nothing has imported it, so that there are none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def dtensor_readers(cls: Any) -> tuple[Any, Any]:
    """What reads a DTensor's local tensor, and its spec of mesh and placements.

    Descriptors of slots take 20 ns. Without them to_local() takes 2 us, and the spec is
    a new object with each call.
    """
    return (
        vars(cls).get("_local_tensor") or torch.no_grad()(cls.to_local),
        vars(cls).get("_spec") or (lambda tensor: (tensor.device_mesh,)),
    )


def local_tensor(tensor: Any) -> torch.Tensor:
    """A DTensor's local tensor, without autograd."""
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        with torch.no_grad():
            local = tensor.to_local()
    return local


def shard_order(tensor: Any) -> Any:
    """In which order mesh dimensions shard a DTensor; torch has it from 2.10 on."""
    return getattr(getattr(tensor, "_spec", None), "shard_order", None)


def shard_of(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a DTensor's shard, and its first element's place in each dimension.

    NotImplementedError where torch has moved the function; seen in 2.13.
    """
    name = "distributed.tensor._utils.compute_local_shape_and_global_offset"
    function = _find(name)
    if function is None:
        raise NotImplementedError(f"torch {torch.__version__} has no torch.{name}")
    found = function(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(found[0]), tuple(found[1])


def is_flat_shard(param: Any) -> bool:
    """True for a parameter of FullyShardedDataParallel: a rank's shard, which looks
    like any tensor."""
    return bool(getattr(param, "_fsdp_flattened", False))


def is_called_to_make_state() -> bool:
    """True in a step() that torch.distributed.checkpoint calls with lr 0 and zeros for
    gradients, so that the optimizer makes its state."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            name = frame.f_globals.get("__name__")
            return name == "torch.distributed.checkpoint.state_dict"
        frame = frame.f_back
    return False


# ---- Attention -----------------------------------------------------------------------

# Torch's own function, whatever takes its public name later.
torchs_sdpa: Callable[..., torch.Tensor]
torchs_sdpa = _find("_C._nn.scaled_dot_product_attention") or (
    functional.scaled_dot_product_attention
)

storage_uses = _find("_C._storage_Use_Count")  # without: no memory is kept

has_amx: Callable[[], bool]
has_amx = _find("cpu._is_amx_tile_supported") or bool

# Without one of these two every call is routed by torch's public functions.
is_any_autocast_enabled = _find("_C._is_any_autocast_enabled") or _always
is_tracing = _find("_C._is_tracing") or _always

FakeTensor = _needed("_subclasses.fake_tensor.FakeTensor")
FunctionalTensor = _needed("_subclasses.functional_tensor.FunctionalTensor")
is_batched = _needed("_C._functorch.is_batchedtensor")
is_batched_by_grad = _needed("_C._functorch.is_legacy_batchedtensor")
n_dispatch_modes = _needed("_C._len_torch_dispatch_stack")
transform_level = _needed("_C._functorch.maybe_current_level")
_needed("autograd.forward_ad._current_level")  # an int that changes

# Why the kernels take no call: torch's own operations compute then.
ATTENTION_REFUSAL: str | None = None
if _missing:
    ATTENTION_REFUSAL = f"torch {torch.__version__} has no {', '.join(_missing)}"
    n_dispatch_modes = transform_level = _always

# ---- The probe's hooks ---------------------------------------------------------------

# The class of a DataLoader's iterators; without it a probe sees no loader.
LoaderIterator: Any = _find("utils.data.dataloader._BaseDataLoaderIter")

# The number that the next node of a backward graph gets; without it the shares of
# statements in the backward pass are 0.
next_node: Callable[[], int] = _find("autograd._get_sequence_nr") or int

# ---- Memory estimates ----------------------------------------------------------------

# Without one of these there is no estimate: MEMORY_REFUSAL says so.
_needs = (
    *("_subclasses.fake_tensor.FakeTensorMode", "_subclasses.fake_tensor.FakeCopyMode"),
    *("_subclasses.fake_tensor.unset_fake_temporarily", "_C._ExcludeDispatchKeyGuard"),
    *("utils._python_dispatch.TorchDispatchMode", "utils._pytree.tree_leaves"),
    *("utils._pytree.tree_map", "library.Library._destroy", "_C.DispatchKeySet"),
    "utils._python_dispatch._disable_current_modes",
)
FakeTensorMode, FakeCopyMode, unset_fake = (_find(path) for path in _needs[:3])
TorchDispatchMode: Any = _find(_needs[4]) or object
tree_leaves, tree_map = (_find(path) for path in _needs[5:7])
_absent = [path for path in _needs if _find(path) is None]
MEMORY_REFUSAL: str | None = None
if _absent:
    MEMORY_REFUSAL = f"torch {torch.__version__} has no torch.{_absent[0]}"


def without_dispatch_modes() -> Any:
    """A context in which fake tensors and trackers see nothing."""
    return _find("utils._python_dispatch._disable_current_modes")()


def below_autocast() -> Any:
    """A context in which the CPU's autocast lets calls through."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def remove_kernels(library: torch.library.Library) -> None:
    """Takes a Library's kernels back now, not when it is collected."""
    library._destroy()


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of torch's own object of the storage."""
    return storage._cdata


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a COO tensor as they are: it is not coalesced."""
    return tensor._indices(), tensor._values()


@contextlib.contextmanager
def fakes_converted() -> Iterator[None]:
    """Within it module.half() and module.to(...) put new parameters in place. torch
    swaps the contents of two tensors instead, which fakes do not allow."""
    usual = torch.nn.Module._apply
    new: dict[torch.Tensor, torch.nn.Parameter] = {}  # also of tied parameters

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        for module in self.children() if recurse else ():
            module._apply(fn)
        for name, param in self._parameters.items():
            while param in new:
                param = new[param]
            if param is None:
                continue
            with torch.no_grad():
                made = fn(param)
            if made is not param:
                made = new[param] = torch.nn.Parameter(made, param.requires_grad)
            self._parameters[name] = made
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else fn(buffer)
        return self

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = usual  # type: ignore[method-assign]


def memory_events(profile: torch.profiler.profile) -> list[int]:
    """Bytes allocated (positive) and freed (negative), in order, as a profiler saw."""
    found: Any = profile.profiler
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
