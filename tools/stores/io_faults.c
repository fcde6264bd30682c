/* Makes the N-th call of a kind on a file fail: to be preloaded (LD_PRELOAD) and armed through ctypes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { WRITES = 1, SYNCS = 2, TRUNCATES = 4, READS = 8 };

static char part[256];
static int kinds, code, for_good, failed;
static long calls_before = -1;

/* From now on: after so many calls of these kinds on files whose path has `name` in it, one fails, or all do. */
void io_faults_arm(const char *name, int mask, long before, int error, int every) {
    snprintf(part, sizeof part, "%s", name);
    kinds = mask, code = error, for_good = every, failed = 0, calls_before = before;
}

/* How many calls have failed so far. */
int io_faults_count(void) { return failed; }

static int fails(int kind, int fd) {
    char link[64], path[4096];
    if (calls_before < 0 || !(kinds & kind)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (!strstr(path, part)) return 0;
    if (calls_before > 0) {
        calls_before--;
        return 0;
    }
    if (!for_good) calls_before = -1;
    failed++;
    errno = code;
    return 1;
}

#define INTERPOSE(kind, type, name, parameters, arguments)                              \
    type name parameters {                                                              \
        static type(*next) parameters;                                                  \
        if (!next) next = dlsym(RTLD_NEXT, #name);                                      \
        return fails(kind, fd) ? (type)-1 : next arguments;                             \
    }

INTERPOSE(WRITES, ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
INTERPOSE(WRITES, ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
INTERPOSE(WRITES, ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
INTERPOSE(SYNCS, int, fsync, (int fd), (fd))
INTERPOSE(SYNCS, int, fdatasync, (int fd), (fd))
INTERPOSE(TRUNCATES, int, ftruncate, (int fd, off_t size), (fd, size))
INTERPOSE(TRUNCATES, int, ftruncate64, (int fd, off64_t size), (fd, size))
INTERPOSE(READS, ssize_t, read, (int fd, void *data, size_t size), (fd, data, size))
INTERPOSE(READS, ssize_t, pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
INTERPOSE(READS, ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
