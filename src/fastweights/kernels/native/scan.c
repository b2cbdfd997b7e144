/* Decay with one value per head: the element-wise scan (k = 1) and the selective scan (Mamba, k =
 * N).
 *
 *     S_t = α_t ⊙ S_{t-1} + k_t v_t ;   o_t = Σ_k q_t ⊙ S_t                         (DSF eq. 19; MetaLA eq. 13-14)
 *     G_t = ᾱ_{t+1} ⊙ G_{t+1} + q̄_t do_t
 *     dq_t = do_t S̄_t    dk_t = v̄_t G_t    dv_t = Σ_k k̄_t ⊙ G_t    d log α_t = ᾱ_t ⊙ S̄_{t-1} ⊙ G_t
 *
 * All numbers are real, or all are complex (number.h). Vectors hold neighbouring heads (k = 1) or
 * the keys of one head. A strip of heads goes through time on its own, SPAN tokens at a time; its
 * streams are read and written where they lie if that is in whole vectors, else through copies. The
 * backward runs a span forwards again from the state marked at its start. Queries or keys (k > 1)
 * shared by all heads (stride 0) stay shared: their gradients come as one sum per strip, in d_q and
 * d_key with the strip's stride in place of the head's. Queries, keys and decays constant in time
 * (stride 0) have gradients that are: sums over all tokens. What has no room for its gradient
 * (NULL) gets none.
 *
 * Where a rate is given (Mamba's decays, of real keys), log α_t = Δ_t rate with one number Δ_t per
 * head, whose −inf empties the state: it lies where log_decay does, and no decay is written out.
 *
 *     dΔ_t = Σ_k d log α_t ⊙ rate_t    drate_t = Δ_t d log α_t, and 0 where Δ_t is −inf
 */
#include <math.h>

#include "number.h"
#include "pool.h"
#include "problem.h"
#include "rows.h"

/* The tokens of a span in one stream; keys, or heads if k = 1, lie side by side. All steps count
 * floats. */
typedef struct {
    float *at;
    long token, head;
    int sums; /* a gradient that is added to, token after token */
} Rows;

typedef struct {
    const Forward *p;
    long b, number, first, heads; /* the strip */
    long keys, lanes;             /* floats of a head (padded unless k = 1) and of the strip */
    long t, tokens;               /* the span */
    int fixed;                    /* decays are constant in time */
    Rows q, key, value, decay, rate, o, d_o, d_q, d_key, d_value, d_decay, d_rate;
    float *copies
        [10]; /* [t lanes] each, for these; a rate takes that of decays, which need none then */
    float *states; /* [t+1 lanes], the first the one before the span; without backward [lanes] */
    float *alpha, *tied; /* α and 1 - α: [lanes] if fixed, else [t lanes], for the backward */
    float *G;            /* [lanes] */
} Strip;

enum { Q, KEY, VALUE, DECAY, OUT, D_OUT, D_Q, D_KEY, D_VALUE, D_DECAY };

/* 0 where memory is out */
static int open_strip(Strip *s, const Forward *p, long task, int backward)
{
    long of = strips(p), heads = heads_per_strip(p), number = task % of,
         tokens = p->t < SPAN ? p->t : SPAN;
    *s = (Strip){.p = p, .b = task / of, .number = number, .first = number * heads};
    s->fixed = p->log_decay.t == 0 && p->t > 1 && !p->rate.at;
    s->heads = p->h - s->first < heads ? p->h - s->first : heads;
    s->keys = (p->k == 1 ? 1 : padded(p->k)) * PARTS;
    s->lanes = p->k == 1 ? padded(s->heads) * PARTS : s->heads * s->keys;
    long alphas = s->fixed ? s->lanes : backward ? tokens * s->lanes : 0;
    Arena arena = {0};
    while (next_pass(&arena)) {
        for (int i = 0; i < (backward ? 10 : 5); i++)
            s->copies[i] = take(&arena, tokens * s->lanes);
        s->states = take(&arena, backward ? (tokens + 1) * s->lanes : s->lanes);
        s->alpha = take(&arena, alphas);
        s->tied = take(&arena, alphas);
        s->G = take(&arena, backward ? s->lanes : 0);
    }
    return arena.at != NULL;
}

/* ---- rows in place or copied ---- */

