/* The number of CPUs that this process may use: the affinity mask, limited by the CPU
 * quota of its control groups, which containers set. */
#ifndef _GNU_SOURCE
#    define _GNU_SOURCE /* sched_getaffinity */
#endif

#include "parallel.h"

#if defined(__linux__)

#    include <sched.h>
#    include <stdio.h>
#    include <string.h>

enum { MAX_PATH = 4096 };

/* Reads up to two numbers from the start of `directory`/`name` and returns how many it
 * read. */
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

/* The CPU limit of one control group, quota / period rounded up, or 0 if it has none. A
 * group without a limit has the quota "max" in version 2 (`unified`) and -1 in version
 * 1. */
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

/* The smaller of two limits; 0 means no limit. */
static int
tighter(int a, int b)
{
    return !a ? b : !b ? a : a < b ? a : b;
}

/* The smallest limit of the control groups from mount/group up to `mount`. In a
 * container `group` may be a path of the host that does not exist here; `mount` itself
 * is then the container's group. */
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

/* The CPU limit set by control groups of either version, or 0. Each line of the file
 * `list` is "number:controllers:/group"; version 2 leaves the controllers empty
 * (cgroups(7)). */
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
