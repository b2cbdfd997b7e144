/* What Python hands over for what is computed of pairs of numbers. */
#ifndef FASTWEIGHTS_POINTWISE_H
#define FASTWEIGHTS_POINTWISE_H

#include "problem.h"

/* to = a + b, or silu(a) b with silu(a) = a / (1 + e^-a); all [count] */
enum { SUM, GATED };

typedef struct {
    int64_t count, kind;
    const float *a, *b;
    float *to;
} Pointwise;

#endif
