/* Many tokens of WindowedLinear, of which windowed.c has one, in blocks of QUERIES.
 *
 * The tokens that count stand at places: the cached ones below w, those of the record without its
 * padding from w on. The queries at w + s + i, i < QUERIES, meet a strip of keys, at s + j, j < w +
 * QUERIES: in the window are those with i < j ≤ i + w, and before it those with j ≤ i, as are all
 * behind S:
 *
 *     o_i = Σ_j p_ij v_{s+j} + c_i φ_i S,   p_ij = a_i e^(s_ij - max s) in the window,  c_i φ_i·φ_{s+j} before it
 *     S += Σ_j φ_{s+j}ᵀ (v_{s+j} ‖ 1) of the first QUERIES keys
 *
 * with a and c from `join`. A block ends before a document that begins; then nothing before that is
 * there, S neither. What belongs to a query, or to a key that leaves, is a column of a
 * matrix, so that a vector holds W tokens: all sums over keys or features go lane by lane. A task
 * is a key head with the query heads it serves.
 */
#include "multiply.h"
#include "pool.h"
#include "window.h"

#define QUERIES 32
#define SLIDE 4 /* blocks between two moves of the strip, or as many as the window has */

typedef struct {
    Head head;
    long window,
        tokens; /* w, or all tokens that it can meet; tokens of the record that are no padding */
    long first; /* the place of the first token that is there */
    const int32_t *kept;   /* [tokens], which of the record's these are */
    const uint8_t *starts; /* [tokens + 1], 1: a document begins with it */
    long k, v, begin,
        room;             /* padded widths; rows: the place of the first, and how many there are */
    float *keys, *values; /* [room ·], by place */
    float *rows, *q;      /* [QUERIES ·] and [k QUERIES], of queries or of keys that leave */
    float *fq, *fk;       /* [f QUERIES] */
    float *weights, *far; /* [w + QUERIES QUERIES], [QUERIES QUERIES], p transposed */
    float *memory, *sums, *o; /* [f v] and its last column [f]; [QUERIES v] */
    float *mix, *log_scale;   /* [QUERIES] */
} Work;

/* Queries of a block, and what they meet */
typedef struct {
    long s, queries, lanes; /* lanes: up to whole vectors */
    long low;               /* the first key of the strip that is there */
} Block;

static long smaller(long a, long b)
{
    return a < b ? a : b;
}
static long larger(long a, long b)
{
    return a > b ? a : b;
}

/* ---- the beginning ---- */

/* 0 where memory is out */
static int take_work(Work *w, const WindowProblem *p, long task)
{
    *w = (Work){.head = head_of(p, task), .k = padded(p->k), .v = padded(p->v)};
    w->window = smaller(p->window, p->cached + p->t + 1);
    long blocks = (p->t + QUERIES - 1) / QUERIES;
    w->room = w->window + smaller(larger(SLIDE * QUERIES, w->window), blocks * QUERIES);
    int32_t *kept;
    uint8_t *starts;
    Arena arena = {0};
    while (next_pass(&arena)) {
        kept = (int32_t *)take(&arena, p->t);
        starts = (uint8_t *)take(&arena, p->t + 1);
        w->keys = take(&arena, (w->room + W) * w->k);
        w->values = take(&arena, (w->room + W) * w->v);
        w->rows = take(&arena, QUERIES * padded(larger(p->k, p->f)));
        w->q = take(&arena, QUERIES * padded(larger(p->k, p->f)));
        w->fq = take(&arena, QUERIES * padded(p->f));
        w->fk = take(&arena, QUERIES * padded(p->f));
        w->weights = take(&arena, (w->window + QUERIES) * QUERIES);
        w->far = take(&arena, QUERIES * QUERIES);
        w->memory = take(&arena, p->f * w->v);
        w->sums = take(&arena, p->f);
        w->o = take(&arena, QUERIES * w->v);
        w->mix = take(&arena, QUERIES);
        w->log_scale = take(&arena, QUERIES);
    }
    if (!arena.at)
        return 0;
    const uint8_t *keep = p->keep ? p->keep + w->head.b * p->t : NULL;
    const uint8_t *begins = p->starts ? p->starts + w->head.b * p->t : NULL;
    memset(starts, 0, p->t + 1);
    for (long i = 0; i < p->t; i++) {
        starts[w->tokens] |= begins && begins[i]; /* padding may begin one, for the next token */
        if (!keep || keep[i])
            kept[w->tokens++] = i;
    }
    w->kept = kept;
    w->starts = starts;
    return 1;
}

