/* What Python hands over for calls that are made one after the other. */
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

#endif
