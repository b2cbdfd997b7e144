/* What Python hands over for one token, or many, of softmax within a window and linear attention to
 * all before it. */
#ifndef FASTWEIGHTS_WINDOWED_H
#define FASTWEIGHTS_WINDOWED_H

#include "problem.h"

/* φ(x) = (f(x W), f(-x W)), softmax(x W + b), or given */
enum { GIVEN, SOFTMAX, EXP, ELU, RELU, LANDMARKS };

/* Whatever is no view is contiguous, of what has pages that of a sequence. The next state may be
 * written where the state lies, if as many tokens are cached. Many tokens may have no state before
 * them: then `cached` is for how many there is room. */
typedef struct {
    int64_t b, t, h, g, k, v, f; /* g | h: a key head serves h / g query heads */
    int64_t window, cached;      /* tokens: the window, and those of it that the state holds */
    int64_t shared;              /* one normaliser for both sides, or 0: one for each */
    int64_t forgotten;           /* the age of a token that is lost to all */
    double scale, softcap;       /* of scores; 0: no cap */
    int64_t threads;             /* at most so many */
    View q, key, value, mix;
    View log_scale;      /* a of e^(s - a) in place of the largest score; may be none */
    const uint8_t *keep;   /* [b t], 0: padding; NULL: there is none */
    const uint8_t *starts; /* [b t], 1: a document begins with it; NULL: none does */
    /* [b g cached ·], oldest first; NULL, and the rest of the state: the empty one */
    const float *keys, *values;
    const int64_t *age;  /* [b cached] */
    const float *memory; /* [b g f v+1] */
    View o;
    float *next_keys, *next_values;
    int64_t *next_age;
    float *next_memory;
    int64_t map;
    View fq, fk;           /* given */
    const float *features; /* [b g cached f] */
    float *next_features;
    const float *W_q, *W_k; /* [h f/2 k], [g f/2 k]: else; of landmarks [h f k], [g f k] */
    const float *b_q, *b_k; /* [h f], [g f]: of landmarks */
    /* [g 2 k]: of one token at a position, whose q and leaving key landmarks read as they were
     * before rotary positions: the other channel of a pair, and how far each turns back, of 2^32,
     * from one position to the next. NULL: as they are */
    const int64_t *turning;
    int64_t position;
    int64_t further; /* so many of the last landmarks read q and the key as they are */
    Pages pages;            /* of keys, values, age and memory, and of the next */
    int64_t following;      /* of one token: so many problems behind this one are solved with it */
} WindowProblem;

#endif
