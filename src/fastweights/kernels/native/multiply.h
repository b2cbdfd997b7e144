/* Products of matrices that lie in the caches. */
#ifndef FASTWEIGHTS_MULTIPLY_H
#define FASTWEIGHTS_MULTIPLY_H

#include "vector.h"

/* to [rows columns] = a [rows inner] b [inner columns]; columns is a multiple of W, and a lies as
 * it likes. */
typedef struct {
    float *to;
    long to_step;
    const float *a;
    long a_row, a_column;
    const float *b;
    long b_step;
    long rows, inner, columns;
} Multiplication;

/* A tile stays in registers until it is done. Each sum runs over `inner` in order, in whatever
 * tile. */
INLINE void multiply_tile(const Multiplication *m, long row, long lane, const int rows,
                          const int nv, int adds)
{
    vec sum[2 * ROWS][NV];
    const float *a = m->a + row * m->a_row, *b = m->b + lane;
    float *to = m->to + row * m->to_step + lane;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < nv; j++)
            sum[i][j] = adds ? load(to + i * m->to_step + j * W) : broadcast(0);
    for (long l = 0; l < m->inner; l++, a += m->a_column, b += m->b_step) {
        vec lanes[NV];
        for (int j = 0; j < nv; j++)
            lanes[j] = load(b + j * W);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < nv; j++)
                sum[i][j] += a[i * m->a_row] * lanes[j];
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < nv; j++)
            store(to + i * m->to_step + j * W, sum[i][j]);
}

INLINE void multiply_columns(const Multiplication *m, long lane, const int nv, int adds)
{
    const int tall = 2 * nv <= NV ? 2 * ROWS : ROWS;
    long row = 0;
    for (; row + tall <= m->rows; row += tall)
        multiply_tile(m, row, lane, tall, nv, adds);
    for (; row + ROWS <= m->rows; row += ROWS)
        multiply_tile(m, row, lane, ROWS, nv, adds);
    for (; row < m->rows; row++)
        multiply_tile(m, row, lane, 1, nv, adds);
}

/* With `adds`, to += a b. */
static void multiply(const Multiplication *m, int adds)
{
    for (long lane = 0, rest = m->columns / W, nv; rest > 0; lane += nv * W, rest -= nv) {
        long tiles = (rest + NV - 1) / NV;
        nv = (rest + tiles - 1) / tiles;
        if (nv == 1)
            multiply_columns(m, lane, 1, adds);
        else if (nv == 2)
            multiply_columns(m, lane, 2, adds);
#if NV > 2
        else if (nv == 3)
            multiply_columns(m, lane, 3, adds);
        else
            multiply_columns(m, lane, 4, adds);
#endif
    }
}

#endif
