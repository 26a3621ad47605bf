/* Preloaded by a test: a thread that C has begun, and that becomes one of Python's, holds Python's list of threads for long.
 *
 *     slow_joins()   how many have, in this process and its children
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <semaphore.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

extern void *__libc_calloc(size_t, size_t);
static int *joins;
static __thread int step; /* 1: its state was made, and the list is locked next */

__attribute__((constructor)) static void begin(void)
{
    joins = mmap(NULL, sizeof *joins, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

int slow_joins(void) { return *joins; }

void *calloc(size_t count, size_t size)
{
    if (count == 1 && size >= 256 && size < 600 && step == 0 && getpid() != syscall(SYS_gettid))
        step = 1; /* a PyThreadState */
    return __libc_calloc(count, size);
}

int sem_post(sem_t *semaphore)
{
    static int (*real)(sem_t *);
    if (!real)
        real = (int (*)(sem_t *))dlsym(RTLD_NEXT, "sem_post");
    if (step == 1) {
        struct timespec rest = {0, 30000000};
        step = 2;
        __atomic_add_fetch(joins, 1, __ATOMIC_RELAXED);
        nanosleep(&rest, NULL);
    }
    return real(semaphore);
}
