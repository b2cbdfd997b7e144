/* The recurrences of rules that erase: what a token writes depends on what all rows of the state
 * hold under its key.
 *
 * A pass over the rows of a lane group serves one token's write and the next token's read, so that
 * the state is read and written once per token. It stays in the L1 cache, its decays in the arrays
 * or applied row by row (DECAY_ROWS).
 */
#ifndef FASTWEIGHTS_ERASE_H
#define FASTWEIGHTS_ERASE_H

#include "sweep.h"

/* Forwards, with a the rows that write, p that peek, z that erase and r that read (Sweep):
 *     e_t = v_t - p_t S_{t-1};  S_t = α_t S_{t-1} + a_tᵀ (β_t e_t);  o_t = r_t S_t.   (p_t carries α_t.)
 *     REMOVE: e_t = p_t S_{t-1};  S_t = α_t S_{t-1} + a_tᵀ v_t - z_tᵀ e_t. */
INLINE void write_lanes(const Sweep *s, const int does, const int nv, const float *beta, long lane)
{
    const float *from = s->from + lane;
    float *to = s->to + lane;
    const long rows = s->rows, to_step = s->to_step;
    long from_step = s->from_step;
    vec found[NV], missing[NV], removed[NV], read[NV];

    for (int j = 0; j < nv; j++)
        found[j] = broadcast(0);
    for (long i = 0; i < rows; i++)
        for (int j = 0; j < nv; j++) {
            vec S = load(from + i * from_step + j * W);
            if (s->enter) {
                S *= s->enter[i];
                store(to + i * to_step + j * W, S);
            }
            found[j] += s->peek_row[i] * S;
        }
    if (s->enter) {
        from = to;
        from_step = to_step;
    }
    for (long t = 0; t < s->tokens; t++) {
        const float *restrict write_row = s->write_row + t * s->row_step;
        const float *restrict read_row = s->read_row + t * s->row_step;
        const float *restrict next_peek =
            s->peek_row + (t + 1 < s->tokens ? t + 1 : t) * s->row_step;
        const float *restrict alpha = does & DECAY_ROWS ? s->alpha + t * s->row_step : NULL;
        const float *restrict erase_row = does & REMOVE ? s->erase_row + t * s->row_step : NULL;
        for (int j = 0; j < nv; j++) {
            vec value = load(s->write_lane + t * s->lane_step + lane + j * W);
            missing[j] = does & REMOVE ? value : value - found[j];
            removed[j] = found[j];
            store(s->peek_sum + t * s->lane_step + lane + j * W,
                  does & REMOVE ? removed[j] : missing[j]);
            if (!(does & REMOVE))
                missing[j] *= beta[t];
            found[j] = read[j] = broadcast(0);
        }
        for (long i = 0; i < rows; i++) {
            vec S[NV];
            for (int j = 0; j < nv; j++) {
                S[j] = load(from + i * from_step + j * W);
                if (does & DECAY_ROWS)
                    S[j] *= alpha[i];
                S[j] += write_row[i] * missing[j];
                if (does & REMOVE)
                    S[j] -= erase_row[i] * removed[j];
                read[j] += read_row[i] * S[j];
                found[j] += next_peek[i] * S[j];
            }
            for (int j = 0; j < nv; j++)
                store(to + i * to_step + j * W, S[j]);
        }
        for (int j = 0; j < nv; j++)
            store(s->read_sum + t * s->lane_step + lane + j * W, read[j]);
        from = to;
        from_step = to_step;
    }
    if (s->leave)
        for (long i = 0; i < rows; i++)
            for (int j = 0; j < nv; j++)
                store(to + i * to_step + j * W, load(to + i * to_step + j * W) * s->leave[i]);
}

/* z_tᵀ y_t leaves G, which decays behind it, or with BEFORE in front of it. */
INLINE vec unwrite(vec G, const int does, float z, vec y, float decay)
{
    return does & BEFORE ? G * decay - z * y : (G - z * y) * decay;
}

/* Backwards: G ← α_{t+1} (G - z_{t+1}ᵀ y_{t+1}) + a_tᵀ x_t;  e_t = p_t G;  y_t = β_t e_t.   The
 * steps are negative, and α points at the token after the first one swept. The state is scaled and
 * updated where it lies. REMOVE: o_t = r_t G as well. */
INLINE void unwrite_lanes(const Sweep *s, const int does, const int nv, const float *beta, float *y,
                          long lane)
{
    float *G_lane = s->to + lane;
    const long rows = s->rows, step = s->to_step;
    vec found[NV], wanted[NV], erased[NV], read[NV];

    for (int j = 0; j < nv; j++)
        erased[j] = broadcast(0);
    for (long t = 0; t < s->tokens; t++) {
        const float *restrict write_row = s->write_row + t * s->row_step;
        const float *restrict peek_row = s->peek_row + t * s->row_step;
        const float *restrict read_row = does & REMOVE ? s->read_row + t * s->row_step : NULL;
        const float *restrict last_erase = s->erase_row + (t ? t - 1 : 0) * s->row_step;
        const float *restrict alpha = does & DECAY_ROWS ? s->alpha + t * s->row_step : NULL;
        for (int j = 0; j < nv; j++) {
            wanted[j] = load(s->write_lane + t * s->lane_step + lane + j * W);
            found[j] = read[j] = broadcast(0);
        }
        const float *enter = t == 0 ? s->enter : NULL;
        for (long i = 0; i < rows; i++) {
            vec G[NV];
            for (int j = 0; j < nv; j++) {
                G[j] = load(G_lane + i * step + j * W);
                if (enter)
                    G[j] *= enter[i];
                G[j] =
                    unwrite(G[j], does, last_erase[i], erased[j], does & DECAY_ROWS ? alpha[i] : 1);
                G[j] += write_row[i] * wanted[j];
                found[j] += peek_row[i] * G[j];
                if (does & REMOVE)
                    read[j] += read_row[i] * G[j];
            }
            for (int j = 0; j < nv; j++)
                store(G_lane + i * step + j * W, G[j]);
        }
        for (int j = 0; j < nv; j++) {
            store(s->peek_sum + t * s->lane_step + lane + j * W, found[j]);
            if (does & REMOVE)
                store(s->read_sum + t * s->lane_step + lane + j * W, read[j]);
            erased[j] = found[j] * beta[-t];
            store(y + t * s->lane_step + lane + j * W, erased[j]);
        }
    }
    const float *restrict last_erase = s->erase_row + (s->tokens - 1) * s->row_step;
    for (long i = 0; i < rows; i++)
        for (int j = 0; j < nv; j++) {
            vec G = load(G_lane + i * step + j * W);
            store(G_lane + i * step + j * W,
                  unwrite(G, does, last_erase[i], erased[j], s->leave ? s->leave[i] : 1));
        }
}

INLINE void write_tokens(const Sweep *s, const int does, const float *beta)
{
    long lane = 0;
    for (; s->lanes - lane >= NV * W; lane += NV * W)
        write_lanes(s, does, NV, beta, lane);
    for (; lane < s->lanes; lane += W)
        write_lanes(s, does, 1, beta, lane);
}

INLINE void unwrite_tokens(const Sweep *s, const int does, const float *beta, float *y)
{
    long lane = 0;
    for (; s->lanes - lane >= NV * W; lane += NV * W)
        unwrite_lanes(s, does, NV, beta, y, lane);
    for (; lane < s->lanes; lane += W)
        unwrite_lanes(s, does, 1, beta, y, lane);
}

#endif
