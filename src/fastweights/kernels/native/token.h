/* One token of decoding: the state is read and written once, row by row as it lies in memory.
 *
 *     e = v - p S;   S' = α S + aᵀ (β e), or α S + aᵀ v where nothing is erased;   o = r S'.       (p carries α.)
 *     REMOVE: e = p S;   S' = α S + aᵀ v - zᵀ e.
 */
#ifndef FASTWEIGHTS_TOKEN_H
#define FASTWEIGHTS_TOKEN_H

#include "sweep.h"

/* Vectors of a row at a time */
#define WIDE (2 * NV)

INLINE void token_lanes(const Sweep *s, const int does, const int nv, const float *beta, long lane)
{
    const float *from = s->from + lane;
    float *to = s->to + lane;
    vec written[WIDE], removed[WIDE], read[WIDE];

    for (int j = 0; j < nv; j++) {
        written[j] = load(s->write_lane + lane + j * W);
        removed[j] = read[j] = broadcast(0);
    }
    if (does & REMOVE) {
        for (long i = 0; i < s->rows; i++)
            for (int j = 0; j < nv; j++)
                removed[j] += s->peek_row[i] * load(from + i * s->from_step + j * W);
        for (int j = 0; j < nv; j++)
            store(s->peek_sum + lane + j * W, removed[j]);
    } else if (does & PEEK) {
        for (long i = 0; i < s->rows; i++)
            for (int j = 0; j < nv; j++)
                written[j] -= s->peek_row[i] * load(from + i * s->from_step + j * W);
        for (int j = 0; j < nv; j++) {
            store(s->peek_sum + lane + j * W, written[j]);
            written[j] *= beta[0];
        }
    }
    for (long i = 0; i < s->rows; i++)
        for (int j = 0; j < nv; j++) {
            vec S = load(from + i * s->from_step + j * W);
            if (does & DECAY_ROWS)
                S *= s->alpha[i];
            S += s->write_row[i] * written[j];
            if (does & REMOVE)
                S -= s->erase_row[i] * removed[j];
            read[j] += s->read_row[i] * S;
            float *after = to + i * s->to_step + j * W;
            if (does & STREAM)
                store_streaming(after, S);
            else
                store(after, S);
        }
    for (int j = 0; j < nv; j++)
        store(s->read_sum + lane + j * W, read[j]);
}

INLINE void token(const Sweep *s, const int does, const float *beta)
{
    long lane = 0;
    for (; s->lanes - lane >= WIDE * W; lane += WIDE * W)
        token_lanes(s, does, WIDE, beta, lane);
    for (; s->lanes - lane >= NV * W; lane += NV * W)
        token_lanes(s, does, NV, beta, lane);
    for (; lane < s->lanes; lane += W)
        token_lanes(s, does, 1, beta, lane);
}

/* `token` with DECAY_ROWS or without */
INLINE void token_of(const Sweep *s, const int does, int decays, const float *beta)
{
    if (decays)
        token(s, does | DECAY_ROWS, beta);
    else
        token(s, does, beta);
}

#endif
