/* A sweep of the tokens of a chunk over a state held in registers.
 *
 * S is cut into tiles of ROWS rows and up to NV·W lanes, and a tile meets all tokens before the
 * next one is loaded. With the rows of a token named as in `Sweep`:
 *
 *     S ← α_t S                        DECAY_ROWS, DECAY_LANES
 *     peek_sum_t += peek_row_t S       PEEK: a read before the write; with BEFORE, before the decay
 *     S += write_row_tᵀ write_lane_t   always
 *     S -= remove_row_tᵀ remove_lane_t REMOVE
 *     read_sum_t += read_row_t S       READ
 *     peek_sum_t += remove_row_t S     READ_TOO
 *     S -= erase_row_tᵀ erase_lane_t   ERASE; with BEFORE, behind the decay, which then comes behind what follows
 *     weigh_sum_t += Σ_rows S̃_t S      WEIGH, with the S̃_t = α_t S_{t-1} that another sweep over this tile has kept (KEEP)
 *
 * This takes 2 multiply-adds per state element and token for a linear attention, the least there
 * can be, where chunks of matrix products take 2 plus the attention map of the chunk. Time runs
 * backwards when the steps are negative, and the state may lie transposed: every gradient of a
 * linear recurrence is a sweep too.
 */
#ifndef FASTWEIGHTS_SWEEP_H
#define FASTWEIGHTS_SWEEP_H

#include "problem.h"
#include "vector.h"

enum {
    DECAY_ROWS = 1,
    DECAY_LANES = 2,
    PEEK = 4,
    READ = 8,
    ERASE = 16,
    KEEP = 32,
    WEIGH = 64,
    SCALE_ROWS = 128,
    STREAM = 256,
    REMOVE = 512,
    READ_TOO = 1024,
    BEFORE = 2048,
};

/* A case of a switch over such flags, whose call the compiler makes for these alone */
#define CASE(flags, call)         \
    case (flags): {               \
        enum { KNOWN = (flags) }; \
        call;                     \
        break;                    \
    }

/* Arrays of a token's numbers over the state's rows (`_row`) or over its lanes, at the first token
 * swept. */
typedef struct {
    long tokens, rows, lanes; /* rows: a multiple of ROWS; lanes: of W */
    long row_step, lane_step; /* from a token to the next, in arrays over rows and over lanes */
    const float *write_row, *write_lane;
    const float *read_row, *peek_row;
    const float *erase_row, *erase_lane;
    const float *remove_row, *remove_lane;
    float *read_sum, *peek_sum, *weigh_sum; /* over lanes, added to */
    const float *alpha;                     /* over rows (DECAY_ROWS) or lanes (DECAY_LANES) */
    /* the state is multiplied by these (SCALE_ROWS: over rows, else over lanes); or NULL */
    const float *enter, *leave;
    const float *from;
    float *to; /* NULL: the state is not wanted */
    long from_step, to_step;
} Sweep;

typedef vec Kept[CHUNK][ROWS][NV];

/* o += r S; every r is loaded once, because nothing is stored until all are. */
INLINE void add_read(float *o, const float *r, vec S[ROWS][NV], const int nv)
{
    vec sum[NV];
    for (int j = 0; j < nv; j++)
        sum[j] = load(o + j * W);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < nv; j++)
            sum[j] += r[i] * S[i][j];
    for (int j = 0; j < nv; j++)
        store(o + j * W, sum[j]);
}

/* S ← α_t S */
INLINE void decay(const int does, const float *alpha, vec S[ROWS][NV], const int nv)
{
    for (int j = 0; j < nv; j++) {
        vec lanes = does & DECAY_LANES ? load(alpha + j * W) : broadcast(1);
        for (int i = 0; i < ROWS; i++)
            S[i][j] *= does & DECAY_ROWS ? broadcast(alpha[i]) : lanes;
    }
}

/* S += aᵀ x, or with a sign S -= aᵀ x */
INLINE void add_product(const float *a, const float *x, const int sign, vec S[ROWS][NV],
                        const int nv)
{
    for (int j = 0; j < nv; j++) {
        vec lanes = load(x + j * W);
        for (int i = 0; i < ROWS; i++)
            S[i][j] = sign < 0 ? S[i][j] - a[i] * lanes : S[i][j] + a[i] * lanes;
    }
}

