/* Decay with one value per head: the element-wise scan (k = 1) and the selective scan (Mamba, k = N).
 *
 *     S_t = α_t ⊙ S_{t-1} + k_t v_t ;   o_t = Σ_k q_t ⊙ S_t                         (DSF eq. 19; MetaLA eq. 13-14)
 *     G_t = α_{t+1} ⊙ G_{t+1} + q_t do_t
 *     dq_t = do_t S_t    dk_t = v_t G_t    dv_t = Σ_k k_t ⊙ G_t    d log α_t = α_t ⊙ S_{t-1} ⊙ G_t
 *
 * Vectors hold neighbouring heads (k = 1) or the keys of one head. A strip of heads passes SPAN tokens at a time
 * through buffers that stay in the cache; the backward runs such a span forwards again from the state marked at its
 * start. Queries or keys (k > 1) shared by all heads (stride 0) stay shared: their gradients come as one sum per strip, in
 * d_q and d_key with the strip's stride in place of the head's.
 */
#include "chunk.h"
#include "pool.h"
#include "problem.h"
#include "vector.h"

typedef struct {
    const Forward *p;
    long b, first, heads;    /* the strip */
    long keys, lanes;        /* padded width of a head (1 if k = 1) and of the strip */
    long t, tokens;          /* the span */
    float *alpha, *q, *key;  /* [t lanes]; q and key [t keys] if shared */
    float *value, *o, *d_o;  /* [t lanes] if k = 1, else [t heads] */
    float *states;           /* [t+1 lanes], the first the one before the span */
    float *G;                /* [lanes] */
    float *d_q, *d_key, *d_value, *d_decay;
} Strip;

static long heads_per_strip(const Forward *p) { return p->k < STRIP ? STRIP / p->k : 1; }

static long strips(const Forward *p) { return (p->h + heads_per_strip(p) - 1) / heads_per_strip(p); }

/* Whether the heads share a row of keys: that of the queries or keys at `view`; decays and tied keys are their own. */
static int shared(const Strip *s, const View *view)
{
    return view->at && view != &s->p->log_decay && s->p->k > 1 && view->h == 0;
}

/* Lanes of a token's row of q or key, and from one head to the next. */
static long row_of(const Strip *s, const View *view) { return shared(s, view) ? s->keys : s->lanes; }
static long head_step(const Strip *s, const View *view) { return shared(s, view) ? 0 : s->keys; }

static void open_strip(Strip *s, const Forward *p, long task, int backward)
{
    long of = strips(p), heads = heads_per_strip(p), strip = task % of;
    *s = (Strip){.p = p, .b = task / of, .first = strip * heads};
    s->heads = p->h - s->first < heads ? p->h - s->first : heads;
    s->keys = p->k == 1 ? 1 : padded(p->k);
    s->lanes = padded(s->heads * s->keys);
    size_t size = SPAN * s->lanes, row = padded(s->heads);
    for (Arena arena = {NULL, 0}; ; arena = (Arena){fw_scratch(arena.used), 0}) {
        s->alpha = take(&arena, size), s->q = take(&arena, size), s->key = take(&arena, size);
        s->value = take(&arena, SPAN * row), s->o = take(&arena, SPAN * row);
        s->states = take(&arena, size + s->lanes);
        if (backward) {
            s->d_o = take(&arena, SPAN * row), s->d_value = take(&arena, SPAN * row);
            s->G = take(&arena, s->lanes), s->d_decay = take(&arena, size);
            s->d_q = take(&arena, size), s->d_key = take(&arena, size);
        }
        if (arena.at)
            return;
    }
}

/* One number per head, as a stream of a single head as wide as the strip */
static View across(const Strip *s, const View *view)
{
    return (View){view->at + s->first * view->h, view->b, view->t, 0, view->h};
}

static void load_heads(float *to, const Strip *s, const View *view)
{
    View row = across(s, view);
    load_rows(to, s->heads, padded(s->heads), &row, s->b, s->t, 0, s->tokens);
}

static void load_keys(float *to, const Strip *s, const View *view)
{
    long width = s->p->k, row = row_of(s, view);
    if (width == 1) {
        load_heads(to, s, view);
    } else if (width == s->keys && (view->h == width || shared(s, view)) && view->w == 1) {
        View flat = {view->at + s->first * view->h, view->b, view->t, 0, 1};
        load_rows(to, row, row, &flat, s->b, s->t, 0, s->tokens);
    } else
        for (long i = 0; i < s->tokens; i++)
            for (long h = 0; h < row / s->keys; h++)
                load_rows(to + i * row + h * s->keys, width, s->keys, view, s->b, s->t + i, s->first + h, 1);
}

