/* A chunk of tokens of one head, packed into rows of whole vectors, with its decays folded into the
 * keys if it can be.
 *
 * With c_t = Σ_{j≤t} log α_j inside the chunk and μ = ½ c_last, the scaled state R_t = e^(μ-c_t)
 * S_t does not decay: queries and erasing keys carry `up` = e^(c_t-μ), writing keys `down` =
 * e^(μ-c_t), and S enters and leaves the chunk times `middle` = e^μ. That holds for any decay, but
 * costs accuracy when α is small: a chunk in which some channel decays faster than GENTLE per token
 * on average is `exact`, and its sweeps apply α_t token by token. Keys that read before the decay
 * carry the `up` of the token before; that of the first is e^(-μ), a row in front of the others.
 */
#ifndef FASTWEIGHTS_CHUNK_H
#define FASTWEIGHTS_CHUNK_H

#include "problem.h"
#include "rows.h"
#include "vector.h"

#define GENTLE 1.25f

typedef struct {
    long tokens, keys, values; /* keys, values: padded widths, the rows' lengths */
    int scaled, exact;         /* neither: there is no decay */
    float *q, *key;            /* [t k], scaled */
    float *erase;              /* [t k], keys that erase */
    float *peek;               /* [t k], the same as they read the state of the token before */
    float *remove;             /* [t k], what is erased along; NULL for key */
    float *value, *d_o, *y;    /* [t v] */
    float *removed;            /* [t v], what is erased, where remove is given */
    float *beta;               /* [t] */
    float *alpha;              /* [t+1 k], exact; the last row is 1 */
    float *up, *down, *middle; /* [-1..t k], [t k], [k] */
    const float *erase_up;     /* [t k], the rows of up that erase carries */
    float *d_key, *d_decay;    /* [t k], gradients under way */
} Chunk;

static inline void take_chunk(Arena *arena, Chunk *c, const Forward *p, int backward)
{
    memset(c, 0, sizeof *c);
    c->keys = padded(p->k);
    c->values = padded(p->v);
    long tokens = p->t < CHUNK ? p->t : CHUNK;
    size_t tk = tokens * c->keys, tv = tokens * c->values;
    c->q = take(arena, tk);
    c->key = take(arena, tk);
    c->value = take(arena, tv);
    if (p->decays) {
        c->alpha = take(arena, tk + c->keys);
        c->middle = take(arena, c->keys);
        c->up = take(arena, tk + c->keys);
        c->down = take(arena, tk);
        if (c->up) {
            c->up += c->keys;
            c->erase_up = p->before ? c->up - c->keys : c->up;
        }
    }
    if (erases(p)) {
        c->erase = take(arena, tk);
        c->beta = take(arena, tokens);
        c->peek = p->decays ? take(arena, tk) : c->erase;
    }
    if (p->remove.at) {
        c->remove = take(arena, tk);
        c->removed = take(arena, tv);
    }
    if (backward) {
        c->d_o = take(arena, tv);
        c->y = take(arena, tv);
        c->d_key = take(arena, tk);
        c->d_decay = take(arena, tk);
    }
}

/* What `load_chunk` will read. */
static inline void expect_chunk(const Forward *p, long b, long t, long h)
{
    long tokens = p->t - t < CHUNK ? p->t - t : CHUNK;
    expect_rows(&p->q, p->k, b, t, h, tokens, 0);
    expect_rows(&p->key, p->k, b, t, h, tokens, 0);
    expect_rows(&p->value, p->v, b, t, h, tokens, 0);
    expect_rows(&p->erase, p->k, b, t, h, tokens, 0);
    expect_rows(&p->remove, p->k, b, t, h, tokens, 0);
    if (p->decays > 1)
        expect_rows(&p->log_decay, p->decays, b, t, h, tokens, 0);
}

/* One value for all lanes of the row if the decay is a scalar, else the next W lanes. */
INLINE void spread(float *row, long lane, long width, int scalar, vec x)
{
    if (!scalar)
        store(row + lane, x);
    else
        for (long j = 0; j < width; j += W)
            store(row + j, x);
}

/* The decays of W channels (or of the one): log α lie in c->alpha. */
INLINE int gentle_lane(Chunk *c, long lane)
{
    vec sum = broadcast(0), floor = broadcast(-GENTLE * c->tokens);
    for (long t = 0; t < c->tokens; t++) {
        sum += load(c->alpha + t * c->keys + lane);
        store(c->up + t * c->keys + lane, sum);
    }
    ivec gentle = sum >= floor;
    int count = 0;
    for (int i = 0; i < W; i++)
        count -= gentle[i];
    return count == W;
}

