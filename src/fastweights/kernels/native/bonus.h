/* What Python hands over for one token of a bonus with exponential gates, whose heads have one key.
 */
#ifndef FASTWEIGHTS_BONUS_H
#define FASTWEIGHTS_BONUS_H

#include "problem.h"

/* Heads that one task takes: a multiple of all vector lengths */
#define BONUS_HEADS 128

/* Whatever is no view is contiguous. */
typedef struct {
    int64_t b, h, v, threads;
    double least, empty; /* the m of an empty state; the log of what a query reads that is zero */
    View q, key, value, log_decay, bonus, log_gain;
    const float *memory, *scale; /* [b h v+1], [b h]: the state divided by e^m, and m */
    float *o;                    /* [b h v] */
    float *next_memory, *next_scale;
} BonusStep;

#endif
