/* Vectors of W floats, as the instruction set has them, and the exponentials. */
#ifndef FASTWEIGHTS_VECTOR_H
#define FASTWEIGHTS_VECTOR_H

#include <stdint.h>
#include <string.h>

/* NV: vectors side by side in a tile of the state; ROWS × NV of them stay in registers. */
#define ROWS 4
#if defined(__AVX512F__)
#define W 16
#define NV 4
#elif defined(__AVX2__)
#define W 8
#define NV 2
#elif defined(__aarch64__)
#define W 4
#define NV 4
#else
#define W 4
#define NV 2
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef float unaligned_vec __attribute__((vector_size(4 * W), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const unaligned_vec *)p; }
INLINE void store(float *p, vec x) { *(unaligned_vec *)p = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ivec yes, vec a, vec b) { return (vec)((yes & (ivec)a) | (~yes & (ivec)b)); }

INLINE float total(vec x)
{
    typedef float four __attribute__((vector_size(16)));
    union {
        vec whole;
        four part[W / 4];
    } u = {x};
    four sum = u.part[0];
    for (int i = 1; i < W / 4; i++)
        sum += u.part[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* e^x = 2ⁿ + 2ⁿ (e^r - 1) with x = n log 2 + r: n by rounding, e^r - 1 by a polynomial on |r| ≤ ½ log 2.
 * 0 below -87 (so for −inf), and NaN stays NaN. x ≤ 88. */
INLINE void exponent(vec x, vec *power, vec *rest)
{
    const vec magic = all(12582912.0f);
    vec t = x * 1.44269504f + magic;
    vec n = t - magic;
    vec r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    vec p = all(1.9841270e-4f);
    p = p * r + 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    *power = (vec)((((ivec)t - (ivec)magic) + 127) << 23);
    *rest = *power * (p * (r * r) + r);
}

INLINE vec vexp(vec x)
{
    vec power, rest, low = all(-87.0f);
    ivec gone = x < low;
    exponent(choose(gone, low, x), &power, &rest);
    return (vec)(~gone & (ivec)(power + rest));
}

/* 1 - e^x, to full relative accuracy */
INLINE vec one_minus_exp(vec x)
{
    vec power, rest, low = all(-87.0f);
    exponent(choose(x < low, low, x), &power, &rest);
    return (1.0f - power) - rest;
}

INLINE long padded(long width) { return (width + W - 1) / W * W; }

#endif
