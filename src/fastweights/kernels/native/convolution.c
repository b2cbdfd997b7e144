/* The short causal convolution of every channel by itself, on inputs x_s, s ≥ -n, of which those
 * before 0 are the tail:
 *
 *     y_t = Σ_{j≤n} w_j ⊙ x_{t-n+j}
 *     dx_s = Σ_j w_j ⊙ dy_{s+n-j}    dw_j = Σ_t dy_t ⊙ x_{t-n+j}
 *
 * where x_s counts for t only if both belong to the same document. A task is a band of channels of
 * one sequence; it goes through time once, so that the rows it needs are those it has just read.
 */
#include "convolution.h"
#include "pool.h"
#include "rows.h"

#include <stddef.h>

#define BAND 256

typedef struct {
    const Convolution *p;
    long b, first, width; /* channels */
} Band;

static long bands(const Convolution *p)
{
    return (p->d + BAND - 1) / BAND;
}

static Band band_of(const Convolution *p, long task)
{
    long first = task % bands(p) * BAND;
    return (Band){p, task / bands(p), first, p->d - first < BAND ? p->d - first : BAND};
}

static void *row(const Band *s, const View *view, long t)
{
    return address(view, s->b, t, 0) + s->first * size_of(view);
}

/* x_t, or the tail's */
static const void *input(const Band *s, long t)
{
    return t < 0 ? row(s, &s->p->tail, t + s->p->taps - 1) : row(s, &s->p->x, t);
}

static int together(const Band *s, long t, long before)
{
    const int64_t *document = s->p->document;
    if (!document)
        return 1;
    document += s->b * (s->p->t + s->p->taps - 1) + s->p->taps - 1;
    return document[t] == document[before];
}

/* The rows that count for a token, and the weights they count with */
typedef struct {
    long count;
    const void *rows[MOST_TAPS];
    const float *weights[MOST_TAPS];
} Terms;

INLINE vec load_of(const void *row, long i, const int narrow)
{
    return narrow ? load_narrow((const uint16_t *)row + i) : load((const float *)row + i);
}

INLINE float get_of(const void *row, long i, const int narrow)
{
    return narrow ? widen(((const uint16_t *)row)[i]) : ((const float *)row)[i];
}

/* Σ weights ⊙ rows of W channels, or of fewer one by one */
INLINE void sum_terms(void *to, const int narrows, const Terms *terms, const int narrow_rows,
                      long width)
{
    long i = 0;
    for (; i + W <= width; i += W) {
        vec sum = broadcast(0);
        for (long j = 0; j < terms->count; j++)
            sum += load(terms->weights[j] + i) * load_of(terms->rows[j], i, narrow_rows);
        if (narrows)
            store_narrow((uint16_t *)to + i, sum);
        else
            store((float *)to + i, sum);
    }
    for (; i < width; i++) {
        float sum = 0;
        for (long j = 0; j < terms->count; j++)
            sum += terms->weights[j][i] * get_of(terms->rows[j], i, narrow_rows);
        if (narrows)
            ((uint16_t *)to)[i] = narrow(sum);
        else
            ((float *)to)[i] = sum;
    }
}

/* The sum into the row of a token; the terms are rows of `of`. */
static void add_up(const Band *s, const View *into, long t, const Terms *terms, const View *of)
{
    void *to = row(s, into, t);
    if (into->narrow) {
        if (of->narrow)
            sum_terms(to, 1, terms, 1, s->width);
        else
            sum_terms(to, 1, terms, 0, s->width);
    } else {
        if (of->narrow)
            sum_terms(to, 0, terms, 1, s->width);
        else
            sum_terms(to, 0, terms, 0, s->width);
    }
}

static int forward_task(const void *problem, long task)
{
    const Convolution *p = problem;
    Band s = band_of(p, task);
    for (long t = 0; t < p->t; t++) {
        Terms terms = {0};
        for (long j = 0, before = t - p->taps + 1; before <= t; j++, before++)
            if (together(&s, t, before)) {
                terms.rows[terms.count] = input(&s, before);
                terms.weights[terms.count++] = p->weight + j * p->d + s.first;
            }
        add_up(&s, &p->y, t, &terms, &p->x);
    }
    return DONE;
}

int FOR_ISA(fw_convolve)(const Convolution *p)
{
    return fw_parallel(forward_task, p, p->b * bands(p), p->threads);
}

INLINE void sum_product(float *sum, const void *a, const int narrow_a, const void *b,
                        const int narrow_b, long width)
{
    long i = 0;
    for (; i + W <= width; i += W)
        store(sum + i, load(sum + i) + load_of(a, i, narrow_a) * load_of(b, i, narrow_b));
    for (; i < width; i++)
        sum[i] += get_of(a, i, narrow_a) * get_of(b, i, narrow_b);
}

/* sum += dy ⊙ x */
static void add_product(float *sum, const Convolution *p, const void *d_y, const void *x,
                        long width)
{
    if (p->d_y.narrow) {
        if (p->x.narrow)
            sum_product(sum, d_y, 1, x, 1, width);
        else
            sum_product(sum, d_y, 1, x, 0, width);
    } else {
        if (p->x.narrow)
            sum_product(sum, d_y, 0, x, 1, width);
        else
            sum_product(sum, d_y, 0, x, 0, width);
    }
}

/* dw of the token t */
static void weights_back(const Band *s, float *sums, long t)
{
    const Convolution *p = s->p;
    for (long j = 0, before = t - p->taps + 1; before <= t; j++, before++)
        if (together(s, t, before))
            add_product(sums + j * BAND, p, row(s, &p->d_y, t), input(s, before), s->width);
}

/* dx of the input at `from`, which the tokens up to `taps` - 1 later have read */
static void input_back(const Band *s, long from)
{
    const Convolution *p = s->p;
    Terms terms = {0};
    for (long j = p->taps - 1, t = from; j >= 0; j--, t++)
        if (t >= 0 && t < p->t && together(s, t, from)) {
            terms.rows[terms.count] = row(s, &p->d_y, t);
            terms.weights[terms.count++] = p->weight + j * p->d + s->first;
        }
    if (from < 0)
        add_up(s, &p->d_tail, from + p->taps - 1, &terms, &p->d_y);
    else
        add_up(s, &p->d_x, from, &terms, &p->d_y);
}

static int backward_task(const void *problem, long task)
{
    const Convolution *p = problem;
    Band s = band_of(p, task);
    float *sums = fw_scratch(p->taps * BAND);
    if (!sums)
        return OUT_OF_MEMORY;
    memset(sums, 0, p->taps * BAND * sizeof(float));
    for (long t = 0; t < p->t + p->taps - 1; t++) {
        if (t < p->t)
            weights_back(&s, sums, t);
        input_back(&s, t - p->taps + 1);
    }
    for (long j = 0; j < p->taps; j++)
        memcpy(p->d_weight + (s.b * p->taps + j) * p->d + s.first, sums + j * BAND,
               s.width * sizeof(float));
    return DONE;
}

int FOR_ISA(fw_convolve_back)(const Convolution *p)
{
    return fw_parallel(backward_task, p, p->b * bands(p), p->threads);
}
