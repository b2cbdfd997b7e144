/* Rotary positions: y = (l c_l - r s_l, r c_r + l s_r) of the halves l, r of every row x, in one
 * pass. */
#include "pool.h"
#include "rotation.h"
#include "rows.h"

static void rotate_row(float *y, const float *x, const float *c, const float *s, long half)
{
    long i = 0;
    for (; i + W <= half; i += W) {
        vec l = load(x + i), r = load(x + half + i);
        store(y + i, l * load(c + i) - r * load(s + i));
        store(y + half + i, r * load(c + half + i) + l * load(s + half + i));
    }
    for (; i < half; i++) {
        float l = x[i], r = x[half + i];
        y[i] = l * c[i] - r * s[i];
        y[half + i] = r * c[half + i] + l * s[half + i];
    }
}

static long spans(const Rotation *p)
{
    return (p->t + ROTATED_TOKENS - 1) / ROTATED_TOKENS;
}

static int rotate_tokens(const void *problem, long task)
{
    const Rotation *p = problem;
    long b = task / spans(p), t = task % spans(p) * ROTATED_TOKENS;
    for (long end = t + ROTATED_TOKENS < p->t ? t + ROTATED_TOKENS : p->t; t < end; t++) {
        const float *c = (const float *)address(&p->cosines, b, t, 0),
                    *s = (const float *)address(&p->sines, b, t, 0);
        for (long h = 0; h < p->h; h++)
            rotate_row((float *)address(&p->y, b, t, h), (const float *)address(&p->x, b, t, h), c,
                       s, p->width / 2);
    }
    return DONE;
}

int FOR_ISA(fw_rotate)(const Rotation *p)
{
    return fw_parallel(rotate_tokens, p, p->b * spans(p), p->threads);
}
