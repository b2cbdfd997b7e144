/* The threads that share a kernel's tasks: those of torch's OpenMP runtime where that is GNU's, else
 * a small pool of our own.
 *
 * torch's threads spin for milliseconds after each of its operations. Workers of our own would share
 * the cores with them, and have to be woken up besides: a product of a megabyte is read sooner.
 *
 * Workers of our own sleep between calls. One call shares its tasks at a time; a call that finds the
 * threads busy runs alone. OpenMP does not survive a fork: a forked child starts without threads and
 * makes workers of its own when it needs them.
 */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define MOST_THREADS 256

typedef void Member(void *team);

#if defined(__linux__)
/* Where torch has loaded GNU's OpenMP: `member(team)` on so many of its threads, the caller among
 * them. */
extern void GOMP_parallel(Member *member, void *team, unsigned threads, unsigned flags)
    __attribute__((weak));
#define OPENMP GOMP_parallel
#else
#define OPENMP ((void (*)(Member *, void *, unsigned, unsigned))NULL)
#endif

static struct {
    pthread_mutex_t owner, lock;
    pthread_cond_t work, done;
    long workers, wanted, busy, round;
    int started, forked;
    Task *task;
    const void *problem;
    long tasks;
    atomic_long next;
    atomic_int status;
} pool = {PTHREAD_MUTEX_INITIALIZER,
          PTHREAD_MUTEX_INITIALIZER,
          PTHREAD_COND_INITIALIZER,
          PTHREAD_COND_INITIALIZER,
          0,
          0,
          0,
          0,
          0,
          0,
          NULL,
          NULL,
          0,
          0,
          DONE};

/* Subnormal numbers cost a hundred cycles each on x86, and a state that fades away is full of them:
 * round them to 0. */
static unsigned flush_subnormals(void)
{
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040u);
    return before;
#else
    return 0;
#endif
}

static void restore_subnormals(unsigned before)
{
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

static void run_tasks(Task *task, const void *problem, long tasks)
{
    unsigned before = flush_subnormals();
    for (long index; (index = atomic_fetch_add(&pool.next, 1)) < tasks;) {
        int status = task(problem, index);
        if (status != DONE)
            atomic_store(&pool.status, status);
    }
    restore_subnormals(before);
}

static int run_alone(Task *task, const void *problem, long tasks)
{
    int status = DONE;
    unsigned before = flush_subnormals();
    for (long index = 0; index < tasks && status == DONE; index++)
        status = task(problem, index);
    restore_subnormals(before);
    return status;
}

static void *worker(void *unused)
{
    (void)unused;
    long seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.round == seen || pool.wanted == 0) {
            seen = pool.round;
            pthread_cond_wait(&pool.work, &pool.lock);
        }
        seen = pool.round;
        pool.wanted--;
        pthread_mutex_unlock(&pool.lock);
        run_tasks(pool.task, pool.problem, pool.tasks);
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0)
            pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static void reset_after_fork(void)
{
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.workers = pool.wanted = pool.busy = 0;
    pool.forked = 1;
}

static void start_workers(long workers)
{
    for (pthread_t thread; pool.workers < workers; pool.workers++) {
        if (pthread_create(&thread, NULL, worker, NULL) != 0)
            return;
        pthread_detach(thread);
    }
}

static void run_member(void *unused)
{
    (void)unused;
    run_tasks(pool.task, pool.problem, pool.tasks);
}

static void run_on_workers(long threads)
{
    pthread_mutex_lock(&pool.lock);
    start_workers(threads - 1);
    pool.wanted = pool.busy = threads - 1 < pool.workers ? threads - 1 : pool.workers;
    pool.round++;
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);

    run_member(NULL);

    pthread_mutex_lock(&pool.lock);
    pool.busy -= pool.wanted; /* those who have not woken up yet are not waited for */
    pool.wanted = 0;
    while (pool.busy > 0)
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

int fw_parallel(Task *task, const void *problem, long tasks, long threads)
{
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    if (threads <= 1 || tasks <= 1 || pthread_mutex_trylock(&pool.owner) != 0)
        return run_alone(task, problem, tasks);
    if (!pool.started)
        pthread_atfork(NULL, NULL, reset_after_fork);
    pool.started = 1;
    pool.task = task;
    pool.problem = problem;
    pool.tasks = tasks;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.status, DONE);
    if (OPENMP && !pool.forked)
        OPENMP(run_member, NULL, threads, 0); /* all of them: fewer would end the others */
    else
        run_on_workers(threads < tasks ? threads : tasks);
    int status = atomic_load(&pool.status);
    pthread_mutex_unlock(&pool.owner);
    return status;
}

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static _Thread_local float *scratch;
static _Thread_local size_t scratch_size;

static void make_key(void)
{
    pthread_key_create(&scratch_key, free);
}

float *fw_scratch(size_t count)
{
    if (scratch && count <= scratch_size)
        return scratch;
    pthread_once(&scratch_once, make_key);
    free(scratch);
    count = (count + 16) & ~(size_t)15;
    scratch = aligned_alloc(64, count * sizeof(float));
    scratch_size = scratch ? count : 0;
    pthread_setspecific(scratch_key, scratch);
    return scratch;
}
