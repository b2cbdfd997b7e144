/* y = x weightᵀ + bias of a few rows x and a weight of bytes, which become floats in registers: what is
 * read from memory is a quarter of a float weight.
 */
#include "quantized.h"
#include "pool.h"
#include "tiles.h"

/* W bytes as floats; compilers widen bytes one by one where they are not told the instruction. */
#if defined(__AVX512F__)
INLINE vec load_bytes(const int8_t *p)
{
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
#elif defined(__AVX2__)
INLINE vec load_bytes(const int8_t *p)
{
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
#else
INLINE vec load_bytes(const int8_t *p)
{
    vec x;
    for (int i = 0; i < W; i++)
        x[i] = p[i];
    return x;
}
#endif

INLINE void tile(const void *product, long r, long o, int rows, int count)
{
    const QuantizedProduct *p = product;
    long inputs = p->inputs, i = 0;
    const float *x = p->x + r * inputs;
    const int8_t *w = p->weight + o * inputs;
    vec sum[2][SIDE];
    for (int a = 0; a < rows; a++)
        for (int b = 0; b < count; b++)
            sum[a][b] = broadcast(0);
    for (; i + W <= inputs; i += W)
        for (int b = 0; b < count; b++) {
            const int8_t *own = w + b * inputs + i;
            vec weight = load_bytes(own);
            if (r == 0 && i % LINE == 0)
                __builtin_prefetch(own + ahead(inputs));
            for (int a = 0; a < rows; a++)
                sum[a][b] += weight * load(x + a * inputs + i);
        }
    for (int a = 0; a < rows; a++)
        for (int b = 0; b < count; b++) {
            float found = total(sum[a][b]);
            for (long j = i; j < inputs; j++)
                found += x[a * inputs + j] * w[b * inputs + j];
            p->y[(r + a) * p->outputs + o + b] =
                found * p->scale[o + b] + (p->bias ? p->bias[o + b] : 0);
        }
}

static long tasks(const QuantizedProduct *p)
{
    return tasks_of(p->outputs, p->inputs);
}

static int task(const void *problem, long index)
{
    const QuantizedProduct *p = problem;
    for (; index >= tasks(p); p++)
        index -= tasks(p);
    run_task(tile, p, p->rows, p->outputs, p->inputs, index);
    return DONE;
}

int FOR_ISA(fw_quantized_product)(const QuantizedProduct *p)
{
    long sum = 0;
    for (long i = 0; i <= p->following; i++)
        sum += tasks(p + i);
    return fw_parallel(task, p, sum, p->threads);
}
