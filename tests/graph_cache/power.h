/* What is left on disk.h's disk when it loses power. */
/* ---- Losing power ---------------------------------------------------------------- */

enum { ALL, NONE, SOME, BEGINNING, SECTORS, BLOCKS, STALE, ONE, N_MODES };

static void
fill_randomly(uint8_t *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (uint8_t)disk_random();
    }
}

/* One write, sector by sector: there, not there, or the whole sector is garbage. */
static void
apply_by_sector(uint8_t **data, size_t *bytes, const disk_write *w, size_t sector)
{
    size_t end = (size_t)w->at + w->bytes, next;

    for (size_t at = (size_t)w->at; at < end; at = next) {
        size_t first = at / sector * sector;
        uint64_t fate = disk_random() % 3;

        next = first + sector < end ? first + sector : end;
        if (fate != 0 && next > *bytes) {
            resize(data, bytes, next);
        }
        if (fate == 1) {
            memcpy(*data + at, w->data + (at - (size_t)w->at), next - at);
        } else if (fate == 2) {
            size_t last = first + sector < *bytes ? first + sector : *bytes;

            fill_randomly(*data + first, last - first);
        }
    }
}

/* All but one sector, which is as it was, or garbage. */
static void
apply_but_one(uint8_t **data, size_t *bytes, const disk_write *w)
{
    size_t at = (size_t)w->at + disk_random() % w->bytes, first = at / 512 * 512;
    size_t from = first < (size_t)w->at ? (size_t)w->at : first, last;
    uint8_t before[512] = {0};

    if (first < *bytes) {
        memcpy(before, *data + first, *bytes - first < 512 ? *bytes - first : 512);
    }
    apply_write(data, bytes, w);
    last = first + 512 < *bytes ? first + 512 : *bytes;
    if (one_in(2)) {
        memcpy(*data + from, before + (from - first), last - from);
    } else {
        fill_randomly(*data + first, last - first);
    }
}

/* What an older file has left on the disk shows through where nothing was written. */
static void
show_stale(uint8_t *data, size_t from, size_t bytes)
{
    const disk_file *old = &disk.files[disk_random() % (uint64_t)disk.n_files];

    for (size_t i = from; i < bytes && i < old->now_bytes; i++) {
        data[i] = old->now[i];
    }
}

static void
lose_file(disk_file *f, int mode)
{
    size_t sector = mode == BLOCKS ? 4096 : 512, safe_bytes = f->safe_bytes;
    int first = (int)(disk_random() % (uint64_t)(f->n_writes + 1));
    bool torn = mode == SECTORS || mode == BLOCKS;

    if (mode == STALE && f->now_bytes > f->safe_bytes) {
        resize(&f->safe, &f->safe_bytes, f->now_bytes);
        show_stale(f->safe, safe_bytes, f->now_bytes);
    }
    for (int i = 0; i < f->n_writes; i++) {
        disk_write *w = &f->writes[i];

        if (mode == ONE && w->data != NULL && w->bytes > 0 && i == first) {
            apply_but_one(&f->safe, &f->safe_bytes, w);
        } else if (torn && w->data != NULL) {
            apply_by_sector(&f->safe, &f->safe_bytes, w, sector);
        } else if (mode == ALL || mode == ONE || (mode == BEGINNING && i < first) ||
                   ((mode == SOME || mode == STALE || torn) && one_in(2))) {
            apply_write(&f->safe, &f->safe_bytes, w);
        }
    }
    if (torn && f->safe_bytes > safe_bytes && one_in(3)) { /* the size came late */
        resize(&f->safe, &f->safe_bytes,
               safe_bytes + disk_random() % (f->safe_bytes - safe_bytes));
    }
    resize(&f->now, &f->now_bytes, f->safe_bytes);
    copy_bytes(f->now, f->safe, f->safe_bytes);
    forget_writes(f);
    f->exclusive = f->shared = 0;
}

static void
lose_names(disk_directory *d, int mode)
{
    int first = (int)(disk_random() % (uint64_t)(d->n_renames + 1));

    d->safe = d->safe ||
              (d->now && (mode == ALL || mode == ONE || (mode != NONE && one_in(2))));
    d->now = d->safe;
    for (int i = 0; i < d->n_renames; i++) {
        if (mode == ALL || mode == ONE || (mode == BEGINNING && i < first) ||
            (mode >= SOME && mode != BEGINNING && one_in(2))) {
            apply_rename(d->safe_names, &d->n_safe, &d->renames[i]);
        }
    }
    d->n_safe = d->safe ? d->n_safe : 0;
    memcpy(d->names, d->safe_names, sizeof d->names);
    d->n_names = d->n_safe;
    d->n_renames = 0;
}

static void
lose_power(int mode)
{
    for (int i = 0; i < disk.n_files; i++) {
        lose_file(&disk.files[i], mode);
    }
    for (int i = 0; i < N_DIRS; i++) {
        lose_names(&disk.directories[i], mode);
    }
    memset(disk.handles, 0, sizeof disk.handles);
    disk.dies_at = disk.full_at = disk.sync_fails_at = 0;
    disk.ragged = disk.dead = false;
}
