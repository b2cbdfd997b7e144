/* The Mesa rule (MesaNet eq. 4-6): conjugate gradients for every token, each as long as it needs.
 *
 * Up to GROUP tokens share H_c, the state before them, so that it is loaded once for all of them:
 *
 *     (H_t + Λ_t) p = γ_{c+1..t} H_c p + Σ_{c<s≤t} γ_{s+1..t} β_s (k_s·p) k_s + Λ_t p               (app. C)
 *
 * A token that has converged drops out of the product. Products of γ are formed as they stand:
 * resets are exact. A single token is written first and solved after, in place.
 */
#include "chunk.h"
#include "mesa.h"
#include "pool.h"

#define GROUP 4

/* Residuals below this part of b are rounding errors of float32: nothing is left to gain. */
#define ROUNDING 1.5e-8f

typedef struct {
    const MesaProblem *p;
    long b, h, keys, values;       /* padded widths */
    long tokens, shared;           /* of the group; whether H, G are those before it */
    float *H, *G;                  /* [k keys], [k values] */
    float *key, *written, *value;  /* [GROUP ·], k, βk and v */
    float *ridge, *diagonal;       /* [GROUP keys] */
    float *across;                 /* [keys], the diagonal of H */
    float *right, *x, *r, *d, *Ad; /* [GROUP keys], d: the direction */
    float *o;                      /* [GROUP values] */
    float since[GROUP][GROUP];     /* γ_{s+1..t} */
    float start[GROUP];            /* γ_{c+1..t} */
} Work;

/* 0 where memory is out */
static int take_work(Work *w, const MesaProblem *p, int own_states)
{
    w->p = p;
    w->keys = padded(p->k);
    w->values = p->value.at ? padded(p->v) : 0;
    size_t keys = GROUP * w->keys, values = GROUP * w->values;
    Arena arena = {0};
    while (next_pass(&arena)) {
        w->key = take(&arena, keys);
        w->written = take(&arena, keys);
        w->value = take(&arena, values);
        w->ridge = take(&arena, keys);
        w->diagonal = take(&arena, keys);
        w->right = take(&arena, keys);
        w->across = take(&arena, w->keys);
        w->x = take(&arena, keys);
        w->r = take(&arena, keys);
        w->d = take(&arena, keys);
        w->Ad = take(&arena, keys);
        w->o = take(&arena, values);
        if (own_states) {
            w->H = take(&arena, p->k * w->keys);
            w->G = take(&arena, p->k * w->values);
        }
    }
    return arena.at != NULL;
}

INLINE void add(float *y, float a, const float *x, long count)
{
    for (long j = 0; j < count; j += W)
        store(y + j, load(y + j) + a * load(x + j));
}

/* ---- y = p S for n rows p: tiles of n × nv vectors stay in registers ---- */

INLINE void tile(float *const *y, float *const *p, const int n, const int nv, const float *S,
                 long rows, long step, long lane)
{
    vec sum[2][GROUP][NV] = {0};
    const int by =
        n == 1
            ? 2
            : 1; /* a single row alternates between two sums, which hides the additions' latency */
    long i = 0;
    for (; i + by <= rows; i += by)
        for (int u = 0; u < by; u++)
            for (int j = 0; j < nv; j++) {
                vec s = load(S + (i + u) * step + lane + j * W);
                for (int m = 0; m < n; m++)
                    sum[u][m][j] += p[m][i + u] * s;
            }
    for (; i < rows; i++)
        for (int j = 0; j < nv; j++)
            sum[0][0][j] += p[0][i] * load(S + i * step + lane + j * W);
    for (int m = 0; m < n; m++)
        for (int j = 0; j < nv; j++)
            store(y[m] + lane + j * W, by == 2 ? sum[0][m][j] + sum[1][m][j] : sum[0][m][j]);
}

INLINE void rows_product(float *const *y, float *const *p, const int n, const float *S, long rows,
                         long step)
{
    long lane = 0;
    for (; step - lane >= NV * W; lane += NV * W)
        tile(y, p, n, NV, S, rows, step, lane);
    for (; lane < step; lane += W)
        tile(y, p, n, 1, S, rows, step, lane);
}

static void product(float *const *y, float *const *p, long n, const float *S, long rows, long step)
{
    for (; n >= 4; n -= 4, y += 4, p += 4)
        rows_product(y, p, 4, S, rows, step);
    if (n == 3)
        rows_product(y, p, 3, S, rows, step);
    else if (n == 2)
        rows_product(y, p, 2, S, rows, step);
    else if (n == 1)
        rows_product(y, p, 1, S, rows, step);
}

/* ---- a group of tokens ---- */

