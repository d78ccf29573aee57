"""torch.optim.AdamW and Adam on trainfast's kernel."""

from typing import Any

import torch
from torch import Tensor

from trainfast.torch import private
from trainfast.torch.optim import state as adamw_state
from trainfast.torch.optim.fused_step import FusedStep

__all__ = ["Adam", "AdamW"]


class AdamW(FusedStep, torch.optim.AdamW):
    """torch.optim.AdamW on trainfast's kernel: same arguments, groups and state.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, capturable,
            differentiable: as in torch.optim.AdamW, with its defaults. `lr` may be a
            tensor. Every step on a CUDA device can be captured in a graph.
        foreach, fused: stored, and otherwise ignored.
        state_dtype: dtype of exp_avg, exp_avg_sq and max_exp_avg_sq (float64, float32,
            float16 or bfloat16); None: each parameter's own. Kept by load_state_dict.
            "int8": 8-bit codes in blocks of 128 elements, 2.1 bytes a parameter in
            place of 8, under keys of their own (`exp_avg_q8`, `exp_avg_sq_q8`,
            `max_exp_avg_sq_q8`, `scales_q8`); float state for parameters
            below 4096 elements, float64 parameters and DTensors.
        max_grad_norm: clips the 2-norm over all groups' gradients, as clip_grad_norm_
            does, inside the step: one read of the gradients, no write. None or 0 is
            off, infinity only measures. The norm before clipping is then in
            `grad_norm`, a tensor of no dimensions on the device: reading it waits, the
            step does not.
        ema_decay: keeps `ema <- ema + (1 - ema_decay) * (param - ema)` of each
            parameter in its state, from its value before the first step on; float32
            for float16 and bfloat16. See swap_ema, ema_weights and copy_ema_to.
        weight_copy_dtype: keeps a copy of each parameter in this dtype in its state,
            `weight_copy`.
        master_weights: keeps float32 weights (`master_param`) for float16 and bfloat16
            parameters, which become their rounded copies. "split", for bfloat16: keeps
            only the bits that the parameter lacks (`master_remainder`, whose values
            mean nothing as bfloat16): the same weights, bit for bit, for 2 bytes a
            parameter in place of 4. Parameters are rounded with ties away from 0.
        rounding: of float16 and bfloat16 parameters. "stochastic" rounds up or down at
            random, with the exact value as mean, and keeps nothing. The seed is drawn
            from torch's generator (of process 0) at the first step, and kept in the
            param group as `rounding_seed`, also in checkpoints. The results do not
            depend on threads, devices, ranks or shards.
        compensation: "kahan" keeps what rounding of float16 and bfloat16 parameters has
            cut off, in their dtype (`compensation`), and adds it in the next step.
        zero_grad: leaves zeros in the gradients, also of a step that a scaler skips.
        write_back_grads: leaves the gradients unscaled and clipped, as the step used
            them; otherwise they stay as backward() left them.
        amp_scaling: True tells torch's gradient scaler that step() unscales and skips
            by itself, so that the scaler neither writes the gradients nor waits for the
            GPU. Lightning's plugin (not trainfast.lightning.Precision) then refuses to
            clip, and accelerate overlooks skipped steps.
            False: no scaler gives step() scaled gradients. None: as in torch, which is
            True for `fused`; also True where zero_grad or master_weights need it.
            trainfast.torch.GradScaler needs no flag.

    All but max_grad_norm and amp_scaling can be set for a param group alone, and work
    together, but for master_weights with weight_copy_dtype, zero_grad with
    write_back_grads or amp_scaling=False, and two of master_weights, rounding and
    compensation: ValueError. Both passes run without waiting
    for the GPU.

    The state is torch's (`step`, `exp_avg`, `exp_avg_sq`, with amsgrad
    `max_exp_avg_sq`), but `step` is always a float32 on the parameter's device.
    Checkpoints load both ways. A pickle of the whole optimizer needs trainfast to load,
    unless patch() was in force when it was written and no option of this class is used:
    then it loads as torch's wherever torch's name is not patched.

    Parameters and gradients may be float64, float32, float16 or bfloat16, in any mix,
    also DTensors, of which each process steps its shards;
    anything else runs torch's own step, which
    trainfast.stats() counts with the reason, and so does a step inside torch.compile
    (not counted), unless a scaler or an option asks for more: that breaks the graph and
    runs as everywhere. State tensors may be replaced, moved or written in place
    between steps: every step reads their addresses again.

    Formula and roundings: see trainfast.adamw_step.
    """

    _torch_class = torch.optim.AdamW
    _is_adam = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        weight_copy_dtype: torch.dtype | None = None,
        master_weights: bool | str = False,
        rounding: str = "nearest",
        compensation: str | None = None,
        zero_grad: bool = False,
        write_back_grads: bool = False,
        amp_scaling: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        options: tuple[Any, ...]
        options = (state_dtype, ema_decay, weight_copy_dtype, master_weights)
        options += (rounding, compensation, zero_grad, write_back_grads)
        self._finish_init(max_grad_norm, amp_scaling, options)


class Adam(FusedStep, torch.optim.Adam):
    """torch.optim.Adam on trainfast's kernel; see AdamW here for what that means.

    Args:
        params, lr, betas, eps, amsgrad, maximize, capturable, differentiable, foreach,
            fused: as in torch.optim.Adam.
        weight_decay: added to the gradient (L2) unless `decoupled_weight_decay`.
        decoupled_weight_decay: decays the parameters as AdamW does; torch has it from
            2.7 on.
        state_dtype, max_grad_norm, ema_decay, weight_copy_dtype, master_weights,
            rounding, compensation, zero_grad, write_back_grads, amp_scaling: as in
            AdamW.
    """

    _torch_class = torch.optim.Adam
    _is_adam = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | str | None = None,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        weight_copy_dtype: torch.dtype | None = None,
        master_weights: bool | str = False,
        rounding: str = "nearest",
        compensation: str | None = None,
        zero_grad: bool = False,
        write_back_grads: bool = False,
        amp_scaling: bool | None = None,
    ) -> None:
        known: dict[str, Any] = {}
        if private.ADAM_DECOUPLES:
            known["decoupled_weight_decay"] = decoupled_weight_decay
        adamw_state.check_decoupled(decoupled_weight_decay)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            **known,
        )
        options: tuple[Any, ...]
        options = (state_dtype, ema_decay, weight_copy_dtype, master_weights)
        options += (rounding, compensation, zero_grad, write_back_grads)
        self._finish_init(max_grad_norm, amp_scaling, options)
