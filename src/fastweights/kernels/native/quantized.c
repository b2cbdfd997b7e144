/* y = x weightᵀ + bias of a few rows x and a weight of bytes, which become floats in registers, or
 * of half bytes: what is read from memory is a quarter of a float weight, or 5 bits of 32. Of half
 * bytes the sums are of integers, as x is rounded to int16.
 */
#include "quantized.h"
#include "pool.h"
#include "vector.h"

#include <math.h>

#define SIDE 4
#define TASK_BYTES (1 << 15)
#define LINE 64
#define FAR_BYTES 2048 /* the next outputs of longer rows would be fetched too far ahead */

/* Outputs of a task, by the bytes of each: enough that what is fetched ahead is mostly its own. */
INLINE long task_outputs(long bytes)
{
    long outputs = TASK_BYTES / bytes / SIDE * SIDE;
    return outputs > SIDE ? outputs : SIDE;
}

INLINE long tasks(long outputs, long bytes)
{
    return (outputs + task_outputs(bytes) - 1) / task_outputs(bytes);
}

/* Bytes from those of an output that are read now to those to fetch, by its bytes in all. */
INLINE long ahead(long bytes)
{
    return bytes > FAR_BYTES ? FAR_BYTES : SIDE * bytes;
}

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
    long own = task_outputs(p->inputs), o = index * own,
         end = o + own < p->outputs ? o + own : p->outputs;
    for (; o + SIDE <= end; o += SIDE)
        outputs_of(p, o, SIDE);
    for (; o < end; o++)
        outputs_of(p, o, 1);
    return DONE;
}

int FOR_ISA(fw_quantized_product)(const QuantizedProduct *p)
{
    return fw_parallel(task, p, tasks(p->outputs, p->inputs), p->threads);
}

/* float16 as floats, of finite ones: their bits, moved, are 2⁻¹¹² of them. */
INLINE void widen_halves(float *to, const uint16_t *from, long count)
{
    long i = 0;
    for (; i + W <= count; i += W) {
        half_vec halves = *(const unaligned_half_vec *)(from + i);
        word_vec bits = __builtin_convertvector(halves, word_vec);
        vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f;
        store(to + i, (vec)((word_vec)size | (bits & 0x8000) << 16));
    }
    for (; i < count; i++) {
        union {
            uint32_t bits;
            float number;
        } u = {(uint32_t)(from[i] & 0x7fff) << 13};
        to[i] = from[i] & 0x8000 ? -u.number * 0x1p112f : u.number * 0x1p112f;
    }
}

/* A row of x: a scale per group, scale · Σ codes per group, and the codes. */
typedef struct {
    float *scale, *sum;
    int16_t *codes;
} RoundedRow;

INLINE RoundedRow rounded_row(const Int4Product *p, long r)
{
    long groups = p->inputs / INT4_GROUP;
    float *own = p->rounded + r * groups * (INT4_ROUNDED / 4);
    return (RoundedRow){own, own + groups, (int16_t *)(own + 2 * groups)};
}

/* x to the nearest of 65,535 multiples of a scale; where that is 0 or not finite, so is what is read
 * of the group. */
static void round_row(const Int4Product *p, long r)
{
    RoundedRow to = rounded_row(p, r);
    const float *x = p->x + r * p->inputs;
    for (long g = 0; g < p->inputs / INT4_GROUP; g++, x += INT4_GROUP) {
        vec sizes = broadcast(0), zeros = broadcast(0);
        for (int i = 0; i < INT4_GROUP; i += W) {
            vec own = load(x + i), size = (vec)((ivec)own & 0x7fffffff);
            sizes = at_least(sizes, size);
            zeros += own * 0;
        }
        float largest = 0, spoiled = total(zeros), codes[INT4_GROUP];
        for (int i = 0; i < W; i++)
            largest = sizes[i] > largest ? sizes[i] : largest;
        float scale = largest / 32767, by = scale > 0 && spoiled == 0 ? scale : INFINITY, sum = 0;
        for (int i = 0; i < INT4_GROUP; i++) {
            codes[i] = spoiled == 0 ? rintf(x[i] / by) : 0;
            to.codes[g * INT4_GROUP + i] = (int16_t)codes[i];
            sum += codes[i];
        }
        to.scale[g] = scale + spoiled;
        to.sum[g] = to.scale[g] * sum;
    }
}

/* Codes of a weight, and Σ code · x of a group in parts that add up to it. */
#if defined(__AVX2__)
typedef struct {
    __m256i first, second;
} group;
typedef float parts __attribute__((vector_size(32)));

