/* y = (x weightᵀ) scale + bias of a few rows x and a weight of bytes, which become floats in
 * registers: what is read from memory is a quarter of a float weight, and sums are those of floats.
 */
#include "quantized.h"
#include "pool.h"
#include "vector.h"

#define SIDE 4
#define TASK_OUTPUTS 16

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

/* `count` outputs from `o` on, of `rows` rows from `r` on. */
INLINE void tile(const QuantizedProduct *p, long r, long o, int rows, int count)
{
    long inputs = p->inputs, i = 0;
    const float *x = p->x + r * inputs;
    const int8_t *w = p->weight + o * inputs;
    vec sum[2][SIDE];
    for (int a = 0; a < rows; a++)
        for (int b = 0; b < count; b++)
            sum[a][b] = broadcast(0);
    for (; i + W <= inputs; i += W)
        for (int b = 0; b < count; b++) {
            vec weight = load_bytes(w + b * inputs + i);
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

INLINE void outputs_of(const QuantizedProduct *p, long o, int count)
{
    long r = 0;
    for (; r + 2 <= p->rows; r += 2)
        tile(p, r, o, 2, count);
    if (r < p->rows)
        tile(p, r, o, 1, count);
}

static int task(const void *problem, long index)
{
    const QuantizedProduct *p = problem;
    long o = index * TASK_OUTPUTS,
         end = o + TASK_OUTPUTS < p->outputs ? o + TASK_OUTPUTS : p->outputs;
    for (; o + SIDE <= end; o += SIDE)
        outputs_of(p, o, SIDE);
    for (; o < end; o++)
        outputs_of(p, o, 1);
    return DONE;
}

int FOR_ISA(fw_quantized_product)(const QuantizedProduct *p)
{
    return fw_parallel(task, p, (p->outputs + TASK_OUTPUTS - 1) / TASK_OUTPUTS, p->threads);
}