/* Rows that lie side by side: all heads, or the keys of each */
static long rows_of(const Strip *s)
{
    return s->p->k == 1 ? 1 : s->heads;
}
static long row_width(const Strip *s)
{
    return (s->p->k == 1 ? s->heads : s->p->k) * PARTS;
}

static int shared(const Strip *s, const View *view)
{
    return view->at && s->p->k > 1 && view->h == 0;
}

static int whole(const Strip *s, const View *view)
{
    return s->p->k == 1 ? view->h == PARTS && s->heads % W == 0
                        : view->w == PARTS && s->keys == s->p->k * PARTS;
}

static Rows in_place(const Strip *s, const View *view, long head)
{
    return (Rows){view->at + s->b * view->b + s->t * view->t + head * view->h, view->t, view->h, 0};
}

static void fill(float *to, const Strip *s, const View *view, long tokens)
{
    const float *from = view->at + s->b * view->b + s->t * view->t;
    for (long i = 0; i < tokens; i++)
        for (long j = 0; j < s->lanes; j += STEP)
            store_num(to + i * s->lanes + j, broadcast_num(from + i * view->t));
}

/* One number per head */
static Rows given_heads(const Strip *s, const View *view, float *copy)
{
    if (s->p->k > 1 || whole(s, view))
        return in_place(s, view, s->first);
    long tokens = view->t ? s->tokens : 1;
    View row = {view->at + s->first * view->h, view->b, view->t, 0, view->h};
    if (view->h)
        load_numbers(copy, s->heads, s->lanes, PARTS, &row, s->b, s->t, 0, tokens);
    else
        fill(copy, s, view, tokens);
    return (Rows){copy, view->t ? s->lanes : 0, PARTS, 0};
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
            load_numbers(copy + i * row + h * s->keys, s->p->k, s->keys, PARTS, view, s->b,
                         s->t + i, s->first + h, 1);
    return (Rows){copy, view->t ? row : 0, view->h ? s->keys : 0, 0};
}

static Rows wanted_heads(const Strip *s, const View *view, float *copy)
{
    if (!view->at)
        return (Rows){0};
    return s->p->k > 1 || whole(s, view) ? in_place(s, view, s->first)
                                         : (Rows){copy, s->lanes, PARTS, 0};
}

/* share: one row for all heads of the strip */
static Rows wanted_keys(const Strip *s, const View *view, int share, float *copy)
{
    if (s->p->k == 1 || !view->at)
        return wanted_heads(s, view, copy);
    Rows rows = whole(s, view) ? in_place(s, view, share ? s->number : s->first)
                               : (Rows){copy, share ? s->keys : s->lanes, s->keys, 0};
    return share ? (Rows){rows.at, rows.token, 0, 0} : rows;
}

/* The gradient of a stream that is constant in time */
static Rows wanted_sum(const Strip *s, int share, float *copy)
{
    memset(copy, 0, s->lanes * sizeof(float));
    return (Rows){copy, 0, share ? 0 : s->keys, 1};
}

/* Copies back what did not go in place. */
static void hand_out(const Strip *s, const Rows *rows, const View *view, const float *copy,
                     long tokens)
{
    if (rows->at != copy)
        return;
    if (s->p->k == 1) {
        store_rows(copy, s->heads * PARTS, s->lanes, view, s->b, s->t, s->first, tokens);
        return;
    }
    long heads = rows->head ? s->heads : 1, first = rows->head ? s->first : s->number;
    for (long i = 0; i < tokens; i++)
        for (long h = 0; h < heads; h++)
            store_rows(copy + i * rows->token + h * s->keys, s->p->k * PARTS, s->keys, view, s->b,
                       s->t + i, first + h, 1);
}

static void open_span(Strip *s, long t)
{
    const Forward *p = s->p;
    s->t = t;
    s->tokens = p->t - t < SPAN ? p->t - t : SPAN;
    s->q = given_keys(s, &p->q, s->copies[Q]);
    s->value = given_heads(s, &p->value, s->copies[VALUE]);
    if (p->rate.at) {
        s->decay = given_heads(s, &p->log_decay, NULL);
        s->rate = given_keys(s, &p->rate, s->copies[DECAY]);
    } else if (!s->fixed)
        s->decay = given_keys(s, &p->log_decay, s->copies[DECAY]);
    if (p->key.at)
        s->key = given_keys(s, &p->key, s->copies[KEY]);
}