static void store_heads(const float *from, const Strip *s, const View *view)
{
    store_rows(from, s->heads, padded(s->heads), view, s->b, s->t, s->first, s->tokens);
}

/* Gradients are contiguous; of shared streams, one per strip. */
static void store_keys(const float *from, const Strip *s, const View *of, const View *to)
{
    long width = s->p->k, row = row_of(s, of), first = shared(s, of) ? s->first / heads_per_strip(s->p) : s->first;
    if (width == 1)
        store_heads(from, s, to);
    else if (width == s->keys)
        store_rows(from, row, row, to, s->b, s->t, first, s->tokens);
    else
        for (long i = 0; i < s->tokens; i++)
            for (long h = 0; h < row / s->keys; h++)
                store_rows(from + i * row + h * s->keys, width, s->keys, to, s->b, s->t + i, first + h, 1);
}

static void load_span(Strip *s, long t)
{
    const Forward *p = s->p;
    s->t = t, s->tokens = p->t - t < SPAN ? p->t - t : SPAN;
    long count = s->tokens * s->lanes;
    load_keys(s->q, s, &p->q);
    load_keys(s->alpha, s, &p->log_decay);
    load_heads(s->value, s, &p->value);
    if (p->key.at)
        load_keys(s->key, s, &p->key);
    else
        for (long i = 0; i < count; i += W)
            store(s->key + i, one_minus_exp(load(s->alpha + i)));
    for (long i = 0; i < count; i += W)
        store(s->alpha + i, vexp(load(s->alpha + i)));
}

/* S_t from S_{t-1}, and o_t */
INLINE void step_heads(const Strip *s, const float *S, float *next, long t)
{
    long row = t * s->lanes;
    for (long j = 0; j < s->lanes; j += W) {
        vec state = load(S + j) * load(s->alpha + row + j) + load(s->key + row + j) * load(s->value + row + j);
        store(next + j, state);
        store(s->o + row + j, load(s->q + row + j) * state);
    }
}

INLINE void step_keys(const Strip *s, const float *S, float *next, long t)
{
    const float *alpha = s->alpha + t * s->lanes, *q = s->q + t * row_of(s, &s->p->q);
    const float *key = s->key + t * row_of(s, &s->p->key), *value = s->value + t * padded(s->heads);
    long q_step = head_step(s, &s->p->q), key_step = head_step(s, &s->p->key);
    for (long h = 0; h < s->heads; h++) {
        vec sum = all(0);
        for (long j = 0; j < s->keys; j += W) {
            long lane = h * s->keys + j;
            vec state = load(S + lane) * load(alpha + lane) + load(key + h * key_step + j) * value[h];
            store(next + lane, state);
            sum += load(q + h * q_step + j) * state;
        }
        s->o[t * padded(s->heads) + h] = total(sum);
    }
}

/* All states of the span, and o */
static void span_forward(Strip *s)
{
    for (long t = 0; t < s->tokens; t++) {
        float *S = s->states + t * s->lanes;
        if (s->p->k == 1)
            step_heads(s, S, S + s->lanes, t);
        else
            step_keys(s, S, S + s->lanes, t);
    }
}

/* The strip's part of a state [b h k 1] in memory ↔ its lanes */
static void load_lanes(float *to, const Strip *s, const float *from)
{
    from += (s->b * s->p->h + s->first) * s->p->k;
    memset(to, 0, s->lanes * sizeof(float));
    for (long h = 0; h < s->heads; h++)
        memcpy(to + h * s->keys, from + h * s->p->k, s->p->k * sizeof(float));
}

static void store_state_lanes(const float *from, const Strip *s, float *to)
{
    to += (s->b * s->p->h + s->first) * s->p->k;
    for (long h = 0; h < s->heads; h++)
        memcpy(to + h * s->p->k, from + h * s->keys, s->p->k * sizeof(float));
}

