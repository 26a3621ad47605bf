/* Preloaded by a test: each fsync takes as many milliseconds longer as the file says that SLOW_SYNC names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void wait_as_told(void)
{
    long ms = 0;
    const char *named = getenv("SLOW_SYNC");
    FILE *file = named ? fopen(named, "re") : NULL;
    if (!file)
        return;
    if (fscanf(file, "%ld", &ms) != 1)
        ms = 0;
    fclose(file);
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left))
        ;
}

int fsync(int fd)
{
    wait_as_told();
    return REAL(fsync)(fd);
}

int fdatasync(int fd)
{
    wait_as_told();
    return REAL(fdatasync)(fd);
}
