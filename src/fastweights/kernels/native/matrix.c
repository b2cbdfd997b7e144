/* Decay, Delta and DPLR with matrix states, forward and backward.
 *
 *     S_t = diag(α_t) S_{t-1} + k_tᵀ u_t ;   o_t = q_t S_t                                 (MetaLA eq. 13-14)
 *     u_t = v_t,   or   β_t e_t with e_t = v_t - k_t diag(α_t) S_{t-1}: the delta rule     (MesaNet Table 3)
 *     S_t = diag(α_t) S_{t-1} + w_tᵀ v_t - b_tᵀ r_t,   r_t = a_t diag(α_t) S_{t-1}, or a_t S_{t-1} (before): DPLR;
 *     where b = w, it is the delta rule with a for the k in e and β = 1
 *
 * With S̃_t = diag(α_t) S_{t-1}, and G_t the gradient of S_t, G̃_t of S̃_t, running backwards in
 * time:
 *
 *     G_t = diag(α_{t+1}) G̃_{t+1} + q_tᵀ do_t         y_t = β_t k_t G_t  (delta; else 0)       G̃_t = G_t - k_tᵀ y_t
 *     dq_t = do_t S_tᵀ       dk_t = u_t G_tᵀ - y_t S̃_tᵀ       dv_t = k_t G_t, or y_t       dβ_t = e_t · k_t G_t
 *     d log α_t = Σ_v S̃_t ⊙ G̃_t
 *
 * For DPLR y_t = b_t G_t (b = w: w_t G_t), G̃_t = G_t - a_tᵀ y_t, da_t = -y_t S̃_tᵀ and db_t = -r_t
 * G_tᵀ; what reads before the decay has S_{t-1} for S̃_t in da, and a_tᵀ y_t leaves G behind the
 * decay, G_t for G̃_t in d log α.
 *
 * Every line is a sweep (sweep.h, erase.h) over a state S, G with the values on its lanes, or over
 * its transpose with the keys on them. The last line needs S and G at once; where decays are gentle
 * its telescoped form
 *     d log α_t = d log α_{t+1} + q_t ⊙ dq_t - k_t ⊙ (u_t G_tᵀ) - k_t ⊙ (y_t S̃_tᵀ)
 * from S_t ⊙ G_t at the chunk's end does not (what reads before the decay belongs to the token
 * before). Kept for the backward: S at block starts, and e, or r where b is not w.
 */
#include "chunk.h"
#include "erase.h"
#include "pool.h"
#include "problem.h"
#include "sweep.h"
#include "token.h"

/* ---- forward: a task is some neighbouring heads, or some lanes of one where there are fewer heads than threads.
 * Heads take turns chunk by chunk, because their rows are neighbours in memory. ---- */

#define GROUP 8

typedef struct {
    long b, h, heads;  /* from head h on */
    long first, lanes; /* of every head */
} Share;

static long shares_per_head(const Forward *p)
{
    long heads = p->b * p->h, groups = padded(p->v) / W;
    long wanted = heads ? (p->threads + heads - 1) / heads : 0;
    return wanted < groups ? wanted : groups;
}

/* Two tasks per thread at least, if there are heads enough. */
static long heads_per_task(const Forward *p)
{
    long fair = p->b * p->h / (2 * p->threads), most = p->h < GROUP ? p->h : GROUP;
    return p->threads == 1 ? most : fair < 1 ? 1 : fair < most ? fair : most;
}

static long groups_per_batch(const Forward *p)
{
    return (p->h + heads_per_task(p) - 1) / heads_per_task(p);
}

static Share share_of(const Forward *p, long task)
{
    long shares = shares_per_head(p), group = task / shares, part = task % shares,
         lanes = padded(p->v) / W;
    long first = lanes * part / shares * W, end = lanes * (part + 1) / shares * W;
    long h = group % groups_per_batch(p) * heads_per_task(p);
    long heads = p->h - h < heads_per_task(p) ? p->h - h : heads_per_task(p);
    return (Share){group / groups_per_batch(p), h, heads, first, end - first};
}

/* The states of one token are read again after those of all other heads and layers: if they are
 * large, from memory. */
