/* Sums of rows, and gated ones, between the products of a token: few numbers, by one thread. */
#include "pointwise.h"
#include "pool.h"
#include "vector.h"

/* By e^-|x|, which nothing is too large for */
INLINE vec sigmoid(vec x)
{
    vec small = vexp(choose(x < 0, x, -x));
    return choose(x < 0, small, broadcast(1)) / (1.0f + small);
}

INLINE vec computed(int64_t kind, vec a, vec b)
{
    const float root = 1.5957691216f; /* √(8/π) */
    if (kind == SUM)
        return a + b;
    return a * sigmoid(kind == GELU_GATED ? root * (a + 0.044715f * a * a * a) : a) * b;
}

int FOR_ISA(fw_pointwise)(const Pointwise *p)
{
    long i = 0;
    for (; i + W <= p->count; i += W)
        store(p->to + i, computed(p->kind, load(p->a + i), load(p->b + i)));
    for (; i < p->count; i++)
        p->to[i] = computed(p->kind, broadcast(p->a[i]), broadcast(p->b[i]))[0];
    return DONE;
}
