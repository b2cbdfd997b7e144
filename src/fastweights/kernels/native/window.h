/* What one token of WindowedLinear and many have in common: where a head's state lies, weights,
 * features, both sides joined. */
#ifndef FASTWEIGHTS_WINDOW_H
#define FASTWEIGHTS_WINDOW_H

#include "rows.h"
#include "windowed.h"

#define LARGEST_LOG_WEIGHT 40.0f /* as in recurrence/windowed.py */

/* ---- the state ---- */

/* A key head of a sequence, and its rows of the state; NULL for the empty one */
typedef struct {
    const WindowProblem *p;
    long b, g;
    const float *keys, *values, *features, *memory;
    const int64_t *age;
} Head;

/* Where the rows of a head begin in [b g n width], and in what may have pages */
INLINE long place(const Head *head, long n, long width)
{
    return (head->b * head->p->g + head->g) * n * width;
}

INLINE float *in_pages(const Head *head, const float *states, long n, long width)
{
    float *own =
        of_sequence(&head->p->pages, states, head->b, head->p->g * n * width * sizeof(float));
    return own + head->g * n * width;
}

INLINE int64_t *ages(const WindowProblem *p, const int64_t *states, long b, long n)
{
    return of_sequence(&p->pages, states, b, n * sizeof(int64_t));
}

static inline Head head_of(const WindowProblem *p, long task)
{
    Head head = {.p = p, .b = task / p->g, .g = task % p->g};
    if (!p->memory)
        return head;
    head.keys = in_pages(&head, p->keys, p->cached, p->k);
    head.values = in_pages(&head, p->values, p->cached, p->v);
    head.memory = in_pages(&head, p->memory, p->f, p->v + 1);
    head.age = ages(p, p->age, head.b, p->cached);
    if (p->map == GIVEN)
        head.features = p->features + place(&head, p->cached, p->f);
    return head;
}

/* Tokens that the next state has */
INLINE long cached_after(const WindowProblem *p)
{
    long room = p->window > 0 ? p->window - 1 : 0;
    return room < p->cached + p->t ? room : p->cached + p->t;
}

/* ---- weights ---- */

/* tanh, to full relative accuracy */
INLINE vec vtanh(vec x)
{
    vec below = -2.0f * choose(x < 0, -x, x),
        magnitude = one_minus_exp(below) / (1.0f + vexp(below));
    return choose(x < 0, -magnitude, magnitude);
}

/* s from q·k */
INLINE vec scored(const WindowProblem *p, vec product)
{
    vec s = product * (float)p->scale;
    return p->softcap ? (float)p->softcap * vtanh(s / (float)p->softcap) : s;
}

/* s - a between ±LARGEST_LOG_WEIGHT, or −inf */
INLINE vec log_weight(vec s, vec a)
{
    const vec most = broadcast(LARGEST_LOG_WEIGHT);
    vec x = s - a;
    x = choose(x > most, most, at_least(-most, x));
    return choose(s == broadcast(-__builtin_inff()), s, x);
}

INLINE vec reciprocal_or_zero(vec x)
{
    return choose(x == broadcast(0), broadcast(0), 1.0f / x);
}

/* o = a N + c F, from the last columns of N and F; a side without weight leaves all to the other.
 */
INLINE void join(const WindowProblem *p, vec mix, vec near, vec far, vec *a, vec *c)
{
    vec of_near = mix, of_far = broadcast(1), sum = mix * near + far;
    if (!p->shared) {
        vec share = choose(near == broadcast(0), broadcast(0), mix),
            rest = choose(far == broadcast(0), broadcast(0), 1.0f - mix);
        of_near = share * reciprocal_or_zero(near);
        of_far = rest * reciprocal_or_zero(far);
        sum = share + rest;
    }
    vec inverse = reciprocal_or_zero(sum);
    *a = of_near * inverse, *c = of_far * inverse;
}

/* ---- features ---- */

/* e^x, of which that of any x above 88 is a product */
INLINE vec exp_of_any(vec x)
{
    const vec most = broadcast(88);
    vec rest = choose(x > most, x - most, broadcast(0));
    return vexp(choose(x > most, most, x)) * vexp(choose(rest > most, most, rest));
}

/* f of what is no softmax */
INLINE vec activated(int64_t map, vec x)
{
    switch (map) {
    case EXP: return exp_of_any(x);
    case ELU: return choose(x > 0, x + 1, vexp(choose(x > 0, broadcast(0), x)));
    default: return choose(x < 0, broadcast(0), x);
    }
}

#endif
