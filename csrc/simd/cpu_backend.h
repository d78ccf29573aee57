/* A CPU backend: the kernels, included for the instruction set whose vocabulary the
 * including file chose, and the table. Everything here is static but the table, or the
 * linker might keep one instruction set's copy for another. NAME and UNUSABLE come from
 * the including file. */
#include "../adamw_coef.h"
#include "../amp_scale.h"
#include "../amp_sum.h"
#include "../attention_dropout.h"
#include "../scratch.h"
#include "../tfast.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* In elements. Six tiles of float64 are 12 KB of a 32 KB L1; 2 KB of float32 ahead was
 * measured better than 0.5 KB, and up to 6 % better than nothing. Tried again on a
 * Zen 5 with 300 tensors of 40,000: nothing costs 0 to 3 %, 4 KB costs 5, 1 KB gains 3
 * with AVX-512 and loses 2 with AVX2; prefetchnta is the same within 1 %. One tensor in
 * place of 300 gains 1 to 4 % of a step, large pages nothing. */
enum { TILE = 256, PREFETCH = 512 };

#include "../kernels/attention_head.h"

#include "../kernels/attention_ahead.h"

#include "../kernels/attention_job.h"

#include "../kernels/attention_philox.h"

#include "../kernels/attention_strip.h"

#include "real_f32.h"

#include "../kernels/tile.h"

#include "../kernels/adamw.h"

#include "../kernels/amp.h"

#include "../kernels/attention_tile.h"

#include "../kernels/attention_scores.h"

#include "../kernels/attention_drop.h"

#include "../kernels/attention_forward.h"

#include "../kernels/attention_decode.h"

#include "../kernels/attention_backward_open.h"

#include "../kernels/attention_backward.h"

#include "../kernels/attention_backward_task.h"

#include "real_f64.h"

#include "../kernels/tile.h"

#include "../kernels/adamw.h"

#include "../kernels/amp.h"

#include "../kernels/attention_tile.h"

#include "../kernels/attention_scores.h"

#include "../kernels/attention_drop.h"

#include "../kernels/attention_forward.h"

#include "../kernels/attention_decode.h"

#include "../kernels/attention_backward_open.h"

#include "../kernels/attention_backward.h"

#include "../kernels/attention_backward_task.h"

#include "../kernels/parts.h"

#include "../kernels/adamw_step.h"

#include "../kernels/amp_step.h"

#include "../kernels/attention_dbias.h"

#include "../kernels/attention.h"

#include "../kernels/attention_backward_call.h"

#include "../kernels/crc32c.h"

#include "../kernels/graph_cache.h"

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
#define STRING_(a) #a
#define STRING(a) STRING_(a)

static const char *
unusable(void)
{
    return UNUSABLE;
}

extern const tfast_backend CONCAT(tfast_backend_, NAME);
const tfast_backend CONCAT(tfast_backend_, NAME) = {
    .abi = TFAST_ABI,
    .name = STRING(NAME),
    .device = TFAST_CPU,
    .unusable = unusable,
    .adamw = adamw_step,
    .amp_grads = amp_grads,
    .amp_update = amp_update,
    .attention = attention_forward,
    .attention_backward = attention_backward,
    .attention_scratch = attention_scratch,
    .graph_cache = &graph_kernels,
};
