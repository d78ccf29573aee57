/* The code of AdamW's 8-bit state, for the binding, the CPU kernels and cuda/device/.
 *
 * exp_avg, exp_avg_sq and max_exp_avg_sq are one uint8_t an element. A block is
 * TFAST_CODE_BLOCK elements in the order of memory; the last one of a tensor may be
 * shorter. The scales s of a block are 3 floats, with amsgrad 5:
 *
 *   root2(|exp_avg|)       |code - 128| * s[0], and exp_avg < 0 for code < 128
 *   root4(exp_avg_sq)      s[1] + code * s[2]
 *   root4(max_exp_avg_sq)  s[3] + code * s[4]
 *
 * s puts the block's largest root2 at 127 steps, and its smallest and its largest root4
 * at 0 and 255. Only the smallest root4 has code 0, so that no other exp_avg_sq is
 * rounded to 0. docs/design/adamw.md says why.
 *
 * The roots are shifts of a float's bits by 1 or 2, which divides the exponent: about
 * the 2nd and 4th root times a power of two, for two operations in place of one or two
 * sqrt(). A root increases, is piecewise linear, and the shift back inverts it:
 *
 *   root(x) = float((bits(x) >> n) + BIAS) - LEAST      root(0) = 0
 *   x       = float((bits(root + LEAST) - BIAS) << n)
 *
 * BIAS is added to the exponent so that no root is subnormal; LEAST = float(BIAS). */
#ifndef TFAST_ADAMW_CODES_H
#define TFAST_ADAMW_CODES_H

#include "tfast.h"

enum { TFAST_CODE_BLOCK = 128 };

/* Scales of a block. */
enum { TFAST_CODE_SCALES = 3, TFAST_CODE_SCALES_AMSGRAD = 5 };

#define CODE_BIAS_2 (32u << 23) /* roots of exp_avg are below 2^33 */
#define CODE_LEAST_2 0x1p-95f
#define CODE_BIAS_4 (64u << 23) /* roots of exp_avg_sq are below 2 */
#define CODE_LEAST_4 0x1p-63f

/* The roots of infinity. */
#define CODE_INFINITE_2 (0x1.8p32f - CODE_LEAST_2)
#define CODE_INFINITE_4 (0x1.cp0f - CODE_LEAST_4)

#endif