/* Rows of memory as padded ones */
static void copy_rows(float *to, long to_step, const float *from, long from_step, long width,
                      long count)
{
    for (long i = 0; i < count; i++, to += to_step, from += from_step) {
        memcpy(to, from, width * sizeof(float));
        for (long j = width; j < to_step; j++)
            to[j] = 0;
    }
}

/* How many of the cached tokens the window still reaches */
static long reached(const WindowProblem *p, long b)
{
    const int64_t *age = ages(p, p->age, b, p->cached);
    long there = 0;
    while (p->age && there < p->cached && age[p->cached - 1 - there] < p->window)
        there++;
    return there;
}

static void load_state_rows(Work *w)
{
    const Head *head = &w->head;
    const WindowProblem *p = head->p;
    long there = reached(p, head->b);
    w->first = w->window - there;
    memset(w->keys, 0, w->window * w->k * sizeof(float));
    memset(w->values, 0, w->window * w->v * sizeof(float));
    if (!head->memory) {
        memset(w->memory, 0, p->f * w->v * sizeof(float));
        memset(w->sums, 0, p->f * sizeof(float));
        return;
    }
    copy_rows(w->keys + w->first * w->k, w->k, head->keys + (p->cached - there) * p->k, p->k, p->k,
              there);
    copy_rows(w->values + w->first * w->v, w->v, head->values + (p->cached - there) * p->v, p->v,
              p->v, there);
    copy_rows(w->memory, w->v, head->memory, p->v + 1, p->v, p->f);
    for (long i = 0; i < p->f; i++)
        w->sums[i] = head->memory[i * (p->v + 1) + p->v];
}

/* ---- tokens ---- */

/* Before a token begins a document, nothing is there. */
static void forget(Work *w, long token)
{
    const WindowProblem *p = w->head.p;
    w->first = w->window + token;
    memset(w->memory, 0, p->f * w->v * sizeof(float));
    memset(w->sums, 0, p->f * sizeof(float));
}

/* Tokens from one on that a block holds: QUERIES, or those before a document begins */
static long block_length(const Work *w, long s)
{
    long most = smaller(QUERIES, w->tokens - s), count = 1;
    while (count < most && !w->starts[s + count])
        count++;
    return count;
}

INLINE float *key_at(const Work *w, long place)
{
    return w->keys + (place - w->begin) * w->k;
}
INLINE float *value_at(const Work *w, long place)
{
    return w->values + (place - w->begin) * w->v;
}

/* Rows of the record's tokens from one on, padding left out */
static void gather(const Work *w, float *to, long width, long step, const View *view, long h,
                   long token, long count)
{
    if (!w->head.p->keep)
        load_rows(to, width, step, view, w->head.b, token, h, count);
    else
        for (long i = 0; i < count; i++)
            load_rows(to + i * step, width, step, view, w->head.b, w->kept[token + i], h, 1);
}

/* Rows [lanes width] as columns [width QUERIES] */
static void turn_rows(float *to, const float *rows, long step, long lanes)
{
    for (long i = 0; i < lanes; i += W)
        for (long l = 0; l < step; l += W) {
            vec x[W];
            for (int j = 0; j < W; j++)
                x[j] = load(rows + (i + j) * step + l);
            transpose(x);
            for (int j = 0; j < W; j++)
                store(to + (l + j) * QUERIES + i, x[j]);
        }
}

