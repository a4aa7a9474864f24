#include <bit>
#include <cmath>

#include "freshet/feature_clones.hpp"
#include "freshet/feature_decode.hpp"

namespace freshet {
namespace {

// log(1 + x) for x >= 0 to well under a float's rounding: u = 1 + x = 2^e m, m in [1/sqrt 2, sqrt 2), and
// log m = 2 artanh((m-1)/(m+1)) by its series up to s^15; the rounding error of 1 + x is added back.
inline double log1p_positive(double x) {
  const double u = 1.0 + x;
  const double lost = (x - (u - 1.0)) / u;
  constexpr uint64_t kSqrtHalf = 0x3FE6A09E667F3BCDull;
  const uint64_t shifted = std::bit_cast<uint64_t>(u) - kSqrtHalf;
  // The exponent is small and not negative, so it can be turned into a double by its bits.
  const uint64_t e = shifted >> 52;
  const double exponent = std::bit_cast<double>(e | 0x4330000000000000ull) - 4503599627370496.0;
  const double m = std::bit_cast<double>(std::bit_cast<uint64_t>(u) - (e << 52));
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double sum = 1.0 / 15;
  sum = sum * z + 1.0 / 13;
  sum = sum * z + 1.0 / 11;
  sum = sum * z + 1.0 / 9;
  sum = sum * z + 1.0 / 7;
  sum = sum * z + 1.0 / 5;
  sum = sum * z + 1.0 / 3;
  sum = sum * z + 1.0;
  return exponent * 0.69314718055994530942 + (2.0 * s * sum + lost);
}

FRESHET_FEATURE_CLONES
void log1p_masked(float* __restrict values, const uint32_t* __restrict mask, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float x = values[i];
    const auto y = static_cast<float>(log1p_positive(static_cast<double>(std::fabs(x))));
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t made = std::bit_cast<uint32_t>(y) | (bits & 0x80000000u);
    const uint32_t take = mask[i] & (x == x ? 0xFFFFFFFFu : 0u);
    values[i] = std::bit_cast<float>((made & take) | (bits & ~take));
  }
}

}  // namespace

void log1p_columns(float* values, size_t rows, std::span<const uint8_t> mask) {
  const size_t columns = mask.size();
  constexpr size_t kRows = 16;  // rows at a time, so that the loop is long whatever D is
  std::vector<uint32_t> wide(columns * kRows);
  bool any = false;
  for (size_t i = 0; i < wide.size(); ++i) {
    wide[i] = mask[i % columns] ? 0xFFFFFFFFu : 0u;
    any |= wide[i] != 0;
  }
  if (!any) return;
  for (size_t r = 0; r < rows; r += kRows) {
    log1p_masked(values + r * columns, wide.data(), std::min(kRows, rows - r) * columns);
  }
}

}  // namespace freshet