static void scan_forward_task(const void *problem, long task)
{
    const Forward *p = problem;
    long size = p->b * p->h * p->k;
    Strip s;
    open_strip(&s, p, task, 0);
    load_lanes(s.states, &s, p->start);
    for (long t = 0; t < p->t; t += SPAN) {
        if (p->marks)
            store_state_lanes(s.states, &s, p->marks + t / SPAN * size);
        load_span(&s, t);
        span_forward(&s);
        store_heads(s.o, &s, &p->o);
        memcpy(s.states, s.states + s.tokens * s.lanes, s.lanes * sizeof(float));
    }
    store_state_lanes(s.states, &s, p->last);
}

void FOR_ISA(fw_scan_forward)(const Forward *p) { fw_parallel(scan_forward_task, p, p->b * strips(p), p->threads); }

INLINE void step_heads_back(Strip *s, long t)
{
    long row = t * s->lanes;
    int tied = !s->p->key.at;
    for (long j = 0; j < s->lanes; j += W) {
        vec d_o = load(s->d_o + row + j), alpha = load(s->alpha + row + j);
        vec G = load(s->G + j) + load(s->q + row + j) * d_o;
        vec d_key = load(s->value + row + j) * G, before = load(s->states + row + j);
        store(s->d_q + row + j, d_o * load(s->states + row + s->lanes + j));
        store(s->d_value + row + j, load(s->key + row + j) * G);
        store(s->d_key + row + j, d_key);
        store(s->d_decay + row + j, alpha * (tied ? before * G - d_key : before * G));
        store(s->G + j, alpha * G);
    }
}

INLINE void step_keys_back(Strip *s, long t)
{
    const View *queries = &s->p->q, *keys = &s->p->key;
    const float *q = s->q + t * row_of(s, queries);
    long q_step = head_step(s, queries);
    int tied = !keys->at;
    long key_row = row_of(s, keys), key_step = head_step(s, keys);
    const float *key = s->key + t * key_row;
    float *d_q = s->d_q + t * row_of(s, queries), *d_key = s->d_key + t * key_row;
    long heads = padded(s->heads), row = t * s->lanes;
    if (!q_step)
        memset(d_q, 0, s->keys * sizeof(float));
    if (!key_step)
        memset(d_key, 0, s->keys * sizeof(float));
    for (long h = 0; h < s->heads; h++) {
        vec sum = all(0), d_o = all(s->d_o[t * heads + h]), value = all(s->value[t * heads + h]);
        for (long j = 0; j < s->keys; j += W) {
            long lane = h * s->keys + j, at = h * q_step + j, to = h * key_step + j;
            vec alpha = load(s->alpha + row + lane), G = load(s->G + lane) + load(q + at) * d_o;
            vec dk = value * G, dq = d_o * load(s->states + row + s->lanes + lane);
            vec before = load(s->states + row + lane);
            sum += load(key + to) * G;
            store(d_q + at, q_step ? dq : load(d_q + at) + dq);
            store(d_key + to, key_step ? dk : load(d_key + to) + dk);
            store(s->d_decay + row + lane, alpha * (tied ? before * G - dk : before * G));
            store(s->G + lane, alpha * G);
        }
        s->d_value[t * heads + h] = total(sum);
    }
}

static void span_back(Strip *s, const Backward *back, long t)
{
    const Forward *p = s->p;
    load_lanes(s->states, s, p->marks + t / SPAN * p->b * p->h * p->k);
    load_span(s, t);
    load_heads(s->d_o, s, &back->d_o);
    span_forward(s);
    for (long i = s->tokens - 1; i >= 0; i--) {
        if (p->k == 1)
            step_heads_back(s, i);
        else
            step_keys_back(s, i);
    }
    store_keys(s->d_q, s, &p->q, &back->d_q);
    if (p->key.at)
        store_keys(s->d_key, s, &p->key, &back->d_key);
    store_keys(s->d_decay, s, &p->log_decay, &back->d_log_decay);
    store_heads(s->d_value, s, &back->d_value);
}

static void scan_backward_task(const void *problem, long task)
{
    const Backward *back = problem;
    const Forward *p = &back->forward;
    Strip s;
    open_strip(&s, p, task, 1);
    load_lanes(s.G, &s, back->d_last);
    for (long i = (p->t + SPAN - 1) / SPAN - 1; i >= 0; i--)
        span_back(&s, back, i * SPAN);
    store_state_lanes(s.G, &s, back->d_start);
}

void FOR_ISA(fw_scan_backward)(const Backward *p)
{
    fw_parallel(scan_backward_task, p, p->forward.b * strips(&p->forward), p->forward.threads);
}
