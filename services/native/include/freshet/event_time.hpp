// Times of events, as a spec says that they are written, in milliseconds since 1970.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "freshet/feature_events.hpp"

namespace freshet {

inline constexpr std::int64_t kMaxTimeMs = 253'402'300'799'999;  // the end of the year 9999
inline constexpr std::int64_t kNoTime = std::numeric_limits<std::int64_t>::min();
inline constexpr std::int64_t kBadTime = kNoTime + 1;

inline std::int64_t time_in_range(std::int64_t ms) { return ms >= -kMaxTimeMs && ms <= kMaxTimeMs ? ms : kBadTime; }

inline std::int64_t time_of_int(TimeUnit unit, std::int64_t v) {
  if (unit == TimeUnit::kSeconds) return v > kMaxTimeMs / 1000 || v < -kMaxTimeMs / 1000 ? kBadTime : v * 1000;
  return time_in_range(unit == TimeUnit::kMicros ? v / 1000 - (v % 1000 < 0) : v);
}

inline std::int64_t time_of_double(TimeUnit unit, double v) {
  const double ms = std::floor(unit == TimeUnit::kSeconds ? v * 1e3 : unit == TimeUnit::kMicros ? v / 1e3 : v);
  const bool fits = std::fabs(ms) <= static_cast<double>(kMaxTimeMs);  // false for NaN
  return fits ? static_cast<std::int64_t>(ms) : kBadTime;
}

inline std::int64_t time_of_text(std::string_view text) {
  std::int64_t ms;
  return parse_iso_time(text, ms) ? ms : kBadTime;
}

inline Why why_of_time(std::int64_t time) {
  return time == kNoTime ? Why::kMissingTime : time == kBadTime ? Why::kTime : Why::kNone;
}

}  // namespace freshet
