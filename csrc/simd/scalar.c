#include "vec_scalar.h"
#define NAME scalar
#define UNUSABLE NULL
#include "cpu_backend.h"
