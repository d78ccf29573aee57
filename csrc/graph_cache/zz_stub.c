/* Stands in until verify.c and repair.c are there; to be deleted then. */
#include "graph_cache.h"

__attribute__((weak)) tfast_status
tfast_graph_cache_verify(tfast_graph_cache *cache, int64_t first, int64_t end,
                         bool values,
                         void (*damaged)(void *context, int64_t i, const char *message),
                         void *context)
{
    (void)cache, (void)first, (void)end, (void)values, (void)damaged, (void)context;
    return tfast_fail(TFAST_EUNSUPPORTED, "verify is not there yet");
}

__attribute__((weak)) tfast_status
tfast_graph_repair(const char *from, const char *to, tfast_graph_repair_report *report,
                   void (*line)(void *context, const char *text), void *context)
{
    (void)from, (void)to, (void)report, (void)line, (void)context;
    return tfast_fail(TFAST_EUNSUPPORTED, "repair is not there yet");
}
