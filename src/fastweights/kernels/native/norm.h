/* What Python hands over for RMSNorm. */
#ifndef FASTWEIGHTS_NORM_H
#define FASTWEIGHTS_NORM_H

#include "problem.h"

/* Rows that one task takes, and whose gradients of the weight it adds up */
#define NORM_ROWS 64

/* Everything is contiguous: [rows width], the weight [width], or NULL for ones. `narrow`: the rows
 * are bfloat16. */
typedef struct {
    int64_t rows, width, threads, narrow;
    double epsilon;
    const void *x;
    const float *weight;
    void *y;
    const void *d_y;
    void *d_x;
    float *d_weight; /* [rows / NORM_ROWS, rounded up, width], or NULL */
} Norm;

#endif
