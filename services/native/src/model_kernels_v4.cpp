// The dense part's hot loops for x86-64-v4 (AVX-512).
#if defined(__x86_64__)
#define FRESHET_LEVEL 4
#define FRESHET_BF16 0
#define FRESHET_KERNELS kernels_v4
#define FRESHET_KERNELS_NAME "x86-64-v4"
#define FRESHET_TARGET "arch=x86-64-v4"
#include "model_kernels.inc"
#endif
