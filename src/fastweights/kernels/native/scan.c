/* Decay with one value per head: the element-wise scan (k = 1) and the selective scan (Mamba, k = N).
 *
 *     S_t = α_t ⊙ S_{t-1} + k_t v_t ;   o_t = Σ_k q_t ⊙ S_t                         (DSF eq. 19; MetaLA eq. 13-14)
 *     G_t = α_{t+1} ⊙ G_{t+1} + q_t do_t
 *     dq_t = do_t S_t    dk_t = v_t G_t    dv_t = Σ_k k_t ⊙ G_t    d log α_t = α_t ⊙ S_{t-1} ⊙ G_t
 *
 * Vectors hold neighbouring heads (k = 1) or the keys of one head. A strip of heads goes through time on its own, SPAN
 * tokens at a time; its streams are read and written where they lie if that is in whole vectors, else through copies.
 * The backward runs a span forwards again from the state marked at its start. Queries or keys (k > 1) shared by all
 * heads (stride 0) stay shared: their gradients come as one sum per strip, in d_q and d_key with the strip's stride in
 * place of the head's.
 */
#include "chunk.h"
#include "pool.h"
#include "problem.h"
#include "vector.h"

/* The tokens of a span in one stream; keys, or heads if k = 1, lie side by side. */
typedef struct {
    float *at;
    long token, head;
} Rows;

typedef struct {
    const Forward *p;
    long b, number, first, heads; /* the strip */
    long keys, lanes;             /* padded width of a head (1 if k = 1) and of the strip */
    long t, tokens;               /* the span */
    Rows q, key, value, decay, o, d_o, d_q, d_key, d_value, d_decay;
    float *copies[10];            /* [t lanes] each, for these */
    float *states;                /* [t+1 lanes], the first the one before the span; without backward [lanes] */
    float *alpha, *tied;          /* [t lanes] α and 1 - α, for the backward */
    float *G;                     /* [lanes] */
} Strip;

enum { Q, KEY, VALUE, DECAY, OUT, D_OUT, D_Q, D_KEY, D_VALUE, D_DECAY };

static void open_strip(Strip *s, const Forward *p, long task, int backward)
{
    long of = strips(p), heads = heads_per_strip(p), number = task % of, tokens = p->t < SPAN ? p->t : SPAN;
    *s = (Strip){.p = p, .b = task / of, .number = number, .first = number * heads};
    s->heads = p->h - s->first < heads ? p->h - s->first : heads;
    s->keys = p->k == 1 ? 1 : padded(p->k);
    s->lanes = padded(s->heads * s->keys);
    for (Arena arena = {NULL, 0}; ; arena = (Arena){fw_scratch(arena.used), 0}) {
        for (int i = 0; i < (backward ? 10 : 5); i++)
            s->copies[i] = take(&arena, tokens * s->lanes);
        s->states = take(&arena, backward ? (tokens + 1) * s->lanes : s->lanes);
        if (backward) {
            s->alpha = take(&arena, tokens * s->lanes), s->tied = take(&arena, tokens * s->lanes);
            s->G = take(&arena, s->lanes);
        }
        if (arena.at)
            return;
    }
}

/* ---- rows in place or copied ---- */

static int shared(const Strip *s, const View *view) { return view->at && s->p->k > 1 && view->h == 0; }

static int whole(const Strip *s, const View *view)
{
    return s->p->k == 1 ? view->h == 1 && s->heads % W == 0 : view->w == 1 && s->keys == s->p->k;
}

static Rows in_place(const Strip *s, const View *view, long head)
{
    return (Rows){view->at + s->b * view->b + s->t * view->t + head * view->h, view->t, view->h};
}

static void fill(float *to, const Strip *s, const View *view, long tokens)
{
    const float *from = view->at + s->b * view->b + s->t * view->t;
    for (long i = 0; i < tokens; i++)
        for (long j = 0; j < s->lanes; j += W)
            store(to + i * s->lanes + j, all(from[i * view->t]));
}