static void load_group(Work *w, long t)
{
    const MesaProblem *p = w->p;
    long keys = w->keys, n = w->tokens;
    float beta[GROUP], decay[GROUP];
    load_rows(w->key, p->k, keys, &p->key, w->b, t, w->h, n);
    load_rows(w->ridge, p->k, keys, &p->ridge, w->b, t, w->h, n);
    load_rows(beta, 1, 1, &p->beta, w->b, t, w->h, n);
    if (p->value.at)
        load_rows(w->value, p->v, w->values, &p->value, w->b, t, w->h, n);
    for (long i = 0; i < n; i++) {
        decay[i] = 1;
        if (p->log_decay.at) {
            load_rows(decay + i, 1, 1, &p->log_decay, w->b, t + i, w->h, 1);
            decay[i] = vexp(broadcast(decay[i]))[0];
        }
        for (long j = 0; j < keys; j += W)
            store(w->written + i * keys + j, beta[i] * load(w->key + i * keys + j));
        for (long j = p->k; j < keys; j++)
            w->ridge[i * keys + j] = 1;
        w->start[i] = i ? w->start[i - 1] * decay[i] : decay[i];
        for (long s = 0; s < i; s++)
            w->since[i][s] = w->since[i - 1][s] * decay[i];
        w->since[i][i] = 1;
    }
}

static void load_right(Work *w, long t)
{
    load_rows(w->right, w->p->k, w->keys, &w->p->right, w->b, t, w->h, w->tokens);
}

/* to = γ from + Σ_s γ_{s+1..} β_s k_sᵀ rows_s, from the state before the group to the one after it
 */
INLINE void advance_lanes(const Work *w, const float *from, float *to, const float *rows, long step,
                          const int n, const int nv)
{
    vec row[GROUP][NV], decay = broadcast(w->start[n - 1]);
    for (int s = 0; s < n; s++)
        for (int j = 0; j < nv; j++)
            row[s][j] = w->since[n - 1][s] * load(rows + s * step + j * W);
    for (long i = 0; i < w->p->k; i++)
        for (int j = 0; j < nv; j++) {
            vec sum = decay * load(from + i * step + j * W);
            for (int s = 0; s < n; s++)
                sum += w->written[s * w->keys + i] * row[s][j];
            store(to + i * step + j * W, sum);
        }
}

INLINE void advance_rows(const Work *w, const float *from, float *to, const float *rows, long step,
                         const int n)
{
    long lane = 0;
    for (; step - lane >= NV * W; lane += NV * W)
        advance_lanes(w, from + lane, to + lane, rows + lane, step, n, NV);
    for (; lane < step; lane += W)
        advance_lanes(w, from + lane, to + lane, rows + lane, step, n, 1);
}

static void advance(const Work *w, const float *from, float *to, const float *rows, long step)
{
    switch (w->tokens) {
    case 4: advance_rows(w, from, to, rows, step, 4); return;
    case 3: advance_rows(w, from, to, rows, step, 3); return;
    case 2: advance_rows(w, from, to, rows, step, 2); return;
    default: advance_rows(w, from, to, rows, step, 1);
    }
}

static void advance_group(const Work *w, const float *gram, const float *memory)
{
    advance(w, gram, w->H, w->key, w->keys);
    if (w->values)
        advance(w, memory, w->G, w->value, w->values);
}

static void set_diagonal(Work *w, long i)
{
    float *diagonal = w->diagonal + i * w->keys;
    float decay = w->shared ? w->start[i] : 1;
    for (long j = 0; j < w->keys; j += W)
        store(diagonal + j, load(w->ridge + i * w->keys + j) + decay * load(w->across + j));
    for (long s = 0; w->shared && s <= i; s++)
        for (long j = 0; j < w->keys; j += W)
            store(diagonal + j, load(diagonal + j) + w->since[i][s] *
                                                         load(w->written + s * w->keys + j) *
                                                         load(w->key + s * w->keys + j));
}

/* Ad = (H_t + Λ_t) from, for the tokens listed */
static void apply(Work *w, const float *from, const long *tokens, long n)
{
    float *y[GROUP], *p[GROUP];
    long keys = w->keys;
    for (long m = 0; m < n; m++) {
        y[m] = w->Ad + tokens[m] * keys;
        p[m] = (float *)from + tokens[m] * keys;
    }
    product(y, p, n, w->H, w->p->k, keys);
    for (long m = 0; m < n; m++) {
        long i = tokens[m];
        float decay = w->shared ? w->start[i] : 1;
        const float *ridge = w->ridge + i * keys;
        for (long j = 0; j < keys; j += W)
            store(y[m] + j, decay * load(y[m] + j) + load(ridge + j) * load(p[m] + j));
        for (long s = 0; w->shared && s <= i; s++)
            add(y[m], w->since[i][s] * dot(p[m], w->key + s * keys, keys), w->written + s * keys,
                keys);
    }
}

