/* The structs of the graph cache's files, version 1.0. docs/graph_cache_format.md is
 * the specification. All numbers are little-endian; a crc is CRC-32C; reserved bytes
 * are zeros, and a reader refuses anything else. */
#ifndef GRAPH_CACHE_FORMAT_H
#define GRAPH_CACHE_FORMAT_H

#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#    error "a graph cache is read as it lies: the machine must be little-endian"
#endif

enum {
    GRAPH_MAJOR = 1,    /* a reader refuses any other */
    GRAPH_MINOR = 0,    /* a reader of 1.0 can read every 1.x */
    GRAPH_UNIT = 16,    /* alignment of frames, and unit of their lengths, in bytes */
    GRAPH_BLOCK = 4096, /* bytes; a torn write may destroy the whole block it is in */
    GRAPH_MAX_RANK = 8,
    GRAPH_MAX_FIELDS = 4096,
    GRAPH_MAX_COUNTS = 4096,
    GRAPH_MAX_NAME = 255,
    GRAPH_NONE = 0xffff, /* instead of a count's number: none */
};

#define GRAPH_HEADER_MAGIC "\x89TFG\r\n\x1a\n" /* detects transfer in text mode */
#define GRAPH_MANIFEST_MAGIC "\x89TFM\r\n\x1a\n"
#define GRAPH_TRAILER_MAGIC "\n\x1a\n\rGFT\x89"
#define GRAPH_RECORD_MAGIC 0x52474654u /* "TFGR" */
#define GRAPH_COMMIT_MAGIC 0x43474654u /* "TFGC" */
#define GRAPH_ENDIAN_PROBE 0x0102030405060708u

/* dtypes. The numbers are on disk and never change their meaning. */
enum {
    GRAPH_BOOL = 1,
    GRAPH_U8,
    GRAPH_U16,
    GRAPH_U32,
    GRAPH_U64,
    GRAPH_I8,
    GRAPH_I16,
    GRAPH_I32,
    GRAPH_I64,
    GRAPH_F16,
    GRAPH_BF16,
    GRAPH_F32,
    GRAPH_F64,
    GRAPH_C64,
    GRAPH_C128,
    GRAPH_F8_E4M3FN,
    GRAPH_F8_E5M2,
    GRAPH_STRING, /* UTF-8; rank 1, dims[0] is the number of bytes */
    GRAPH_BYTES,  /* rank 1, as GRAPH_STRING */
    GRAPH_N_DTYPES
};

/* How a field of a record is stored: absent, in its dtype, or as narrower integers. */
enum {
    GRAPH_ABSENT = 0,
    GRAPH_AS_IS,
    GRAPH_AS_U8,
    GRAPH_AS_U16,
    GRAPH_AS_U32,
    GRAPH_AS_I8,
    GRAPH_AS_I16,
    GRAPH_AS_I32,
    GRAPH_N_STORED
};

/* Roles: what a count counts. */
enum {
    GRAPH_NODES = 0, /* of one type; its name is the type's, "" in homogeneous graphs */
    GRAPH_EDGES,     /* of one type; source and target are its counts of nodes */
    GRAPH_SIZE,      /* of a ragged dimension; no name */
    GRAPH_INCREMENT, /* number that a graph adds to values of later graphs in a batch,
                        if it is none of the counts above; no name */
    GRAPH_N_ROLES
};

/* What collation adds to a field's values. If it is a count other than an increment,
 * the values are indices: 0 <= value < count. */
enum {
    GRAPH_ADD_NOTHING = 0,
    GRAPH_ADD_COUNT, /* the sum of the field's count, counts[add[0]], over the graphs
                        that come before this one in the batch */
    GRAPH_ADD_ROWS,  /* the same, with add[0] for row 0 and add[1] for row 1 (dims[0]
                        is 2) */
    GRAPH_N_ADDS
};

/* Flags of a field. */
enum {
    GRAPH_OPTIONAL = 1, /* a graph may lack it */
    GRAPH_SCALAR = 2,   /* rank 0, and a Python bool, int or float when read alone */
};

