#ifndef FASTWEIGHTS_POOL_H
#define FASTWEIGHTS_POOL_H

#include <stddef.h>

typedef void Task(const void *problem, long index);

/* Runs task(problem, 0 … tasks-1) on at most `threads` threads, the caller among them. */
void fw_parallel(Task *task, const void *problem, long tasks, long threads);

/* `count` floats of scratch, 64-byte aligned, that stay this thread's until its next call. */
float *fw_scratch(size_t count);

#endif
