/* Attention: the sizes of a register tile. */

/* Calls f(rows, vectors, ...) with its two sizes constant. */
#if V_ROWS == 12
#    define ATTENTION_ROWS(f, rows, vectors, ...)                                      \
        switch (rows) {                                                                \
        case 12:                                                                       \
            f(12, vectors, __VA_ARGS__);                                               \
            break;                                                                     \
        case 8:                                                                        \
            f(8, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        case 4:                                                                        \
            f(4, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        case 2:                                                                        \
            f(2, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        default:                                                                       \
            f(1, vectors, __VA_ARGS__);                                                \
        }
#else
#    define ATTENTION_ROWS(f, rows, vectors, ...)                                      \
        switch (rows) {                                                                \
        case 6:                                                                        \
            f(6, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        case 4:                                                                        \
            f(4, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        case 2:                                                                        \
            f(2, vectors, __VA_ARGS__);                                                \
            break;                                                                     \
        default:                                                                       \
            f(1, vectors, __VA_ARGS__);                                                \
        }
#endif
#define ATTENTION_STRIP(f, rows, vectors, ...)                                         \
    if ((vectors) == 2) {                                                              \
        ATTENTION_ROWS(f, rows, 2, __VA_ARGS__)                                        \
    } else {                                                                           \
        ATTENTION_ROWS(f, rows, 1, __VA_ARGS__)                                        \
    }
/* The same with `pairs` constant, too, and left out where there are none. */
#define ATTENTION_PAIRED(f, rows, vectors, pairs, ...)                                 \
    if (REAL_IS_F32 && V_PAIRS && (pairs)) {                                           \
        ATTENTION_STRIP(f, rows, vectors, true, __VA_ARGS__)                           \
    } else {                                                                           \
        ATTENTION_STRIP(f, rows, vectors, false, __VA_ARGS__)                          \
    }