INLINE void scale_lane(Chunk *c, long lane, int scalar)
{
    vec middle = load(c->up + (c->tokens - 1) * c->keys + lane) * 0.5f;
    spread(c->middle, lane, c->keys, scalar, vexp(middle));
    spread(c->up - c->keys, lane, c->keys, scalar, vexp(-middle));
    for (long t = 0; t < c->tokens; t++) {
        vec x = load(c->up + t * c->keys + lane) - middle;
        spread(c->up + t * c->keys, lane, c->keys, scalar, vexp(x));
        spread(c->down + t * c->keys, lane, c->keys, scalar, vexp(-x));
    }
}

INLINE void decay_lane(Chunk *c, long lane, int scalar)
{
    for (long t = 0; t < c->tokens; t++)
        spread(c->alpha + t * c->keys, lane, c->keys, scalar,
               vexp(load(c->alpha + t * c->keys + lane)));
    spread(c->alpha + c->tokens * c->keys, lane, c->keys, scalar, broadcast(1));
}

static inline void prepare_decays(Chunk *c, int scalar)
{
    long width = scalar ? W : c->keys;
    int gentle = c->tokens > 1; /* one token alone is no more work exactly */
    for (long lane = 0; lane < width; lane += W)
        gentle &= gentle_lane(c, lane);
    c->scaled = gentle;
    c->exact = !gentle;
    for (long lane = 0; lane < width; lane += W) {
        if (gentle)
            scale_lane(c, lane, scalar);
        else
            decay_lane(c, lane, scalar);
    }
}

INLINE void multiply(float *to, const float *a, const float *b, long count)
{
    for (long i = 0; i < count; i += W)
        store(to + i, load(a + i) * load(b + i));
}

static inline void load_decays(Chunk *c, const Forward *p, long b, long t, long h)
{
    load_rows(c->alpha, p->decays, c->keys, &p->log_decay, b, t, h, c->tokens);
    if (p->decays == 1)
        for (long i = 0; i < c->tokens; i++)
            store(c->alpha + i * c->keys, broadcast(c->alpha[i * c->keys]));
}

/* Keys that erase, before those that write are scaled */
static inline void load_erasing(Chunk *c, const Forward *p, long b, long t, long h)
{
    long tk = c->tokens * c->keys;
    const float *key = p->erase.at ? c->erase : c->key;
    if (p->erase.at)
        load_rows(c->erase, p->k, c->keys, &p->erase, b, t, h, c->tokens);
    if (p->beta.at)
        load_rows(c->beta, 1, 1, &p->beta, b, t, h, c->tokens);
    else
        for (long i = 0; i < c->tokens; i++)
            c->beta[i] = 1;
    if (c->scaled)
        multiply(c->erase, key, c->erase_up, tk);
    else if (key != c->erase)
        memcpy(c->erase, key, tk * sizeof(float));
    if (c->exact && !p->before)
        multiply(c->peek, c->erase, c->alpha, tk);
    else if (c->peek != c->erase)
        memcpy(c->peek, c->erase, tk * sizeof(float));
    if (p->remove.at) {
        load_rows(c->remove, p->k, c->keys, &p->remove, b, t, h, c->tokens);
        if (c->scaled)
            multiply(c->remove, c->remove, c->down, tk);
    }
}

static inline void load_chunk(Chunk *c, const Forward *p, long b, long t, long h)
{
    c->tokens = p->t - t < CHUNK ? p->t - t : CHUNK;
    long tk = c->tokens * c->keys;
    load_rows(c->q, p->k, c->keys, &p->q, b, t, h, c->tokens);
    load_rows(c->value, p->v, c->values, &p->value, b, t, h, c->tokens);
    if (p->key.at)
        load_rows(c->key, p->k, c->keys, &p->key, b, t, h, c->tokens);
    if (p->decays) {
        load_decays(c, p, b, t, h);
        if (!p->key.at)
            for (long i = 0; i < tk; i += W)
                store(c->key + i, one_minus_exp(load(c->alpha + i)));
        prepare_decays(c, p->decays == 1 && p->key.at);
    }
    if (erases(p))
        load_erasing(c, p, b, t, h);
    if (c->scaled) {
        multiply(c->q, c->q, c->up, tk);
        multiply(c->key, c->key, c->down, tk);
    }
}

/* [k v] in memory ↔ the padded state, as it is or transposed */
static inline void load_state(float *to, long rows, long step, const float *from, long k, long v)
{
    memset(to, 0, rows * step * sizeof(float));
    for (long i = 0; i < k; i++)
        memcpy(to + i * step, from + i * v, v * sizeof(float));
}

static inline void store_state(const float *from, long step, float *to, long k, long v)
{
    for (long i = 0; i < k; i++)
        memcpy(to + i * v, from + i * step, v * sizeof(float));
}

static inline void load_transposed(float *to, long rows, long step, const float *from, long k,
                                   long v)
{
    memset(to, 0, rows * step * sizeof(float));
    for (long j = 0; j < v; j++)
        for (long i = 0; i < k; i++)
            to[j * step + i] = from[i * v + j];
}

INLINE long whole_rows(long width)
{
    return (width + ROWS - 1) / ROWS * ROWS;
}

#endif