/* One number per head */
static Rows given_heads(const Strip *s, const View *view, float *copy)
{
    if (s->p->k > 1 || whole(s, view))
        return in_place(s, view, s->first);
    long tokens = view->t ? s->tokens : 1;
    View row = {view->at + s->first * view->h, view->b, view->t, 0, view->h};
    if (view->h)
        load_rows(copy, s->heads, s->lanes, &row, s->b, s->t, 0, tokens);
    else
        fill(copy, s, view, tokens);
    return (Rows){copy, view->t ? s->lanes : 0, 1};
}

static Rows given_keys(const Strip *s, const View *view, float *copy)
{
    if (s->p->k == 1)
        return given_heads(s, view, copy);
    if (whole(s, view))
        return in_place(s, view, s->first);
    long tokens = view->t ? s->tokens : 1, heads = view->h ? s->heads : 1, row = heads * s->keys;
    for (long i = 0; i < tokens; i++)
        for (long h = 0; h < heads; h++)
            load_rows(copy + i * row + h * s->keys, s->p->k, s->keys, view, s->b, s->t + i, s->first + h, 1);
    return (Rows){copy, view->t ? row : 0, view->h ? s->keys : 0};
}

static Rows wanted_heads(const Strip *s, const View *view, float *copy)
{
    return s->p->k > 1 || whole(s, view) ? in_place(s, view, s->first) : (Rows){copy, s->lanes, 1};
}

/* share: one row for all heads of the strip */
static Rows wanted_keys(const Strip *s, const View *view, int share, float *copy)
{
    if (s->p->k == 1)
        return wanted_heads(s, view, copy);
    Rows rows = whole(s, view) ? in_place(s, view, share ? s->number : s->first)
                               : (Rows){copy, share ? s->keys : s->lanes, s->keys};
    return share ? (Rows){rows.at, rows.token, 0} : rows;
}

/* Copies back what did not go in place. */
static void hand_out(const Strip *s, const Rows *rows, const View *view, const float *copy)
{
    if (rows->at != copy)
        return;
    if (s->p->k == 1) {
        store_rows(copy, s->heads, s->lanes, view, s->b, s->t, s->first, s->tokens);
        return;
    }
    long heads = rows->head ? s->heads : 1, first = rows->head ? s->first : s->number;
    for (long i = 0; i < s->tokens; i++)
        for (long h = 0; h < heads; h++)
            store_rows(copy + i * rows->token + h * s->keys, s->p->k, s->keys, view, s->b, s->t + i, first + h, 1);
}

static void open_span(Strip *s, long t)
{
    const Forward *p = s->p;
    s->t = t, s->tokens = p->t - t < SPAN ? p->t - t : SPAN;
    s->q = given_keys(s, &p->q, s->copies[Q]);
    s->decay = given_keys(s, &p->log_decay, s->copies[DECAY]);
    s->value = given_heads(s, &p->value, s->copies[VALUE]);
    if (p->key.at)
        s->key = given_keys(s, &p->key, s->copies[KEY]);
}

/* ---- forward ---- */

enum { TIED = 1, KEEPS = 2, READS = 4 };

/* Announces the token after the next one: its row lies on another page, where no hardware prefetcher looks. */
INLINE void expect(const Rows *rows, const float *here) { __builtin_prefetch(here + 2 * rows->token); }

INLINE vec advance(Strip *s, const int does, const float *decay, const float *key, vec value, float *S, long kept)
{
    vec log_alpha = load(decay), alpha = vexp(log_alpha), k = does & TIED ? one_minus_exp(log_alpha) : load(key);
    vec state = load(S) * alpha + k * value;
    if (does & KEEPS) {
        store(s->alpha + kept, alpha);
        if (does & TIED)
            store(s->tied + kept, k);
        S += s->lanes;
    }
    store(S, state);
    return state;
}

INLINE void step_heads(Strip *s, const int does, long t)
{
    float *S = s->states + (does & KEEPS ? t * s->lanes : 0), *o = s->o.at + t * s->o.token;
    const float *decay = s->decay.at + t * s->decay.token, *key = s->key.at + t * s->key.token;
    const float *value = s->value.at + t * s->value.token, *q = s->q.at + t * s->q.token;
    for (long j = 0; j < s->lanes; j += W) {
        vec state = advance(s, does, decay + j, key + j, load(value + j), S + j, t * s->lanes + j);
        if (does & READS)
            store(o + j, load(q + j) * state);
    }
}