/* α and 1 - α of all tokens */
static void fix_decays(Strip *s)
{
    long rows = rows_of(s), row = s->lanes / rows;
    num rest;
    s->tokens = 1;
    s->decay = given_keys(s, &s->p->log_decay, s->copies[DECAY]);
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < row; j += STEP) {
            store_split(s->alpha + i * row + j,
                        exponential(load_num(s->decay.at + i * s->decay.head + j), &rest));
            store_split(s->tied + i * row + j, rest);
        }
}

/* ---- forward ---- */

enum { TIED = 1, KEEPS = 2, READS = 4, FIXED = 8, RATED = 16 };

/* Announces the token after the next one: its row lies on another page, where no hardware
 * prefetcher looks. */
INLINE void expect(const Rows *rows, const float *here)
{
    __builtin_prefetch(here + 2 * rows->token);
}

/* What a rate multiplies: Δ, and 0 for −inf, which is added, as −inf times 0 is no number */
INLINE num finite_of(const float *delta)
{
    const float zero[PARTS] = {0};
    return broadcast_num(*delta == -INFINITY ? zero : delta);
}

INLINE num log_alpha(const float *delta, const float *rate)
{
    const float reset[PARTS] = {*delta == -INFINITY ? -INFINITY : 0};
    return plus(times(finite_of(delta), load_num(rate)), broadcast_num(reset));
}

/* The state of `lane` after token t */
INLINE num advance(Strip *s, const int does, num decay, const float *key, num value, long t,
                   long lane)
{
    float *S = s->states + lane + (does & KEEPS ? t * s->lanes : 0);
    num alpha, rest;
    if (does & FIXED) {
        alpha = load_split(s->alpha + lane);
        rest = does & TIED ? load_split(s->tied + lane) : alpha;
    } else
        alpha = exponential(decay, &rest);
    num state = plus(times(load_split(S), alpha), times(does & TIED ? rest : load_num(key), value));
    if (does & KEEPS) {
        if (!(does & FIXED))
            store_split(s->alpha + t * s->lanes + lane, alpha);
        if (does & TIED && !(does & FIXED))
            store_split(s->tied + t * s->lanes + lane, rest);
        S += s->lanes;
    }
    store_split(S, state);
    return state;
}

INLINE void step_heads(Strip *s, const int does, long t)
{
    float *o = s->o.at + t * s->o.token;
    const float *decay = s->decay.at + t * s->decay.token, *key = s->key.at + t * s->key.token;
    const float *value = s->value.at + t * s->value.token, *q = s->q.at + t * s->q.token;
    for (long j = 0; j < s->lanes; j += STEP) {
        num state = advance(s, does, load_num(decay + j), key + j, load_num(value + j), t, j);
        if (does & READS)
            store_num(o + j, times(load_num(q + j), state));
    }
}

/* The row of heads from `first` on, at a token: in variables, which no write to floats is taken to
 * alter */
typedef struct {
    float *at;
    long head;
    int sums;
} Row;

INLINE Row row(const Rows *rows, long t, long first)
{
    float *at = rows->at ? rows->at + t * rows->token + first * rows->head : NULL;
    return (Row){at, rows->head, rows->sums};
}

/* Adds to the sum of a head, from the first of its keys on. */
INLINE void add(num *sum, num x, long j)
{
    *sum = j ? plus(*sum, x) : x;
}

/* A number per head, x[i] summed over its lanes for the i-th from `first` on */
INLINE void put_totals(const Rows *to, long t, long first, num x[W], const long count)
{
    float found[STEP];
    store_num(found, totals_of(x));
    memcpy(to->at + t * to->token + first * PARTS, found, count * PARTS * sizeof(float));
}

/* `count` ≤ W heads from `first` on; a constant where it is W. */
INLINE void step_group(Strip *s, const int does, long t, long first, const long count)
{
    const Row decay = row(&s->decay, t, first), rate = row(&s->rate, t, first),
              q = row(&s->q, t, first);
    const Row key = row(&s->key, t, first), value = row(&s->value, t, first);
    const long keys = s->keys;
    num sums[W];
    for (long h = count; h < W; h++)
        sums[h] = (num){0};
    for (long j = 0; j < keys; j += STEP)
        for (long h = 0; h < count; h++) {
            const float *own_decay = decay.at + h * decay.head + (does & RATED ? 0 : j);
            if (!(does & (FIXED | RATED)))
                expect(&s->decay, own_decay);
            num alpha = does & RATED ? log_alpha(own_decay, rate.at + h * rate.head + j)
                                     : load_num(own_decay);
            num state =
                advance(s, does, alpha, key.at + h * key.head + j,
                        broadcast_num(value.at + h * value.head), t, (first + h) * keys + j);
            if (does & READS)
                add(&sums[h], times(load_num(q.at + h * q.head + j), state), j);
        }
    if (does & READS)
        put_totals(&s->o, t, first, sums, count);
}

