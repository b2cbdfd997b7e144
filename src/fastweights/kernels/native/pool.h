#ifndef FASTWEIGHTS_POOL_H
#define FASTWEIGHTS_POOL_H

#include <stddef.h>

enum { DONE, OUT_OF_MEMORY };

/* Returns DONE, or why it is not done. */
typedef int Task(const void *problem, long index);

/* Runs task(problem, 0 … tasks-1) on at most `threads` threads, the caller among them; returns
 * DONE, or what one of the tasks returned instead. */
int fw_parallel(Task *task, const void *problem, long tasks, long threads);

/* `count` floats of working space, 64-byte aligned, that stay this thread's until its next call;
 * NULL where memory is out. */
float *fw_scratch(size_t count);

#endif
