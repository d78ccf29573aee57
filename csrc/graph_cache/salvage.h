/* Every committed record of one file that can still be read, whatever its state. */
#ifndef GRAPH_CACHE_SALVAGE_H
#define GRAPH_CACHE_SALVAGE_H

#include "scan.h"

enum { GRAPH_UNKNOWN = -1 }; /* the number of a record */

/* What is done with a record that is whole; the frame is the callee's only during the
 * call. `number`: which one of its segment it was. */
typedef tfast_status graph_salvage_record(void *context, int64_t number,
                                          const void *frame, int64_t bytes);

typedef struct {
    /* In. */
    const char *path;
    uint8_t uuid[16]; /* by the file's name */
    bool closed;      /* by its name: all of its records were committed */
    const tfast_graph_schema *schema;
    graph_salvage_record *record;
    void *context;
    /* Out. */
    int64_t whole, damaged, uncommitted;
    int64_t bytes_skipped;
} graph_salvage;

tfast_status graph_salvage_file(graph_salvage *salvage);

/* Whether the file has a record of this schema, for one whose header is lost. */
tfast_status graph_salvage_matches(const char *path, const uint8_t uuid[16],
                                   const tfast_graph_schema *schema, bool *matches);

#endif