INLINE void run_tokens(Strip *s, const int does)
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

/* Of real numbers only */
INLINE int rated(const Strip *s)
{
    return PARTS == 1 && s->p->rate.at;
}

INLINE void run_span(Strip *s, const int does)
{
    if (rated(s))
        run_tokens(s, does | RATED);
    else if (s->p->key.at) {
        if (s->fixed)
            run_tokens(s, does | FIXED);
        else
            run_tokens(s, does);
    } else {
        if (s->fixed)
            run_tokens(s, does | TIED | FIXED);
        else
            run_tokens(s, does | TIED);
    }
}

/* The strip's part of a state [b h k 1] in memory ↔ its lanes */
/* Where the heads of the strip lie in [b h k], and in states that may have pages */
static float *in_batch(const Strip *s, float *states)
{
    return states + (s->b * s->p->h + s->first) * s->p->k * PARTS;
}

static float *in_pages(const Strip *s, float *states)
{
    long head = s->p->k * PARTS;
    return (float *)of_sequence(&s->p->pages, states, s->b, s->p->h * head * sizeof(float)) +
           s->first * head;
}

static void load_lanes(float *to, const Strip *s, const float *from)
{
    long rows = rows_of(s), row = s->lanes / rows, width = row_width(s);
    memset(to, 0, s->lanes * sizeof(float));
    for (long i = 0; i < rows; i++)
        memcpy(to + i * row, from + i * width, width * sizeof(float));
    for (long j = 0; j < s->lanes; j += STEP)
        store_split(to + j, load_num(to + j));
}

static void store_lanes(const float *from, const Strip *s, float *to)
{
    long rows = rows_of(s), row = s->lanes / rows, width = row_width(s);
    float numbers[STEP];
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < width; j += STEP) {
            store_num(numbers, load_split(from + i * row + j));
            memcpy(to + i * width + j, numbers,
                   (width - j < STEP ? width - j : STEP) * sizeof(float));
        }
}

static int scan_forward_task(const void *problem, long task)
{
    const Forward *p = problem;
    long size = p->b * p->h * p->k * PARTS;
    Strip s;
    if (!open_strip(&s, p, task, 0))
        return OUT_OF_MEMORY;
    if (s.fixed)
        fix_decays(&s);
    load_lanes(s.states, &s, in_pages(&s, p->start));
    for (long t = 0; t < p->t; t += SPAN) {
        if (p->marks)
            store_lanes(s.states, &s, in_batch(&s, p->marks + t / SPAN * size));
        open_span(&s, t);
        s.o = wanted_heads(&s, &p->o, s.copies[OUT]);
        run_span(&s, READS);
        hand_out(&s, &s.o, &p->o, s.copies[OUT], s.tokens);
    }
    store_lanes(s.states, &s, in_pages(&s, p->last));
    return DONE;
}

int FOR_ISA(fw_scan_forward)(const Forward *p)
{
    return fw_parallel(scan_forward_task, p, p->b * strips(p), p->threads);
}

/* ---- backward ---- */

INLINE void give(const Row *to, long offset, num x)
{
    if (to->at)
        store_num(to->at + offset, to->sums ? plus(load_num(to->at + offset), x) : x);
}

