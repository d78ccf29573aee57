/* The kernel table of one instruction set and arithmetic type. Include it after a
 * vector vocabulary, vec_SET_f32.h or vec_SET_f64.h, which the kernels use. */
#ifndef TYPE_UNIT_H
#define TYPE_UNIT_H

#include "../kernels/adamw.h"
#include "../kernels/amp.h"
#include "../kernels/attention_backward.h"
#include "../kernels/attention_forward.h"
#include "../kernels/trajectory.h"
#include "../kernels/type_kernels.h"

#define TYPE_KERNELS                                                                   \
    {                                                                                  \
        .adamw_span = adamw_span, .amp_span = amp_span,                                \
        .attention = attention_forward, .attention_backward = attention_backward,      \
        .attention_scratch = attention_scratch,                                        \
        .trajectory_agents = trajectory_agents,                                        \
    }

#endif
