/* Checks a shared library's file before dlopen(), for backend.c and cuda/. */
#ifndef TFAST_LIBRARY_H
#define TFAST_LIBRARY_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#if defined(__linux__)
#    include <link.h>

/* Whether the file holds all bytes of its ELF segments. dlopen() does not check: it
 * maps a truncated file, and the process dies of SIGBUS. */
static inline bool
tfast_is_whole(FILE *file)
{
    ElfW(Ehdr) header;
    ElfW(Phdr) segment;
    long size;

    if (fread(&header, sizeof header, 1, file) != 1 ||
        memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_phentsize != sizeof segment || fseek(file, 0, SEEK_END) != 0) {
        return false;
    }
    size = ftell(file);
    if (size < 0 || fseek(file, (long)header.e_phoff, SEEK_SET) != 0) {
        return false;
    }
    for (int i = 0; i < header.e_phnum; i++) {
        if (fread(&segment, sizeof segment, 1, file) != 1 ||
            segment.p_offset > (size_t)size ||
            segment.p_filesz > (size_t)size - segment.p_offset) {
            return false;
        }
    }
    return true;
}

/* False if the file exists but is truncated or no ELF file. True for a missing file:
 * dlopen() reports it. */
static inline bool
tfast_may_open(const char *path)
{
    FILE *file = fopen(path, "rb");
    const bool whole = file == NULL || tfast_is_whole(file);

    if (file != NULL) {
        fclose(file);
    }
    return whole;
}
#else
static inline bool
tfast_may_open(const char *path)
{
    (void)path;
    return true;
}
#endif

#endif
