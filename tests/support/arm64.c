/* What the kernels ask of a system, for arm64.py's emulated processor: one thread, and memory that is never freed. */
#include <stddef.h>

static char heap[1 << 28] __attribute__((aligned(4096)));
static size_t used;

void *aligned_alloc(size_t alignment, size_t size)
{
    char *found = heap + (used + alignment - 1) / alignment * alignment;
    used = found - heap + size;
    return used <= sizeof heap ? found : NULL;
}
void free(void *p) { (void)p; }
void abort(void) { __builtin_trap(); }

void *stderr;
int fputs(const char *text, void *file) { return text && file; }

int pthread_once(int *done, void (*run)(void))
{
    if (!*done)
        *done = 1, run();
    return 0;
}
int pthread_create(void *thread, void *attributes, void *run, void *argument) { return 11; /* EAGAIN */ }
int pthread_atfork(void *before, void *parent, void *child) { return 0; }
int pthread_detach(unsigned long thread) { return 0; }
int pthread_key_create(unsigned *key, void *destroy) { return 0; }
int pthread_setspecific(unsigned key, const void *value) { return 0; }
int pthread_mutex_init(void *mutex, void *attributes) { return 0; }
int pthread_mutex_lock(void *mutex) { return 0; }
int pthread_mutex_trylock(void *mutex) { return 0; }
int pthread_mutex_unlock(void *mutex) { return 0; }
int pthread_cond_init(void *condition, void *attributes) { return 0; }
int pthread_cond_signal(void *condition) { return 0; }
int pthread_cond_broadcast(void *condition) { return 0; }
int pthread_cond_wait(void *condition, void *mutex) { return 0; }

int main(void) { return 0; }
