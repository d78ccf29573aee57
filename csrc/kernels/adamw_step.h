/* One step over a list of slots on the CPU: the slots' elements, laid end to end, are
 * cut into one contiguous run a thread. */

enum {
    SLOT_COST = 64,    /* what entering a slot costs, in elements */
    PART_COST = 32768, /* elements worth waking a sleeping thread, which takes 50 us */
    CUT = 64           /* runs are cut at multiples of this many elements of a slot */
};

typedef struct {
    const tfast_adamw_args *args;
    int64_t cost; /* of all slots */
} adamw_job;

/* Where a cut at `at`, counted from the slot's start, falls among its elements. */
static int64_t
adamw_cut(int64_t at, int64_t numel)
{
    if (at <= 0) {
        return 0;
    }
    return at >= numel ? numel : at / CUT * CUT;
}

static void
adamw_part(void *context, int part, int parts)
{
    const adamw_job *job = context;
    const tfast_adamw_args *args = job->args;
    const double lr = args->lr_device != NULL ? *args->lr_device : args->lr;
    const double scale = args->grad_scale != NULL ? *args->grad_scale : 1.0;
    /* 128 bits: cost * parts may pass 2^63 */
    const int64_t from = (int64_t)((__int128)job->cost * part / parts);
    const int64_t to = (int64_t)((__int128)job->cost * (part + 1) / parts);
    tfast_adamw_coef coef = {0};
    int64_t coef_step = 0, at = 0;

    for (int64_t i = 0; i < args->n_slots && at < to; i++) {
        const tfast_adamw_slot *slot = &args->slots[i];
        const int64_t first = adamw_cut(from - at, slot->numel);
        const int64_t end = adamw_cut(to - at, slot->numel);
        const int64_t step = slot->step != NULL ? (int64_t)*slot->step : args->step;

        at += slot->numel + SLOT_COST;
        if (first >= end) {
            continue;
        }
        if (step != coef_step) {
            coef = tfast_adamw_coef_at(args, step, lr, scale);
            coef_step = step;
        }
        if (slot->param_dtype == TFAST_F64 || slot->state_dtype == TFAST_F64) {
            adamw_span_f64(slot, first, end - first, &coef, args->write_back_grads);
        } else {
            adamw_span_f32(slot, first, end - first, &coef, args->write_back_grads);
        }
    }
}

static tfast_status
adamw_step(const tfast_adamw_args *args)
{
    adamw_job job = {.args = args};
    int64_t parts = tfast_num_threads();

    if (args->found_inf != NULL && *args->found_inf != 0) {
        return TFAST_OK;
    }
    for (int64_t i = 0; i < args->n_slots; i++) {
        job.cost += args->slots[i].numel + SLOT_COST;
        if (args->slots[i].step != NULL) {
            *args->slots[i].step += 1;
        }
    }
    if (parts > job.cost / PART_COST) {
        parts = job.cost / PART_COST;
    }
    tfast_parallel(parts < 1 ? 1 : (int)parts, adamw_part, &job);
    return TFAST_OK;
}