/* x = b / diag, r = b - (H + Λ) x, d = r, with b scaled to 1: (‖r‖², what is enough of it) of every
 * token, and b's scale */
static void begin(Work *w, float *residual, float *enough, float *scale)
{
    const long every[GROUP] = {0, 1, 2, 3};
    long keys = w->keys;
    for (long j = 0; j < keys; j++)
        w->across[j] = j < w->p->k ? w->H[j * keys + j] : 0;
    for (long i = 0; i < w->tokens; i++) {
        float *b = w->right + i * keys, most = 0;
        for (long j = 0; j < keys; j++)
            most = __builtin_fabsf(b[j]) > most ? __builtin_fabsf(b[j]) : most;
        scale[i] = most;
        set_diagonal(w, i);
        for (long j = 0; j < keys; j += W) {
            if (most > 0)
                store(b + j, load(b + j) / most);
            store(w->x + i * keys + j, load(b + j) / load(w->diagonal + i * keys + j));
        }
    }
    apply(w, w->x, every, w->tokens);
    for (long i = 0; i < w->tokens; i++) {
        const float *b = w->right + i * keys;
        for (long j = 0; j < keys; j += W) {
            vec r = load(b + j) - load(w->Ad + i * keys + j);
            store(w->r + i * keys + j, r);
            store(w->d + i * keys + j, r);
        }
        residual[i] = dot(w->r + i * keys, w->r + i * keys, keys);
        float asked = w->p->tol < 0 ? 0 : w->p->tol * w->p->tol * residual[i];
        float rounding = ROUNDING * ROUNDING * dot(b, b, keys);
        enough[i] = asked > rounding ? asked : rounding;
    }
}

/* One step of one token: ‖r‖² after it */
static float improve(Work *w, long i, float residual)
{
    long keys = w->keys;
    float *x = w->x + i * keys, *r = w->r + i * keys, *d = w->d + i * keys, *Ad = w->Ad + i * keys;
    float curvature = dot(d, Ad, keys), length = curvature ? residual / curvature : 0;
    vec sum = broadcast(0);
    for (long j = 0; j < keys; j += W) {
        store(x + j, load(x + j) + length * load(d + j));
        vec left = load(r + j) - length * load(Ad + j);
        store(r + j, left);
        sum += left * left;
    }
    float found = total(sum), turn = found / residual;
    for (long j = 0; j < keys; j += W)
        store(d + j, load(r + j) + turn * load(d + j));
    return found;
}

/* The active tokens' numbers move to the front: how many there are */
static long still_active(long *tokens, long n, const float *residual, const float *enough)
{
    long left = 0;
    for (long m = 0; m < n; m++)
        if (residual[tokens[m]] > enough[tokens[m]])
            tokens[left++] = tokens[m];
    return left;
}

static void solve_group(Work *w, long t)
{
    float residual[GROUP], enough[GROUP], scale[GROUP];
    long tokens[GROUP] = {0, 1, 2, 3}, taken[GROUP] = {0}, keys = w->keys;
    begin(w, residual, enough, scale);
    long n = still_active(tokens, w->tokens, residual, enough);
    for (long step = 0; n && step < w->p->steps; step++) {
        apply(w, w->d, tokens, n);
        for (long m = 0; m < n; m++) {
            long i = tokens[m];
            residual[i] = improve(w, i, residual[i]);
            taken[i]++;
        }
        n = still_active(tokens, n, residual, enough);
    }
    for (long i = 0; i < w->tokens; i++) {
        for (long j = 0; j < keys; j += W)
            store(w->x + i * keys + j, scale[i] * load(w->x + i * keys + j));
        if (w->p->taken)
            w->p->taken[(w->b * w->p->h + w->h) * w->p->t + t + i] = taken[i];
    }
}

/* o_t = x_t G_t */
static void read_group(Work *w)
{
    float *y[GROUP], *x[GROUP];
    for (long i = 0; i < w->tokens; i++) {
        y[i] = w->o + i * w->values;
        x[i] = w->x + i * w->keys;
    }
    product(y, x, w->tokens, w->G, w->p->k, w->values);
    for (long i = 0; w->shared && i < w->tokens; i++) {
        for (long j = 0; j < w->values; j += W)
            store(y[i] + j, w->start[i] * load(y[i] + j));
        for (long s = 0; s <= i; s++)
            add(y[i], w->since[i][s] * dot(x[i], w->written + s * w->keys, w->keys),
                w->value + s * w->values, w->values);
    }
}

static void store_group(const Work *w, long t)
{
    const MesaProblem *p = w->p;
    if (p->x.at)
        store_rows(w->x, p->k, w->keys, &p->x, w->b, t, w->h, w->tokens);
    if (w->values)
        store_rows(w->o, p->v, w->values, &p->o, w->b, t, w->h, w->tokens);
}