static Block block_at(const Work *w, long s, long count)
{
    return (Block){s, count, padded(count), larger(w->first - s, 0)};
}

/* The keys and values of a block's own tokens, behind the others of its strip */
static void read_keys(Work *w, const Block *block)
{
    const WindowProblem *p = w->head.p;
    long end = w->window + block->s, token = block->s;
    if (end + QUERIES - w->begin > w->room) {
        memmove(w->keys, key_at(w, block->s), w->window * w->k * sizeof(float));
        memmove(w->values, value_at(w, block->s), w->window * w->v * sizeof(float));
        w->begin = block->s;
    }
    gather(w, key_at(w, end), p->k, w->k, &p->key, w->head.g, token, block->queries);
    gather(w, value_at(w, end), p->v, w->v, &p->value, w->head.g, token, block->queries);
}

/* ---- features ---- */

/* `count` columns of scores become softmax of each column; log Σ e^score goes to `log_sums` if
 * there is one. */
static void softmax_columns(float *scores, long count, long lanes, float *log_sums)
{
    for (long i = 0; i < lanes; i += W) {
        vec highest = load(scores + i), sum = broadcast(0);
        for (long l = 1; l < count; l++)
            highest = at_least(highest, load(scores + l * QUERIES + i));
        for (long l = 0; l < count; l++) {
            vec e = vexp(load(scores + l * QUERIES + i) - highest);
            store(scores + l * QUERIES + i, e);
            sum += e;
        }
        vec inverse = 1.0f / sum;
        for (long l = 0; l < count; l++)
            store(scores + l * QUERIES + i, load(scores + l * QUERIES + i) * inverse);
        for (int j = 0; log_sums && j < W; j++)
            log_sums[i + j] = highest[j] + __builtin_logf(sum[j]);
    }
}

/* φ of columns x [k QUERIES], as columns; `log_scale` is written if the map has one. */
static void map_columns(const Work *w, float *to, const float *x, const float *weights,
                        const float *biases, long h, long lanes, float *log_scale)
{
    const WindowProblem *p = w->head.p;
    long count = p->map == LANDMARKS ? p->f : p->f / 2;
    multiply(&(Multiplication){to, QUERIES, weights + h * count * p->k, p->k, 1, x, QUERIES, count,
                               p->k, lanes},
             0);
    if (p->map == LANDMARKS) {
        for (long l = 0; l < count; l++)
            for (long i = 0; i < lanes; i += W)
                store(to + l * QUERIES + i, load(to + l * QUERIES + i) + biases[h * count + l]);
        softmax_columns(to, count, lanes, log_scale);
        return;
    }
    for (long l = 0; l < count * QUERIES; l += QUERIES)
        for (long i = l; i < l + lanes; i += W) {
            vec plus = load(to + i);
            store(to + i, p->map == SOFTMAX ? plus : activated(p->map, plus));
            store(to + count * QUERIES + i, p->map == SOFTMAX ? -plus : activated(p->map, -plus));
        }
    if (p->map == SOFTMAX) {
        softmax_columns(to, count, lanes, NULL);
        softmax_columns(to + count * QUERIES, count, lanes, NULL);
    }
}

/* Given features of tokens at places, which the cache or the record has */
static void gather_features(const Work *w, float *to, long step, long place, long count)
{
    const WindowProblem *p = w->head.p;
    long cached = smaller(larger(w->window - place, 0), count);
    for (long i = 0; i < cached; i++)
        if (place + i >= w->first)
            copy_rows(to + i * step, step,
                      w->head.features + (p->cached - w->window + place + i) * p->f, p->f, p->f, 1);
        else
            memset(to + i * step, 0, step * sizeof(float));
    gather(w, to + cached * step, p->f, step, &p->fk, w->head.g, place + cached - w->window,
           count - cached);
}

