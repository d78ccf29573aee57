/* Builds the rows that AdamW's kernel reads: see adamw_rows.h. */
#include "adamw_rows.h"

#include "adamw_half.h"

#include <string.h>

static bool
all_of_dtype(const tfast_adamw_slot *slots, int64_t n, int dtype)
{
    for (int64_t i = 0; i < n; i++) {
        if (slots[i].param_dtype != dtype || slots[i].grad_dtype != dtype ||
            slots[i].state_dtype != dtype || slots[i].scales != NULL) {
            return false;
        }
    }
    return true;
}

/* What a slot has besides its own arrays: nothing where there are no extras. */
static tfast_adamw_extra
extra_of(const tfast_adamw_args *args, int64_t i)
{
    static const tfast_adamw_extra none = {0};

    return args->extras != NULL ? args->extras[i] : none;
}

/* Arithmetic is float64. */
static bool
is_wide(int param_dtype, int state_dtype)
{
    return param_dtype == TFAST_F64 || state_dtype == TFAST_F64;
}

static bool
any_extra(const tfast_adamw_args *args)
{
    for (int64_t i = 0; i < args->n_slots; i++) {
        const tfast_adamw_extra extra = extra_of(args, i);
        if (extra.ema != NULL || extra.copy != NULL ||
            extra.rounding != TFAST_NEAREST) {
            return true;
        }
    }
    return false;
}

adamw_mix
adamw_mix_of(const tfast_adamw_args *args)
{
    const tfast_adamw_slot *slots = args->slots;
    const int64_t n = args->n_slots;
    const bool plain = !any_extra(args);

    if (plain && all_of_dtype(slots, n, TFAST_F32)) {
        return ALL_F32;
    }
    if (plain && all_of_dtype(slots, n, TFAST_BF16)) {
        return ALL_BF16;
    }
    for (int64_t i = 0; i < n; i++) {
        if (slots[i].scales != NULL || extra_of(args, i).rounding != TFAST_NEAREST) {
            return BLOCKS;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        if (is_wide(slots[i].param_dtype, slots[i].state_dtype)) {
            return WIDE;
        }
    }
    return NARROW;
}

/* Whether element `head` of the array begins a vector. */
static bool
aligned_at(const void *array, int dtype, int head, int vector)
{
    const size_t size = tfast_dtype_size((tfast_dtype)dtype);

    return array == NULL || ((uintptr_t)array + size * head) % (size * vector) == 0;
}

static bool
has_float64(const adamw_row *row)
{
    return is_wide(row->param_dtype, row->state_dtype) ||
           row->grad_dtype == TFAST_F64 ||
           (row->extra.ema != NULL && row->extra.ema_dtype == TFAST_F64) ||
           (row->extra.copy != NULL && row->extra.copy_dtype == TFAST_F64);
}

/* Codes of a vector are one word. */
static bool
state_aligned_at(const adamw_row *row, const void *array, int head, int vector)
{
    return row->scales != NULL ? (uintptr_t)array % (size_t)vector == 0
                               : aligned_at(array, row->state_dtype, head, vector);
}

/* The arrays of a slot may be views that are misaligned differently (a gradient in a
 * bucket): then no head aligns them all, and the slot is done element by element, still
 * coalesced. */
static uint8_t
head_of(const adamw_row *row, int vector)
{
    const bool blocks = row->scales != NULL || row->extra.rounding != TFAST_NEAREST;

    if (has_float64(row)) {
        return NO_VECTORS;
    }
    for (int head = 0; head < (blocks ? 1 : vector); head++) {
        if (aligned_at(row->param, row->param_dtype, head, vector) &&
            aligned_at(row->grad, row->grad_dtype, head, vector) &&
            state_aligned_at(row, row->exp_avg, head, vector) &&
            state_aligned_at(row, row->exp_avg_sq, head, vector) &&
            state_aligned_at(row, row->max_exp_avg_sq, head, vector) &&
            aligned_at(row->extra.ema, row->extra.ema_dtype, head, vector) &&
            aligned_at(row->extra.copy, row->extra.copy_dtype, head, vector) &&
            aligned_at(row->extra.tail, row->param_dtype, head, vector)) {
            return (uint8_t)head;
        }
    }
    return NO_VECTORS;
}

/* The first item has the head besides its ITEM elements. */
static int
items_of(int64_t numel, int head)
{
    const int64_t body = head == NO_VECTORS ? numel : numel - head;

    if (numel <= 0) {
        return 0;
    }
    return body <= ITEM ? 1 : (int)((body + ITEM - 1) / ITEM);
}

int
adamw_fill_table(adamw_table *table, const tfast_adamw_args *args, adamw_mix mix)
{
    const int vector = mix == ALL_BF16 ? 8 : 4;
    int items = 0;

    memset(table, 0, adamw_table_bytes(args->n_slots));
    for (int64_t i = 0; i < args->n_slots; i++) {
        const tfast_adamw_slot *slot = &args->slots[i];
        adamw_row *row = &table->rows[i];
        row->param = slot->param;
        row->grad = slot->grad;
        row->exp_avg = slot->exp_avg;
        row->exp_avg_sq = slot->exp_avg_sq;
        row->max_exp_avg_sq = slot->max_exp_avg_sq;
        row->extra = extra_of(args, i);
        row->step = slot->step;
        row->scales = slot->scales;
        row->numel = slot->numel;
        row->first_item = items;
        row->param_dtype = slot->param_dtype;
        row->grad_dtype = slot->grad_dtype;
        row->state_dtype = slot->state_dtype;
        row->head = head_of(row, vector);
        items += items_of(slot->numel, row->head);
        row->end_item = items;
    }
    return items;
}

static bool
same_extra(const tfast_adamw_extra *a, const tfast_adamw_extra *b)
{
    return a->ema == b->ema && a->copy == b->copy && a->tail == b->tail &&
           a->place == b->place && a->row == b->row && a->row_stride == b->row_stride &&
           a->index == b->index && a->rounding == b->rounding &&
           a->ema_dtype == b->ema_dtype && a->copy_dtype == b->copy_dtype;
}

bool
adamw_same_rows(const adamw_table *table, const tfast_adamw_args *args)
{
    for (int64_t i = 0; i < args->n_slots; i++) {
        const tfast_adamw_slot *a = &args->slots[i];
        const tfast_adamw_extra extra = extra_of(args, i);
        const adamw_row *b = &table->rows[i];
        if (a->param != b->param || a->grad != b->grad || a->exp_avg != b->exp_avg ||
            a->exp_avg_sq != b->exp_avg_sq || a->max_exp_avg_sq != b->max_exp_avg_sq ||
            a->step != b->step || a->scales != b->scales || a->numel != b->numel ||
            a->param_dtype != b->param_dtype || a->grad_dtype != b->grad_dtype ||
            a->state_dtype != b->state_dtype || !same_extra(&extra, &b->extra)) {
            return false;
        }
    }
    return true;
}
