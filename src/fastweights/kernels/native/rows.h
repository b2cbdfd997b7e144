/* Working space, and rows of streams copied to and from it. */
#ifndef FASTWEIGHTS_ROWS_H
#define FASTWEIGHTS_ROWS_H

#include <stddef.h>
#include <string.h>

#include "pool.h"
#include "problem.h"
#include "vector.h"

/* A cursor over one piece of working space, which is laid out in two passes over the same code: the
 * first counts (at = NULL), the second hands addresses out.
 *
 *     Arena arena = {0};
 *     while (next_pass(&arena))
 *         x = take(&arena, count);
 *     return arena.at != NULL; // or memory is out
 */
typedef struct {
    float *at;
    size_t used;
    int passes; /* begun */
} Arena;

static inline int next_pass(Arena *arena)
{
    if (arena->passes == 1)
        arena->at = fw_scratch(arena->used);
    if (arena->passes == 2 || (arena->passes == 1 && !arena->at))
        return 0;
    arena->used = 0;
    arena->passes++;
    return 1;
}

INLINE float *take(Arena *arena, size_t floats)
{
    float *found = arena->at ? arena->at + arena->used : NULL;
    arena->used += (floats + 15) & ~(size_t)15;
    return found;
}

INLINE long size_of(const View *view)
{
    return view->narrow ? sizeof(uint16_t) : sizeof(float);
}

/* Where the row of a token and head lies */
INLINE char *address(const View *view, long b, long t, long h)
{
    return (char *)view->at + (b * view->b + t * view->t + h * view->h) * size_of(view);
}

static inline void load_floats(float *to, const float *from, long width, long parts,
                               const View *view)
{
    if (view->w == parts)
        memcpy(to, from, width * sizeof(float));
    else
        for (long j = 0; j < width; j++)
            to[j] = from[j / parts * view->w + j % parts];
}

static inline void load_halves(float *to, const uint16_t *from, long width, const View *view)
{
    if (view->w == 1)
        widen_row(to, from, width);
    else
        for (long j = 0; j < width; j++)
            to[j] = widen(from[j * view->w]);
}

/* Rows of `count` numbers of `parts` floats each, padded with zeros to `step` floats; bfloat16 has
 * one part. */
static inline void load_numbers(float *to, long count, long step, long parts, const View *view,
                                long b, long t, long h, long tokens)
{
    const char *from = address(view, b, t, h);
    long width = count * parts;
    for (long i = 0; i < tokens; i++, from += view->t * size_of(view), to += step) {
        if (view->narrow)
            load_halves(to, (const uint16_t *)from, width, view);
        else
            load_floats(to, (const float *)from, width, parts, view);
        for (long j = width; j < step; j++)
            to[j] = 0;
    }
}

INLINE void load_rows(float *to, long width, long step, const View *view, long b, long t, long h,
                      long tokens)
{
    load_numbers(to, width, step, 1, view, b, t, h, tokens);
}

static inline void store_rows(const float *from, long width, long step, const View *view, long b,
                              long t, long h, long tokens)
{
    char *to = address(view, b, t, h);
    for (long i = 0; i < tokens; i++, from += step, to += view->t * size_of(view))
        if (view->narrow)
            narrow_row((uint16_t *)to, from, width);
        else
            memcpy(to, from, width * sizeof(float));
}

/* Announces rows that lie kilobytes apart, which no hardware prefetcher sees coming. */
INLINE void expect_rows(const View *view, long width, long b, long t, long h, long tokens,
                        const int stored)
{
    const char *row = address(view, b, t, h);
    for (long i = 0; view->at && i < tokens; i++, row += view->t * size_of(view))
        for (long j = 0; j < width * size_of(view); j += 64) {
            if (stored)
                __builtin_prefetch(row + j, 1);
            else
                __builtin_prefetch(row + j, 0, 2);
        }
}

#endif