/* `count` ≤ W heads from `first` on; a constant where it is W. */
INLINE void step_group(Strip *s, const int does, long t, long first, const long count)
{
    float *S = s->states + (does & KEEPS ? t * s->lanes : 0) + first * s->keys;
    const float *decay = s->decay.at + t * s->decay.token + first * s->decay.head;
    const float *key = s->key.at + t * s->key.token + first * s->key.head;
    const float *value = s->value.at + t * s->value.token + first * s->value.head;
    const float *q = s->q.at + t * s->q.token + first * s->q.head;
    vec sums[W] = {0};
    for (long j = 0; j < s->keys; j += W)
        for (long h = 0; h < count; h++) {
            const float *log_alpha = decay + h * s->decay.head + j;
            long lane = h * s->keys + j;
            expect(&s->decay, log_alpha);
            vec state = advance(s, does, log_alpha, key + h * s->key.head + j, all(value[h * s->value.head]), S + lane,
                                t * s->lanes + first * s->keys + lane);
            if (does & READS)
                sums[h] += load(q + h * s->q.head + j) * state;
        }
    if (does & READS) {
        vec o = totals(sums);
        memcpy(s->o.at + t * s->o.token + first, &o, count * sizeof(float));
    }
}

INLINE void run_span(Strip *s, const int does)
{
    for (long t = 0; t < s->tokens; t++) {
        long h = 0;
        if (s->p->k == 1)
            step_heads(s, does, t);
        else {
            for (; h + W <= s->heads; h += W)
                step_group(s, does, t, h, W);
            if (h < s->heads)
                step_group(s, does, t, h, s->heads - h);
        }
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

static void store_lanes(const float *from, const Strip *s, float *to)
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
            store_lanes(s.states, &s, p->marks + t / SPAN * size);
        open_span(&s, t);
        s.o = wanted_heads(&s, &p->o, s.copies[OUT]);
        if (p->key.at)
            run_span(&s, READS);
        else
            run_span(&s, READS | TIED);
        hand_out(&s, &s.o, &p->o, s.copies[OUT]);
    }
    store_lanes(s.states, &s, p->last);
}

void FOR_ISA(fw_scan_forward)(const Forward *p) { fw_parallel(scan_forward_task, p, p->b * strips(p), p->threads); }

/* ---- backward ---- */

INLINE void step_heads_back(Strip *s, const int tied, long t)
{
    float *d_q = s->d_q.at + t * s->d_q.token, *d_key = s->d_key.at + t * s->d_key.token;
    float *d_value = s->d_value.at + t * s->d_value.token, *d_decay = s->d_decay.at + t * s->d_decay.token;
    const float *q = s->q.at + t * s->q.token, *value = s->value.at + t * s->value.token;
    const float *d_out = s->d_o.at + t * s->d_o.token, *alphas = s->alpha + t * s->lanes;
    const float *key = tied ? s->tied + t * s->lanes : s->key.at + t * s->key.token;
    const float *before = s->states + t * s->lanes, *after = before + s->lanes;
    for (long j = 0; j < s->lanes; j += W) {
        vec d_o = load(d_out + j), alpha = load(alphas + j), G = load(s->G + j) + load(q + j) * d_o;
        vec dk = load(value + j) * G, through = alpha * G, decay = load(before + j) * through;
        store(d_q + j, d_o * load(after + j));
        store(d_value + j, load(key + j) * G);
        store(d_decay + j, tied ? decay - alpha * dk : decay);
        store(s->G + j, through);
        if (!tied)
            store(d_key + j, dk);
    }
}