INLINE void step_heads_back(Strip *s, const int tied, long t)
{
    const Row d_q = row(&s->d_q, t, 0), d_key = row(&s->d_key, t, 0),
              d_value = row(&s->d_value, t, 0);
    const Row d_decay = row(&s->d_decay, t, 0);
    const float *q = s->q.at + t * s->q.token, *value = s->value.at + t * s->value.token;
    const float *d_out = s->d_o.at + t * s->d_o.token, *key = s->key.at + t * s->key.token;
    const long known = s->fixed ? 0 : t * s->lanes;
    const float *before = s->states + t * s->lanes, *after = before + s->lanes;
    for (long j = 0; j < s->lanes; j += STEP) {
        num d_o = load_num(d_out + j), alpha = conjugate(load_split(s->alpha + known + j));
        num G = plus(load_split(s->G + j), times(conjugate(load_num(q + j)), d_o)),
            through = times(alpha, G);
        num dk = times(conjugate(load_num(value + j)), G),
            decay = times(conjugate(load_split(before + j)), through);
        give(&d_q, j, times(d_o, conjugate(load_split(after + j))));
        give(&d_value, j,
             times(conjugate(tied ? load_split(s->tied + known + j) : load_num(key + j)), G));
        give(&d_decay, j, tied ? minus(decay, times(alpha, dk)) : decay);
        give(&d_key, j, dk);
        store_split(s->G + j, through);
    }
}

INLINE void step_group_back(Strip *s, const int does, const int shared_q, const int shared_key,
                            long t, long first, const long count)
{
    const Row d_q = row(&s->d_q, t, first), d_key = row(&s->d_key, t, first),
              d_decay = row(&s->d_decay, t, first);
    const Row d_rate = row(&s->d_rate, t, first), d_out = row(&s->d_o, t, first);
    const Row decay = row(&s->decay, t, first), rate = row(&s->rate, t, first),
              q = row(&s->q, t, first);
    const Row key = row(&s->key, t, first), value = row(&s->value, t, first);
    const long keys = s->keys, known = s->fixed ? 0 : t * s->lanes;
    const float *before = s->states + t * s->lanes, *after = before + s->lanes;
    const float *alphas = s->alpha + known, *tied = s->tied + known;
    float *Gs = s->G;
    num sums[W], decay_sums[W];
    for (long h = count; h < W; h++)
        sums[h] = decay_sums[h] = (num){0};
    for (long j = 0; j < keys; j += STEP) {
        num q_sum = {0}, key_sum = {0};
        for (long h = 0; h < count; h++) {
            long lane = (first + h) * keys + j;
            num d_o = broadcast_num(d_out.at + h * d_out.head),
                alpha = conjugate(load_split(alphas + lane));
            num G = plus(load_split(Gs + lane),
                         times(conjugate(load_num(q.at + h * q.head + j)), d_o)),
                through = times(alpha, G);
            num dq = times(d_o, conjugate(load_split(after + lane)));
            num dk = times(conjugate(broadcast_num(value.at + h * value.head)), G);
            num d_log_alpha = times(conjugate(load_split(before + lane)), through);
            num k = does & TIED ? load_split(tied + lane) : load_num(key.at + h * key.head + j);
            add(&sums[h], times(conjugate(k), G), j);
            store_split(Gs + lane, through);
            if (does & RATED) {
                add(&decay_sums[h], times(d_log_alpha, load_num(rate.at + h * rate.head + j)), j);
                give(&d_rate, h * d_rate.head + j,
                     times(d_log_alpha, finite_of(decay.at + h * decay.head)));
            } else
                give(&d_decay, h * d_decay.head + j,
                     does & TIED ? minus(d_log_alpha, times(alpha, dk)) : d_log_alpha);
            if (shared_q)
                q_sum = plus(q_sum, dq);
            else
                give(&d_q, h * d_q.head + j, dq);
            if (shared_key)
                key_sum = plus(key_sum, dk);
            else
                give(&d_key, h * d_key.head + j, dk);
        }
        if (shared_q)
            give(&(Row){d_q.at, 0, d_q.sums | (first > 0)}, j, q_sum);
        if (shared_key)
            give(&(Row){d_key.at, 0, d_key.sums | (first > 0)}, j, key_sum);
    }
    if (s->d_value.at)
        put_totals(&s->d_value, t, first, sums, count);
    if (does & RATED && s->d_decay.at)
        put_totals(&s->d_decay, t, first, decay_sums, count);
}

INLINE void run_tokens_back(Strip *s, const int does, const int shared_q, const int shared_key)
{
    for (long t = s->tokens - 1; t >= 0; t--) {
        long h = 0;
        if (s->p->k == 1)
            step_heads_back(s, does & TIED, t);
        else {
            for (; h + W <= s->heads; h += W)
                step_group_back(s, does, shared_q, shared_key, t, h, W);
            if (h < s->heads)
                step_group_back(s, does, shared_q, shared_key, t, h, s->heads - h);
        }
    }
}

