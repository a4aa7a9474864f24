// The dense part's hot loops for x86-64-v3 (AVX2, FMA).
#if defined(__x86_64__)
#define FRESHET_LEVEL 3
#define FRESHET_BF16 0
#define FRESHET_KERNELS kernels_v3
#define FRESHET_KERNELS_NAME "x86-64-v3"
#define FRESHET_TARGET "arch=x86-64-v3"
#include "model_kernels.inc"
#endif
