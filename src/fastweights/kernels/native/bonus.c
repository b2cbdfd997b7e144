/* One token of Amplified(Normalized(Bonus)) with one key per head, all logs in double:
 *
 *     m' = max(m + log α, w),   r = max(m, w)
 *     o = (q e^(m - r) S + u e^(w - r) (v ‖ 1)) divided by its last number;   S' = e^(m + log α - m') S + e^(w - m') k (v ‖ 1)
 *
 * for states S e^m. What is exponentiated is never above 0.
 */
#include "bonus.h"
#include "pool.h"
#include "vector.h"

#include <math.h>

enum { KEPT, WRITTEN, SEEN, OWN, FACTORS };

static const float *head_of(const View *view, long b, long h)
{
    return view->at + b * view->b + h * view->h;
}

static double number_of(const View *view, long b, long h)
{
    return view->at ? *head_of(view, b, h) : 0;
}

/* NaN stays NaN. */
static double larger(double a, double b)
{
    return a > b || a != a ? a : b;
}

static float round_up(double m)
{
    float near = (float)m;
    return near < m ? nextafterf(near, INFINITY) : near;
}

/* The logs of a head's factors; m' goes to the state. */
static void logs_of(const BonusStep *p, long b, long h, float logs[FACTORS][BONUS_HEADS],
                    long place)
{
    double gain = number_of(&p->log_gain, b, h), before = p->scale[b * p->h + h];
    double decayed = before + number_of(&p->log_decay, b, h);
    double after = p->next_scale[b * p->h + h] = round_up(larger(larger(decayed, gain), p->least));
    if (number_of(&p->q, b, h) == 0)
        before = p->empty;
    double read = larger(larger(before, gain), p->least);
    logs[KEPT][place] = (float)(decayed - after);
    logs[WRITTEN][place] = (float)(gain - after);
    logs[SEEN][place] = (float)(before - read);
    logs[OWN][place] = (float)(gain - read);
}

static void head(const BonusStep *p, long b, long h, float factors[FACTORS][BONUS_HEADS],
                 long place)
{
    long row = b * p->h + h, v = p->v;
    const float *S = p->memory + row * (v + 1), *value = head_of(&p->value, b, h);
    float *next = p->next_memory + row * (v + 1);
    float seen = (float)number_of(&p->q, b, h) * factors[SEEN][place];
    float own = (float)number_of(&p->bonus, b, h) * factors[OWN][place];
    float written = (float)number_of(&p->key, b, h) * factors[WRITTEN][place],
          kept = factors[KEPT][place];
    float sum = seen * S[v] + own, inverse = sum == 0 ? 0 : 1 / sum;
    for (long j = 0; j < v; j++) {
        float x = value[j * p->value.w];
        p->o[row * v + j] = (seen * S[j] + own * x) * inverse;
        next[j] = kept * S[j] + written * x;
    }
    next[v] = kept * S[v] + written;
}

static long tasks_of_sequence(const BonusStep *p)
{
    return (p->h + BONUS_HEADS - 1) / BONUS_HEADS;
}

static int task(const void *problem, long index)
{
    const BonusStep *p = problem;
    long b = index / tasks_of_sequence(p), first = index % tasks_of_sequence(p) * BONUS_HEADS;
    long heads = p->h - first < BONUS_HEADS ? p->h - first : BONUS_HEADS;
    float factors[FACTORS][BONUS_HEADS] = {0};
    for (long i = 0; i < heads; i++)
        logs_of(p, b, first + i, factors, i);
    for (long f = 0; f < FACTORS; f++)
        for (long i = 0; i < heads; i += W)
            store(factors[f] + i, vexp(load(factors[f] + i)));
    for (long i = 0; i < heads; i++)
        head(p, b, first + i, factors, i);
    return DONE;
}

int FOR_ISA(fw_bonus_step)(const BonusStep *p)
{
    return fw_parallel(task, p, p->b * tasks_of_sequence(p), p->threads);
}
