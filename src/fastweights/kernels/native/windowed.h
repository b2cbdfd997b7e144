/* What Python hands over for one token of softmax within a window and linear attention to all before it. */
#ifndef FASTWEIGHTS_WINDOWED_H
#define FASTWEIGHTS_WINDOWED_H

#include "problem.h"

/* Whatever is no view is contiguous. */
typedef struct {
    int64_t b, h, g, k, v, f; /* g | h: a key head serves h / g query heads */
    int64_t window, cached;   /* tokens: the window, and those of it that the state holds */
    int64_t shared;           /* one normaliser for both sides, or 0: one for each */
    int64_t forgotten;        /* the age of a token that is lost to all */
    double softcap;           /* 0: none */
    int64_t threads;          /* at most so many */
    View q, fq, mix, key, value, fk;
    const float *keys, *values, *features; /* [b g cached ·], oldest first */
    const int64_t *age;                    /* [b cached] */
    const float *memory;                   /* [b g f v+1] */
    float *o;                              /* [b h v] */
    float *next_keys, *next_values, *next_features;
    int64_t *next_age;
    float *next_memory;
} WindowStep;

#endif
