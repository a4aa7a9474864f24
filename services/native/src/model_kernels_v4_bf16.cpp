// The dense part's hot loops for x86-64-v4 with AVX512-BF16.
#if defined(__x86_64__)
#define FRESHET_LEVEL 4
#define FRESHET_BF16 1
#define FRESHET_KERNELS kernels_v4_bf16
#define FRESHET_KERNELS_NAME "x86-64-v4-bf16"
#define FRESHET_TARGET "arch=x86-64-v4,avx512bf16"
#include "model_kernels.inc"
#endif
