#include "attention_plain_far.cuh"

TFAST_EXPORT(attention_plain)
