/* What Python hands over for what is computed of pairs of numbers. */
#ifndef FASTWEIGHTS_POINTWISE_H
#define FASTWEIGHTS_POINTWISE_H

#include "problem.h"

/* to = a + b, or act(a) b with silu(a) = a σ(a) and, as by tanh, gelu(a) = a σ(√(8/π) (a + .044715
 * a³)), σ(x) = 1 / (1 + e^-x); all [count] */
enum { SUM, SILU_GATED, GELU_GATED };

typedef struct {
    int64_t count, kind;
    const float *a, *b;
    float *to;
} Pointwise;

#endif
