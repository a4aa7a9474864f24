// Where a label's biases start, and the losses of numbers.
#pragma once

#include <algorithm>
#include <cmath>

#include "freshet/hedge.hpp"

namespace freshet {

struct Start {
  float bias;    // of every expert
  double scale;  // of a number's label
  bool known;    // false: the label cannot teach yet
};

// From the sums {rows, Σ y, Σ y²} of earlier steps and of this batch. A true/false label starts at the log-odds of its
// rows, counted as if half a true and half a false row were among them, so that it stays finite. A number's label is
// measured for ever in standard deviations of the rows it starts from, and starts at their mean: it waits for
// kStartRows of them, and while all are equal. Deviations of the first three rows can be off by orders of magnitude.
constexpr double kStartRows = 100.0;  // kept in step with START_ROWS of torch_model.py

inline Start start_of(Loss loss, const double* before, const double* now) {
  const double n = before[0] + now[0], sum = before[1] + now[1], squares = before[2] + now[2];
  if (n <= 0.0) return {0.0f, 1.0, loss == Loss::kLogloss};
  if (loss == Loss::kLogloss) return {static_cast<float>(std::log((sum + 0.5) / (n - sum + 0.5))), 1.0, true};
  const double mean = sum / n, variance = squares / n - mean * mean;
  if (n < kStartRows || variance <= 1e-12 * (mean * mean + 1e-12)) return {static_cast<float>(mean), 1.0, false};
  const double scale = std::sqrt(variance);
  return {static_cast<float>(mean / scale), scale, true};
}

// Loss of a residual in standard deviations; huber is linear beyond one of them.
inline void number_loss(Loss loss, float residual, float& value, float& gradient) {
  const float size = std::fabs(residual);
  if (loss == Loss::kHuber && size > 1.0f) {
    value = size - 0.5f;
    gradient = residual > 0.0f ? 1.0f : -1.0f;
    return;
  }
  value = 0.5f * residual * residual;
  gradient = residual;
}

}  // namespace freshet
