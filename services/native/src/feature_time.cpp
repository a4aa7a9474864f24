#include "freshet/feature_events.hpp"

namespace freshet {
namespace {

// Reads a time from left to right; every step returns whether the text went on as expected.
struct Reader {
  std::string_view rest;

  bool take(char c) {
    if (rest.empty() || rest.front() != c) return false;
    rest.remove_prefix(1);
    return true;
  }
  bool digits(size_t n, int64_t low, int64_t high, int64_t& out) {
    if (rest.size() < n) return false;
    out = 0;
    for (size_t i = 0; i < n; ++i) {
      if (rest[i] < '0' || rest[i] > '9') return false;
      out = out * 10 + (rest[i] - '0');
    }
    rest.remove_prefix(n);
    return out >= low && out <= high;
  }
  // ".5", ".123456789": any number of digits, cut to milliseconds.
  bool fraction(int64_t& ms) {
    ms = 0;
    int64_t unit = 100;
    size_t n = 0;
    for (; n < rest.size() && rest[n] >= '0' && rest[n] <= '9'; ++n, unit /= 10) ms += (rest[n] - '0') * unit;
    rest.remove_prefix(n);
    return n > 0;
  }
};

// Days since 1970-01-01 (proleptic Gregorian). Source: H. Hinnant, "chrono-compatible low-level date algorithms".
int64_t days_from_civil(int64_t y, int64_t m, int64_t d) {
  y -= m <= 2;
  const int64_t era = y / 400, year_of_era = y - era * 400;  // y >= 0 here
  const int64_t day_of_year = (153 * (m + (m > 2 ? -3 : 9)) + 2) / 5 + d - 1;
  return era * 146097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719468;
}

int64_t days_in_month(int64_t y, int64_t m) {
  constexpr int64_t kDays[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  const bool leap = y % 4 == 0 && (y % 100 != 0 || y % 400 == 0);
  return kDays[m - 1] + (m == 2 && leap);
}

// "Z", "+01:00", "-0730", "+01" or nothing; minutes east of Greenwich.
bool zone(Reader& in, int64_t& minutes) {
  minutes = 0;
  if (in.rest.empty() || in.take('Z') || in.take('z')) return in.rest.empty();
  const int64_t sign = in.take('-') ? -1 : in.take('+') ? 1 : 0;
  int64_t hours, more = 0;
  if (!sign || !in.digits(2, 0, 18, hours)) return false;
  if (!in.rest.empty()) {
    in.take(':');
    if (!in.digits(2, 0, 59, more)) return false;
  }
  minutes = sign * (hours * 60 + more);
  return in.rest.empty();
}

}  // namespace

bool parse_iso_time(std::string_view text, int64_t& time_ms) {
  Reader in{text};
  int64_t y, mo, d, h = 0, mi = 0, s = 0, ms = 0, east = 0;
  if (!in.digits(4, 1, 9999, y) || !in.take('-') || !in.digits(2, 1, 12, mo) || !in.take('-')) return false;
  if (!in.digits(2, 1, days_in_month(y, mo), d)) return false;
  if (!in.rest.empty()) {
    if (!in.take('T') && !in.take('t') && !in.take(' ')) return false;
    if (!in.digits(2, 0, 23, h) || !in.take(':') || !in.digits(2, 0, 59, mi)) return false;
    if (in.take(':')) {
      if (!in.digits(2, 0, 60, s)) return false;  // 60: a leap second, which runs into the next minute
      if ((in.take('.') || in.take(',')) && !in.fraction(ms)) return false;
    }
    in.rest.remove_prefix(in.rest.starts_with(' ') ? 1 : 0);
    if (!zone(in, east)) return false;
  }
  time_ms = ((days_from_civil(y, mo, d) * 24 + h) * 60 + mi - east) * 60'000 + s * 1000 + ms;
  return true;
}

}  // namespace freshet
