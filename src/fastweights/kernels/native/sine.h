/* Sines and cosines of W angles. */
#ifndef FASTWEIGHTS_SINE_H
#define FASTWEIGHTS_SINE_H

#include <math.h>

#include "vector.h"

#define FARTHEST 8192.0f

/* Angles beyond those that three parts of ½π reduce */
static void far_sine(vec x, vec *sine, vec *cosine)
{
    for (int i = 0; i < W; i++) {
        (*sine)[i] = (float)sin(x[i]);
        (*cosine)[i] = (float)cos(x[i]);
    }
}

/* sin x and cos x: x = n ½π + r, a polynomial each on |r| ≤ ¼π, exchanged and negated as n modulo 4
 * says. */
INLINE void sincos_of(vec x, vec *sine, vec *cosine)
{
    const vec magic = broadcast(12582912.0f);
    ivec far = (x > FARTHEST) | (x < -FARTHEST);
    vec t = x * 0.636619772f + magic, n = t - magic;
    vec r = x - n * 1.5703125f;
    r = r - n * 4.837512969970703125e-4f;
    r = r - n * 7.54978995489188216e-8f;
    vec square = r * r;
    vec s = -1.9515295891e-4f * square + 8.3321608736e-3f;
    s = s * square - 1.6666654611e-1f;
    s = s * square * r + r;
    vec c = 2.443315711809948e-5f * square - 1.388731625493765e-3f;
    c = c * square + 4.166664568298827e-2f;
    c = c * square * square - 0.5f * square + 1.0f;
    ivec quarter = (ivec)t, turned = -(quarter & 1);
    ivec down = (quarter & 2) << 30, back = ((quarter + 1) & 2) << 30;
    *sine = (vec)((((ivec)c & turned) | ((ivec)s & ~turned)) ^ down);
    *cosine = (vec)((((ivec)s & turned) | ((ivec)c & ~turned)) ^ back);
    int any = 0;
    for (int i = 0; i < W; i++)
        any |= far[i];
    if (any)
        far_sine(x, sine, cosine);
}

#endif
