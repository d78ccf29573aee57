/* Makes `REAL` double for the kernels included next: R(name) is this variant's name, vr
 * its vector. No include guard: real_f32.h and real_f64.h replace each other. */
#undef REAL
#undef REAL_DTYPE
#undef REAL_IS_F32
#undef R
#undef VR_WIDTH
#undef vr
#undef vr_set1
#undef vr_load
#undef vr_store
#undef vr_add
#undef vr_sub
#undef vr_mul
#undef vr_div
#undef vr_fma
#undef vr_sqrt
#undef vr_max
#undef vr_min
#undef vr_madd
#undef vr_if_less
#undef vr_pow2
#undef vr_transpose
#undef vr_sum
#undef REAL_MAX
#undef REAL_MIN

#define REAL double
#define REAL_MAX DBL_MAX
#define REAL_MIN DBL_MIN
#define REAL_DTYPE TFAST_F64
#define REAL_IS_F32 0
#define R(name) name##_f64
#define VR_WIDTH VD_WIDTH
#define vr vd
#define vr_set1 vd_set1
#define vr_load vd_load
#define vr_store vd_store
#define vr_add vd_add
#define vr_sub vd_sub
#define vr_mul vd_mul
#define vr_div vd_div
#define vr_fma vd_fma
#define vr_sqrt vd_sqrt
#define vr_max vd_max
#define vr_min vd_min
#define vr_madd vd_madd
#define vr_if_less vd_if_less
#define vr_pow2 vd_pow2
#define vr_transpose vd_transpose
#define vr_sum vd_sum
