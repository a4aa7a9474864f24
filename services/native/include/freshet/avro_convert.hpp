// Values that a schema writes in one form and means in another: decimals, UUIDs, times in units.
#pragma once

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace freshet {

// v = v * factor / divisor, rounded down. False if that has no 64 bits.
inline bool scaled(int64_t& v, int64_t factor, int64_t divisor) {
  int64_t product;
  if (__builtin_mul_overflow(v, factor, &product)) return false;
  v = product / divisor - (product % divisor < 0);
  return true;
}

// A decimal as Avro writes it: a signed big-endian integer of any length, divided by 10^scale.
//
// Without a scale it is an integer where that has 64 bits. All else is the double that is nearest, as a reader of its
// text would find it, so that 12.30 of scale 2 is the double 12.3; digits beyond a double's 15 to 17 are lost.
class Decimal {
 public:
  static constexpr size_t kMaxBytes = 64;  // 153 digits, twice what databases have

  Decimal(const uint8_t* p, size_t n, int32_t scale) : scale_(scale) {
    const uint8_t sign = n > 0 && (p[0] & 0x80) ? 0xFF : 0;
    negative_ = sign != 0;
    while (n > 1 && p[0] == sign && (p[1] & 0x80) == (sign & 0x80)) ++p, --n;
    size_ = n;
    for (size_t i = 0; i < n && i < kMaxBytes; ++i) bytes_[i] = p[i];
  }

  bool readable() const { return size_ <= kMaxBytes && scale_ <= 400; }
  bool has_int() const { return scale_ == 0 && size_ <= 8; }
  int64_t as_int() const {
    uint64_t v = negative_ ? ~uint64_t{0} : 0;
    for (size_t i = 0; i < size_; ++i) v = v << 8 | bytes_[i];
    return static_cast<int64_t>(v);
  }
  double as_double() const {
    if (size_ <= 7 &&
        scale_ <= 22) {  // up to 2^55: exact below 2^53, and so is the power, so the quotient is the nearest
      const int64_t v = as_int();
      if (v > -kExact && v < kExact) return static_cast<double>(v) / power(scale_);
    }
    return of_digits();
  }

 private:
  static constexpr int64_t kExact = int64_t{1} << 53;

  static double power(int32_t scale) {
    double p = 1;
    for (; scale > 0; --scale) p *= 10;  // exact up to 10^22
    return p;
  }

  // The digits written out, and read as any text is.
  double of_digits() const {
    std::array<uint8_t, kMaxBytes> magnitude{};
    unsigned carry = negative_ ? 1 : 0;
    for (size_t i = size_; i-- > 0;) {
      const unsigned byte = (negative_ ? bytes_[i] ^ 0xFFu : bytes_[i]) + carry;
      magnitude[i] = static_cast<uint8_t>(byte);
      carry = byte >> 8;
    }
    std::array<char, 3 * kMaxBytes + 16> text{};
    char* const end = text.data() + 3 * kMaxBytes;
    char* at = end;
    size_t first = 0;
    while (first < size_ && magnitude[first] == 0) ++first;
    while (first < size_) {
      unsigned rest = 0;
      for (size_t i = first; i < size_; ++i) {
        const unsigned v = rest << 8 | magnitude[i];
        magnitude[i] = static_cast<uint8_t>(v / 10);
        rest = v % 10;
      }
      *--at = static_cast<char>('0' + rest);
      while (first < size_ && magnitude[first] == 0) ++first;
    }
    if (at == end) *--at = '0';
    *end = 'e';
    char* stop = std::to_chars(end + 1, text.data() + text.size(), -scale_).ptr;
    double v = 0;
    const auto read = std::from_chars(at, stop, v);
    if (read.ec != std::errc{}) v = scale_ > 100 ? 0 : std::numeric_limits<double>::infinity();
    return negative_ ? -v : v;
  }

  std::array<uint8_t, kMaxBytes> bytes_{};  // without needless signs
  size_t size_ = 0;
  int32_t scale_;
  bool negative_ = false;
};

// A JSON number as the bytes of a decimal: digits, a point, an exponent, each as RFC 8259 has it. `size`: of a fixed;
// 0: as few bytes as hold it. False if it has more digits than `precision`, or any but zeros behind `scale` of them.
inline bool decimal_bytes(std::string_view text, int64_t scale, int64_t precision, size_t size,
                          std::vector<uint8_t>& out) {
  const bool negative = text.front() == '-';
  size_t at = negative ? 1 : 0;
  std::string digits;
  int64_t behind = 0;  // digits behind the point
  for (bool point = false; at < text.size() && text[at] != 'e' && text[at] != 'E'; ++at) {
    if (text[at] == '.') {
      point = true;
      continue;
    }
    if (!digits.empty() || text[at] != '0') digits.push_back(text[at]);
    behind += point;
  }
  int64_t exponent = 0;
  if (at < text.size()) {
    at += text[at + 1] == '+' ? 2 : 1;
    const auto read = std::from_chars(text.data() + at, text.data() + text.size(), exponent);
    const bool readable = read.ec == std::errc{} && exponent > -100'000 && exponent < 100'000;
    if (!readable && !digits.empty()) return false;
  }
  if (digits.empty()) digits = "0", exponent = behind = 0;
  int64_t shift = scale + exponent - behind;
  for (; shift < 0 && digits.size() > 1 && digits.back() == '0'; ++shift) digits.pop_back();
  if (digits == "0") shift = 0;
  const auto width = static_cast<int64_t>(digits.size());
  if (shift < 0 || shift > precision || width + shift > precision || precision > 150) return false;
  digits.append(static_cast<size_t>(shift), '0');
  std::array<uint8_t, 64> number{};  // big-endian
  for (const char digit : digits) {
    unsigned carry = static_cast<unsigned>(digit - '0');
    for (size_t i = number.size(); i-- > 0; carry >>= 8) {
      carry += number[i] * 10u;
      number[i] = static_cast<uint8_t>(carry);
    }
  }
  if (negative) {
    unsigned carry = 1;
    for (size_t i = number.size(); i-- > 0; carry >>= 8) {
      carry += static_cast<uint8_t>(~number[i]);
      number[i] = static_cast<uint8_t>(carry);
    }
  }
  const uint8_t sign = number[0] & 0x80 ? 0xFF : 0;
  size_t first = 0;
  while (first + 1 < number.size() && number[first] == sign && (number[first + 1] & 0x80) == (sign & 0x80)) ++first;
  const size_t needed = number.size() - first;
  if (size && needed > size) return false;
  out.assign(size ? size - needed : 0, sign);
  out.insert(out.end(), number.begin() + static_cast<ptrdiff_t>(first), number.end());
  return true;
}

// 16 bytes as 8-4-4-4-12 hexadecimal digits in small letters, 36 characters.
inline void uuid_text(const uint8_t* p, uint8_t* out) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) *out++ = '-';
    *out++ = static_cast<uint8_t>(kDigits[p[i] >> 4]);
    *out++ = static_cast<uint8_t>(kDigits[p[i] & 15]);
  }
}

}  // namespace freshet