static int streams(const Forward *p)
{
    int aligned = p->v % W == 0 && p->k % ROWS == 0 &&
                  ((uintptr_t)p->last | p->pages.step) % sizeof(vec) == 0;
    return aligned && p->b * p->h * p->k * p->v * sizeof(float) >= STREAMED;
}

static void forward_token(const Sweep *s, const Forward *p, const Chunk *c)
{
    int does = (p->remove.at ? REMOVE : erases(p) ? PEEK : 0) | (streams(p) ? STREAM : 0);
    switch (does) {
        CASE(0, token_of(s, KNOWN, c->exact, NULL))
        CASE(STREAM, token_of(s, KNOWN, c->exact, NULL))
        CASE(PEEK, token_of(s, KNOWN, c->exact, c->beta))
        CASE(PEEK | STREAM, token_of(s, KNOWN, c->exact, c->beta))
        CASE(REMOVE, token_of(s, KNOWN, c->exact, NULL))
        CASE(REMOVE | STREAM, token_of(s, KNOWN, c->exact, NULL))
    }
}

static void forward_chunk(const Chunk *c, const Forward *p, Sweep *s, long first)
{
    s->tokens = c->tokens;
    s->row_step = c->keys;
    s->lane_step = c->values;
    s->write_row = c->key;
    s->read_row = c->q;
    s->write_lane = c->value + first;
    s->alpha = c->alpha;
    s->enter = s->leave = c->scaled ? c->middle : NULL;
    s->peek_row = c->peek;
    s->erase_row = c->remove;
    if (p->t == 1) {
        forward_token(s, p, c);
        return;
    }
    if (erases(p)) {
        switch ((c->exact ? DECAY_ROWS : 0) | (p->remove.at ? REMOVE : 0)) {
            CASE(0, write_tokens(s, KNOWN, c->beta))
            CASE(DECAY_ROWS, write_tokens(s, KNOWN, c->beta))
            CASE(REMOVE, write_tokens(s, KNOWN, c->beta))
            CASE(DECAY_ROWS | REMOVE, write_tokens(s, KNOWN, c->beta))
        }
        return;
    }
    for (long t = 0; t < c->tokens; t++)
        memset(s->read_sum + t * c->values, 0, s->lanes * sizeof(float));
    if (c->exact)
        sweep(s, DECAY_ROWS | READ | SCALE_ROWS);
    else
        sweep(s, READ | SCALE_ROWS);
}

/* The share's columns of a [k v] matrix */
static void copy_columns(float *to, long to_step, const float *from, long from_step,
                         const Forward *p, const Share *of)
{
    long width = p->v - of->first < of->lanes ? p->v - of->first : of->lanes;
    for (long i = 0; i < p->k; i++)
        memcpy(to + i * to_step + of->first, from + i * from_step + of->first,
               width * sizeof(float));
}

static void store_columns(const float *from, const View *to, const Forward *p, const Share *of,
                          long t, long h, long n)
{
    View columns = *to;
    columns.at = (float *)((char *)to->at + of->first * size_of(to));
    store_rows(from + of->first, p->v - of->first < of->lanes ? p->v - of->first : of->lanes,
               padded(p->v), &columns, of->b, t, h, n);
}

typedef struct {
    const Forward *p;
    Share of;
    Chunk c;
    float *o, *e;
    float *states; /* [heads k v], padded; NULL if the states of the problem are whole vectors */
} Turn;

/* 0 where memory is out */
static int take_turn(Turn *turn, const Forward *p, long task)
{
    long rows = whole_rows(p->k), values = padded(p->v);
    int whole = rows == p->k && values == p->v;
    *turn = (Turn){.p = p, .of = share_of(p, task)};
    Arena arena = {0};
    while (next_pass(&arena)) {
        take_chunk(&arena, &turn->c, p, 0);
        turn->o = take(&arena, CHUNK * values);
        turn->e = take(&arena, CHUNK * values);
        turn->states = whole ? NULL : take(&arena, turn->of.heads * rows * values);
    }
    return arena.at != NULL;
}