/* φ of the keys that leave the window, zeros where there are none */
static void map_leaving(const Work *w, const Block *block)
{
    const WindowProblem *p = w->head.p;
    if (p->map == GIVEN) {
        gather_features(w, w->rows, padded(p->f), block->s, block->queries);
        turn_rows(w->fk, w->rows, padded(p->f), block->lanes);
    } else {
        turn_rows(w->q, key_at(w, block->s), w->k, block->lanes);
        map_columns(w, w->fk, w->q, p->W_k, p->b_k, w->head.g, block->lanes, NULL);
    }
    for (long l = 0; l < p->f; l++) {
        for (long i = 0; i < smaller(block->low, block->lanes); i++)
            w->fk[l * QUERIES + i] = 0;
        for (long i = block->queries; i < block->lanes; i++)
            w->fk[l * QUERIES + i] = 0;
    }
}

/* ---- a block ---- */

/* The numbers of W queries from one on */
INLINE ivec numbers(long first)
{
    ivec x;
    for (int i = 0; i < W; i++)
        x[i] = first + i;
    return x;
}

static void load_queries(Work *w, const Block *block, long h)
{
    const WindowProblem *p = w->head.p;
    gather(w, w->rows, p->k, w->k, &p->q, h, block->s, block->queries);
    turn_rows(w->q, w->rows, w->k, block->lanes);
    gather(w, w->mix, 1, 1, &p->mix, h, block->s, block->queries);
    if (p->log_scale.at)
        gather(w, w->log_scale, 1, 1, &p->log_scale, h, block->s, block->queries);
    if (p->map == GIVEN) {
        gather(w, w->rows, p->f, padded(p->f), &p->fq, h, block->s, block->queries);
        turn_rows(w->fq, w->rows, padded(p->f), block->lanes);
    } else
        map_columns(w, w->fq, w->q, p->W_q, p->b_q, h, block->lanes, w->log_scale);
}

/* Where queries do not see a key, their score becomes −inf. */
INLINE vec hide(const Work *w, const Block *block, ivec query, long key, vec score)
{
    if (key >= block->lanes && key <= w->window)
        return score;
    return choose((query < (int)key) & (query >= (int)(key - w->window)), score,
                  broadcast(-__builtin_inff()));
}

/* The window's weights of W queries from i on, by rows; returns their sums. */
static vec weigh_window(const Work *w, const Block *block, long i)
{
    const WindowProblem *p = w->head.p;
    const long end = w->window + block->queries;
    vec highest = broadcast(-__builtin_inff()), sum = broadcast(0);
    ivec query = numbers(i);
    for (long j = block->low; j < end; j++) {
        vec s = hide(w, block, query, j, scored(p, load(w->weights + j * QUERIES + i)));
        store(w->weights + j * QUERIES + i, s);
        highest = at_least(highest, s);
    }
    const int has_scale = p->log_scale.at || p->map == LANDMARKS;
    vec origin = has_scale ? load(w->log_scale + i)
                           : choose(highest == broadcast(-__builtin_inff()), broadcast(0), highest);
    for (long j = block->low; j < end; j++) {
        vec s = load(w->weights + j * QUERIES + i),
            e = vexp(has_scale ? log_weight(s, origin) : s - origin);
        store(w->weights + j * QUERIES + i, e);
        sum += e;
    }
    return sum;
}

/* The sums of W queries' weights of keys before the window, and what of the block's own they do not
 * see becomes 0. */
static vec weigh_memory(const Work *w, const Block *block, long i)
{
    vec sum = broadcast(0);
    ivec query = numbers(i);
    for (long l = 0; l < w->head.p->f; l++)
        sum += w->sums[l] * load(w->fq + l * QUERIES + i);
    for (long j = block->low; j < block->queries; j++) {
        vec seen = choose(query >= (int)j, load(w->far + j * QUERIES + i), broadcast(0));
        store(w->far + j * QUERIES + i, seen);
        sum += seen;
    }
    return sum;
}