INLINE void run_keys_back(Strip *s, const int does)
{
    int shared_q = shared(s, &s->p->q), shared_key = shared(s, &s->p->key);
    if (shared_key) {
        if (shared_q)
            run_tokens_back(s, does, 1, 1);
        else
            run_tokens_back(s, does, 0, 1);
    } else {
        if (shared_q)
            run_tokens_back(s, does, 1, 0);
        else
            run_tokens_back(s, does, 0, 0);
    }
}

static void run_span_back(Strip *s)
{
    if (rated(s))
        run_keys_back(s, RATED);
    else if (s->p->key.at)
        run_keys_back(s, 0);
    else {
        if (shared(s, &s->p->q))
            run_tokens_back(s, TIED, 1, 0);
        else
            run_tokens_back(s, TIED, 0, 0);
    }
}

/* The three streams that may be constant in time, the last of decays or their rate: the room for
 * their gradients, and where it is handed out to. */
typedef struct {
    Rows *rows;
    const View *stream, *gradient;
    float *copy;
    int sums, share;
} Result;

enum { RESULTS = 3 };

static void list_results(Result *list, Strip *s, const Backward *back)
{
    const Forward *p = s->p;
    list[0] = (Result){&s->d_q, &p->q, &back->d_q, s->copies[D_Q], 0, shared(s, &p->q)};
    list[1] = (Result){&s->d_key, &p->key, &back->d_key, s->copies[D_KEY], 0, shared(s, &p->key)};
    list[2] =
        p->rate.at
            ? (Result){&s->d_rate, &p->rate, &back->d_rate, s->copies[D_DECAY], 0, 0}
            : (Result){&s->d_decay, &p->log_decay, &back->d_log_decay, s->copies[D_DECAY], 0, 0};
    for (int i = 0; i < RESULTS; i++)
        list[i].sums = list[i].stream->t == 0 && p->t > 1;
}

static void open_sums(Result *list, const Strip *s)
{
    for (int i = 0; i < RESULTS; i++)
        *list[i].rows = list[i].sums && list[i].gradient->at
                            ? wanted_sum(s, list[i].share, list[i].copy)
                            : (Rows){0};
}

static void span_back(Strip *s, const Backward *back, Result *list, long t)
{
    const Forward *p = s->p;
    load_lanes(s->states, s, in_batch(s, p->marks + t / SPAN * p->b * p->h * p->k * PARTS));
    open_span(s, t);
    s->d_o = given_heads(s, &back->d_o, s->copies[D_OUT]);
    s->d_value = wanted_heads(s, &back->d_value, s->copies[D_VALUE]);
    if (p->rate.at)
        s->d_decay = wanted_heads(s, &back->d_log_decay, NULL);
    for (int i = 0; i < RESULTS; i++)
        if (!list[i].sums)
            *list[i].rows = wanted_keys(s, list[i].gradient, list[i].share, list[i].copy);
    run_span(s, KEEPS);
    run_span_back(s);
    hand_out(s, &s->d_value, &back->d_value, s->copies[D_VALUE], s->tokens);
    for (int i = 0; i < RESULTS; i++)
        if (!list[i].sums)
            hand_out(s, list[i].rows, list[i].gradient, list[i].copy, s->tokens);
}

static int scan_backward_task(const void *problem, long task)
{
    const Backward *back = problem;
    const Forward *p = &back->forward;
    Strip s;
    Result list[RESULTS];
    if (!open_strip(&s, p, task, 1))
        return OUT_OF_MEMORY;
    if (s.fixed)
        fix_decays(&s);
    list_results(list, &s, back);
    open_sums(list, &s);
    load_lanes(s.G, &s, in_batch(&s, back->d_last));
    for (long i = (p->t + SPAN - 1) / SPAN - 1; i >= 0; i--)
        span_back(&s, back, list, i * SPAN);
    s.t = 0;
    for (int i = 0; i < RESULTS; i++)
        if (list[i].sums)
            hand_out(&s, list[i].rows, list[i].gradient, list[i].copy, 1);
    store_lanes(s.G, &s, in_batch(&s, back->d_start));
    return DONE;
}

int FOR_ISA(fw_scan_backward)(const Backward *p)
{
    return fw_parallel(scan_backward_task, p, p->forward.b * strips(&p->forward),
                       p->forward.threads);
}
