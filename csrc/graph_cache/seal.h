/* The end of a segment, as a writer or a recovery makes it. */
#ifndef GRAPH_CACHE_SEAL_H
#define GRAPH_CACHE_SEAL_H

#include "manifest.h"
#include "scan.h"

/* Writes index and trailer at `end`, where the last commit frame and the file end,
 * and flushes. Fills *entry but for the uuid. */
tfast_status graph_seal(int file, const char *path, const graph_index *index,
                        int64_t end, int64_t last_commit, bool durable,
                        graph_manifest_segment *entry);

/* Gives a sealed segment its final name. */
tfast_status graph_seal_name(const char *directory, const uint8_t uuid[16],
                             bool durable);

#endif
