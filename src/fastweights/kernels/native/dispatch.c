/* The exported functions: each calls itself as compiled for the best instruction set this CPU has. */
#include "bonus.h"
#include "convolution.h"
#include "mesa.h"
#include "norm.h"
#include "problem.h"
#include "product.h"
#include "quantized.h"
#include "rotation.h"
#include "windowed.h"

#define DECLARE(isa)                         \
    void JOIN(fw_forward, isa)(const Forward *); \
    void JOIN(fw_backward, isa)(const Backward *); \
    void JOIN(fw_scan_forward, isa)(const Forward *); \
    void JOIN(fw_scan_backward, isa)(const Backward *); \
    void JOIN(fw_complex_forward, isa)(const Forward *); \
    void JOIN(fw_complex_backward, isa)(const Backward *); \
    void JOIN(fw_mesa, isa)(const MesaProblem *); \
    void JOIN(fw_window_step, isa)(const WindowProblem *); \
    void JOIN(fw_window_prefill, isa)(const WindowProblem *); \
    void JOIN(fw_convolve, isa)(const Convolution *); \
    void JOIN(fw_convolve_back, isa)(const Convolution *); \
    void JOIN(fw_norm, isa)(const Norm *); \
    void JOIN(fw_norm_back, isa)(const Norm *); \
    void JOIN(fw_rotate, isa)(const Rotation *); \
    void JOIN(fw_product, isa)(const Product *); \
    void JOIN(fw_quantized_product, isa)(const QuantizedProduct *); \
    void JOIN(fw_bonus_step, isa)(const BonusStep *);

DECLARE(portable)

#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)

static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

#define BEST(name, p) (has_avx512() ? JOIN(name, avx512)(p) : has_avx2() ? JOIN(name, avx2)(p) : JOIN(name, portable)(p))
#else
#define BEST(name, p) JOIN(name, portable)(p)
#endif

void fw_forward(const Forward *p) { BEST(fw_forward, p); }
void fw_backward(const Backward *p) { BEST(fw_backward, p); }
void fw_scan_forward(const Forward *p) { BEST(fw_scan_forward, p); }
void fw_scan_backward(const Backward *p) { BEST(fw_scan_backward, p); }
void fw_complex_forward(const Forward *p) { BEST(fw_complex_forward, p); }
void fw_complex_backward(const Backward *p) { BEST(fw_complex_backward, p); }
void fw_mesa(const MesaProblem *p) { BEST(fw_mesa, p); }
void fw_window_step(const WindowProblem *p) { BEST(fw_window_step, p); }
void fw_window_prefill(const WindowProblem *p) { BEST(fw_window_prefill, p); }
void fw_convolve(const Convolution *p) { BEST(fw_convolve, p); }
void fw_convolve_back(const Convolution *p) { BEST(fw_convolve_back, p); }
void fw_norm(const Norm *p) { BEST(fw_norm, p); }
void fw_norm_back(const Norm *p) { BEST(fw_norm_back, p); }
void fw_rotate(const Rotation *p) { BEST(fw_rotate, p); }
void fw_product(const Product *p) { BEST(fw_product, p); }
void fw_quantized_product(const QuantizedProduct *p) { BEST(fw_quantized_product, p); }
void fw_bonus_step(const BonusStep *p) { BEST(fw_bonus_step, p); }

/* What Python has to know to make room for results */
const int64_t fw_sources = SOURCES;
const int64_t fw_matrix_marks = BLOCK, fw_scan_marks = SPAN, fw_widest_scan = WIDEST, fw_most_taps = MOST_TAPS,
              fw_norm_rows = NORM_ROWS;

int fw_scan_strips(const Forward *p) { return (int)strips(p); }
