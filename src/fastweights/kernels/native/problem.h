/* What Python hands over: sizes, and tensors as raw float32 pointers with strides counted in
 * floats. Complex numbers are pairs of them. Rows that rows.h copies may be of bfloat16, and so may
 * those of a convolution. */
#ifndef FASTWEIGHTS_PROBLEM_H
#define FASTWEIGHTS_PROBLEM_H

#include <stdint.h>

typedef struct {
    float *at; /* NULL: there is none */
    int64_t b, t, h, w;
    int64_t narrow; /* whether these are bfloat16, and the strides counted in them */
} View;

/* Where the state of a sequence lies: one of `bytes` behind the other, or in a page that is the
 * sequence's own */
typedef struct {
    const int64_t
        *of; /* [b], the number of each sequence's page; NULL: states lie one behind the other */
    int64_t step; /* bytes from one page to the next */
} Pages;

static inline void *of_sequence(const Pages *pages, const void *states, int64_t b, int64_t bytes)
{
    return (char *)states + (pages->of ? pages->of[b] * pages->step : b * bytes);
}

/* S_t = diag(α_t) S_{t-1} + k_tᵀ v_t; o_t = q_t S_t. Where beta is given, the delta rule; where
 * erase is, DPLR, whose keys are apart: key writes, erase reads what is erased, and remove, or key
 * where there is none, erases it. In a scan that has a rate, log α is log_decay times it. States
 * are contiguous, those of a sequence at least; the last may be written where the start lies. */
typedef struct {
    int64_t b, t, h, k, v;
    int64_t decays;  /* the width of log_decay: 0 (none), 1 or k */
    int64_t before;  /* whether erase reads the state before it decays */
    int64_t threads; /* at most so many */
    View q, key, value, log_decay, beta, erase, remove, rate, o;
    float *start, *last; /* [b h k v] */
    /* [⌈t / BLOCK⌉ b h k v], the state before every block (a scan: SPAN); NULL if no gradient is wanted */
    float *marks;
    /* [b h t v], what is found missing, v_t - k_t diag(α_t) S_{t-1}; where remove is given, what is erased; may be
     * NULL */
    float *missing;
    Pages pages; /* of start and last */
} Forward;

typedef struct {
    Forward forward;
    View d_o, d_q, d_key, d_value, d_log_decay, d_beta, d_erase, d_remove, d_rate;
    float *d_last, *d_start;
} Backward;

static inline int erases(const Forward *p)
{
    return p->beta.at || p->erase.at;
}

/* Tokens that share their decays' scale, and tokens between two marks. */
#define CHUNK 32
#define BLOCK 256
/* Bytes of states from which on one token writes them past the caches */
#define STREAMED (1 << 21)
/* The scans: the widest key; lanes of a strip, if there are enough for all threads; and tokens
 * between two marks. */
#define WIDEST 128
#define STRIP 1024
#define SPAN 16

/* Whole heads, and unless they are wide a multiple of all vector lengths */
static inline int64_t heads_per_strip(const Forward *p)
{
    int64_t fair = p->b * p->h * p->k / (2 * p->threads);
    int64_t heads = (fair < WIDEST ? WIDEST : fair < STRIP ? fair : STRIP) / p->k;
    return heads < 16 ? heads : heads / 16 * 16;
}

static inline int64_t strips(const Forward *p)
{
    return (p->h + heads_per_strip(p) - 1) / heads_per_strip(p);
}

/* Every kernel is compiled once per instruction set, under names of its own. */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define FOR_ISA(name) JOIN(name, ISA)

#endif
