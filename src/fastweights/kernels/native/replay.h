/* What Python hands over for calls that are made one after the other, and for what they count. */
#ifndef FASTWEIGHTS_REPLAY_H
#define FASTWEIGHTS_REPLAY_H

#include "problem.h"

/* A kernel, and the structure that it reads */
typedef struct {
    int (*run)(const void *);
    const void *problem;
} Call;

typedef struct {
    int64_t count;
    const Call *calls;
} Replay;

/* Numbers of calls' structures that grow by one, and the most that each can be */
typedef struct {
    int64_t count;
    int64_t **numbers;
    const int64_t *most;
} Counters;

#endif
