/* What Python hands over for the short convolution. */
#ifndef FASTWEIGHTS_CONVOLUTION_H
#define FASTWEIGHTS_CONVOLUTION_H

#include "problem.h"

/* Most taps, that of the token itself included */
#define MOST_TAPS 64

/* Channels lie side by side; views have no heads. What is read (tail, x and their gradients) is of
 * one type, what is made of it (y and its gradient) of another or the same. The weights are [taps
 * d], that of the token itself last. */
typedef struct {
    int64_t b, t, d, taps, threads;
    const int64_t *document; /* [b taps-1+t]; NULL: all inputs belong to the same one */
    const float *weight;
    float *d_weight; /* [b taps d] */
    View tail, x, y, d_tail, d_x, d_y;
} Convolution;

#endif
