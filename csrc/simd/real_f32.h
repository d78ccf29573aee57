/* Makes `REAL` float for the kernels included next: R(name) is this variant's name, vr
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

#define REAL float
#define REAL_MAX FLT_MAX
#define REAL_MIN FLT_MIN
#define REAL_DTYPE TFAST_F32
#define REAL_IS_F32 1
#define R(name) name##_f32
#define VR_WIDTH VF_WIDTH
#define vr vf
#define vr_set1 vf_set1
#define vr_load vf_load
#define vr_store vf_store
#define vr_add vf_add
#define vr_sub vf_sub
#define vr_mul vf_mul
#define vr_div vf_div
#define vr_fma vf_fma
#define vr_sqrt vf_sqrt
#define vr_max vf_max
#define vr_min vf_min
#define vr_madd vf_madd
#define vr_if_less vf_if_less
#define vr_pow2 vf_pow2
#define vr_transpose vf_transpose
#define vr_sum vf_sum
