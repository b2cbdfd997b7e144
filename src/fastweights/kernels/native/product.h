/* What Python hands over for products of a few rows with weights. */
#ifndef FASTWEIGHTS_PRODUCT_H
#define FASTWEIGHTS_PRODUCT_H

#include "problem.h"

/* Outputs that one task computes */
#define PRODUCT_OUTPUTS 16

/* Everything is contiguous: x [rows inputs], weight [outputs inputs], bias [outputs] or NULL, y
 * [rows outputs]. Behind the first product lie so many `following` it; all are made at once, by the
 * threads of the first. */
typedef struct {
    int64_t rows, inputs, outputs, threads;
    const float *x, *weight, *bias;
    float *y;
    int64_t following;
} Product;

#endif
