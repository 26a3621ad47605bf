/* A thread that calls products until its very end: by what C++ runs for a thread_local object, and by keys of pthread's.
 *
 *     take(MM, OUT, A, B)     aoti_torch_cpu_mm_out of the hook's library, and handles of its three tensors
 *     make_key()              a key whose destructor calls; those made earlier come first
 *     run(HOW, COUNT)         so many threads, one after another: 0 a thread_local made before the first call, else a key
 */
#include <pthread.h>
#include <stddef.h>

typedef int (*Product)(void*, void*, void*);
static Product mm;
static void *out, *a, *b;
static pthread_key_t keys[8];
static int made;
extern int __cxa_thread_atexit_impl(void (*)(void*), void*, void*);
extern void* __dso_handle;

static void call(void* unused) {
  (void)unused;
  mm(out, a, b);
}

void take(Product product, void* result, void* left, void* right) { mm = product, out = result, a = left, b = right; }

int make_key(void) { return pthread_key_create(&keys[++made], &call) == 0 ? made : 0; }

static void* body(void* how) {
  if (!how) __cxa_thread_atexit_impl(&call, &made, &__dso_handle);
  else pthread_setspecific(keys[(size_t)how], &made);
  call(NULL);
  return NULL;
}

int run(size_t how, int count) {
  for (int i = 0; i < count; ++i) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, &body, (void*)how)) return 1;
    pthread_join(thread, NULL);
  }
  return 0;
}
