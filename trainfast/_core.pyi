from collections.abc import Callable, Sequence
from typing import Any, final

version: str

@final
class Workspace: ...

def adamw(
    params: Sequence[Any],
    grads: Sequence[Any],
    exp_avgs: Sequence[Any],
    exp_avg_sqs: Sequence[Any],
    max_exp_avg_sqs: Sequence[Any] | None,
    step: int | Sequence[Any],
    workspace: Workspace,
    *,
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    decoupled_weight_decay: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
    relayout: Callable[[Any, Any], Any] | None = None,
    stream: int = 0,
    emas: Sequence[Any] | None = None,
    copies: Sequence[Any] | None = None,
    ema_decay: float = 0.0,
    clip_coef: Any = None,
    zero_grad: bool = False,
    write_back_grads: bool = False,
) -> None: ...
def adamw_groups(
    groups: list[Any],
    state: dict[Any, dict[str, Any]],
    bump: Callable[[list[Any]], Any],
    relayout: Callable[[Any, Any], Any],
    workspace: Workspace,
    measure_inf: bool,
    measure_norm: bool,
    max_norm: float,
    grad_scale: Any = None,
    found_inf: Any = None,
    total_norm: Any = None,
    total_norm_f64: Any = None,
    clip_coef: Any = None,
    stream: int = 0,
) -> int | tuple[int, int]: ...
def amp_grads(
    grads: list[Any],
    workspace: Workspace,
    *,
    found_inf: Any = None,
    total_norm: Any = None,
    total_norm_f64: Any = None,
    clip_coef: Any = None,
    norm_type: float = 2.0,
    max_norm: float = ...,
    rewrite: str = "read",
    clip_value: float = 0.0,
    grad_scale: Any = None,
    factor: Any = None,
    stream: int = 0,
) -> None: ...
def amp_update(
    scale: Any,
    growth_tracker: Any,
    found_infs: list[Any],
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float = 0.0,
    max_scale: float = ...,
    hysteresis: int = 1,
    hysteresis_tracker: Any = None,
    stream: int = 0,
) -> None: ...
def backend_in_use() -> str: ...
def backends() -> list[tuple[str, str | None, bool]]: ...
def num_threads() -> int: ...
def thread_runtime() -> str: ...
def use_backend(name: str | None, /) -> None: ...
