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
) -> None: ...
def adamw_group(
    params: list[Any],
    state: dict[Any, dict[str, Any]],
    workspace: Workspace,
    bump: Callable[[list[Any]], Any],
    relayout: Callable[[Any, Any], Any],
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    decoupled_weight_decay: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
    stream: int = 0,
) -> int | None: ...
def backend_in_use() -> str: ...
def backends() -> list[tuple[str, str | None, bool]]: ...
def num_threads() -> int: ...
def thread_runtime() -> str: ...
def use_backend(name: str | None, /) -> None: ...
