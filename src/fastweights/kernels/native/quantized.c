/* y = x weightᵀ + bias of a few rows x and a weight of bytes, or of half bytes, with a scale, and of half
 * bytes an offset, per group of inputs. x is rounded to int16 in the groups of the weight, so that what is
 * summed within one are integers:
 *
 *     Σ_i (scale · code_i + offset) x_i = scale Σ_i code_i x_i + offset Σ_i x_i
 *
 * Bytes lie in the order of their inputs, and so does rounded x beside them. Of half bytes a word of two
 * bytes has four codes: of the inputs 2j, 16 + 2j, 2j + 1 and 17 + 2j of its group. So masks make four
 * vectors of codes of the words of a pair of groups, and rounded x lies as they do: 8 words' inputs of
 * the first group and 8 of the second, four times.
 */
#include "quantized.h"
#include "pool.h"
#include "tiles.h"

#include <math.h>

#define PAIR (2 * GROUP_INPUTS)
#define WORDS 8 /* of a group of half bytes */
#define GROUPS_AT_ONCE 64
#if defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float unaligned_lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE lanes load_lanes(const float *p)
{
    return *(const unaligned_lanes *)p;
}

INLINE float sum_of_lanes(lanes x)
{
    float sum[4];
    for (int i = 0; i < 4; i++)
        sum[i] = LANES == 8 ? x[i] + x[i + LANES / 2] : x[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* LANES of float16 as floats, of which there are so many until the end; the rest are 0. Without
 * instructions for it of finite ones: their bits, moved, are 2⁻¹¹² of them. */
INLINE lanes widen_halves(const uint16_t *from, long left)
{
    uint16_t last[LANES] = {0};
    if (left < LANES) {
        for (long i = 0; i < left; i++)
            last[i] = from[i];
        from = last;
    }
#if defined(__F16C__)
    return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    lanes found;
    for (int i = 0; i < LANES; i++) {
        union {
            uint32_t bits;
            float number;
        } size = {(uint32_t)(from[i] & 0x7fff) << 13};
        found[i] = from[i] & 0x8000 ? -size.number * 0x1p112f : size.number * 0x1p112f;
    }
    return found;
#endif
}

INLINE long groups_of(const QuantizedProduct *p)
{
    return (p->inputs + GROUP_INPUTS - 1) / GROUP_INPUTS;
}

/* ---- x ---- */

/* A row of x: a scale per group, scale · Σ codes per group, and the codes. Behind the last group there is
 * room for whole vectors, of zeros. */
typedef struct {
    float *scale, *sum;
    int16_t *codes;
} RoundedRow;

INLINE RoundedRow rounded_row(const QuantizedProduct *p, long r)
{
    long room = (groups_of(p) + 7) / 8 * 8;
    float *own = p->rounded + r * room * (ROUNDED_BYTES / 4);
    return (RoundedRow){own, own + room, (int16_t *)(own + 2 * room)};
}

/* Where the code of an input lies beside bytes, and beside half bytes. */
typedef long Place(long input);

INLINE long place_by_bytes(long input)
{
    return input;
}

INLINE long place_by_halves(long input)
{
    long group = input / GROUP_INPUTS, i = input % GROUP_INPUTS, j = i % 16 / 2;
    long quarter = 2 * (i % 2) + i / 16;
    return group / 2 * PAIR + quarter * 2 * WORDS + group % 2 * WORDS + j;
}

/* x to the nearest of 65,535 multiples of a scale; where that is 0 or not finite, so is what is read
 * of the group. */
INLINE void round_group(Place *place, RoundedRow to, long g, const float *x)
{
    vec sizes = broadcast(0), zeros = broadcast(0);
    for (int i = 0; i < GROUP_INPUTS; i += W) {
        vec own = load(x + i), size = (vec)((ivec)own & 0x7fffffff);
        sizes = at_least(sizes, size);
        zeros += own * 0;
    }
    float largest = 0, spoiled = total(zeros), codes[GROUP_INPUTS], sum = 0;
    for (int i = 0; i < W; i++)
        largest = sizes[i] > largest ? sizes[i] : largest;
    float scale = largest / 32767, by = scale > 0 && spoiled == 0 ? scale : INFINITY;
    for (int i = 0; i < GROUP_INPUTS; i++)
        codes[i] = spoiled == 0 ? rintf(x[i] / by) : 0;
    for (int i = 0; i < GROUP_INPUTS; i++) {
        to.codes[place(g * GROUP_INPUTS + i)] = (int16_t)codes[i];
        sum += codes[i];
    }
    to.scale[g] = scale + spoiled;
    to.sum[g] = to.scale[g] * sum;
}

INLINE void round_rows(const QuantizedProduct *p, Place *place)
{
    long whole = p->inputs / GROUP_INPUTS, rest = p->inputs % GROUP_INPUTS;
    for (long r = 0; r < p->rows; r++) {
        RoundedRow to = rounded_row(p, r);
        const float *x = p->x + r * p->inputs;
        for (long g = 0; g < whole; g++)
            round_group(place, to, g, x + g * GROUP_INPUTS);
        if (rest) {
            float last[GROUP_INPUTS] = {0};
            memcpy(last, x + whole * GROUP_INPUTS, rest * sizeof *x);
            round_group(place, to, whole, last);
        }
    }
}

/* ---- what a tile reads ---- */

/* Where a tile's rows of x lie, its outputs' codes, the product of the scales of both, and how far
 * ahead codes are fetched. */
typedef struct {
    const char *codes[SIDE];
    const int16_t *x[2];
    float scale[2][SIDE][GROUPS_AT_ONCE];
    long ahead;
} Reading;

/* Scales of x and of some groups of an output multiplied; what offsets add is returned, in parts. */
INLINE lanes scales_of(const QuantizedProduct *p, long o, long first, long own, RoundedRow x,
                       float *to)
{
    long groups = groups_of(p), place = o * groups + first;
    lanes shift = {0};
    for (long g = 0; g < own; g += LANES) {
        long left = p->outputs * groups - place - g;
        lanes scale = widen_halves(p->scale + place + g, left) * load_lanes(x.scale + first + g);
        *(unaligned_lanes *)(to + g) = scale;
        if (p->offset)
            shift += widen_halves(p->offset + place + g, left) * load_lanes(x.sum + first + g);
    }
    return shift;
}

/* sum += Σ scale · code · x of `own` groups, for a kind of codes. */
typedef void Read(const Reading *t, long own, long inputs, int rows, int count, lanes sum[2][SIDE]);

/* ---- bytes ---- */

#if defined(__AVX2__)
INLINE lanes read_bytes(const int8_t *codes, const int16_t *x)
{
    __m256i half[2];
    for (int i = 0; i < 2; i++)
        half[i] =
            _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes + i)),
                              _mm256_loadu_si256((const __m256i *)x + i));
    return (lanes)_mm256_cvtepi32_ps(_mm256_add_epi32(half[0], half[1]));
}
#else
INLINE lanes read_bytes(const int8_t *codes, const int16_t *x)
{
    int32_t sum[LANES] = {0};
    for (int i = 0; i < GROUP_INPUTS; i++)
        sum[i % LANES] += codes[i] * x[i];
    return (lanes){(float)sum[0], (float)sum[1], (float)sum[2], (float)sum[3]};
}
#endif

