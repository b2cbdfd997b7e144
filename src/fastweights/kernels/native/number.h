/* What a scan computes with: W real numbers at a time, or, with COMPLEX defined, W complex ones.
 *
 * Streams hold complex numbers as pairs. What is only put by for later (`load_split`) lies as W
 * real parts, then W imaginary ones. Conjugates, which gradients are made of, are the numbers
 * themselves where they are real.
 */
#ifndef FASTWEIGHTS_NUMBER_H
#define FASTWEIGHTS_NUMBER_H

#include "vector.h"

#ifdef COMPLEX

#include "sine.h"

#define PARTS 2
typedef struct {
    vec re, im;
} num;

#define EVEN(i, s) (2 * (i))
#define ODD(i, s) (2 * (i) + 1)
#define LOW(i, s) ((i) / 2 + ((i) & 1 ? W : 0))
#define HIGH(i, s) (W / 2 + (i) / 2 + ((i) & 1 ? W : 0))

INLINE num load_split(const float *p)
{
    return (num){load(p), load(p + W)};
}
INLINE void store_split(float *p, num x)
{
    store(p, x.re), store(p + W, x.im);
}
INLINE num load_num(const float *p)
{
    vec a = load(p), b = load(p + W);
    return (num){SHUFFLE(a, b, EACH(EVEN, 0)), SHUFFLE(a, b, EACH(ODD, 0))};
}
INLINE void store_num(float *p, num x)
{
    store(p, SHUFFLE(x.re, x.im, EACH(LOW, 0)));
    store(p + W, SHUFFLE(x.re, x.im, EACH(HIGH, 0)));
}
INLINE num broadcast_num(const float *p)
{
    return (num){broadcast(p[0]), broadcast(p[1])};
}
INLINE num plus(num a, num b)
{
    return (num){a.re + b.re, a.im + b.im};
}
INLINE num minus(num a, num b)
{
    return (num){a.re - b.re, a.im - b.im};
}
INLINE num times(num a, num b)
{
    return (num){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
INLINE num conjugate(num a)
{
    return (num){a.re, -a.im};
}

INLINE num totals_of(num x[W])
{
    vec re[W], im[W];
    for (int i = 0; i < W; i++) {
        re[i] = x[i].re;
        im[i] = x[i].im;
    }
    return (num){totals(re), totals(im)};
}

/* e^z and 1 - e^z by the sine and cosine of half the angle: 1 - cos φ = 2 sin² ½φ keeps the digits
 * of a small one. */
INLINE num exponential(num z, num *rest)
{
    vec sine, cosine, modulus = vexp(z.re);
    sincos_of(z.im * 0.5f, &sine, &cosine);
    vec gone = 2.0f * sine * sine * modulus, im = 2.0f * sine * cosine * modulus;
    *rest = (num){one_minus_exp(z.re) + gone, -im};
    return (num){modulus - gone, im};
}

#else

#define PARTS 1
typedef vec num;

INLINE num load_split(const float *p)
{
    return load(p);
}
INLINE void store_split(float *p, num x)
{
    store(p, x);
}
INLINE num load_num(const float *p)
{
    return load(p);
}
INLINE void store_num(float *p, num x)
{
    store(p, x);
}
INLINE num broadcast_num(const float *p)
{
    return broadcast(*p);
}
INLINE num plus(num a, num b)
{
    return a + b;
}
INLINE num minus(num a, num b)
{
    return a - b;
}
INLINE num times(num a, num b)
{
    return a * b;
}
INLINE num conjugate(num a)
{
    return a;
}
INLINE num totals_of(num x[W])
{
    return totals(x);
}
INLINE num exponential(num z, num *rest)
{
    *rest = one_minus_exp(z);
    return vexp(z);
}

#endif

/* Floats of W numbers */
#define STEP (W * PARTS)

#endif