/* One chunk of one head, the i-th of its task */
static void forward_turn(Turn *turn, long t, long i)
{
    const Forward *p = turn->p;
    const Share *of = &turn->of;
    Chunk *c = &turn->c;
    long h = of->h + i, head = of->b * p->h + h, size = p->k * p->v, rows = whole_rows(p->k),
         values = padded(p->v);
    View missing = {p->missing, p->h * p->t * p->v, p->v, p->t * p->v, 1};
    long sequence = p->h * size * sizeof(float);
    float *last = (float *)of_sequence(&p->pages, p->last, of->b, sequence) + h * size;
    float *state = turn->states ? turn->states + i * rows * values : last;
    const float *start = (float *)of_sequence(&p->pages, p->start, of->b, sequence) + h * size,
                *from = t ? state : start;
    if (t == 0 && turn->states) {
        load_state(state, rows, values, start, p->k, p->v);
        from = state;
    }
    if (p->marks && t % BLOCK == 0)
        copy_columns(p->marks + (t / BLOCK * p->b * p->h + head) * size, p->v, from, values, p, of);
    load_chunk(c, p, of->b, t, h);
    expect_rows(&p->o, p->v, of->b, t, h, c->tokens, 1);
    if (i + 1 < of->heads)
        expect_chunk(p, of->b, t, h + 1);
    else
        expect_chunk(p, of->b, t + CHUNK, of->h);
    Sweep s = {.rows = rows,
               .lanes = of->lanes,
               .read_sum = turn->o + of->first,
               .peek_sum = turn->e + of->first,
               .from = from + of->first,
               .to = state + of->first,
               .from_step = values,
               .to_step = values};
    forward_chunk(c, p, &s, of->first);
    store_columns(turn->o, &p->o, p, of, t, h, c->tokens);
    if (p->missing)
        store_columns(turn->e, &missing, p, of, t, h, c->tokens);
    if (turn->states && t + c->tokens == p->t)
        copy_columns(last, p->v, state, values, p, of);
}

static int forward_task(const void *problem, long task)
{
    const Forward *p = problem;
    Turn turn;
    if (!take_turn(&turn, p, task))
        return OUT_OF_MEMORY;
    for (long t = 0; t < p->t; t += CHUNK)
        for (long i = 0; i < turn.of.heads; i++)
            forward_turn(&turn, t, i);
    fence_streams();
    return DONE;
}

int FOR_ISA(fw_forward)(const Forward *p)
{
    long shares = p->h ? p->b * groups_per_batch(p) * shares_per_head(p) : 0;
    return fw_parallel(forward_task, p, shares, p->threads);
}

/* ---- backward: a task is a head; for Decay, dv and the rest are two tasks where heads are few ---- */

enum { VALUES = 1, KEYS = 2 };

typedef struct {
    const Backward *p;
    long b, h;
    Chunk chunks[BLOCK / CHUNK];
    float *G;      /* [k v], the gradient of the state */
    float *turned; /* [v k], the same, transposed */
    float *states; /* [n+1 v k], transposed states at chunk starts */
    float *found;  /* [t k|v], what a sweep reads */
    float *peeked; /* [t k|v], what it reads besides */
    float *behind; /* [k], d log α of the token behind a chunk */
} Work;

static int parts(const Forward *p)
{
    return !erases(p) && p->b * p->h < 4 * p->threads && p->threads > 1 ? 2 : 1;
}

static int take_work(Work *work, const Forward *p)
{
    long keys = padded(p->k), values = padded(p->v), krows = whole_rows(p->k),
         vrows = whole_rows(p->v);
    Arena arena = {0};
    while (next_pass(&arena)) {
        for (int i = 0; i < BLOCK / CHUNK; i++)
            take_chunk(&arena, &work->chunks[i], p, 1);
        work->G = take(&arena, krows * values);
        work->turned = take(&arena, vrows * keys);
        work->states = take(&arena, (BLOCK / CHUNK + 1) * vrows * keys);
        work->found = take(&arena, CHUNK * (keys > values ? keys : values));
        work->peeked = take(&arena, CHUNK * (keys > values ? keys : values));
        work->behind = take(&arena, keys);
    }
    return arena.at != NULL;
}

