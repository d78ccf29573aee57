"""What a configuration file asks `trainfast run` for."""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

PRECISIONS = ("highest", "high", "medium")
_SECTIONS = ("trainer", "training")  # their keys may also stand at the top level
_OWN = ("cudnn_benchmark", "env_vars", "float32_matmul_precision", "malloc", "patch")
# Settings that only the script can follow, as it builds the model and the loader.
_OF_THE_SCRIPT = (
    *("batch_size", "minibatch_size", "compile", "compile_mode", "use_compile"),
    *("use_mixed_precision", "grad_scaler_enabled", "gradient_clip", "log_interval"),
    *("num_workers", "persistent_workers", "pin_memory", "prefetch_factor"),
    *("device", "vectorization", "profiler", "interval_epochs", "profile_dir"),
    *("d_model", "nhead", "num_layers", "dim_feedforward", "model_name"),
    *("lr_temporal", "accumulation_steps", "mixed_precision_dtype", "fused"),
    *("channels_last", "detect_anomaly", "deterministic"),
)
_KNOWN = sorted({*_OWN, "threads", *_OF_THE_SCRIPT, *_SECTIONS})


@dataclass
class Settings:
    """What to turn on. The defaults change results by rounding at most.

    Attributes:
        patch: names for `trainfast.patch`; [] patches all default names, None nothing.
        float32_matmul_precision: torch's setting of this name; None leaves torch's.
        cudnn_benchmark: whether cuDNN times its convolutions; None leaves torch's.
        malloc: whether glibc keeps freed memory for the next step.
        threads: of OpenMP, MKL and OpenBLAS; None: the cores of the CPU quota.
        env_vars: further environment variables.
        of_the_script: dotted names of settings that only the script can follow.
    """

    patch: list[str] | None = field(default_factory=list)
    float32_matmul_precision: str | None = None
    cudnn_benchmark: bool | None = None
    malloc: bool = True
    threads: int | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    of_the_script: list[str] = field(default_factory=list)


def read_settings(config: dict[str, Any]) -> Settings:
    """Checks the keys and values of a configuration.

    Args:
        config: what `load_config` returns.

    Raises:
        ValueError: an unknown key, with the known key nearest to it, or a value that
            the setting does not take.
    """
    settings = Settings()
    for name, value in config.items():
        if name in _SECTIONS:
            for inner, setting in _section(name, value).items():
                _read(settings, f"{name}.{inner}", str(inner), setting)
        else:
            _read(settings, name, name, value)
    return settings


def _section(name: str, value: Any) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a section, got {value!r}; indent its keys")
    return value


def _read(settings: Settings, path: str, key: str, value: Any) -> None:
    if key in _OF_THE_SCRIPT:
        settings.of_the_script.append(path)
    elif key == "patch":
        settings.patch = _patch(path, value)
    elif key == "env_vars":
        settings.env_vars |= _variables(path, value)
    elif key == "threads":
        if type(value) is not int or value < 1:
            raise ValueError(f"{path} must be a positive integer, got {value!r}")
        settings.threads = value
    elif key == "float32_matmul_precision":
        if value not in PRECISIONS:
            wanted = ", ".join(PRECISIONS)
            raise ValueError(f"{path} must be one of {wanted}, got {value!r}")
        settings.float32_matmul_precision = value
    elif key in ("cudnn_benchmark", "malloc"):
        if type(value) is not bool:
            raise ValueError(f"{path} must be true or false, got {value!r}")
        setattr(settings, key, value)
    else:
        raise ValueError(_unknown(path, key))


def _unknown(path: str, key: str) -> str:
    near = get_close_matches(key, _KNOWN, 1)
    remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(_KNOWN)}"
    return f"{path} is not a setting; {remedy}"


def _patch(path: str, value: Any) -> list[str] | None:
    if type(value) is bool:
        return [] if value else None
    from trainfast.patching.registry import is_patched

    if not isinstance(value, list) or not value:
        raise ValueError(f"{path} must be true, false or a list of names, got {value}")
    for name in value:
        try:
            is_patched(str(name))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return [str(name) for name in value]


def _variables(path: str, value: Any) -> dict[str, str]:
    found = {}
    for name, setting in _section(path, value).items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII):
            raise ValueError(f"{path} must have names of variables, got {name!r}")
        if type(setting) not in (str, int, float) or "\0" in str(setting):
            raise ValueError(
                f"{path}.{name} must be text or a number, got {setting!r}; "
                "put the text into quotes"
            )
        found[str(name)] = str(setting)
    return found
