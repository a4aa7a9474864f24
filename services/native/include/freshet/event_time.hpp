// Times of events, read in the unit of the spec, in milliseconds since 1970.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "freshet/feature_events.hpp"

namespace freshet {

inline constexpr int64_t kMaxTimeMs = 253'402'300'799'999;  // the end of the year 9999
inline constexpr int64_t kDayMs = 86'400'000;
inline constexpr int64_t kNoTime = std::numeric_limits<int64_t>::min();
inline constexpr int64_t kBadTime = kNoTime + 1;

inline constexpr int64_t kYear2000Seconds = 946'684'800;
// Whether the time of a live event is implausible: before 1970, later than `latest`, or in the week of January 1970
// where a time of a unit a thousand times longer would be (seconds read as milliseconds).
inline bool is_implausible_time(int64_t time_ms, int64_t latest_ms) {
  return time_ms < 0 || time_ms > latest_ms || (time_ms >= kYear2000Seconds && time_ms <= latest_ms / 1000);
}

inline int64_t time_in_range(int64_t ms) { return ms >= -kMaxTimeMs && ms <= kMaxTimeMs ? ms : kBadTime; }

inline int64_t time_of_int(TimeUnit unit, int64_t v) {
  switch (unit) {
    case TimeUnit::kSeconds:
      return v > kMaxTimeMs / 1000 || v < -kMaxTimeMs / 1000 ? kBadTime : v * 1000;
    case TimeUnit::kDays:
      return v > kMaxTimeMs / kDayMs || v < -kMaxTimeMs / kDayMs ? kBadTime : v * kDayMs;
    case TimeUnit::kMicros:
      return time_in_range(v / 1000 - (v % 1000 < 0));
    case TimeUnit::kNanos:
      return time_in_range(v / 1'000'000 - (v % 1'000'000 < 0));
    default:
      return time_in_range(v);
  }
}

inline double millis_of(TimeUnit unit) {
  switch (unit) {
    case TimeUnit::kSeconds:
      return 1e3;
    case TimeUnit::kDays:
      return static_cast<double>(kDayMs);
    default:
      return 1;
  }
}

inline int64_t time_of_double(TimeUnit unit, double v) {
  const double divisor = unit == TimeUnit::kMicros ? 1e3 : unit == TimeUnit::kNanos ? 1e6 : 1;
  const double ms = std::floor(v * millis_of(unit) / divisor);
  const bool fits = std::fabs(ms) <= static_cast<double>(kMaxTimeMs);  // false for NaN
  return fits ? static_cast<int64_t>(ms) : kBadTime;
}

inline int64_t time_of_text(std::string_view text) {
  int64_t ms;
  return parse_iso_time(text, ms) ? ms : kBadTime;
}

inline Why why_of_time(int64_t time) {
  return time == kNoTime ? Why::kMissingTime : time == kBadTime ? Why::kTime : Why::kNone;
}

}  // namespace freshet
