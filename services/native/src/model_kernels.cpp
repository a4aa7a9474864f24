#include "freshet/model_kernels.hpp"

#include <cstring>

#include "model_kernels_all.hpp"

namespace freshet {
namespace {

struct Entry {
  const Kernels* (*table)();
  bool (*supported)();
};

// Best first.
const Entry kEntries[] = {
#if defined(__x86_64__)
    {kernels_v4_bf16, [] { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("x86-64-v4"); }},
    {kernels_v4, [] { return static_cast<bool>(__builtin_cpu_supports("x86-64-v4")); }},
    {kernels_v3, [] { return static_cast<bool>(__builtin_cpu_supports("x86-64-v3")); }},
#endif
    {kernels_plain, [] { return true; }},
};

}  // namespace

std::vector<const char*> kernel_names() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  std::vector<const char*> names;
  for (const Entry& e : kEntries)
    if (e.supported()) names.push_back(e.table()->name);
  return names;
}

const Kernels* kernels_named(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  for (const Entry& e : kEntries)  // a table that the processor does not support is not even built
    if (e.supported() && std::strcmp(e.table()->name, name) == 0) return e.table();
  return nullptr;
}

const Kernels& kernels() {
  static const Kernels* const kBest = kernels_named(kernel_names().front());
  return *kBest;
}

}  // namespace freshet
