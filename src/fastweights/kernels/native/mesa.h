/* What Python hands over for the Mesa rule. */
#ifndef FASTWEIGHTS_MESA_H
#define FASTWEIGHTS_MESA_H

#include "problem.h"

/* H_t = γ_t H_{t-1} + β_t k_tᵀ k_t ;  G_t = γ_t G_{t-1} + β_t k_tᵀ v_t ;  x_t = (H_t + Λ_t)⁻¹ b_t ;
 * o_t = x_t G_t
 *
 * Without values only the x_t are found. States are contiguous. */
typedef struct {
    int64_t b, t, h, k, v;
    int64_t steps;   /* at most so many */
    double tol;      /* of the first residual's norm; negative: none */
    int64_t threads; /* at most so many */
    View right, key, beta, ridge, log_decay, value; /* log_decay, value: may be NULL */
    View x, o;                                      /* x: may be NULL */
    float *gram, *memory, *last_gram, *last_memory; /* [b h k k], [b h k v]; memory as value */
    float *marks; /* [⌈t / SOLVED⌉ b h k (k + v)], the states before every span; NULL: one span */
    float *taken; /* [b h t], steps of every token; may be NULL */
} MesaProblem;

/* Tokens between two marks */
#define SOLVED 256

#endif