INLINE void step_group_back(Strip *s, const int tied, const int shared_q, const int shared_key, long t, long first,
                            const long count)
{
    long row = t * s->lanes + first * s->keys;
    const float *q = s->q.at + t * s->q.token + first * s->q.head;
    const float *key = tied ? s->tied + row : s->key.at + t * s->key.token + first * s->key.head;
    long key_head = tied ? s->keys : s->key.head;
    float *d_q = s->d_q.at + t * s->d_q.token + first * s->d_q.head;
    float *d_key = s->d_key.at + t * s->d_key.token + first * s->d_key.head;
    float *d_decay = s->d_decay.at + t * s->d_decay.token + first * s->d_decay.head;
    const float *value = s->value.at + t * s->value.token + first * s->value.head;
    const float *d_out = s->d_o.at + t * s->d_o.token + first * s->d_o.head;
    float *G = s->G + first * s->keys;
    vec sums[W] = {0};
    for (long j = 0; j < s->keys; j += W) {
        vec q_sum = all(0), key_sum = all(0);
        for (long h = 0; h < count; h++) {
            long lane = h * s->keys + j;
            vec d_o = all(d_out[h * s->d_o.head]), alpha = load(s->alpha + row + lane);
            vec g = load(G + lane) + load(q + h * s->q.head + j) * d_o, through = alpha * g;
            vec dq = d_o * load(s->states + row + s->lanes + lane), dk = all(value[h * s->value.head]) * g;
            vec decay = load(s->states + row + lane) * through;
            sums[h] += load(key + h * key_head + j) * g;
            store(G + lane, through);
            store(d_decay + h * s->d_decay.head + j, tied ? decay - alpha * dk : decay);
            if (shared_q)
                q_sum += dq;
            else
                store(d_q + h * s->d_q.head + j, dq);
            if (shared_key)
                key_sum += dk;
            else if (!tied)
                store(d_key + h * s->d_key.head + j, dk);
        }
        if (shared_q)
            store(d_q + j, first ? load(d_q + j) + q_sum : q_sum);
        if (shared_key)
            store(d_key + j, first ? load(d_key + j) + key_sum : key_sum);
    }
    vec d_value = totals(sums);
    memcpy(s->d_value.at + t * s->d_value.token + first, &d_value, count * sizeof(float));
}

INLINE void run_span_back(Strip *s, const int tied, const int shared_q, const int shared_key)
{
    for (long t = s->tokens - 1; t >= 0; t--) {
        long h = 0;
        if (s->p->k == 1)
            step_heads_back(s, tied, t);
        else {
            for (; h + W <= s->heads; h += W)
                step_group_back(s, tied, shared_q, shared_key, t, h, W);
            if (h < s->heads)
                step_group_back(s, tied, shared_q, shared_key, t, h, s->heads - h);
        }
    }
}

static void open_span_back(Strip *s, const Backward *back)
{
    const Forward *p = s->p;
    s->d_o = given_heads(s, &back->d_o, s->copies[D_OUT]);
    s->d_q = wanted_keys(s, &back->d_q, shared(s, &p->q), s->copies[D_Q]);
    s->d_decay = wanted_keys(s, &back->d_log_decay, 0, s->copies[D_DECAY]);
    s->d_value = wanted_heads(s, &back->d_value, s->copies[D_VALUE]);
    if (p->key.at)
        s->d_key = wanted_keys(s, &back->d_key, shared(s, &p->key), s->copies[D_KEY]);
}

static void hand_out_all(const Strip *s, const Backward *back)
{
    hand_out(s, &s->d_q, &back->d_q, s->copies[D_Q]);
    hand_out(s, &s->d_decay, &back->d_log_decay, s->copies[D_DECAY]);
    hand_out(s, &s->d_value, &back->d_value, s->copies[D_VALUE]);
    if (s->p->key.at)
        hand_out(s, &s->d_key, &back->d_key, s->copies[D_KEY]);
}

static void span_back(Strip *s, const Backward *back, long t)
{
    const Forward *p = s->p;
    load_lanes(s->states, s, p->marks + t / SPAN * p->b * p->h * p->k);
    open_span(s, t);
    open_span_back(s, back);
    int shared_q = shared(s, &p->q), shared_key = shared(s, &p->key);
    if (!p->key.at) {
        run_span(s, KEEPS | TIED);
        shared_q ? run_span_back(s, 1, 1, 0) : run_span_back(s, 1, 0, 0);
    } else {
        run_span(s, KEEPS);
        if (shared_key)
            shared_q ? run_span_back(s, 0, 1, 1) : run_span_back(s, 0, 0, 1);
        else
            shared_q ? run_span_back(s, 0, 1, 0) : run_span_back(s, 0, 0, 0);
    }
    hand_out_all(s, back);
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
    store_lanes(s.G, &s, back->d_start);
}

void FOR_ISA(fw_scan_backward)(const Backward *p)
{
    fw_parallel(scan_backward_task, p, p->forward.b * strips(&p->forward), p->forward.threads);
}