typedef struct {
    uint8_t magic[8];
    uint16_t major, minor;
    uint32_t schema_bytes; /* which follow the header; a multiple of 16 */
    uint64_t endian;
    uint8_t uuid[16];
    uint32_t incompatible; /* features that a reader must know; none so far */
    uint32_t reserved[4];
    uint32_t crc; /* of this header with crc = 0, then the schema's bytes */
} graph_header;

/* A schema is this, its counts, its fields, the names of both, zeros to GRAPH_UNIT. */
typedef struct {
    uint16_t n_counts, n_fields;
    uint32_t names_bytes; /* of all names together */
    uint32_t reserved[2];
} graph_schema_header;

typedef struct {
    uint8_t role;
    uint8_t reserved[3];
    uint16_t source, target; /* of edges: counts of their nodes; else GRAPH_NONE */
    uint16_t name_bytes;
    uint16_t reserved_too[3];
} graph_schema_count;

typedef struct {
    uint16_t name_bytes;
    uint16_t type; /* count of the nodes or edges that the field belongs to; GRAPH_NONE:
                      it belongs to the whole graph */
    uint8_t dtype;
    uint8_t rank;
    int8_t cat_dim; /* collation concatenates along it; -1: stacks in a new first one */
    uint8_t add_mode; /* GRAPH_ADD_... */
    uint16_t add[2];  /* counts to add; GRAPH_NONE where add_mode uses none */
    uint8_t flags;
    uint8_t reserved[3];
    int32_t dims[GRAPH_MAX_RANK]; /* >= 0: fixed; < 0: counts[-1 - dim]; 0 past rank */
    uint8_t reserved_too[16];
} graph_schema_field;

/* A record: this, its counts (u32), one `stored` byte a field, zeros, the payload. */
typedef struct {
    uint32_t magic;
    uint32_t header_crc;  /* of the segment's uuid, then from payload_crc up to the
                             payload */
    uint32_t payload_crc; /* of the payload and the zeros at its end */
    uint32_t units;       /* length of the frame in units of GRAPH_UNIT */
    uint8_t key[16];      /* identifies what the graph was made from; 0: unknown */
} graph_record;

typedef struct {
    uint32_t magic;
    uint32_t crc;       /* of the segment's uuid, then all after this field */
    uint64_t records;   /* in the segment so far */
    uint64_t previous;  /* offset of the commit frame before this one, 0: none */
    uint32_t group_crc; /* of the header_crc (u32) of each record since `previous` */
    uint32_t reserved;
} graph_commit;

typedef struct {
    uint32_t crc; /* of all after this field */
    uint32_t index_crc;
    uint64_t index_offset;
    uint64_t index_bytes; /* from index_offset to the trailer */
    uint64_t records;
    uint64_t last_commit; /* offset of the last commit frame, 0: none */
    uint32_t n_counts;
    uint32_t reserved[3];
    uint8_t magic[8];
} graph_trailer;

typedef struct {
    uint8_t magic[8];
    uint16_t major, minor;
    uint32_t crc;        /* of all after this field, to the file's end */
    uint64_t generation; /* increases by 1 with every replacement */
    uint64_t n_segments;
    uint64_t n_graphs; /* in the cache */
    uint8_t uuid[16];  /* of the cache */
    uint32_t building; /* 1: a build has begun and not ended */
    uint32_t ordered;  /* 1: an order, one u64 a graph, follows the segments */
} graph_manifest;

typedef struct {
    uint8_t uuid[16];
    uint64_t records;
    uint64_t bytes;       /* of the file */
    uint32_t trailer_crc; /* the trailer's `crc` */
    uint32_t reserved[3];
} graph_manifest_segment;

_Static_assert(sizeof(graph_header) == 64, "");
_Static_assert(sizeof(graph_schema_header) == 16, "");
_Static_assert(sizeof(graph_schema_count) == 16, "");
_Static_assert(sizeof(graph_schema_field) == 64, "");
_Static_assert(sizeof(graph_record) == 32, "");
_Static_assert(sizeof(graph_commit) == 32, "");
_Static_assert(sizeof(graph_trailer) == 64, "");
_Static_assert(sizeof(graph_manifest) == 64, "");
_Static_assert(sizeof(graph_manifest_segment) == 48, "");

#endif
