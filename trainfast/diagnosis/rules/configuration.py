"""Rules about a configuration's device, precision and compiler, against the GPU."""

from trainfast.diagnosis.rules.rule import Case, Rule

_CUDA_DOCS = "docs.nvidia.com/cuda/ampere-tuning-guide"


def _on_cpu(case: Case) -> str | None:
    device = case.settings.find("device")
    if not device or not str(device.value).startswith(("auto", "cuda", "gpu")):
        return None
    hidden = case.variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"{device}, and CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
    if not case.gpu:
        return f"{device}, and there is no NVIDIA GPU"
    return None


def _emulated_bfloat16(case: Case) -> str | None:
    precision, gpu = case.settings.precision(), case.older_than(8)
    if gpu and precision and precision[0] == "bfloat16":
        return f"{precision[1]}, and {gpu} emulates bfloat16"
    asks = "torch.cuda.is_bf16_supported()"
    for script in case.scripts if gpu else ():
        if asks in script.names:
            place = f"{script.path}:{script.names[asks]}"
            return f"{place}: {asks} is true, and {gpu} emulates bfloat16"
    return None


def _no_tf32(case: Case) -> str | None:
    gpu = case.older_than(8)
    if not gpu:
        return None
    matmul = case.settings.find("matmul")
    if matmul and str(matmul.value) in ("high", "medium"):
        return f"{matmul}, and {gpu} has no TF32: it has no effect"
    if case.settings.on("tf32"):
        return f"{case.settings.find('tf32')}, and {gpu} has no TF32: it has no effect"
    return None


def _no_mixed_precision(case: Case) -> str | None:
    precision, gpu = case.settings.precision(), case.gpu
    if not gpu or not gpu.capability or gpu.capability < (7, 0):
        return None
    if precision and precision[0] == "float32":
        return f"{precision[1]}, and {gpu} has tensor cores for float16"
    return None


def _no_scaler(case: Case) -> str | None:
    precision = case.settings.precision()
    if precision and precision[0] == "float16" and case.settings.on("scaler") is False:
        return f"{precision[1]} with {case.settings.find('scaler')}"
    return None


def _no_compile(case: Case) -> str | None:
    if not case.settings.on("compile"):
        return None
    asked = case.settings.find("compile")
    gpu = case.older_than(7)
    if gpu:
        return f"{asked}, and Triton supports no {gpu}"
    torch = case.machine.torch_version
    if torch and torch < (2, 0):
        return f"{asked}, and torch {case.machine.torch} is older than 2.0"
    if not case.machine.compiler:
        return f"{asked}, and no C compiler is found"
    return None


def _no_flash(case: Case) -> str | None:
    settings = case.settings
    heads, width = settings.number("heads"), settings.number("width")
    if not (case.gpu and (heads or settings.find("head_dim"))):
        return None
    reasons = []
    gpu = case.older_than(8)
    if gpu:
        reasons.append(f"{gpu} is below 8.0")
    precision = settings.precision()
    if precision and precision[0] == "float32":
        reasons.append(f"{precision[1]}: it takes float16 and bfloat16")
    head_dim = settings.number("head_dim")
    if head_dim is None and heads and width:
        head_dim = width // heads
    if head_dim and head_dim > 256:
        reasons.append(f"head dimension {head_dim} is above 256")
    if not reasons:
        return None
    return f"torch's flash attention cannot run: {', '.join(reasons)}"


RULES = (
    Rule(
        "device-is-cpu",
        _on_cpu,
        "choose a GPU runtime or unset CUDA_VISIBLE_DEVICES; `device: cpu` says that "
        "the CPU is meant",
        "1.17",
        "CUDA Programming Guide, CUDA_VISIBLE_DEVICES",
    ),
    Rule(
        "bfloat16-emulated",
        _emulated_bfloat16,
        "use float16 with trainfast.GradScaler; ask "
        "is_bf16_supported(including_emulation=False)",
        "1.7 2.3",
        "torch/cuda/__init__.py, is_bf16_supported(including_emulation=True)",
    ),
    Rule(
        "tf32-unavailable",
        _no_tf32,
        "use float16 autocast; TF32 exists from capability 8.0 on, and the guide's 8x "
        "is the ratio of an A100's data sheet",
        "0.7 1.4",
        _CUDA_DOCS,
    ),
    Rule(
        "mixed-precision-off",
        _no_mixed_precision,
        "use torch.autocast with float16 and trainfast.GradScaler, or bfloat16 from "
        "capability 8.0 on",
        "0.14 1.7 2.13 3.20",
        "docs.pytorch.org: Automatic Mixed Precision",
    ),
    Rule(
        "scaler-off",
        _no_scaler,
        "use trainfast.GradScaler: small float16 gradients become 0 without a scale",
        "3.5",
        "docs.pytorch.org: Gradient Scaling",
    ),
    Rule(
        "compile-unavailable",
        _no_compile,
        "set it to false; without a C compiler: apt install gcc, or set CC",
        "1.19 3.21",
        "torch/_inductor/exc.py, GPUTooOldForTriton; triton/runtime/build.py",
    ),
    Rule(
        "flash-unavailable",
        _no_flash,
        "use float16 and trainfast.patch(): trainfast's attention runs from capability "
        "7.5 on",
        "1.11",
        "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
    ),
)
