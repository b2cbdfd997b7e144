/* y = x weightᵀ + bias of a few rows x, for every product handed over: each weight is read from
 * memory once, and that is all that takes time.
 *
 * Several outputs are computed side by side, so that as many streams of the weight are fetched
 * ahead at once, and further rows find these in the nearest cache.
 */
#include "product.h"
#include "pool.h"
#include "vector.h"

#define SIDE 4
#define FAR_INPUTS 2048 /* the next outputs of longer rows would be fetched too far ahead */

/* to[r · outputs + o] = x_r · w_o + bias_o for SIDE outputs and `rows` rows; x and w are `inputs`
 * apart. */
INLINE void tile(const Product *p, const float *x, const float *w, const float *bias, float *to,
                 int rows, int fetch)
{
    long inputs = p->inputs, ahead = inputs > FAR_INPUTS ? FAR_INPUTS : SIDE * inputs, i = 0;
    vec sum[2][SIDE];
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < SIDE; o++)
            sum[r][o] = broadcast(0);
    for (; i + W <= inputs; i += W)
        for (int o = 0; o < SIDE; o++) {
            vec weight = load(w + o * inputs + i);
            if (fetch)
                __builtin_prefetch(w + o * inputs + i + ahead);
            for (int r = 0; r < rows; r++)
                sum[r][o] += weight * load(x + r * inputs + i);
        }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < SIDE; o++) {
            float found = total(sum[r][o]);
            for (long j = i; j < inputs; j++)
                found += x[r * inputs + j] * w[o * inputs + j];
            to[r * p->outputs + o] = found + (bias ? bias[o] : 0);
        }
}

static void outputs_of(const Product *p, long o)
{
    const float *w = p->weight + o * p->inputs, *bias = p->bias ? p->bias + o : NULL;
    long r = 0;
    if (p->rows == 1)
        tile(p, p->x, w, bias, p->y + o, 1, 1);
    else
        for (; r + 2 <= p->rows; r += 2)
            tile(p, p->x + r * p->inputs, w, bias, p->y + r * p->outputs + o, 2, r == 0);
    if (r < p->rows && p->rows > 1)
        tile(p, p->x + r * p->inputs, w, bias, p->y + r * p->outputs + o, 1, 0);
}

static long tasks(const Product *p)
{
    return (p->outputs + PRODUCT_OUTPUTS - 1) / PRODUCT_OUTPUTS;
}

static int task(const void *problem, long index)
{
    const Product *p = problem;
    for (; index >= tasks(p); p++)
        index -= tasks(p);
    long o = index * PRODUCT_OUTPUTS,
         end = o + PRODUCT_OUTPUTS < p->outputs ? o + PRODUCT_OUTPUTS : p->outputs;
    for (; o + SIDE <= end; o += SIDE)
        outputs_of(p, o);
    for (; o < end; o++)
        for (long r = 0; r < p->rows; r++)
            p->y[r * p->outputs + o] =
                dot(p->x + r * p->inputs, p->weight + o * p->inputs, p->inputs) +
                (p->bias ? p->bias[o] : 0);
    return DONE;
}

int FOR_ISA(fw_product)(const Product *p)
{
    long sum = tasks(p);
    for (long i = 1; i <= p->following; i++)
        sum += tasks(p + i);
    return fw_parallel(task, p, sum, p->threads);
}