/* Weights of both sides as parts of o: p, and φ(Q) times c */
static void divide_weights(const Work *w, const Block *block, long i, vec near, vec far)
{
    vec a, c;
    join(w->head.p, load(w->mix + i), near, far, &a, &c);
    for (long j = block->low; j < w->window + block->queries; j++) {
        float *weight = w->weights + j * QUERIES + i;
        vec divided = w->window ? a * load(weight) : broadcast(0);
        store(weight, j < block->queries ? divided + c * load(w->far + j * QUERIES + i) : divided);
    }
    for (long l = 0; l < w->head.p->f; l++)
        store(w->fq + l * QUERIES + i, c * load(w->fq + l * QUERIES + i));
}

/* o of ROWS queries at most, from the keys that one of them sees */
static void read_values(const Work *w, const Block *block, long i)
{
    long n = smaller(2 * ROWS, block->queries - i), inner = w->window + i + n - block->low;
    const float *weights = w->weights + block->low * QUERIES + i;
    float *o = w->o + i * w->v;
    multiply(&(Multiplication){o, w->v, weights, 1, QUERIES, value_at(w, block->s + block->low),
                               w->v, n, inner, w->v},
             0);
    multiply(
        &(Multiplication){o, w->v, w->fq + i, 1, QUERIES, w->memory, w->v, n, w->head.p->f, w->v},
        1);
}

static void store_outputs(const Work *w, const Block *block, long h)
{
    const WindowProblem *p = w->head.p;
    for (long i = 0; i < block->queries; i++)
        store_rows(w->o + i * w->v, p->v, w->v, &p->o, w->head.b, w->kept[block->s + i], h, 1);
}

static void attend(Work *w, const Block *block, long h)
{
    const WindowProblem *p = w->head.p;
    const long low = block->low, lanes = block->lanes, strip = w->window + block->queries - low;
    load_queries(w, block, h);
    if (w->window)
        multiply(&(Multiplication){w->weights + low * QUERIES, QUERIES, key_at(w, block->s + low),
                                   w->k, 1, w->q, QUERIES, strip, p->k, lanes},
                 0);
    if (low < block->queries)
        multiply(&(Multiplication){w->far + low * QUERIES, QUERIES, w->fk + low, 1, QUERIES, w->fq,
                                   QUERIES, block->queries - low, p->f, lanes},
                 0);
    for (long i = 0; i < lanes; i += W) {
        vec near = w->window ? weigh_window(w, block, i) : broadcast(0);
        divide_weights(w, block, i, near, weigh_memory(w, block, i));
    }
    for (long i = 0; i < block->queries; i += 2 * ROWS)
        read_values(w, block, i);
    store_outputs(w, block, h);
}

/* S and its last column, with the keys that leave */
static void write_memory(const Work *w, const Block *block)
{
    const long low = block->low, f = w->head.p->f;
    if (low >= block->queries)
        return;
    multiply(&(Multiplication){w->memory, w->v, w->fk + low, QUERIES, 1,
                               value_at(w, block->s + low), w->v, f, block->queries - low, w->v},
             1);
    for (long l = 0; l < f; l++) {
        vec sum = broadcast(0);
        for (long i = 0; i < block->lanes; i += W)
            sum += load(w->fk + l * QUERIES + i);
        w->sums[l] += total(sum);
    }
}

/* Announces what the block from a token on will read, of tokens without padding between them. */
static void expect_block(const Work *w, long s)
{
    const WindowProblem *p = w->head.p;
    if (s >= w->tokens)
        return;
    long b = w->head.b, g = w->head.g, token = w->kept[s], count = smaller(QUERIES, p->t - token);
    expect_rows(&p->key, p->k, b, token, g, count, 0);
    expect_rows(&p->value, p->v, b, token, g, count, 0);
    for (long h = g * (p->h / p->g); h < (g + 1) * (p->h / p->g); h++)
        expect_rows(&p->q, p->k, b, token, h, count, 0);
}