/* y_t, and for DPLR with keys apart w_t G_t */
static void unwrite_chunk(const Sweep *s, const Forward *p, Chunk *c)
{
    long last = c->tokens - 1;
    float *y = c->y + last * c->values;
    const float *beta = c->beta + last;
    int does = (c->exact ? DECAY_ROWS : 0) | (c->exact && p->before ? BEFORE : 0) |
               (p->remove.at ? REMOVE : 0);
    switch (does) {
        CASE(0, unwrite_tokens(s, KNOWN, beta, y))
        CASE(DECAY_ROWS, unwrite_tokens(s, KNOWN, beta, y))
        CASE(DECAY_ROWS | BEFORE, unwrite_tokens(s, KNOWN, beta, y))
        CASE(REMOVE, unwrite_tokens(s, KNOWN, beta, y))
        CASE(DECAY_ROWS | REMOVE, unwrite_tokens(s, KNOWN, beta, y))
        CASE(DECAY_ROWS | REMOVE | BEFORE, unwrite_tokens(s, KNOWN, beta, y))
    }
}

/* dβ_t = e_t · k_t G_t, of the e that c->value holds; from here on it holds u = β e. */
static void strengths_back(Work *w, Chunk *c, long t)
{
    long values = c->values;
    for (long i = 0; i < c->tokens; i++) {
        float *e = c->value + i * values;
        vec sum = broadcast(0);
        for (long j = 0; j < values; j += W) {
            sum += load(e + j) * load(w->found + i * values + j);
            store(e + j, c->beta[i] * load(e + j));
        }
        float d_beta = total(sum);
        store_rows(&d_beta, 1, 1, &w->p->d_beta, w->b, t + i, w->h, 1);
    }
}

/* dv_t = k_t G_t; for the delta rule y_t, which is dv_t, and dβ_t */
static void values_back(Work *w, Chunk *c, long t)
{
    const Forward *p = &w->p->forward;
    long last = c->tokens - 1, keys = c->keys, values = c->values;
    Sweep s = {.tokens = c->tokens,
               .rows = whole_rows(p->k),
               .lanes = values,
               .row_step = -keys,
               .lane_step = -values,
               .write_row = c->q + last * keys,
               .write_lane = c->d_o + last * values,
               .alpha = c->alpha + (last + 1) * keys,
               .from = w->G,
               .to = w->G,
               .from_step = values,
               .to_step = values};
    expect_rows(&w->p->d_value, p->v, w->b, t, w->h, c->tokens, 1);
    if (c->scaled)
        s.enter = s.leave = c->middle;
    if (c->exact)
        s.leave = c->alpha;
    if (!erases(p)) {
        memset(w->found, 0, c->tokens * values * sizeof(float));
        s.read_row = c->key + last * keys;
        s.read_sum = w->found + last * values;
        if (c->exact)
            sweep(&s, DECAY_ROWS | READ | SCALE_ROWS);
        else
            sweep(&s, READ | SCALE_ROWS);
        store_rows(w->found, p->v, values, &w->p->d_value, w->b, t, w->h, c->tokens);
        return;
    }
    s.peek_row = (p->remove.at ? c->remove : c->key) + last * keys;
    s.read_row = c->key + last * keys;
    s.erase_row = c->erase + last * keys;
    s.peek_sum = w->found + last * values;
    s.read_sum = w->peeked + last * values;
    unwrite_chunk(&s, p, c);
    store_rows(p->remove.at ? w->peeked : c->y, p->v, values, &w->p->d_value, w->b, t, w->h,
               c->tokens);
    if (p->beta.at)
        strengths_back(w, c, t);
}

/* The sweep of S, transposed, over the tokens of a chunk. */
static Sweep states_sweep(const Chunk *c, const Forward *p, const float *from)
{
    Sweep s = {.tokens = c->tokens,
               .rows = whole_rows(p->v),
               .lanes = c->keys,
               .row_step = c->values,
               .lane_step = c->keys,
               .write_row = c->value,
               .write_lane = c->key,
               .remove_row = c->removed,
               .remove_lane = c->remove,
               .alpha = c->alpha,
               .from = from,
               .from_step = c->keys,
               .to_step = c->keys};
    if (c->scaled)
        s.enter = s.leave = c->middle;
    return s;
}

