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

struct fault {
    char folder[4096]; /* "": off */
    long wanted, seen; /* which call fails, and how many there were */
    int number;        /* errno then */
};
static struct fault changes, reads;

static void arm(struct fault *fault, const char *where, long n, int with)
{
    snprintf(fault->folder, sizeof fault->folder, "%s", where);
    fault->wanted = n, fault->seen = 0, fault->number = with;
}

void fail_arm(const char *where, long n, int with) { arm(&changes, where, n, with); }
void fail_reads(const char *where, long n, int with) { arm(&reads, where, n, with); }
long fail_count(void) { return changes.seen; }

static int happens(struct fault *fault, const char *path)
{
    if (!fault->folder[0] || !path || strncmp(path, fault->folder, strlen(fault->folder)))
        return 0;
    if (++fault->seen != fault->wanted)
        return 0;
    errno = fault->number;
    return 1;
}

static int fails(const char *path) { return happens(&changes, path); }

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

static int fails_fd(int fd) { return changes.folder[0] ? fails(path_of(fd)) : 0; }
static int fails_read(int fd) { return reads.folder[0] ? happens(&reads, path_of(fd)) : 0; }

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