INLINE void read_group_of_bytes(const Reading *t, long g, const int8_t *codes, int b, int rows,
                                lanes sum[2][SIDE])
{
    for (int a = 0; a < rows; a++) {
        lanes scale = (lanes){0} + t->scale[a][b][g];
        sum[a][b] += scale * read_bytes(codes, t->x[a] + g * GROUP_INPUTS);
    }
}

INLINE void read_groups_of_bytes(const Reading *t, long own, long inputs, int rows, int count,
                                 lanes sum[2][SIDE])
{
    long whole = inputs / GROUP_INPUTS, rest = inputs % GROUP_INPUTS;
    for (long g = 0; g < whole; g++)
        for (int b = 0; b < count; b++) {
            const int8_t *codes = (const int8_t *)t->codes[b] + g * GROUP_INPUTS;
            if (g % 2 == 0)
                __builtin_prefetch(codes + t->ahead);
            read_group_of_bytes(t, g, codes, b, rows, sum);
        }
    for (int b = 0; b < count && whole < own; b++) {
        int8_t last[GROUP_INPUTS] = {0};
        memcpy(last, t->codes[b] + whole * GROUP_INPUTS, rest);
        read_group_of_bytes(t, whole, last, b, rows, sum);
    }
}

/* ---- half bytes ---- */

/* Codes of a pair of groups, or of one; Σ code · x of them, of the first in the lower lanes; and the
 * scales of both in these lanes. */
#if defined(__AVX2__)
typedef struct {
    __m256i quarter[4];
} Codes;

INLINE Codes load_codes(const char *p, int groups)
{
    __m256i mask = _mm256_set1_epi16(15);
    __m256i words = groups == 2 ? _mm256_loadu_si256((const __m256i *)p)
                                : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return (Codes){
        {_mm256_and_si256(words, mask), _mm256_and_si256(_mm256_srli_epi16(words, 4), mask),
         _mm256_and_si256(_mm256_srli_epi16(words, 8), mask), _mm256_srli_epi16(words, 12)}};
}

INLINE lanes read_codes(Codes weight, const int16_t *x)
{
    __m256i read[4];
    for (int i = 0; i < 4; i++)
        read[i] = _mm256_madd_epi16(weight.quarter[i], _mm256_loadu_si256((const __m256i *)x + i));
    __m256i sum =
        _mm256_add_epi32(_mm256_add_epi32(read[0], read[1]), _mm256_add_epi32(read[2], read[3]));
    return (lanes)_mm256_cvtepi32_ps(sum);
}

INLINE lanes spread(const float *scales)
{
    double both;
    memcpy(&both, scales, sizeof both);
    __m256i which = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return (lanes)_mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(both)), which);
}
#else
typedef struct {
    const char *at;
    int groups;
} Codes;

INLINE Codes load_codes(const char *p, int groups)
{
    return (Codes){p, groups};
}

