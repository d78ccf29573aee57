/* The list of slots as AdamW's kernel reads it: see adamw_row in arguments.h. */
#ifndef TFAST_ADAMW_ROWS_H
#define TFAST_ADAMW_ROWS_H

#include "arguments.h"

adamw_mix adamw_mix_of(const tfast_adamw_args *args);

/* Bytes of a table of n slots. */
static inline size_t
adamw_table_bytes(int64_t n)
{
    return offsetof(adamw_table, rows) + sizeof(adamw_row) * (size_t)n;
}

/* Fills a table, every byte of it, and returns how many work items it has. */
int adamw_fill_table(adamw_table *table, const tfast_adamw_args *args, adamw_mix mix);

/* Whether the table's rows, as many as there are slots, are those of the arguments. */
bool adamw_same_rows(const adamw_table *table, const tfast_adamw_args *args);

#endif
