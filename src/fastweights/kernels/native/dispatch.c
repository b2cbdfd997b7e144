/* The exported functions: each calls itself as compiled for the best instruction set this CPU has.
 */
#include "attention.h"
#include "bonus.h"
#include "convolution.h"
#include "mesa.h"
#include "norm.h"
#include "pointwise.h"
#include "problem.h"
#include "product.h"
#include "quantized.h"
#include "replay.h"
#include "rotation.h"
#include "windowed.h"

/* Every kernel, and the structure that it reads */
#define KERNELS(X)                       \
    X(fw_forward, Forward)               \
    X(fw_backward, Backward)             \
    X(fw_scan_forward, Forward)          \
    X(fw_scan_backward, Backward)        \
    X(fw_complex_forward, Forward)       \
    X(fw_complex_backward, Backward)     \
    X(fw_mesa, MesaProblem)              \
    X(fw_window_step, WindowProblem)     \
    X(fw_window_prefill, WindowProblem)  \
    X(fw_attend, TokenAttention)         \
    X(fw_convolve, Convolution)          \
    X(fw_convolve_back, Convolution)     \
    X(fw_norm, Norm)                     \
    X(fw_norm_back, Norm)                \
    X(fw_rotate, Rotation)               \
    X(fw_pointwise, Pointwise)           \
    X(fw_product, Product)               \
    X(fw_int8_product, QuantizedProduct) \
    X(fw_int4_product, QuantizedProduct) \
    X(fw_bonus_step, BonusStep)          \
    X(fw_replay, Replay)                 \
    X(fw_advance, Counters)

#if defined(__x86_64__)

static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

#define EXPORT(name, Problem)                  \
    int JOIN(name, portable)(const Problem *); \
    int JOIN(name, avx2)(const Problem *);     \
    int JOIN(name, avx512)(const Problem *);   \
    int name(const Problem *p)                 \
    {                                          \
        if (has_avx512())                      \
            return JOIN(name, avx512)(p);      \
        if (has_avx2())                        \
            return JOIN(name, avx2)(p);        \
        return JOIN(name, portable)(p);        \
    }

#else

#define EXPORT(name, Problem)                  \
    int JOIN(name, portable)(const Problem *); \
    int name(const Problem *p)                 \
    {                                          \
        return JOIN(name, portable)(p);        \
    }

#endif

KERNELS(EXPORT)

/* What Python has to know to make room for results */
const int64_t fw_sources = SOURCES;
const int64_t fw_matrix_marks = BLOCK, fw_scan_marks = SPAN, fw_widest_scan = WIDEST,
              fw_most_taps = MOST_TAPS, fw_norm_rows = NORM_ROWS,
              fw_attended_tokens = ATTENDED_TOKENS;

int fw_scan_strips(const Forward *p)
{
    return (int)strips(p);
}
