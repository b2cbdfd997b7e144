/* One token of WindowedLinear (LoLCATs): softmax over the last w tokens, linear attention to all
 * before them,
 *
 *     N = Σ_i e^(s_i - max s) (v_i ‖ 1)  over the window,  s_i = q·k_i · scale      F = φ_q S       S' = S + φ_lᵀ (v_l ‖ 1)
 *     o = (γ N + F) / its last column,  or  γ N / N's last column + (1-γ) F / F's   (eq. 8)
 *
 * where l is the token that leaves the window; without a window that is this one, and F = φ_q S'.
 * Features are given, or made here of q and k_l, of landmarks as these were before rotary positions.
 * With a scale a, which is given or that of landmarks' features, it stands in place of max s. A task is a key head with the query heads that
 * it serves.
 */
#include <math.h>

#include "pool.h"
#include "sine.h"
#include "window.h"

typedef struct {
    Head head;
    float *key, *value, *fk; /* the token itself, its value with a 1 behind it */
    float *leaving, *products;
    float *cosines, *sines, *unrotated;
    float *q, *fq, *near, *far, *weights, *o;
} Turn;

/* 0 where memory is out */
static int take_turn(Turn *turn, const WindowProblem *p, long task)
{
    *turn = (Turn){.head = head_of(p, task)};
    Arena arena = {0};
    while (next_pass(&arena)) {
        turn->key = take(&arena, p->k);
        turn->value = take(&arena, p->v + 1);
        turn->fk = take(&arena, p->f);
        turn->leaving = take(&arena, p->f);
        turn->products = take(&arena, 2 * padded((p->f + 1) / 2));
        turn->cosines = take(&arena, padded(p->k));
        turn->sines = take(&arena, padded(p->k));
        turn->unrotated = take(&arena, p->k);
        turn->q = take(&arena, p->k);
        turn->fq = take(&arena, p->f);
        turn->near = take(&arena, p->v + 1);
        turn->far = take(&arena, p->v + 1);
        turn->weights = take(&arena, padded(p->cached + 1));
        turn->o = take(&arena, p->v);
    }
    if (!arena.at)
        return 0;
    long b = turn->head.b, g = turn->head.g;
    load_rows(turn->key, p->k, p->k, &p->key, b, 0, g, 1);
    load_rows(turn->value, p->v, p->v, &p->value, b, 0, g, 1);
    turn->value[p->v] = 1;
    if (p->map == GIVEN)
        load_rows(turn->fk, p->f, p->f, &p->fk, b, 0, g, 1);
    return 1;
}

/* ---- rows ---- */

/* to += Σ_i weights_i rows_i on `count` vectors of the rows */
INLINE void add_lanes(float *to, const float *weights, const float *rows, long n, long step,
                      const int count)
{
    vec sum[NV];
    for (int c = 0; c < count; c++)
        sum[c] = load(to + c * W);
    for (long i = 0; i < n; i++)
        for (int c = 0; c < count; c++)
            sum[c] += weights[i] * load(rows + i * step + c * W);
    for (int c = 0; c < count; c++)
        store(to + c * W, sum[c]);
}

/* to += Σ_i weights_i rows_i */
static void add_rows(float *to, const float *weights, const float *rows, long n, long width)
{
    long j = 0;
    for (; j + NV * W <= width; j += NV * W)
        add_lanes(to + j, weights, rows + j, n, width, NV);
    for (; j + W <= width; j += W)
        add_lanes(to + j, weights, rows + j, n, width, 1);
    for (; j < width; j++)
        for (long i = 0; i < n; i++)
            to[j] += weights[i] * rows[i * width + j];
}

/* x becomes e^(x - highest), and the sum is returned; behind its end are −inf up to whole vectors.
 */
static float exponentials_below(float *x, long count, float highest)
{
    vec sum = broadcast(0);
    for (long i = 0; i < count; i += W) {
        vec weights = vexp(load(x + i) - (highest == -INFINITY ? 0 : highest));
        store(x + i, weights);
        sum += weights;
    }
    return total(sum);
}

static float largest(const float *x, long count)
{
    float highest = -INFINITY;
    for (long i = 0; i < count; i++)
        highest = x[i] > highest ? x[i] : highest;
    return highest;
}

/* x becomes e^(x - max x), and the sum is returned; behind its end are −inf up to whole vectors. */
static float exponentials(float *x, long count)
{
    return exponentials_below(x, count, largest(x, count));
}

/* The same relative to a */
static float scaled_exponentials(float *x, long count, float a)
{
    for (long i = 0; i < count; i += W)
        store(x + i, log_weight(load(x + i), broadcast(a)));
    return exponentials_below(x, count, 0);
}

/* ---- features ---- */

