/* Preloaded by a test: the Nth write, fsync, rename or open below a folder fails, once.
 *
 *     fail_arm(folder, n, number)   from now on; n = 0 only counts
 *     fail_count()                  how many calls there were since
 *     fail_reads(folder, n, number) as fail_arm, of reads at a place in the file, which are counted apart
 *
 * Python and SQLite call these through the dynamic linker, so both are reached.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[4096];
static long wanted, seen;
static int number;

void fail_arm(const char *where, long n, int with)
{
    snprintf(folder, sizeof folder, "%s", where);
    wanted = n, seen = 0, number = with;
}

long fail_count(void) { return seen; }

static char read_folder[4096];
static long read_wanted, read_seen;
static int read_number;

void fail_reads(const char *where, long n, int with)
{
    snprintf(read_folder, sizeof read_folder, "%s", where);
    read_wanted = n, read_seen = 0, read_number = with;
}

static int fails(const char *path)
{
    if (!folder[0] || !path || strncmp(path, folder, strlen(folder)))
        return 0;
    if (++seen != wanted)
        return 0;
    errno = number;
    return 1;
}

static const char *path_of(int fd)
{
    static char path[4096];
    char link[64];
    ssize_t size;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    return path;
}

static int fails_fd(int fd) { return folder[0] ? fails(path_of(fd)) : 0; }

static int fails_read(int fd)
{
    if (!read_folder[0] || strncmp(path_of(fd), read_folder, strlen(read_folder)) || ++read_seen != read_wanted)
        return 0;
    errno = read_number;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return fails(path) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return fails(path) ? -1 : REAL(open64)(path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t size) { return fails_fd(fd) ? -1 : REAL(write)(fd, data, size); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    return fails_fd(fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    return fails_fd(fd) ? -1 : REAL(pwrite)(fd, data, size, at);
}
int fsync(int fd) { return fails_fd(fd) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return fails_fd(fd) ? -1 : REAL(fdatasync)(fd); }
int rename(const char *from, const char *to) { return fails(from) ? -1 : REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { return fails(from) ? -1 : REAL(renameat)(a, from, b, to); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at)
{
    return fails_read(fd) ? -1 : REAL(pread64)(fd, data, size, at);
}
ssize_t pread(int fd, void *data, size_t size, off_t at) { return fails_read(fd) ? -1 : REAL(pread)(fd, data, size, at); }
