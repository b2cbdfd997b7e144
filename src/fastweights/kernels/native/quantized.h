/* What Python hands over for products of a few rows with weights of bytes, or of half bytes. */
#ifndef FASTWEIGHTS_QUANTIZED_H
#define FASTWEIGHTS_QUANTIZED_H

#include "problem.h"

/* Everything is contiguous: x [rows inputs], weight [outputs inputs], scale [outputs], bias
 * [outputs] or NULL, y [rows outputs]. Behind the first product lie so many `following` it, of the same
 * x; all are made at once, by the threads of the first. */
typedef struct {
    int64_t rows, inputs, outputs, threads;
    const float *x;
    const int8_t *weight;
    const float *scale, *bias;
    float *y;
    int64_t following;
} QuantizedProduct;

#define INT4_GROUP 32   /* inputs that share a scale and an offset */
#define INT4_ROUNDED 72 /* bytes that a group of x takes, rounded */

/* As above; codes [outputs inputs/2], 16 bytes a group: the codes 0 … 15 of its first 16 inputs in
 * their lower halves, those of the others in the upper ones; scale and offset [outputs inputs/32],
 * float16. A weight is scale · code + offset. x is rounded to int16 with a scale a group,
 * where `rounded`, zeros at first and the same for all products of x, has room: 72 bytes a row and
 * group, of eight groups or a multiple. */
typedef struct {
    int64_t rows, inputs, outputs, threads;
    const float *x;
    const uint8_t *codes;
    const uint16_t *scale, *offset;
    const float *bias;
    float *y, *rounded;
    int64_t following;
} Int4Product;

#endif