/* The sweep of S that finds o and, where a rule erases, what is erased */
static void read_states(const Sweep *s, const Forward *p, const Chunk *c)
{
    int does = READ | (c->exact ? DECAY_LANES : 0);
    if (erases(p))
        does |= PEEK | (p->remove.at ? REMOVE : 0) | (c->exact && p->before ? BEFORE : 0);
    switch (does) {
        CASE(READ, sweep(s, KNOWN))
        CASE(READ | DECAY_LANES, sweep(s, KNOWN))
        CASE(READ | PEEK, sweep(s, KNOWN))
        CASE(READ | PEEK | DECAY_LANES, sweep(s, KNOWN))
        CASE(READ | PEEK | DECAY_LANES | BEFORE, sweep(s, KNOWN))
        CASE(READ | PEEK | REMOVE, sweep(s, KNOWN))
        CASE(READ | PEEK | REMOVE | DECAY_LANES, sweep(s, KNOWN))
        CASE(READ | PEEK | REMOVE | DECAY_LANES | BEFORE, sweep(s, KNOWN))
    }
}

/* What erasing keys contribute: -y_t S̃_tᵀ to dk_t or da_t, and to the telescoped d log α_t, before
 * the decay to that of the token before. */
static void erasing_back(Work *w, Chunk *c, long t)
{
    const Forward *p = &w->p->forward;
    long count = c->tokens * c->keys, behind = p->before ? c->keys : 0;
    for (long i = 0; i < count; i += W) {
        vec peeked = load(w->peeked + i);
        if (i >= behind)
            store(c->d_decay + i - behind,
                  load(c->d_decay + i - behind) - load(c->erase + i) * peeked);
        if (c->scaled)
            peeked *= load(c->erase_up + i);
        store(w->peeked + i, -peeked);
    }
    if (p->erase.at)
        store_rows(w->peeked, p->k, c->keys, &w->p->d_erase, w->b, t, w->h, c->tokens);
    else
        memcpy(c->d_key, w->peeked, count * sizeof(float));
}

/* dq_t = do_t S_tᵀ, the part -y_t S̃_tᵀ of dk_t, and what both contribute to the telescoped d log
 * α_t */
static void queries_back(Work *w, Chunk *c, long t, const float *from, float *to)
{
    const Forward *p = &w->p->forward;
    long count = c->tokens * c->keys;
    Sweep s = states_sweep(c, p, from);
    expect_rows(&w->p->d_q, p->k, w->b, t, w->h, c->tokens, 1);
    s.to = to;
    s.read_row = c->d_o;
    s.read_sum = w->found;
    s.peek_row = c->y;
    s.peek_sum = w->peeked;
    memset(w->found, 0, count * sizeof(float));
    memset(w->peeked, 0, count * sizeof(float));
    memset(c->d_key, 0, count * sizeof(float));
    read_states(&s, p, c);
    for (long i = 0; i < count; i += W) {
        vec dq = load(w->found + i);
        store(c->d_decay + i, load(c->q + i) * dq);
        store(w->found + i, c->scaled ? dq * load(c->up + i) : dq);
    }
    store_rows(w->found, p->k, c->keys, &w->p->d_q, w->b, t, w->h, c->tokens);
    if (erases(p))
        erasing_back(w, c, t);
}

/* Σ_v S ⊙ G [k], the d log α of a token behind the chunk */
static void meet(float *sum, const float *S, const float *G, long rows, long keys)
{
    for (long j = 0; j < keys; j += W) {
        vec lanes = broadcast(0);
        for (long i = 0; i < rows; i++)
            lanes += load(S + i * keys + j) * load(G + i * keys + j);
        store(sum + j, lanes);
    }
}

/* d log α_t from the chunk's end on; with `removed`, r_t G_tᵀ, for keys apart */
static void telescope(Chunk *c, const float *d_written, const float *removed, const float *behind)
{
    for (long j = 0; j < c->keys; j += W) {
        vec sum = load(behind + j);
        for (long i = (c->tokens - 1) * c->keys + j; i >= 0; i -= c->keys) {
            sum += load(c->d_decay + i) - load(c->key + i) * load(d_written + i);
            if (c->remove)
                sum += load(c->remove + i) * load(removed + i);
            store(c->d_decay + i, sum);
        }
    }
}

