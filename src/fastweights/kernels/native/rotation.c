/* Rotary positions: y = (l c_l - r s_l, r c_r + l s_r) of the halves l, r of every row x, in one
 * pass. Every product is rounded by itself, as torch's are. */
#include "pool.h"
#include "rotation.h"
#include "rows.h"

/* x, of which no later addition makes one operation with what x was */
INLINE vec rounded(vec x)
{
#if defined(__x86_64__)
    __asm__("" : "+v"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

static void rotate_row(float *y, const float *x, const float *c, const float *s, long half)
{
    long i = 0;
    for (; i + W <= half; i += W) {
        vec l = load(x + i), r = load(x + half + i);
        store(y + i, rounded(l * load(c + i)) - rounded(r * load(s + i)));
        vec right = rounded(r * load(c + half + i));
        store(y + half + i, right + rounded(l * load(s + half + i)));
    }
    for (; i < half; i++) {
        vec l = broadcast(x[i]), r = broadcast(x[half + i]);
        y[i] = (rounded(l * c[i]) - rounded(r * s[i]))[0];
        y[half + i] = (rounded(r * c[half + i]) + rounded(l * s[half + i]))[0];
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
