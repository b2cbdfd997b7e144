/* RMSNorm of every row x:
 *
 *     y = r x ⊙ w,    r = (mean x² + ε)^(-1/2)
 *     dx = r (g - r² mean(g ⊙ x) x) with g = dy ⊙ w,    dw = Σ r dy ⊙ x
 *
 * r is cheaper computed again than kept.
 */
#include "norm.h"
#include "pool.h"
#include "vector.h"

#include <math.h>

static float inverse_root(const Norm *p, const float *x)
{
    return 1 / sqrtf(dot(x, x, p->width) / p->width + (float)p->epsilon);
}

static long end_of(const Norm *p, long task)
{
    return (task + 1) * NORM_ROWS < p->rows ? (task + 1) * NORM_ROWS : p->rows;
}

static long tasks(const Norm *p)
{
    return (p->rows + NORM_ROWS - 1) / NORM_ROWS;
}

/* to = scale a ⊙ w, without w scale a */
INLINE void weigh(float *to, float scale, const float *a, const float *w, long width)
{
    long i = 0;
    for (; i + W <= width; i += W)
        store(to + i, w ? scale * load(a + i) * load(w + i) : scale * load(a + i));
    for (; i < width; i++)
        to[i] = w ? scale * a[i] * w[i] : scale * a[i];
}

/* to += scale a ⊙ b, without b scale a */
INLINE void add(float *to, float scale, const float *a, const float *b, long width)
{
    long i = 0;
    for (; i + W <= width; i += W)
        store(to + i, load(to + i) + (b ? scale * load(a + i) * load(b + i) : scale * load(a + i)));
    for (; i < width; i++)
        to[i] += b ? scale * a[i] * b[i] : scale * a[i];
}

/* Rows of floats where they are, others as copies */
static const float *read_row(const Norm *p, const void *rows, long row, float *copy)
{
    if (!p->narrow)
        return (const float *)rows + row * p->width;
    widen_row(copy, (const uint16_t *)rows + row * p->width, p->width);
    return copy;
}

static float *begin_row(const Norm *p, void *rows, long row, float *copy)
{
    return p->narrow ? copy : (float *)rows + row * p->width;
}

static void end_row(const Norm *p, void *rows, long row, const float *copy)
{
    if (p->narrow)
        narrow_row((uint16_t *)rows + row * p->width, copy, p->width);
}

static int forward_task(const void *problem, long task)
{
    const Norm *p = problem;
    float *copies = fw_scratch(2 * p->width);
    if (!copies)
        return OUT_OF_MEMORY;
    for (long row = task * NORM_ROWS; row < end_of(p, task); row++) {
        const float *x = read_row(p, p->x, row, copies);
        float *y = begin_row(p, p->y, row, copies + p->width);
        weigh(y, inverse_root(p, x), x, p->weight, p->width);
        end_row(p, p->y, row, y);
    }
    return DONE;
}

int FOR_ISA(fw_norm)(const Norm *p)
{
    return fw_parallel(forward_task, p, tasks(p), p->threads);
}

static int backward_task(const void *problem, long task)
{
    const Norm *p = problem;
    float *d_weight = p->d_weight ? p->d_weight + task * p->width : NULL;
    float *copies = fw_scratch(3 * p->width);
    if (!copies)
        return OUT_OF_MEMORY;
    if (d_weight)
        memset(d_weight, 0, p->width * sizeof(float));
    for (long row = task * NORM_ROWS; row < end_of(p, task); row++) {
        const float *x = read_row(p, p->x, row, copies),
                    *d_y = read_row(p, p->d_y, row, copies + p->width);
        float *d_x = begin_row(p, p->d_x, row, copies + 2 * p->width), r = inverse_root(p, x);
        weigh(d_x, r, d_y, p->weight, p->width);
        add(d_x, -r * r * dot(d_x, x, p->width) / p->width, x, NULL, p->width);
        if (d_weight)
            add(d_weight, r, d_y, x, p->width);
        end_row(p, p->d_x, row, d_x);
    }
    return DONE;
}

int FOR_ISA(fw_norm_back)(const Norm *p)
{
    return fw_parallel(backward_task, p, tasks(p), p->threads);
}