/* dk of the streams, into c->d_key; the tied key k = 1 - α hands its own on to d log α. */
static void finish_keys(Work *w, Chunk *c)
{
    int tied = !w->p->forward.key.at;
    for (long i = 0; i < c->tokens * c->keys; i += W) {
        vec dk = load(w->found + i), key = load(c->key + i);
        if (c->scaled) {
            dk *= load(c->down + i);
            key *= load(c->up + i);
        }
        dk += load(c->d_key + i);
        store(c->d_key + i, dk);
        if (tied)
            store(c->d_decay + i,
                  load(c->d_decay + i) - (c->exact ? load(c->alpha + i) : 1.0f - key) * dk);
    }
}

static void store_decays(Work *w, Chunk *c, long t)
{
    const Forward *p = &w->p->forward;
    if (p->decays == 1 && p->k > 1)
        for (long i = 0; i < c->tokens; i++) {
            vec sum = broadcast(0);
            for (long j = 0; j < c->keys; j += W)
                sum += load(c->d_decay + i * c->keys + j);
            c->d_decay[i * c->keys] = total(sum);
        }
    store_rows(c->d_decay, p->decays, c->keys, &w->p->d_log_decay, w->b, t, w->h, c->tokens);
}

enum { EXACT = DECAY_LANES | WEIGH, KEPT = DECAY_LANES | KEEP };

/* The sweep of G that finds u_t G_tᵀ and, where keys are apart, r_t G_tᵀ; exactly, d log α_t as
 * well */
static void read_gradients(Sweep *s, const Sweep *states, const Forward *p, const Chunk *c)
{
    const int before = c->exact && p->before && erases(p);
    int does = READ | (erases(p) ? ERASE : 0) | (p->remove.at ? READ_TOO : 0);
    if (c->exact && before) /* α_t itself behind the token, not α_{t+1} in front of it */
        s->alpha -= c->keys;
    else if (c->exact)
        s->leave = c->alpha;
    if (c->exact)
        does |= EXACT | (before ? BEFORE : 0);
    switch (does) {
        CASE(READ, sweep(s, KNOWN))
        CASE(READ | ERASE, sweep(s, KNOWN))
        CASE(READ | ERASE | READ_TOO, sweep(s, KNOWN))
        CASE(READ | EXACT, sweep_after(s, KNOWN, states, KEPT))
        CASE(READ | ERASE | EXACT, sweep_after(s, KNOWN, states, KEPT))
        CASE(READ | ERASE | EXACT | BEFORE, sweep_after(s, KNOWN, states, KEPT))
        CASE(READ | ERASE | READ_TOO | EXACT, sweep_after(s, KNOWN, states, KEPT | REMOVE))
        CASE(READ | ERASE | READ_TOO | EXACT | BEFORE, sweep_after(s, KNOWN, states, KEPT | REMOVE))
    }
}

/* db_t = -r_t G_tᵀ */
static void store_removing(Work *w, Chunk *c, long t)
{
    for (long i = 0; i < c->tokens * c->keys; i += W) {
        vec read = load(w->peeked + i);
        store(w->peeked + i, c->scaled ? -read * load(c->down + i) : -read);
    }
    store_rows(w->peeked, w->p->forward.k, c->keys, &w->p->d_remove, w->b, t, w->h, c->tokens);
}

