/* The short causal convolution of every channel by itself, on inputs x_s, s ≥ -n, of which those before 0 are the tail:
 *
 *     y_t = Σ_{j≤n} w_j ⊙ x_{t-n+j}
 *     dx_s = Σ_j w_j ⊙ dy_{s+n-j}    dw_j = Σ_t dy_t ⊙ x_{t-n+j}
 *
 * where x_s counts for t only if both belong to the same document. A task is a band of channels of one sequence; it
 * goes through time once, so that the rows it needs are those it has just read.
 */
#include "convolution.h"
#include "pool.h"
#include "vector.h"

#include <stddef.h>

#define BAND 256

typedef struct {
    const Convolution *p;
    long b, first, width; /* channels */
} Band;

static long bands(const Convolution *p) { return (p->d + BAND - 1) / BAND; }

static Band band_of(const Convolution *p, long task)
{
    long first = task % bands(p) * BAND;
    return (Band){p, task / bands(p), first, p->d - first < BAND ? p->d - first : BAND};
}

static float *row(const Band *s, const View *view, long t) { return view->at + s->b * view->b + t * view->t + s->first; }

/* x_t, or the tail's */
static const float *input(const Band *s, long t)
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
    const float *rows[MOST_TAPS], *weights[MOST_TAPS];
} Terms;

/* Σ weights ⊙ rows of W channels, or of fewer one by one */
INLINE void add_up(float *to, const Terms *terms, long width)
{
    long i = 0;
    for (; i + W <= width; i += W) {
        vec sum = all(0);
        for (long j = 0; j < terms->count; j++)
            sum += load(terms->weights[j] + i) * load(terms->rows[j] + i);
        store(to + i, sum);
    }
    for (; i < width; i++) {
        float sum = 0;
        for (long j = 0; j < terms->count; j++)
            sum += terms->weights[j][i] * terms->rows[j][i];
        to[i] = sum;
    }
}

static void forward_task(const void *problem, long task)
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
        add_up(row(&s, &p->y, t), &terms, s.width);
    }
}

void FOR_ISA(fw_convolve)(const Convolution *p) { fw_parallel(forward_task, p, p->b * bands(p), p->threads); }

INLINE void add_product(float *sum, const float *a, const float *b, long width)
{
    long i = 0;
    for (; i + W <= width; i += W)
        store(sum + i, load(sum + i) + load(a + i) * load(b + i));
    for (; i < width; i++)
        sum[i] += a[i] * b[i];
}

/* dw of the token t */
static void weights_back(const Band *s, float *sums, long t)
{
    const Convolution *p = s->p;
    for (long j = 0, before = t - p->taps + 1; before <= t; j++, before++)
        if (together(s, t, before))
            add_product(sums + j * BAND, row(s, &p->d_y, t), input(s, before), s->width);
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
    add_up(from < 0 ? row(s, &p->d_tail, from + p->taps - 1) : row(s, &p->d_x, from), &terms, s->width);
}

static void backward_task(const void *problem, long task)
{
    const Convolution *p = problem;
    Band s = band_of(p, task);
    float *sums = fw_scratch(p->taps * BAND);
    memset(sums, 0, p->taps * BAND * sizeof(float));
    for (long t = 0; t < p->t + p->taps - 1; t++) {
        if (t < p->t)
            weights_back(&s, sums, t);
        input_back(&s, t - p->taps + 1);
    }
    for (long j = 0; j < p->taps; j++)
        memcpy(p->d_weight + (s.b * p->taps + j) * p->d + s.first, sums + j * BAND, s.width * sizeof(float));
}

void FOR_ISA(fw_convolve_back)(const Convolution *p) { fw_parallel(backward_task, p, p->b * bands(p), p->threads); }
