// Histograms of many cells, one after the other in flat columns: the functions that need running sums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace freshet {

// AUC of each of `cells` histograms, samples of one bin being tied; bins stand in rising order of prediction. Cell c
// has the entries [starts[c], starts[c + 1]). NaN for a cell without both kinds.
inline void aucs(const int64_t* starts, size_t cells, const double* positive, const double* negative, double* out) {
  for (size_t c = 0; c < cells; c++) {
    double pairs = 0, p = 0, n = 0;
    for (int64_t i = starts[c]; i < starts[c + 1]; i++) {
      pairs += positive[i] * (n + 0.5 * negative[i]);
      p += positive[i];
      n += negative[i];
    }
    out[c] = p > 0 && n > 0 ? pairs / (p * n) : std::numeric_limits<double>::quiet_NaN();
  }
}

}  // namespace freshet