/* f of `columns` products, behind whose end there is room up to whole vectors */
static void activate(const Turn *turn, float *to, float *products, long columns)
{
    for (long j = columns; j < padded(columns); j++)
        products[j] = -INFINITY;
    int64_t map = turn->head.p->map;
    float sum = map == SOFTMAX ? exponentials(products, columns) : 1;
    for (long j = 0; map != SOFTMAX && j < columns; j += W)
        store(products + j, activated(map, load(products + j)));
    for (long j = 0; j < columns; j++)
        to[j] = products[j] / sum;
}

/* φ(x) of a head */
static void map_row(const Turn *turn, float *to, const float *x, const float *weights, long head)
{
    long columns = turn->head.p->f / 2, width = turn->head.p->k;
    float *plus = turn->products, *minus = plus + padded(columns);
    for (long j = 0; j < columns; j++) {
        plus[j] = dot(x, weights + (head * columns + j) * width, width);
        minus[j] = -plus[j];
    }
    activate(turn, to, plus, columns);
    activate(turn, to + columns, minus, columns);
}

/* Of how far the channels have turned at a position */
static void find_turns(const Turn *turn, int64_t position)
{
    const WindowProblem *p = turn->head.p;
    if (!p->turning)
        return;
    const int64_t *speeds = p->turning + (2 * turn->head.g + 1) * p->k;
    const float unit = 1.4629180792671596e-9f; /* 2π / 2^32 */
    for (long i = 0; i < p->k; i += W) {
        vec angles, sines, cosines;
        for (long j = 0; j < W; j++) {
            uint64_t turned = i + j < p->k ? (uint64_t)position * (uint64_t)speeds[i + j] : 0;
            angles[j] = (float)(int32_t)(uint32_t)turned * unit;
        }
        sincos_of(angles, &sines, &cosines);
        store(turn->sines + i, sines);
        store(turn->cosines + i, cosines);
    }
}

/* What rotary positions have made x of, at the position of `find_turns` */
static const float *unrotated(const Turn *turn, const float *x)
{
    const WindowProblem *p = turn->head.p;
    if (!p->turning)
        return x;
    const int64_t *partners = p->turning + 2 * turn->head.g * p->k;
    for (long i = 0; i < p->k; i++)
        turn->unrotated[i] = x[i] * turn->cosines[i] + x[partners[i]] * turn->sines[i];
    return turn->unrotated;
}

/* φ(x) = softmax(x W + b) of a head, with x as it was before rotary positions, and
 * log Σ e^(x W + b) */
static float map_to_landmarks(const Turn *turn, float *to, const float *x, const float *weights,
                              const float *biases, long head)
{
    long count = turn->head.p->f, width = turn->head.p->k, own = count - turn->head.p->further;
    float *scores = turn->products;
    const float *before = unrotated(turn, x);
    for (long j = 0; j < count; j++)
        scores[j] = dot(j < own ? before : x, weights + (head * count + j) * width, width) +
                    biases[head * count + j];
    for (long j = count; j < padded(count); j++)
        scores[j] = -INFINITY;
    float highest = largest(scores, count), sum = exponentials_below(scores, count, highest);
    for (long j = 0; j < count; j++)
        to[j] = scores[j] / sum;
    return highest + logf(sum);
}

/* ---- the state ---- */

/* φ of the oldest token, of this age */
static const float *leaving(const Turn *turn, int64_t age)
{
    const WindowProblem *p = turn->head.p;
    if (p->map == GIVEN)
        return p->cached ? turn->head.features : turn->fk;
    const float *key = p->cached ? turn->head.keys : turn->key;
    if (p->map != LANDMARKS) {
        map_row(turn, turn->leaving, key, p->W_k, turn->head.g);
        return turn->leaving;
    }
    find_turns(turn, p->position - age);
    map_to_landmarks(turn, turn->leaving, key, p->W_k, p->b_k, turn->head.g);
    return turn->leaving;
}

/* S', with the oldest token if it leaves the window */
static void write_memory(const Turn *turn, const float *memory, float *next)
{
    const WindowProblem *p = turn->head.p;
    long oldest = p->cached ? turn->head.age[0] : 0, width = p->v + 1;
    if (oldest != (p->window ? p->window - 1 : 0)) {
        if (next != memory)
            memcpy(next, memory, p->f * width * sizeof(float));
        return;
    }
    const float *fk = leaving(turn, oldest), *value = p->cached ? turn->head.values : turn->value;
    for (long i = 0; i < p->f; i++, memory += width, next += width) {
        long j = 0;
        for (; j + W <= p->v; j += W)
            store(next + j, load(memory + j) + fk[i] * load(value + j));
        for (; j < p->v; j++)
            next[j] = memory[j] + fk[i] * value[j];
        next[p->v] = memory[p->v] + fk[i];
    }
}

/* The cached rows without the first `gone`, and the new one, as far as there is room */
static void follow(float *next, const float *rows, const float *row, long cached, long gone,
                   long width)
{
    if (gone > cached)
        return;
    memmove(next, rows + gone * width, (cached - gone) * width * sizeof(float));
    memcpy(next + (cached - gone) * width, row, width * sizeof(float));
}