static void read_block(Work *w, long s, long count)
{
    const WindowProblem *p = w->head.p;
    Block block = block_at(w, s, count);
    read_keys(w, &block);
    expect_block(w, s + count);
    if (block.low < block.queries)
        map_leaving(w, &block);
    for (long h = w->head.g * (p->h / p->g); h < (w->head.g + 1) * (p->h / p->g); h++)
        attend(w, &block, h);
    write_memory(w, &block);
}

/* The token that is in the window of the last query and leaves before the next one */
static void write_last(Work *w)
{
    Block block = block_at(w, w->tokens, 1);
    if (w->window && !block.low) {
        map_leaving(w, &block);
        write_memory(w, &block);
    }
}

/* ---- the end ---- */

static void store_state_rows(const Work *w)
{
    const Head *head = &w->head;
    const WindowProblem *p = head->p;
    long count = cached_after(p), oldest = w->window + w->tokens - count;
    long absent = smaller(larger(w->first - oldest, 0), count);
    float *keys = in_pages(head, p->next_keys, count, p->k),
          *values = in_pages(head, p->next_values, count, p->v);
    copy_rows(keys, p->k, key_at(w, oldest), w->k, p->k, count);
    copy_rows(values, p->v, value_at(w, oldest), w->v, p->v, count);
    if (absent) {
        memset(keys, 0, absent * p->k * sizeof(float));
        memset(values, 0, absent * p->v * sizeof(float));
    }
    if (p->map == GIVEN) {
        float *features = p->next_features + place(head, count, p->f);
        gather_features(w, features, p->f, oldest, count);
        if (absent)
            memset(features, 0, absent * p->f * sizeof(float));
    }
    float *memory = in_pages(head, p->next_memory, p->f, p->v + 1);
    copy_rows(memory, p->v + 1, w->memory, w->v, p->v, p->f);
    for (long l = 0; l < p->f; l++)
        memory[l * (p->v + 1) + p->v] = w->sums[l];
}

/* o of padding */
static void store_zeros(const Work *w)
{
    const WindowProblem *p = w->head.p;
    if (w->tokens == p->t)
        return;
    memset(w->o, 0, w->v * sizeof(float));
    for (long t = 0; t < p->t; t++)
        for (long r = 0; r < p->h / p->g && !p->keep[w->head.b * p->t + t]; r++)
            store_rows(w->o, p->v, w->v, &p->o, w->head.b, t, w->head.g * (p->h / p->g) + r, 1);
}

static int read_tokens(const void *problem, long task)
{
    Work w;
    if (!take_work(&w, problem, task))
        return OUT_OF_MEMORY;
    load_state_rows(&w);
    for (long s = 0, count; s < w.tokens; s += count) {
        if (w.starts[s])
            forget(&w, s);
        count = block_length(&w, s);
        read_block(&w, s, count);
    }
    if (w.starts[w.tokens])
        forget(&w, w.tokens);
    write_last(&w);
    store_state_rows(&w);
    store_zeros(&w);
    return DONE;
}

/* The ages of a sequence's tokens, which all its heads have read */
static void write_ages(const WindowProblem *p, long b)
{
    long there = reached(p, b), count = cached_after(p);
    for (long t = b * p->t; t < (b + 1) * p->t; t++) {
        if (p->starts && p->starts[t])
            there = 0;
        there += !p->keep || p->keep[t];
    }
    int64_t *next = ages(p, p->next_age, b, count);
    for (long i = 0; i < count; i++)
        next[i] = count - i <= there ? count - i : p->forgotten;
}

int FOR_ISA(fw_window_prefill)(const WindowProblem *p)
{
    int status = fw_parallel(read_tokens, p, p->b * p->g, p->threads);
    for (long b = 0; b < p->b; b++)
        write_ages(p, b);
    return status;
}
