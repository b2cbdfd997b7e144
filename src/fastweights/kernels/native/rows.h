/* Working space, and rows of streams copied to and from it. */
#ifndef FASTWEIGHTS_ROWS_H
#define FASTWEIGHTS_ROWS_H

#include <stddef.h>
#include <string.h>

#include "problem.h"
#include "vector.h"

/* A cursor over one piece of scratch memory; with at = NULL it only counts. */
typedef struct {
    float *at;
    size_t used;
} Arena;

INLINE float *take(Arena *arena, size_t floats)
{
    float *found = arena->at ? arena->at + arena->used : NULL;
    arena->used += (floats + 15) & ~(size_t)15;
    return found;
}

/* Rows of `count` numbers of `parts` floats each, padded with zeros to `step` floats */
static inline void load_numbers(float *to, long count, long step, long parts, const View *view, long b, long t, long h,
                                long tokens)
{
    const float *from = view->at + b * view->b + t * view->t + h * view->h;
    long width = count * parts;
    for (long i = 0; i < tokens; i++, from += view->t, to += step) {
        if (view->w == parts)
            memcpy(to, from, width * sizeof(float));
        else
            for (long j = 0; j < width; j++)
                to[j] = from[j / parts * view->w + j % parts];
        for (long j = width; j < step; j++)
            to[j] = 0;
    }
}

INLINE void load_rows(float *to, long width, long step, const View *view, long b, long t, long h, long tokens)
{
    load_numbers(to, width, step, 1, view, b, t, h, tokens);
}

static inline void store_rows(const float *from, long width, long step, const View *view, long b, long t, long h, long tokens)
{
    float *to = view->at + b * view->b + t * view->t + h * view->h;
    for (long i = 0; i < tokens; i++, from += step, to += view->t)
        memcpy(to, from, width * sizeof(float));
}

#endif
