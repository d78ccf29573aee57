/* Helpers for schemas and dtypes inside the core. */
#ifndef GRAPH_CACHE_SCHEMA_H
#define GRAPH_CACHE_SCHEMA_H

#include "graph_cache.h"

/* `at`, or the next multiple of `to`, which is a power of two. */
static inline uint64_t
graph_align(uint64_t at, uint64_t to)
{
    return (at + to - 1) & ~(to - 1);
}

/* Bytes of an element of a dtype stored as GRAPH_AS_...; 0 if that is not allowed. */
extern const uint8_t graph_stored_widths[GRAPH_N_DTYPES][GRAPH_N_STORED];
int graph_dtype_bytes(int dtype); /* 0: unknown dtype */

static inline int
graph_stored_bytes(int dtype, int stored)
{
    return dtype > 0 && dtype < GRAPH_N_DTYPES && stored >= 0 && stored < GRAPH_N_STORED
               ? graph_stored_widths[dtype][stored]
               : 0;
}

const char *graph_dtype_name(int dtype);

bool graph_is_integer(int dtype);
bool graph_all_zero(const void *bytes, int64_t n);
bool graph_is_utf8(const void *text, int64_t bytes);

#endif
