/* What Python hands over for one token of softmax attention. */
#ifndef FASTWEIGHTS_ATTENTION_H
#define FASTWEIGHTS_ATTENTION_H

#include "problem.h"

/* Tokens of a cache that one task reads */
#define ATTENDED_TOKENS 128

/* g | h: a key head serves h / g query heads. Rows of all views lie side by side. */
typedef struct {
    int64_t b, h, g, s, k, v; /* s: tokens of the cache, this one among them */
    int64_t threads;          /* at most so many */
    double scale;             /* of scores */
    View q, keys, values, o;  /* [b 1 h ·], [b s g ·] */
    const float *key, *value; /* [b g ·], this token's, which are written into the cache's last row
                                 first; NULL: they are there */
    const uint8_t *keep;      /* [b s], 0: not read; NULL: all are */
    float *parts;             /* [b h ⌈s / ATTENDED_TOKENS⌉ v+2]: sums of spans */
} TokenAttention;

#endif
