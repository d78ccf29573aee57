/* Tiles: up to TILE elements of any dtype as REAL and back; and single vectors, for
 * loops over dtypes that deserve one. Elements are converted only here, but for pairs
 * of bfloat16 (attention_tile.h); which dtypes get a loop of their own is decided by
 * the kernels. tile_read pads a tile's last vector with zeros. tile_open and tile_close
 * copy nothing where the tile is whole vectors of an array that is REAL already. */

/* Reads elements first .. first + n - 1. */
static inline void
R(tile_read)(REAL *tile, const void *array, tfast_dtype dtype, int64_t first, int n)
{
    const uint16_t *half = (const uint16_t *)array + first;
    int i = 0;

    switch (dtype) {
    case TFAST_F32:
        for (; i < n; i++) {
            tile[i] = (REAL)((const float *)array)[first + i];
        }
        break;
    case TFAST_F64:
        for (; i < n; i++) {
            tile[i] = (REAL)((const double *)array)[first + i];
        }
        break;
    case TFAST_F16:
#if REAL_IS_F32
        for (; i + VF_WIDTH <= n; i += VF_WIDTH) {
            vf_store(tile + i, vf_load_f16(half + i));
        }
#endif
        for (; i < n; i++) {
            tile[i] = tfast_from_f16(half[i]);
        }
        break;
    default:
#if REAL_IS_F32
        for (; i + VF_WIDTH <= n; i += VF_WIDTH) {
            vf_store(tile + i, vf_load_bf16(half + i));
        }
#endif
        for (; i < n; i++) {
            tile[i] = tfast_from_bf16(half[i]);
        }
        break;
    }
    for (; i % VR_WIDTH != 0; i++) {
        tile[i] = 0;
    }
}

/* Writes elements first .. first + n - 1, each rounded once (float64 to a half type by
 * way of float32). */
static inline void
R(tile_write)(void *array, const REAL *tile, tfast_dtype dtype, int64_t first, int n)
{
    uint16_t *half = (uint16_t *)array + first;
    int i = 0;

    switch (dtype) {
    case TFAST_F32:
        for (; i < n; i++) {
            ((float *)array)[first + i] = (float)tile[i];
        }
        break;
    case TFAST_F64:
        for (; i < n; i++) {
            ((double *)array)[first + i] = (double)tile[i];
        }
        break;
    case TFAST_F16:
#if REAL_IS_F32
        for (; i + VF_WIDTH <= n; i += VF_WIDTH) {
            vf_store_f16(half + i, vf_load(tile + i));
        }
#endif
        for (; i < n; i++) {
            half[i] = tfast_to_f16((float)tile[i]);
        }
        break;
    default:
#if REAL_IS_F32
        for (; i + VF_WIDTH <= n; i += VF_WIDTH) {
            vf_store_bf16(half + i, vf_load(tile + i));
        }
#endif
        for (; i < n; i++) {
            half[i] = tfast_to_bf16((float)tile[i]);
        }
        break;
    }
}

/* Elements first .. first + n - 1 to read and write: the array's own where they are
 * whole vectors of REAL, else a copy in `tile`. */
static inline REAL *
R(tile_open)(REAL *tile, void *array, tfast_dtype dtype, int64_t first, int n)
{
    if (dtype == REAL_DTYPE && n % VR_WIDTH == 0) {
        return (REAL *)array + first;
    }
    R(tile_read)(tile, array, dtype, first, n);
    return tile;
}

/* Writes back what tile_open gave, if it was a copy. */
static inline void
R(tile_close)(const REAL *opened, const REAL *tile, void *array, tfast_dtype dtype,
              int64_t first, int n)
{
    if (opened == tile) {
        R(tile_write)(array, tile, dtype, first, n);
    }
}

/* ---- Vectors --------------------------------------------------------------------- */

/* VR_WIDTH elements from i on. `dtype` is REAL_DTYPE, or for float32 also a half type,
 * and a compile-time constant wherever speed matters. */
static inline __attribute__((always_inline)) vr
R(vector_read)(const void *array, tfast_dtype dtype, int64_t i)
{
#if REAL_IS_F32
    if (dtype == TFAST_F16) {
        return vf_load_f16((const uint16_t *)array + i);
    }
    if (dtype == TFAST_BF16) {
        return vf_load_bf16((const uint16_t *)array + i);
    }
#endif
    (void)dtype;
    return vr_load((const REAL *)array + i);
}

static inline __attribute__((always_inline)) void
R(vector_write)(void *array, tfast_dtype dtype, int64_t i, vr value)
{
#if REAL_IS_F32
    if (dtype == TFAST_F16) {
        vf_store_f16((uint16_t *)array + i, value);
        return;
    }
    if (dtype == TFAST_BF16) {
        vf_store_bf16((uint16_t *)array + i, value);
        return;
    }
#endif
    (void)dtype;
    vr_store((REAL *)array + i, value);
}

/* Asks the cache for the element i. */
static inline __attribute__((always_inline)) void
R(prefetch)(const void *array, tfast_dtype dtype, int64_t i)
{
    __builtin_prefetch((const char *)array + i * (int64_t)tfast_dtype_size(dtype));
}
