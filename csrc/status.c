/* The error message of each thread, and names of dtypes. */
#include "tfast.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char message[TFAST_MESSAGE_BYTES];

tfast_status
tfast_fail(tfast_status status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

const char *
tfast_message(void)
{
    return message;
}

const char *
tfast_dtype_name(tfast_dtype dtype)
{
    static const char *const names[] = {"float32", "float64", "float16", "bfloat16"};

    return names[dtype];
}
