/* What Python hands over for products of a few rows with weights of bytes, or of half bytes. */
#ifndef FASTWEIGHTS_QUANTIZED_H
#define FASTWEIGHTS_QUANTIZED_H

#include "problem.h"

#define GROUP_INPUTS 32  /* inputs that share a scale */
#define ROUNDED_BYTES 72 /* of a group of x, rounded */

/* Everything is contiguous: x [rows inputs], bias [outputs] or NULL, y [rows outputs]. Scale and
 * offset are [outputs groups] of float16, of which the last group may lack inputs.
 *
 * fw_int8_product: a weight is scale · code; codes [outputs inputs] of signed bytes.
 * fw_int4_product: a weight is scale · code + offset; codes [outputs inputs/2], 16 bytes a group: the
 * codes 0 … 15 of its first 16 inputs in their lower halves, those of the others in the upper ones.
 *
 * x is rounded to int16 with a scale a group, where `rounded`, zeros at first and the same for all
 * products of x, has room: 72 bytes a row and group, of eight groups or a multiple. Behind the first
 * product lie so many `following` it, of the same x; all are made at once, by the threads of the
 * first. */
typedef struct {
    int64_t rows, inputs, outputs, threads;
    const float *x;
    const void *codes;
    const uint16_t *scale, *offset;
    const float *bias;
    float *y, *rounded;
    int64_t following;
} QuantizedProduct;

#endif
