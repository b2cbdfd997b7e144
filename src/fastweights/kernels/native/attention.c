/* One token of softmax attention to a cache, span by span of its tokens,
 *
 *     s_i = scale q·k_i,    m = max s,    o = Σ_i e^(s_i - m) v_i / Σ_i e^(s_i - m),
 *
 * each relative to its own m. The spans are joined in their order, so that a result does not depend
 * on threads. A task is a span of a key head, with the query heads that it serves.
 */
#include "attention.h"
#include "rows.h"

#include <math.h>

static long spans(const TokenAttention *p)
{
    return (p->s + ATTENDED_TOKENS - 1) / ATTENDED_TOKENS;
}

/* Σ_i e^(s_i - m) v_i, Σ_i e^(s_i - m) and m of a span */
static float *part_of(const TokenAttention *p, long b, long h, long span)
{
    return p->parts + ((b * p->h + h) * spans(p) + span) * (p->v + 2);
}

/* W scores from `first` on, of `count` tokens that are there; −inf behind them */
INLINE vec score(const TokenAttention *p, const float *q, const float *keys, long first, long count)
{
    vec sum[W];
    const float *row[W];
    long j = 0;
    for (int i = 0; i < W; i++) {
        row[i] = keys + (first + (i < count ? i : 0)) * p->keys.t;
        sum[i] = broadcast(0);
    }
    for (; j + W <= p->k; j += W)
        for (int i = 0; i < W; i++)
            sum[i] += load(q + j) * load(row[i] + j);
    vec scores = totals(sum);
    for (; j < p->k; j++)
        for (int i = 0; i < W; i++)
            scores[i] += q[j] * row[i][j];
    scores *= (float)p->scale;
    for (long i = count; i < W; i++)
        scores[i] = -INFINITY;
    return scores;
}

/* to = Σ_i weights_i rows_i */
INLINE void weigh_lanes(float *to, const float *weights, const float *rows, long step, long count,
                        const int lanes)
{
    vec sum[2 * ROWS];
    for (int c = 0; c < lanes; c++)
        sum[c] = broadcast(0);
    for (long i = 0; i < count; i++)
        for (int c = 0; c < lanes; c++)
            sum[c] += weights[i] * load(rows + i * step + c * W);
    for (int c = 0; c < lanes; c++)
        store(to + c * W, sum[c]);
}

static void weigh(float *to, const float *weights, const float *rows, long step, long count,
                  long width)
{
    long j = 0;
    for (; j + 2 * ROWS * W <= width; j += 2 * ROWS * W)
        weigh_lanes(to + j, weights, rows + j, step, count, 2 * ROWS);
    for (; j + W <= width; j += W)
        weigh_lanes(to + j, weights, rows + j, step, count, 1);
    for (; j < width; j++) {
        to[j] = 0;
        for (long i = 0; i < count; i++)
            to[j] += weights[i] * rows[i * step + j];
    }
}

/* A span of `count` tokens as a query reads it */
static void read_span(const TokenAttention *p, const float *q, const float *keys,
                      const float *values, const uint8_t *keep, long count, float *to)
{
    float weights[ATTENDED_TOKENS], highest = -INFINITY;
    for (long i = 0; i < count; i += W)
        store(weights + i, score(p, q, keys, i, count - i < W ? count - i : W));
    for (long i = 0; i < count; i++) {
        if (keep && !keep[i])
            weights[i] = -INFINITY;
        highest = weights[i] > highest ? weights[i] : highest;
    }
    vec sum = broadcast(0);
    for (long i = 0; i < count; i += W) {
        vec own = vexp(load(weights + i) - (highest == -INFINITY ? 0 : highest));
        store(weights + i, own);
        sum += own;
    }
    weigh(to, weights, values, p->values.t, count, p->v);
    to[p->v] = total(sum);
    to[p->v + 1] = highest;
}

static int span_task(const void *problem, long task)
{
    const TokenAttention *p = problem;
    long span = task % spans(p), g = task / spans(p) % p->g, b = task / spans(p) / p->g;
    long first = span * ATTENDED_TOKENS, left = p->s - first, queries = p->h / p->g;
    long count = left < ATTENDED_TOKENS ? left : ATTENDED_TOKENS;
    const float *keys = (const float *)address(&p->keys, b, first, g),
                *values = (const float *)address(&p->values, b, first, g);
    const uint8_t *keep = p->keep ? p->keep + b * p->s + first : NULL;
    for (long h = g * queries; h < (g + 1) * queries; h++)
        read_span(p, (const float *)address(&p->q, b, 0, h), keys, values, keep, count,
                  part_of(p, b, h, span));
    return DONE;
}

/* o of a query head, from its spans */
static void join_spans(const TokenAttention *p, long b, long h)
{
    float *o = (float *)address(&p->o, b, 0, h), highest = -INFINITY, sum = 0;
    for (long i = 0; i < spans(p); i++) {
        float own = part_of(p, b, h, i)[p->v + 1];
        highest = own > highest ? own : highest;
    }
    memset(o, 0, p->v * sizeof(float));
    for (long i = 0; i < spans(p); i++) {
        const float *part = part_of(p, b, h, i);
        float share = part[p->v + 1] == -INFINITY ? 0 : expf(part[p->v + 1] - highest);
        for (long j = 0; j < p->v; j++)
            o[j] += share * part[j];
        sum += share * part[p->v];
    }
    for (long j = 0; j < p->v; j++)
        o[j] /= sum;
}

static void write_last_row(View cache, long s, const float *from, long b, long g, long width)
{
    for (long i = 0; i < b; i++)
        for (long j = 0; j < g; j++)
            memcpy((float *)address(&cache, i, s - 1, j), from + (i * g + j) * width,
                   width * sizeof *from);
}

int FOR_ISA(fw_attend)(const TokenAttention *p)
{
    if (p->key) {
        write_last_row(p->keys, p->s, p->key, p->b, p->g, p->k);
        write_last_row(p->values, p->s, p->value, p->b, p->g, p->v);
    }
    int status = fw_parallel(span_task, p, p->b * p->g * spans(p), p->threads);
    for (long b = 0; b < p->b; b++)
        for (long h = 0; h < p->h; h++)
            join_spans(p, b, h);
    return status;
}
