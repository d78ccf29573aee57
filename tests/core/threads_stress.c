/* A program for test_threads.py: regions from many threads, nested ones in them, and
 * workers that fall asleep in between. Ends with 0 when every part ran once. */
#include "tfast.h"
#include "threads.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum { PARTS = 5 };

/* Plain, not atomic: the region itself must order these writes and reads. */
static void
add_part(void *cells, int part, int parts)
{
    (void)parts;
    ((long *)cells)[part]++;
}

static void
outer_part(void *cells, int part, int parts)
{
    add_part(cells, part, parts);
    tfast_parallel(2, add_part, (long *)cells + PARTS + 2 * part);
}

static void *
caller(void *pause)
{
    for (int i = 0; i < 300; i++) {
        long cells[3 * PARTS] = {0};
        tfast_parallel(PARTS, outer_part, cells);
        for (int k = 0; k < 3 * PARTS; k++)
            if (cells[k] != 1)
                exit(3);
        if (pause && i % 50 == 0) /* long enough for the workers to fall asleep */
            nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return NULL;
}

int
main(void)
{
    pthread_t threads[3];
    caller("pausing");
    for (int i = 0; i < 3; i++)
        if (pthread_create(&threads[i], NULL, caller, i ? "pausing" : NULL) != 0)
            return 2;
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
