/* Memory whose first reader waits in the middle of reading it, for as long as another thread likes.
 *
 *     copied(FROM, BYTES)   a copy of it in such memory, or null
 *     wait_for_reader()     until somebody reads it
 *     let_go()              and the reader goes on
 */
#define _GNU_SOURCE
#include <semaphore.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char* page;
static size_t size;
static sem_t reached, gone_on;

static void on_fault(int number, siginfo_t* facts, void* context) {
  (void)context;
  const char* const at = facts->si_addr;
  if (at < page || at >= page + size) {
    signal(number, SIG_DFL); /* somebody else's fault: the same access ends the program */
    return;
  }
  sem_post(&reached);
  while (sem_wait(&gone_on)) {}
  mprotect(page, size, PROT_READ);
}

void* copied(const void* from, size_t bytes) {
  size = (size_t)sysconf(_SC_PAGESIZE);
  page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED || bytes > size || sem_init(&reached, 0, 0) || sem_init(&gone_on, 0, 0)) return NULL;
  memcpy(page, from, bytes);
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
  return mprotect(page, size, PROT_NONE) || sigaction(SIGSEGV, &action, NULL) ? NULL : page;
}

void wait_for_reader(void) {
  while (sem_wait(&reached)) {}
}

void let_go(void) { sem_post(&gone_on); }
