/* How many processors this process may keep busy: the affinity mask, and the quota of
 * control groups, which containers set and the mask does not show. */
#ifndef _GNU_SOURCE
#    define _GNU_SOURCE /* sched_getaffinity */
#endif

#include "parallel.h"

#if defined(__linux__)

#    include <sched.h>
#    include <stdio.h>
#    include <string.h>

enum { MAX_PATH = 4096 };

/* The numbers at the start of a file of `directory`: how many there were, up to 2. */
static int
read_numbers(const char *directory, const char *name, long long numbers[2])
{
    char path[MAX_PATH + 32];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    int count = fscanf(file, "%lld %lld", &numbers[0], &numbers[1]);
    fclose(file);
    return count < 0 ? 0 : count;
}

/* One group's quota / period rounded up, or 0 where it sets no limit: version 2 then
 * says "max", which is no number, and version 1 says -1. */
static int
quota_cpus(const char *directory, bool unified)
{
    long long numbers[2] = {0, 0}, period[2] = {0, 0};
    bool known;
    if (unified) {
        known = read_numbers(directory, "cpu.max", numbers) == 2;
        period[0] = numbers[1];
    } else {
        known = read_numbers(directory, "cpu.cfs_quota_us", numbers) == 1 &&
                read_numbers(directory, "cpu.cfs_period_us", period) == 1;
    }
    if (!known || numbers[0] <= 0 || period[0] <= 0)
        return 0;
    long long cpus = numbers[0] / period[0] + (numbers[0] % period[0] != 0);
    return cpus < TFAST_MAX_THREADS ? (int)cpus : TFAST_MAX_THREADS;
}

/* The smaller of two limits, 0 being none. */
static int
tighter(int a, int b)
{
    return !a ? b : !b ? a : a < b ? a : b;
}

/* The least limit on the way from mount/group up to `mount`. Inside a container the
 * group's path may be the host's and missing here; the top is then the container's. */
static int
least_quota(const char *mount, const char *group, bool unified)
{
    char path[MAX_PATH];
    size_t top = strlen(mount);
    int least = 0;
    if (snprintf(path, sizeof path, "%s%s", mount, group) >= (int)sizeof path)
        return 0;
    for (;;) {
        least = tighter(least, quota_cpus(path, unified));
        if (strlen(path) <= top)
            return least;
        *strrchr(path, '/') = '\0';
    }
}

static bool
names_cpu(char *controllers)
{
    for (char *rest, *name = strtok_r(controllers, ",", &rest); name;
         name = strtok_r(NULL, ",", &rest))
        if (strcmp(name, "cpu") == 0)
            return true;
    return false;
}

/* The limit set by control groups of either version, or 0. `list` is a file of lines
 * "number:controllers:/group", version 2's without controllers (cgroups(7)). */
static int
cgroup_cpus(const char *list, const char *mount)
{
    char line[MAX_PATH], cpu_mount[MAX_PATH];
    int least = 0;
    FILE *file = fopen(list, "re");
    if (!file)
        return 0;
    snprintf(cpu_mount, sizeof cpu_mount, "%s/cpu", mount);
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group || group[1] != '/')
            continue;
        *controllers++ = *group++ = '\0';
        if (!*controllers)
            least = tighter(least, least_quota(mount, group, true));
        else if (names_cpu(controllers))
            least = tighter(least, least_quota(cpu_mount, group, false));
    }
    fclose(file);
    return least;
}

int
tfast_usable_cpus(void)
{
    cpu_set_t set[8]; /* 8192 processors */
    int cpus = 0;
    if (sched_getaffinity(0, sizeof set, set) == 0)
        cpus = CPU_COUNT_S(sizeof set, set);
    cpus = tighter(cpus, cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup"));
    return cpus ? cpus : 1;
}

#else

#    include <unistd.h>

int
tfast_usable_cpus(void)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    return cpus < 1 ? 1 : cpus < TFAST_MAX_THREADS ? (int)cpus : TFAST_MAX_THREADS;
}

#endif