INLINE lanes read_codes(Codes weight, const int16_t *x)
{
    int32_t sum[2] = {0};
    for (int g = 0; g < weight.groups; g++)
        for (int j = 0; j < WORDS; j++) {
            const unsigned char *bytes = (const unsigned char *)weight.at + (g * WORDS + j) * 2;
            int word = bytes[0] | bytes[1] << 8;
            for (int i = 0; i < 4; i++)
                sum[g] += (word >> 4 * i & 15) * x[(2 * i + g) * WORDS + j];
        }
    return (lanes){(float)sum[0], 0, (float)sum[1]};
}

INLINE lanes spread(const float *scales)
{
    return (lanes){scales[0], scales[0], scales[1], scales[1]};
}
#endif

/* Of the groups g and g + 1, or of g alone. */
INLINE void read_pair_of_halves(const Reading *t, long g, int groups, int rows, int count,
                                lanes sum[2][SIDE])
{
    for (int b = 0; b < count; b++) {
        const char *codes = t->codes[b] + g * (GROUP_INPUTS / 2);
        Codes weight = load_codes(codes, groups);
        __builtin_prefetch(codes + t->ahead);
        for (int a = 0; a < rows; a++)
            sum[a][b] +=
                spread(t->scale[a][b] + g) * read_codes(weight, t->x[a] + g * GROUP_INPUTS);
    }
}

INLINE void read_groups_of_halves(const Reading *t, long own, long inputs, int rows, int count,
                                  lanes sum[2][SIDE])
{
    long g = 0;
    (void)inputs;
    for (; g + 2 <= own; g += 2)
        read_pair_of_halves(t, g, 2, rows, count, sum);
    if (g < own)
        read_pair_of_halves(t, g, 1, rows, count, sum);
}

/* ---- products ---- */

/* A tile of a kind of codes, of which there are so many in a byte: some outputs of some rows. */
INLINE void tile_of(Read *read, long in_a_byte, const QuantizedProduct *p, long r, long o, int rows,
                    int count)
{
    long groups = groups_of(p), bytes = p->inputs / in_a_byte,
         group_bytes = GROUP_INPUTS / in_a_byte;
    lanes sum[2][SIDE] = {0};
    Reading t;
    t.ahead = ahead(bytes);
    for (long first = 0; first < groups; first += GROUPS_AT_ONCE) {
        long own = groups - first < GROUPS_AT_ONCE ? groups - first : GROUPS_AT_ONCE;
        long left = p->inputs - first * GROUP_INPUTS;
        for (int b = 0; b < count; b++)
            t.codes[b] = (const char *)p->codes + (o + b) * bytes + first * group_bytes;
        for (int a = 0; a < rows; a++) {
            RoundedRow row = rounded_row(p, r + a);
            t.x[a] = row.codes + first * GROUP_INPUTS;
            for (int b = 0; b < count; b++)
                sum[a][b] += scales_of(p, o + b, first, own, row, t.scale[a][b]);
        }
        read(&t, own, left < own * GROUP_INPUTS ? left : own * GROUP_INPUTS, rows, count, sum);
    }
    for (int a = 0; a < rows; a++)
        for (int b = 0; b < count; b++)
            p->y[(r + a) * p->outputs + o + b] =
                sum_of_lanes(sum[a][b]) + (p->bias ? p->bias[o + b] : 0);
}

INLINE void tile_of_bytes(const void *product, long r, long o, int rows, int count)
{
    const QuantizedProduct *p = product;
    tile_of(read_groups_of_bytes, 1, p, r, o, rows, count);
}

INLINE void tile_of_halves(const void *product, long r, long o, int rows, int count)
{
    const QuantizedProduct *p = product;
    tile_of(read_groups_of_halves, 2, p, r, o, rows, count);
}

/* A task of one of the products that follow one another. */
INLINE int run(Tile *tile, long in_a_byte, const QuantizedProduct *p, long index)
{
    for (long own; index >= (own = tasks_of(p->outputs, p->inputs / in_a_byte)); p++)
        index -= own;
    run_task(tile, p, p->rows, p->outputs, p->inputs / in_a_byte, index);
    return DONE;
}

static int task_of_bytes(const void *problem, long index)
{
    return run(tile_of_bytes, 1, problem, index);
}

static int task_of_halves(const void *problem, long index)
{
    return run(tile_of_halves, 2, problem, index);
}

INLINE long tasks_of_all(const QuantizedProduct *p, long in_a_byte)
{
    long sum = 0;
    for (long i = 0; i <= p->following; i++)
        sum += tasks_of(p[i].outputs, p[i].inputs / in_a_byte);
    return sum;
}

int FOR_ISA(fw_int8_product)(const QuantizedProduct *p)
{
    round_rows(p, place_by_bytes);
    return fw_parallel(task_of_bytes, p, tasks_of_all(p, 1), p->threads);
}

int FOR_ISA(fw_int4_product)(const QuantizedProduct *p)
{
    round_rows(p, place_by_halves);
    return fw_parallel(task_of_halves, p, tasks_of_all(p, 2), p->threads);
}