static void one_group(Work *w, long t)
{
    load_group(w, t);
    load_right(w, t);
    solve_group(w, t);
    if (w->values)
        read_group(w);
    store_group(w, t);
    advance_group(w, w->H, w->G);
}

/* ---- tasks ---- */

static long heads(const MesaProblem *p)
{
    return p->b * p->h;
}

static void open_head(Work *w, long head)
{
    w->b = head / w->p->h, w->h = head % w->p->h;
}

static void load_states(Work *w, const float *gram, const float *memory)
{
    load_state(w->H, w->p->k, w->keys, gram, w->p->k, w->p->k);
    if (w->values)
        load_state(w->G, w->p->k, w->values, memory, w->p->k, w->p->v);
}

static void store_states(const Work *w, float *gram, float *memory)
{
    store_state(w->H, w->keys, gram, w->p->k, w->p->k);
    if (w->values)
        store_state(w->G, w->values, memory, w->p->k, w->p->v);
}

static void load_first(Work *w, long head)
{
    const MesaProblem *p = w->p;
    load_states(w, p->gram + head * p->k * p->k, p->memory + head * p->k * p->v);
}

static void store_last(const Work *w, long head)
{
    const MesaProblem *p = w->p;
    store_states(w, p->last_gram + head * p->k * p->k, p->last_memory + head * p->k * p->v);
}

static float *mark(const MesaProblem *p, long span, long head)
{
    return p->marks + (span * heads(p) + head) * p->k * (p->k + p->v);
}

static void groups(Work *w, long from, long to, void (*each)(Work *, long))
{
    for (long t = from; t < to; t += GROUP) {
        w->tokens = to - t < GROUP ? to - t : GROUP;
        each(w, t);
    }
}

static void skip_group(Work *w, long t)
{
    load_group(w, t);
    advance_group(w, w->H, w->G);
}

/* Marks the states of a head, unsolved */
static int mark_task(const void *problem, long head)
{
    const MesaProblem *p = problem;
    Work w = {.shared = 1};
    if (!take_work(&w, p, 1))
        return OUT_OF_MEMORY;
    open_head(&w, head);
    load_first(&w, head);
    for (long t = 0, span = 0; t < p->t; t += SOLVED, span++) {
        float *to = mark(p, span, head);
        store_states(&w, to, to + p->k * p->k);
        groups(&w, t, p->t - t < SOLVED ? p->t : t + SOLVED, skip_group);
    }
    store_last(&w, head);
    return DONE;
}

static int span_task(const void *problem, long task)
{
    const MesaProblem *p = problem;
    Work w = {.shared = 1};
    long head = task % heads(p), span = task / heads(p), t = span * SOLVED;
    const float *from = mark(p, span, head);
    if (!take_work(&w, p, 1))
        return OUT_OF_MEMORY;
    open_head(&w, head);
    load_states(&w, from, from + p->k * p->k);
    groups(&w, t, p->t - t < SOLVED ? p->t : t + SOLVED, one_group);
    return DONE;
}

static int head_task(const void *problem, long head)
{
    const MesaProblem *p = problem;
    Work w = {.shared = 1};
    if (!take_work(&w, p, 1))
        return OUT_OF_MEMORY;
    open_head(&w, head);
    load_first(&w, head);
    groups(&w, 0, p->t, one_group);
    store_last(&w, head);
    return DONE;
}

/* A single token of states whose rows are whole vectors */
static int token_task(const void *problem, long head)
{
    const MesaProblem *p = problem;
    Work w = {.tokens = 1};
    if (!take_work(&w, p, 0))
        return OUT_OF_MEMORY;
    open_head(&w, head);
    w.H = p->last_gram + head * p->k * p->k;
    w.G = p->last_memory + head * p->k * p->v;
    load_group(&w, 0);
    load_right(&w, 0);
    advance_group(&w, p->gram + head * p->k * p->k, p->memory + head * p->k * p->v);
    solve_group(&w, 0);
    if (w.values)
        read_group(&w);
    store_group(&w, 0);
    return DONE;
}

int FOR_ISA(fw_mesa)(const MesaProblem *p)
{
    int whole = p->k % W == 0 && (!p->value.at || p->v % W == 0);
    if (p->t == 1 && whole)
        return fw_parallel(token_task, p, heads(p), p->threads);
    if (!p->marks)
        return fw_parallel(head_task, p, heads(p), p->threads);
    int status = fw_parallel(mark_task, p, heads(p), p->threads);
    if (status != DONE)
        return status;
    return fw_parallel(span_task, p, heads(p) * ((p->t + SOLVED - 1) / SOLVED), p->threads);
}
