// The kernel tables that exist; each is the same source (model_kernels.inc) compiled for one instruction set.
#pragma once

#include "freshet/model_kernels.hpp"

namespace freshet {

const Kernels* kernels_plain();
#if defined(__x86_64__)
const Kernels* kernels_v3();
const Kernels* kernels_v4();
const Kernels* kernels_v4_bf16();
#endif

}  // namespace freshet
