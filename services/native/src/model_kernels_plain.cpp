// The dense part's hot loops for any processor.
#define FRESHET_LEVEL 0
#define FRESHET_BF16 0
#define FRESHET_KERNELS kernels_plain
#define FRESHET_KERNELS_NAME "plain"
#include "model_kernels.inc"