/* The part u_t G_tᵀ of dk_t, db_t, and d log α_t */
static void keys_back(Work *w, Chunk *c, long t, const float *before, const float *after)
{
    const Forward *p = &w->p->forward;
    long last = c->tokens - 1, keys = c->keys, values = c->values;
    Sweep states = states_sweep(c, p, before);
    Sweep s = {.tokens = c->tokens,
               .rows = states.rows,
               .lanes = keys,
               .row_step = -values,
               .lane_step = -keys,
               .write_row = c->d_o + last * values,
               .write_lane = c->q + last * keys,
               .read_row = c->value + last * values,
               .read_sum = w->found + last * keys,
               .erase_row = c->y + last * values,
               .erase_lane = c->erase + last * keys,
               .remove_row = c->removed + last * values,
               .peek_sum = w->peeked + last * keys,
               .weigh_sum = c->d_decay + last * keys,
               .alpha = c->alpha + (last + 1) * keys,
               .from = w->turned,
               .to = w->turned,
               .from_step = keys,
               .to_step = keys};
    expect_rows(&w->p->d_key, p->k, w->b, t, w->h, c->tokens, 1);
    memset(w->found, 0, c->tokens * keys * sizeof(float));
    if (c->remove)
        memset(w->peeked, 0, c->tokens * keys * sizeof(float));
    if (c->exact)
        memset(c->d_decay, 0, c->tokens * keys * sizeof(float));
    if (c->scaled) {
        s.enter = s.leave = c->middle;
        meet(w->behind, after, w->turned, states.rows, keys);
    }
    read_gradients(&s, &states, p, c);
    if (c->scaled)
        telescope(c, w->found, w->peeked, w->behind);
    finish_keys(w, c);
    if (c->remove)
        store_removing(w, c, t);
    if (p->key.at)
        store_rows(c->d_key, p->k, keys, &w->p->d_key, w->b, t, w->h, c->tokens);
    if (p->decays)
        store_decays(w, c, t);
}

static long load_block(Work *w, long start)
{
    const Forward *p = &w->p->forward;
    View missing = {p->missing, p->h * p->t * p->v, p->v, p->t * p->v, 1};
    long n = 0;
    for (long t = start; t < p->t && t < start + BLOCK; t += CHUNK, n++) {
        Chunk *c = &w->chunks[n];
        load_chunk(c, p, w->b, t, w->h);
        load_rows(c->d_o, p->v, c->values, &w->p->d_o, w->b, t, w->h, c->tokens);
        if (erases(p))
            load_rows(c->remove ? c->removed : c->value, p->v, c->values, &missing, w->b, t, w->h,
                      c->tokens);
    }
    return n;
}

static void block_back(Work *w, long start, const float *mark, int does)
{
    const Forward *p = &w->p->forward;
    long n = load_block(w, start), keys = padded(p->k), rows = whole_rows(p->v), size = rows * keys;
    if (does & VALUES)
        for (long i = n - 1; i >= 0; i--)
            values_back(w, &w->chunks[i], start + i * CHUNK);
    if (!(does & KEYS))
        return;
    load_transposed(w->states, rows, keys, mark, p->k, p->v);
    for (long i = 0; i < n; i++)
        queries_back(w, &w->chunks[i], start + i * CHUNK, w->states + i * size,
                     w->states + (i + 1) * size);
    for (long i = n - 1; i >= 0; i--)
        keys_back(w, &w->chunks[i], start + i * CHUNK, w->states + i * size,
                  w->states + (i + 1) * size);
}

static int backward_task(const void *problem, long task)
{
    const Backward *backward = problem;
    const Forward *p = &backward->forward;
    long head = task / parts(p), size = p->k * p->v, blocks = (p->t + BLOCK - 1) / BLOCK;
    int does = parts(p) == 1 ? VALUES | KEYS : task % 2 ? VALUES : KEYS;
    Work work = {.p = backward, .b = head / p->h, .h = head % p->h};
    if (!take_work(&work, p))
        return OUT_OF_MEMORY;
    load_state(work.G, whole_rows(p->k), padded(p->v), backward->d_last + head * size, p->k, p->v);
    load_transposed(work.turned, whole_rows(p->v), padded(p->k), backward->d_last + head * size,
                    p->k, p->v);
    for (long i = blocks - 1; i >= 0; i--)
        block_back(&work, i * BLOCK, p->marks + (i * p->b * p->h + head) * size, does);
    if (does & VALUES)
        store_state(work.G, padded(p->v), backward->d_start + head * size, p->k, p->v);
    return DONE;
}

int FOR_ISA(fw_backward)(const Backward *p)
{
    const Forward *forward = &p->forward;
    return fw_parallel(backward_task, p, forward->b * forward->h * parts(forward),
                       forward->threads);
}
