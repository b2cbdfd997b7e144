/* Vectors of W floats, as the instruction set has them, and the exponentials. */
#ifndef FASTWEIGHTS_VECTOR_H
#define FASTWEIGHTS_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

INLINE vec load(const float *p)
{
    return *(const unaligned_vec *)p;
}
INLINE void store(float *p, vec x)
{
    *(unaligned_vec *)p = x;
}

/* bfloat16: the upper halves of floats, rounded to the nearest, of two to the even one; NaN stays
 * NaN. */
typedef uint32_t word_vec __attribute__((vector_size(4 * W)));
typedef uint16_t half_vec __attribute__((vector_size(2 * W)));
typedef uint16_t unaligned_half_vec __attribute__((vector_size(2 * W), aligned(2), may_alias));

INLINE vec load_narrow(const uint16_t *p)
{
    half_vec halves = *(const unaligned_half_vec *)p;
    return (vec)(__builtin_convertvector(halves, word_vec) << 16);
}

INLINE void store_narrow(uint16_t *p, vec x)
{
    word_vec bits = (word_vec)x, nan = (word_vec)(x != x);
    word_vec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(unaligned_half_vec *)p = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), half_vec);
}

INLINE float widen(uint16_t x)
{
    union {
        uint32_t bits;
        float number;
    } u = {(uint32_t)x << 16};
    return u.number;
}

INLINE uint16_t narrow(float x)
{
    union {
        float number;
        uint32_t bits;
    } u = {x};
    return x != x ? 0x7fc0 : (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
}

INLINE void widen_row(float *to, const uint16_t *from, long width)
{
    long i = 0;
    for (; i + W <= width; i += W)
        store(to + i, load_narrow(from + i));
    for (; i < width; i++)
        to[i] = widen(from[i]);
}

INLINE void narrow_row(uint16_t *to, const float *from, long width)
{
    long i = 0;
    for (; i + W <= width; i += W)
        store_narrow(to + i, load(from + i));
    for (; i < width; i++)
        to[i] = narrow(from[i]);
}

/* Past the caches, to an aligned address: for what is not read again soon. `fence_streams` before
 * others may read it. */
#if W == 16
INLINE void store_streaming(float *p, vec x)
{
    _mm512_stream_ps(p, (__m512)x);
}
#elif W == 8
INLINE void store_streaming(float *p, vec x)
{
    _mm256_stream_ps(p, (__m256)x);
}
#elif defined(__x86_64__)
INLINE void store_streaming(float *p, vec x)
{
    _mm_stream_ps(p, (__m128)x);
}
#else
INLINE void store_streaming(float *p, vec x)
{
    store(p, x);
}
#endif
INLINE void fence_streams(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

INLINE vec broadcast(float x)
{
    return x - (vec){0};
}

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

/* x[i] summed over its lanes, in lane i: halves of the lanes of pairs of vectors change places
 * before every addition. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define NEAR(i, s) ((i) & (s) ? W + (i) - (s) : (i))
#define FAR(i, s) ((i) & (s) ? W + (i) : (i) + (s))
#define FOUR(F, i, s) F(i, s), F(i + 1, s), F(i + 2, s), F(i + 3, s)
#if W == 16
#define EACH(F, s) FOUR(F, 0, s), FOUR(F, 4, s), FOUR(F, 8, s), FOUR(F, 12, s)
#elif W == 8
#define EACH(F, s) FOUR(F, 0, s), FOUR(F, 4, s)
#else
#define EACH(F, s) FOUR(F, 0, s)
#endif
#define FOLD(x, s)                     \
    for (int i = 0; i < W; i += 2 * s) \
        x[i] = SHUFFLE(x[i], x[i + s], EACH(NEAR, s)) + SHUFFLE(x[i], x[i + s], EACH(FAR, s));

INLINE vec totals(vec x[W])
{
    FOLD(x, 1)
    FOLD(x, 2)
#if W > 4
    FOLD(x, 4)
#endif
#if W > 8
    FOLD(x, 8)
#endif
    return x[0];
}

/* x[i][j] and x[j][i] change places, by the halves that `totals` adds. */
#define TURN(x, s)                                  \
    for (int i = 0; i < W; i++)                     \
        if (!(i & s)) {                             \
            vec a = x[i], b = x[i + s];             \
            x[i] = SHUFFLE(a, b, EACH(NEAR, s));    \
            x[i + s] = SHUFFLE(a, b, EACH(FAR, s)); \
        }

INLINE void transpose(vec x[W]){TURN(x, 1) TURN(x, 2)
#if W > 4
                                    TURN(x, 4)
#endif
#if W > 8
                                        TURN(x, 8)
#endif
}

INLINE vec choose(ivec mask, vec yes, vec no)
{
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* The larger one; NaN stays NaN. */
INLINE vec at_least(vec low, vec x)
{
    return choose(x < low, low, x);
}

/* e^x = 2ⁿ + 2ⁿ (e^r - 1) with x = n log 2 + r: n by rounding, e^r - 1, returned, by a polynomial
 * on |r| ≤ ½ log 2. 2ⁿ is 0 where n = -127, so from below -87.7 (and for −inf) on; NaN stays NaN. x
 * ≤ 88. */
INLINE vec exponent(vec x, vec *power)
{
    const vec magic = broadcast(
        12582912.0f + 127.0f); /* the last bits of n + magic are those of the exponent of 2ⁿ */
    x = at_least(broadcast(-88.0f), x);
    vec t = x * 1.44269504f + magic;
    vec n = t - magic;
    vec r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    vec p = broadcast(1.9841270e-4f);
    p = p * r + 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    *power = (vec)((ivec)t << 23);
    return p * (r * r) + r;
}

INLINE vec vexp(vec x)
{
    vec power, rest = exponent(x, &power);
    return power + power * rest;
}

/* 1 - e^x, to full relative accuracy */
INLINE vec one_minus_exp(vec x)
{
    vec power, rest = exponent(x, &power);
    return (1.0f - power) - power * rest;
}

INLINE float dot(const float *a, const float *b, long width)
{
    vec sum = broadcast(0);
    long i = 0;
    for (; i + W <= width; i += W)
        sum += load(a + i) * load(b + i);
    float found = total(sum);
    for (; i < width; i++)
        found += a[i] * b[i];
    return found;
}

INLINE long padded(long width)
{
    return (width + W - 1) / W * W;
}

#endif
