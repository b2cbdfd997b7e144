/* A sweep of the tokens of a chunk over a state held in registers.
 *
 * S is cut into tiles of ROWS rows and up to NV·W lanes, and a tile meets all tokens before the next one is loaded:
 *
 *     S ← α_t S             DECAY_ROWS, DECAY_LANES
 *     e_t += p_t S          PEEK: a read before the write; with BEFORE, before the decay
 *     S += a_tᵀ x_t         always
 *     S -= n_tᵀ m_t         REMOVE
 *     o_t += r_t S          READ
 *     e_t += n_t S          READ_TOO
 *     S -= z_tᵀ y_t         ERASE; with BEFORE, behind the decay, which then comes behind what follows
 *     w_t += Σ_rows S̃_t S   WEIGH, with the S̃_t = α_t S_{t-1} that another sweep over this tile has put by (KEEP)
 *
 * This takes 2 multiply-adds per state element and token for a linear attention, the least there can be, where chunks
 * of matrix products take 2 plus the attention map of the chunk. Time runs backwards when the steps are negative, and
 * the state may lie transposed: every gradient of a linear recurrence is a sweep too.
 */
#ifndef FASTWEIGHTS_SWEEP_H
#define FASTWEIGHTS_SWEEP_H

#include "problem.h"
#include "vector.h"

enum { DECAY_ROWS = 1, DECAY_LANES = 2, PEEK = 4, READ = 8, ERASE = 16, KEEP = 32, WEIGH = 64, SCALE_ROWS = 128,
       STREAM = 256, REMOVE = 512, READ_TOO = 1024, BEFORE = 2048 };

typedef struct {
    long tokens, rows, lanes; /* rows: a multiple of ROWS; lanes: of W */
    long row_step, lane_step; /* from a token to the next, in arrays over the state's rows and over its lanes */
    const float *a, *r, *p, *z, *n; /* over rows, at the first token swept */
    const float *x, *y, *m;         /* over lanes */
    float *o, *e, *w;           /* over lanes, added to */
    const float *alpha;         /* over rows (DECAY_ROWS) or lanes (DECAY_LANES) */
    const float *enter, *leave; /* the state is multiplied by these (SCALE_ROWS: over rows, else over lanes); or NULL */
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
        vec lanes = does & DECAY_LANES ? load(alpha + j * W) : all(1);
        for (int i = 0; i < ROWS; i++)
            S[i][j] *= does & DECAY_ROWS ? all(alpha[i]) : lanes;
    }
}

/* S += aᵀ x, or with a sign S -= aᵀ x */
INLINE void add_product(const float *a, const float *x, const int sign, vec S[ROWS][NV], const int nv)
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

INLINE void tile(const Sweep *s, const int does, const int nv, long row, long lane, vec (*kept)[ROWS][NV])
{
    const int decays = does & (DECAY_ROWS | DECAY_LANES), lags = does & BEFORE && does & ERASE;
    const float *restrict a = s->a + row, *restrict x = s->x + lane;
    const float *restrict r = s->r + row, *restrict p = s->p + row, *restrict z = s->z + row;
    const float *restrict n = s->n + row, *restrict m = s->m + lane;
    const float *restrict y = s->y + lane;
    const float *restrict alpha = s->alpha + (does & DECAY_ROWS ? row : lane);
    const long alpha_step = does & DECAY_ROWS ? s->row_step : s->lane_step;
    float *restrict o = s->o + lane, *restrict e = s->e + lane, *restrict w = s->w + lane;
    const long row_step = s->row_step, lane_step = s->lane_step;
    vec S[ROWS][NV];

    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < nv; j++) {
            S[i][j] = load(s->from + (row + i) * s->from_step + lane + j * W);
            if (s->enter)
                S[i][j] *= does & SCALE_ROWS ? all(s->enter[row + i]) : load(s->enter + lane + j * W);
        }
    for (long t = 0; t < s->tokens; t++) {
        if (does & PEEK && does & BEFORE)
            add_read(e, p, S, nv);
        if (decays && !lags)
            decay(does, alpha, S, nv);
        if (does & KEEP)
            for (int i = 0; i < ROWS; i++)
                for (int j = 0; j < nv; j++)
                    kept[t][i][j] = S[i][j];
        if (does & PEEK && !(does & BEFORE))
            add_read(e, p, S, nv);
        add_product(a, x, 1, S, nv);
        if (does & REMOVE)
            add_product(n, m, -1, S, nv);
        if (does & READ)
            add_read(o, r, S, nv);
        if (does & READ_TOO)
            add_read(e, n, S, nv);
        if (does & ERASE && !lags)
            add_product(z, y, -1, S, nv);
        if (does & WEIGH)
            weigh(w, kept[s->tokens - 1 - t], S, nv);
        if (decays && lags)
            decay(does, alpha, S, nv);
        if (does & ERASE && lags)
            add_product(z, y, -1, S, nv);
        a += row_step, r += row_step, p += row_step, z += row_step, n += row_step;
        x += lane_step, y += lane_step, m += lane_step, o += lane_step, e += lane_step, w += lane_step;
        alpha += alpha_step;
    }
    if (s->to)
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < nv; j++) {
                if (s->leave)
                    S[i][j] *= does & SCALE_ROWS ? all(s->leave[row + i]) : load(s->leave + lane + j * W);
                store(s->to + (row + i) * s->to_step + lane + j * W, S[i][j]);
            }
}

/* All tiles; with `before`, each is first swept forwards to put S̃_t by for WEIGH. */
INLINE void sweep_lanes(const Sweep *s, const int does, const Sweep *before, const int did, const int nv, long lane)
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

INLINE void sweep(const Sweep *s, const int does) { sweep_after(s, does, s, 0); }

#endif