/* w += Σ_rows S̃ S */
INLINE void weigh(float *w, vec (*kept)[NV], vec S[ROWS][NV], const int nv)
{
    for (int j = 0; j < nv; j++) {
        vec sum = load(w + j * W);
        for (int i = 0; i < ROWS; i++)
            sum += kept[i][j] * S[i][j];
        store(w + j * W, sum);
    }
}

/* The tile's rows and lanes of the state before the first token */
INLINE void load_tile(const Sweep *s, const int does, const int nv, long row, long lane,
                      vec S[ROWS][NV])
{
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < nv; j++) {
            S[i][j] = load(s->from + (row + i) * s->from_step + lane + j * W);
            if (s->enter)
                S[i][j] *= does & SCALE_ROWS ? broadcast(s->enter[row + i])
                                             : load(s->enter + lane + j * W);
        }
}

INLINE void store_tile(const Sweep *s, const int does, const int nv, long row, long lane,
                       vec S[ROWS][NV])
{
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < nv; j++) {
            if (s->leave)
                S[i][j] *= does & SCALE_ROWS ? broadcast(s->leave[row + i])
                                             : load(s->leave + lane + j * W);
            store(s->to + (row + i) * s->to_step + lane + j * W, S[i][j]);
        }
}

INLINE void tile(const Sweep *sweep, const int does, const int nv, long row, long lane,
                 vec (*kept)[ROWS][NV])
{
    const Sweep own = *sweep,
                *s = &own; /* a copy, which no store can change: its fields stay in registers */
    const int decays = does & (DECAY_ROWS | DECAY_LANES);
    const int decays_last = does & BEFORE && does & ERASE;
    const long alpha_step = does & DECAY_ROWS ? s->row_step : s->lane_step;
    vec S[ROWS][NV];

    load_tile(s, does, nv, row, lane, S);
    for (long t = 0; t < s->tokens; t++) {
        /* where this token's numbers for the tile lie, in arrays over rows and over lanes */
        const long r = t * s->row_step + row, l = t * s->lane_step + lane;
        const float *alpha =
            decays ? s->alpha + t * alpha_step + (does & DECAY_ROWS ? row : lane) : NULL;
        if (does & PEEK && does & BEFORE)
            add_read(s->peek_sum + l, s->peek_row + r, S, nv);
        if (decays && !decays_last)
            decay(does, alpha, S, nv);
        if (does & KEEP)
            for (int i = 0; i < ROWS; i++)
                for (int j = 0; j < nv; j++)
                    kept[t][i][j] = S[i][j];
        if (does & PEEK && !(does & BEFORE))
            add_read(s->peek_sum + l, s->peek_row + r, S, nv);
        add_product(s->write_row + r, s->write_lane + l, 1, S, nv);
        if (does & REMOVE)
            add_product(s->remove_row + r, s->remove_lane + l, -1, S, nv);
        if (does & READ)
            add_read(s->read_sum + l, s->read_row + r, S, nv);
        if (does & READ_TOO)
            add_read(s->peek_sum + l, s->remove_row + r, S, nv);
        if (does & ERASE && !decays_last)
            add_product(s->erase_row + r, s->erase_lane + l, -1, S, nv);
        if (does & WEIGH)
            weigh(s->weigh_sum + l, kept[s->tokens - 1 - t], S, nv);
        if (decays && decays_last)
            decay(does, alpha, S, nv);
        if (does & ERASE && decays_last)
            add_product(s->erase_row + r, s->erase_lane + l, -1, S, nv);
    }
    if (s->to)
        store_tile(s, does, nv, row, lane, S);
}

/* All tiles; with `before`, each is first swept forwards to keep S̃_t for WEIGH. */
INLINE void sweep_lanes(const Sweep *s, const int does, const Sweep *before, const int did,
                        const int nv, long lane)
{
    Kept kept;
    for (long row = 0; row < s->rows; row += ROWS) {
        if (did)
            tile(before, did, nv, row, lane, kept);
        tile(s, does, nv, row, lane, kept);
    }
}

INLINE void sweep_after(const Sweep *s, const int does, const Sweep *before, const int did)
{
    long lane = 0;
    for (; s->lanes - lane >= NV * W; lane += NV * W)
        sweep_lanes(s, does, before, did, NV, lane);
#if NV == 4
    if (s->lanes - lane >= 2 * W) {
        sweep_lanes(s, does, before, did, 2, lane);
        lane += 2 * W;
    }
#endif
    for (; lane < s->lanes; lane += W)
        sweep_lanes(s, does, before, did, 1, lane);
}

INLINE void sweep(const Sweep *s, const int does)
{
    sweep_after(s, does, s, 0);
}

#endif