INLINE group load_group(const uint8_t *p)
{
    __m128i both = _mm_loadu_si128((const __m128i *)p), half = _mm_set1_epi8(15);
    __m128i low = _mm_and_si128(both, half), high = _mm_and_si128(_mm_srli_epi16(both, 4), half);
    return (group){_mm256_cvtepu8_epi16(low), _mm256_cvtepu8_epi16(high)};
}

INLINE parts read_group(group weight, const int16_t *x)
{
    const __m256i *pairs = (const __m256i *)x;
    __m256i first = _mm256_madd_epi16(weight.first, _mm256_loadu_si256(pairs));
    __m256i second = _mm256_madd_epi16(weight.second, _mm256_loadu_si256(pairs + 1));
    return (parts)_mm256_cvtepi32_ps(_mm256_add_epi32(first, second));
}

INLINE float sum_of_parts(parts x)
{
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
#else
typedef const uint8_t *group;
typedef float parts;

INLINE group load_group(const uint8_t *p)
{
    return p;
}

INLINE parts read_group(group weight, const int16_t *x)
{
    int32_t sum = 0;
    for (int i = 0; i < INT4_GROUP / 2; i++)
        sum += (weight[i] & 15) * x[i] + (weight[i] >> 4) * x[INT4_GROUP / 2 + i];
    return (parts)sum;
}

INLINE float sum_of_parts(parts x)
{
    return x;
}
#endif

#define GROUPS_AT_ONCE 64

/* `count` outputs from `o` on, of `rows` rows from `r` on: within a group Σ (scale · code + offset)
 * x = scale Σ code · x + offset Σ x. */
INLINE void int4_tile(const Int4Product *p, long r, long o, int rows, int count)
{
    long groups = p->inputs / INT4_GROUP;
    float scale[2][SIDE][GROUPS_AT_ONCE], wide[GROUPS_AT_ONCE], shift[2][SIDE] = {0};
    parts sum[2][SIDE] = {0};
    for (long first = 0; first < groups; first += GROUPS_AT_ONCE) {
        long own = groups - first < GROUPS_AT_ONCE ? groups - first : GROUPS_AT_ONCE;
        for (int b = 0; b < count; b++) {
            long begin = (o + b) * groups + first;
            widen_halves(wide, p->offset + begin, own);
            for (int a = 0; a < rows; a++)
                shift[a][b] += dot(wide, rounded_row(p, r + a).sum + first, own);
            widen_halves(wide, p->scale + begin, own);
            for (int a = 0; a < rows; a++)
                for (long g = 0; g < own; g++)
                    scale[a][b][g] = wide[g] * rounded_row(p, r + a).scale[first + g];
        }
        for (long g = 0; g < own; g++)
            for (int b = 0; b < count; b++) {
                long place = (o + b) * groups + first + g;
                const uint8_t *codes = p->codes + place * (INT4_GROUP / 2);
                group weight = load_group(codes);
                if (r == 0 && (first + g) % (2 * LINE / INT4_GROUP) == 0)
                    __builtin_prefetch(codes + ahead(p->inputs / 2));
                for (int a = 0; a < rows; a++) {
                    const int16_t *x = rounded_row(p, r + a).codes + (first + g) * INT4_GROUP;
                    sum[a][b] += scale[a][b][g] * read_group(weight, x);
                }
            }
    }
    for (int a = 0; a < rows; a++)
        for (int b = 0; b < count; b++)
            p->y[(r + a) * p->outputs + o + b] =
                sum_of_parts(sum[a][b]) + shift[a][b] + (p->bias ? p->bias[o + b] : 0);
}

INLINE void int4_outputs_of(const Int4Product *p, long o, int count)
{
    long r = 0;
    for (; r + 2 <= p->rows; r += 2)
        int4_tile(p, r, o, 2, count);
    if (r < p->rows)
        int4_tile(p, r, o, 1, count);
}

static int int4_task(const void *problem, long index)
{
    const Int4Product *p = problem;
    long own = task_outputs(p->inputs / 2), o = index * own,
         end = o + own < p->outputs ? o + own : p->outputs;
    for (; o + SIDE <= end; o += SIDE)
        int4_outputs_of(p, o, SIDE);
    for (; o < end; o++)
        int4_outputs_of(p, o, 1);
    return DONE;
}

int FOR_ISA(fw_int4_product)(const Int4Product *p)
{
    for (long r = 0; r < p->rows; r++)
        round_row(p, r);
    return fw_parallel(int4_task, p, tasks(p->outputs, p->inputs / 2), p->threads);
}
