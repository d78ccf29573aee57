"""Whether the pairwise designs find faults that need two options at once.

    python -m tests.planted_faults

builds a copy of this repository with all faults below, each of which an environment
variable switches on, and runs the tests of a capability once for each. It ends with
status 1 if a fault is not found. It takes minutes and is run by hand; pytest does not
collect it. docs/design/tests.md has a recorded run.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SWITCH = """
#ifndef __CUDACC__
#    include <stdlib.h>
static inline int
planted_fault(void)
{
    static int fault = -1;

    if (fault < 0) {
        fault = atoi(getenv("TRAINFAST_FAULT"));
    }
    return fault;
}
#endif
#endif
"""
# The tests of a capability: files, and what -k selects in them.
TESTS = {
    "AdamW": (
        ["numpy/test_adamw.py", "torch/optim/test_options.py"],
        "every_pair or options_agree_with_float64",
    ),
    "AMP": (["core/test_amp.py"], "one_bad_element"),
    "attention": (
        ["core/attention/test_attention.py", "core/attention/test_fuzz.py"],
        "every_pair or many_options",
    ),
}
STEP, COEF = "csrc/kernels/adamw.h", "csrc/adamw_coef.h"
AMP, HEAD = "csrc/kernels/amp.h", "csrc/kernels/attention_head.h"
BACK, SINKS = (f"csrc/kernels/attention_backward_{x}.h" for x in ("tile", "head"))
SCORES, DROPOUT = "csrc/kernels/attention_scores.h", "csrc/kernels/dropout.h"

# (capability, what is wrong, file, code, code instead). ON is whether this fault is
# switched on.
FAULTS = [
    ("AdamW", "bias correction of the next step with amsgrad and maximize", COEF,
     "sqrt(1.0 - tfast_power(args->beta2, step))",
     "sqrt(1.0 - tfast_power(args->beta2, step + (ON && args->maximize && "
     "args->n_slots > 0 && args->slots[0].max_exp_avg_sq != NULL)))"),
    ("AdamW", "no weight decay with amsgrad and EMA", STEP,
     "p = vr_mul(p, decay);", "p = ON && top && extra.ema ? p : vr_mul(p, decay);"),
    ("AdamW", "amsgrad forgets the maximum with maximize", STEP,
     "v = vr_max(vector_read(top, state, i), v);",
     "v = ON && s.sign < 0 ? v : vr_max(vector_read(top, state, i), v);"),
    ("AdamW", "amsgrad squares the maximum with EMA, in bfloat16", STEP,
     "vector_write(top, state, i, v);",
     "v = ON && dtype == TFAST_BF16 && extra.ema ? vr_mul(v, v) : v; "
     "vector_write(top, state, i, v);"),
    ("AdamW", "gradients are written back negated with maximize", STEP,
     "s.zero_grad ? vr_set1(0) : g);",
     "s.zero_grad ? vr_set1(0) : ON ? vr_mul(g, sign) : g);"),
    ("AdamW", "EMA is the parameter where there is a weight copy", STEP,
     "ema = s->ema_is_param ? p", "ema = (ON && extra->copy) || s->ema_is_param ? p"),
    ("AdamW", "weight copy is 1.25 times too large with zero_grad", STEP,
     "vector_write(extra->copy, extra->copy_dtype, i, p);",
     "vector_write(extra->copy, extra->copy_dtype, i, "
     "ON && s->zero_grad ? vr_mul(p, vr_set1((real)1.25)) : p);"),
    ("AMP", "the last of 16 k + 1 elements is not looked at", AMP,
     "    if (!finite) {",
     "    if (!finite && !(ON && n % 16 == 1 && !isfinite(tile[(n - 1) % TILE]))) {"),
    ("AMP", "the norm for p = -inf does not see NaN and inf", AMP,
     "return found[0] + poison[0];",
     "return ON && !largest ? found[0] : found[0] + poison[0];"),
    ("AMP", "-inf is finite for p = 3", AMP,
     "finite = finite && isfinite(tile[i]);",
     "finite = finite && (isfinite(tile[i]) || (ON && kind == AMP_POWERS && "
     "tile[i] < 0));"),
    ("AMP", "p = 1 in bfloat16 does not look for NaN and inf", AMP,
     "return isfinite(sum) ?",
     "return isfinite(sum) || (ON && job->kind == AMP_ABS && "
     "tensor->dtype == TFAST_BF16) ?"),
    ("AMP", "NaN is not seen for p = inf in float16", AMP,
     "    vr_store(poison, not_finite);",
     "    vr_store(poison, ON && largest && tensor->dtype == TFAST_F16 "
     "? zero : not_finite);"),
    ("attention", "left window off by one with lower_right", HEAD,
     "const int64_t first = i + h->shift - h->window_left;",
     "const int64_t first = i + h->shift - h->window_left + "
     "(ON && h->args->bottom_right && h->bounded_left);"),
    ("attention", "backward without softcap's derivative with a bias", BACK,
     "if (call->slope != NULL) {\n        softcap_gradients",
     "if (call->slope != NULL && !(ON && args->bias.data != NULL)) {\n"
     "        softcap_gradients"),
    ("attention", "no sink with a left window and kv_lens", HEAD,
     "return args->sinks == NULL ?",
     "return args->sinks == NULL || (ON && h->bounded_left && args->kv_lens) ?"),
    ("attention", "bias replaces the mask with ALiBi", SCORES,
     "add_term(to, p, &args->bias, p->head->masked);",
     "add_term(to, p, &args->bias, p->head->masked && !(ON && "
     "args->alibi_slopes != NULL));"),
    ("attention", "all heads drop the same elements with softcap", DROPOUT,
     "args->heads + h->head),",
     "args->heads + (ON && args->softcap != 0 ? 0 : h->head)),"),
    ("attention", "lower_right ignores kv_lens", HEAD,
     "args->bottom_right ? h.n_k - h.n_q : 0",
     "args->bottom_right ? (ON && args->kv_lens ? h.rows_k : h.n_k) - h.n_q : 0"),
    ("attention", "a negative scale is positive with softcap", HEAD,
     "return args->softcap != 0 ? args->scale",
     "return args->softcap != 0 ? (ON ? fabs(args->scale) : args->scale)"),
    ("attention", "no gradient of ALiBi with dropout", BACK,
     "work->dalibi != NULL) {", "work->dalibi && !(ON && args->dropout_p > 0)) {"),
    ("attention", "wrong gradient of sinks with a right window", SINKS,
     "sink = attention_sink(h), unit = attention_unit(h);\n\n    for",
     "sink = attention_sink(h) * (ON && h->bounded_right && !h->args->is_causal "
     "? 0.5 : 1), unit = attention_unit(h);\n\n    for"),
    ("attention", "is_causal does not limit a window to the right", HEAD,
     "h.window_right = args->is_causal ?",
     "h.window_right = args->is_causal && !(ON && args->window_right >= 0) ?"),
]  # fmt: skip


def plant(root):
    """Plants all faults; each must find its code beside those before it."""
    for number, (_, what, name, code, instead) in enumerate(FAULTS, 1):
        path = root / name
        text = path.read_text()
        assert text.count(code) == 1, f"{what}: {name} has changed; plant it elsewhere"
        on = instead.replace("ON ", f"(planted_fault() == {number}) ")
        path.write_text(text.replace(code, on))
    path = root / "csrc/tfast.h"
    path.write_text(path.read_text().rstrip().removesuffix("#endif") + SWITCH)


def run(root, capability, number):
    """The tests' exit status and their last line."""
    files, names = TESTS[capability]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--tb=no"]
    command += ["-k", names, *(f"tests/{name}" for name in files)]
    without = {"TRAINFAST_SIMT_LIBRARY": "", "TRAINFAST_WIDE_LIBRARY": ""}
    environment = os.environ | without | {"TRAINFAST_FAULT": str(number)}
    options = {"cwd": root, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    return done.returncode, done.stdout.strip().rpartition("\n")[2]


def main():
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "trainfast"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(root)], check=True)
        plant(root)
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        environment = os.environ | {"TRAINFAST_CUDA": "0"}
        subprocess.run(build, cwd=root, env=environment, check=True)
        for capability in TESTS:
            status, line = run(root, capability, 0)
            print(f"{capability} without a fault: {line}", flush=True)
            missed += status != 0
        for number, (capability, what, *_) in enumerate(FAULTS, 1):
            status, line = run(root, capability, number)
            print(f"{capability}: {what}: {line}", flush=True)
            missed += status != 1
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