static void write_cache(const Turn *turn)
{
    const Head *head = &turn->head;
    const WindowProblem *p = head->p;
    long cached = p->cached, kept = cached_after(p), gone = cached + 1 - kept;
    follow(in_pages(head, p->next_keys, kept, p->k), head->keys, turn->key, cached, gone, p->k);
    follow(in_pages(head, p->next_values, kept, p->v), head->values, turn->value, cached, gone,
           p->v);
    if (p->map == GIVEN)
        follow(p->next_features + place(head, kept, p->f), head->features, turn->fk, cached, gone,
               p->f);
}

/* The ages of a sequence's tokens, which all its heads have read */
static void write_ages(const WindowProblem *p, long b)
{
    long kept = cached_after(p), gone = p->cached + 1 - kept;
    const int64_t *age = ages(p, p->age, b, p->cached);
    int64_t *next = ages(p, p->next_age, b, kept);
    for (long i = 0; i < kept; i++) {
        int64_t old = i + gone < p->cached ? age[i + gone] : 0;
        next[i] = old < p->forgotten ? old + 1 : old;
    }
}

/* ---- the output ---- */

/* s of the cached tokens and of this one, −inf outside the window and behind them */
static float score(const Turn *turn, long i)
{
    const WindowProblem *p = turn->head.p;
    if (i > p->cached || (i < p->cached ? turn->head.age[i] : 0) >= p->window)
        return -INFINITY;
    return scored(p, broadcast(dot(turn->q, i < p->cached ? turn->head.keys + i * p->k : turn->key,
                                   p->k)))[0];
}

/* o of a head from N and F */
static void join_sides(const Turn *turn, float mix, long h)
{
    const WindowProblem *p = turn->head.p;
    vec a, c;
    join(p, broadcast(mix), broadcast(turn->near[p->v]), broadcast(turn->far[p->v]), &a, &c);
    for (long j = 0; j < p->v; j++)
        turn->o[j] = a[0] * turn->near[j] + c[0] * turn->far[j];
    store_rows(turn->o, p->v, p->v, &p->o, turn->head.b, 0, h, 1);
}

static void attend(Turn *turn, const float *memory, long h)
{
    const WindowProblem *p = turn->head.p;
    const long b = turn->head.b;
    float mix, scale;
    load_rows(turn->q, p->k, p->k, &p->q, b, 0, h, 1);
    if (p->log_scale.at)
        load_rows(&scale, 1, 1, &p->log_scale, b, 0, h, 1);
    if (p->map == GIVEN)
        load_rows(turn->fq, p->f, p->f, &p->fq, b, 0, h, 1);
    else if (p->map == LANDMARKS)
        scale = map_to_landmarks(turn, turn->fq, turn->q, p->W_q, p->b_q, h);
    else
        map_row(turn, turn->fq, turn->q, p->W_q, h);
    load_rows(&mix, 1, 1, &p->mix, b, 0, h, 1);
    memset(turn->near, 0, (p->v + 1) * sizeof(float));
    memset(turn->far, 0, (p->v + 1) * sizeof(float));
    for (long i = 0; i < padded(p->cached + 1); i++)
        turn->weights[i] = score(turn, i);
    if (p->log_scale.at || p->map == LANDMARKS)
        turn->near[p->v] = scaled_exponentials(turn->weights, p->cached + 1, scale);
    else
        turn->near[p->v] = exponentials(turn->weights, p->cached + 1);
    add_rows(turn->near, turn->weights, turn->head.values, p->cached, p->v);
    add_rows(turn->near, turn->weights + p->cached, turn->value, 1, p->v);
    add_rows(turn->far, turn->fq, memory, p->f, p->v + 1);
    join_sides(turn, mix, h);
}

static int step_task(const void *problem, long task)
{
    const WindowProblem *p = problem;
    Turn turn;
    if (!take_turn(&turn, p, task))
        return OUT_OF_MEMORY;
    const float *memory = turn.head.memory;
    float *next = in_pages(&turn.head, p->next_memory, p->f, p->v + 1);
    if (!p->window)
        write_memory(&turn, memory, next);
    find_turns(&turn, p->position);
    for (long h = turn.head.g * (p->h / p->g); h < (turn.head.g + 1) * (p->h / p->g); h++)
        attend(&turn, p->window ? memory : next, h);
    if (p->window)
        write_memory(&turn, memory, next);
    write_cache(&turn);
    return DONE;
}

static int step_each(const void *problems, long task)
{
    const WindowProblem *p = problems;
    for (; task >= p->b * p->g; p++)
        task -= p->b * p->g;
    return step_task(p, task);
}

int FOR_ISA(fw_window_step)(const WindowProblem *p)
{
    const WindowProblem *end = p + 1 + p->following;
    long tasks = 0;
    for (const WindowProblem *own = p; own < end; own++)
        tasks += own->b * own->g;
    int status = fw_parallel(step_each, p, tasks, p->threads);
    for (; p < end; p++)
        for (long b = 0; b < p->b; b++)
            write_ages(p, b);
    return status;
}
