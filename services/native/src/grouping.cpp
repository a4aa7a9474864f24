#include "freshet/grouping.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <string>

namespace freshet {
namespace {

constexpr uint32_t kBinBits = 16;

// Numbers codes by first occurrence.
class Numbers {
 public:
  uint32_t of(uint64_t code) {
    if (2 * codes.size() >= places_.size()) grow();
    for (size_t at = home(code);; at = (at + 1) & (places_.size() - 1)) {
      if (places_[at] == kEmpty) {
        places_[at] = static_cast<uint32_t>(codes.size());
        codes.push_back(code);
        return places_[at];
      }
      if (codes[places_[at]] == code) return places_[at];
    }
  }
  std::vector<uint64_t> codes;

 private:
  static constexpr uint32_t kEmpty = ~0u;
  size_t home(uint64_t code) const { return (code * 0x9e3779b97f4a7c15ull) >> (64 - std::countr_zero(places_.size())); }
  void grow() {
    places_.assign(std::max<size_t>(256, 4 * places_.size()), kEmpty);
    for (uint32_t i = 0; i < codes.size(); i++) {
      size_t at = home(codes[i]);
      while (places_[at] != kEmpty) at = (at + 1) & (places_.size() - 1);
      places_[at] = i;
    }
  }
  std::vector<uint32_t> places_;
};

std::vector<int64_t> distinct(const int64_t* windows, size_t size) {
  std::vector<int64_t> found;
  for (size_t i = 0; i < size; i++)
    if (i == 0 || windows[i] != windows[i - 1]) found.push_back(windows[i]);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

struct Entry {
  uint64_t code;  // cell and bin
  uint32_t sample;
};

// By code, equal ones in their order.
void sort_entries(std::vector<Entry>& entries, uint64_t largest) {
  constexpr uint32_t digit = 11;
  std::vector<Entry> other(entries.size());
  for (uint32_t shift = 0; shift < 64 && largest >> shift; shift += digit) {
    size_t next[1 << digit] = {};
    const auto place = [&](const Entry& e) { return (e.code >> shift) & ((1u << digit) - 1); };
    for (const Entry& e : entries) next[place(e)]++;
    std::exclusive_scan(next, next + (1 << digit), next, size_t{0});
    for (const Entry& e : entries) other[next[place(e)]++] = e;
    entries.swap(other);
  }
}

// The number of each sample's cells, one field after the other, and the cells' codes.
struct Numbered {
  std::vector<uint32_t> cells;  // (1 + segments, N)
  std::vector<uint64_t> codes;  // rising
};

Numbered number_cells(const MeasuredSamples& from, const std::vector<int64_t>& windows) {
  const size_t n = from.size, fields = 1 + from.segments.size();
  uint64_t choices = 1;
  for (const SegmentColumn& segment : from.segments) choices += segment.distinct;
  Numbered made;
  made.cells.resize(fields * n);
  Numbers numbers;
  size_t window = 0;
  for (size_t i = 0; i < n; i++) {
    if (i == 0 || from.windows[i] != from.windows[i - 1])
      window = static_cast<size_t>(std::lower_bound(windows.begin(), windows.end(), from.windows[i]) - windows.begin());
    if (from.labels[i] >= from.label_count)
      throw std::invalid_argument("expected a label below " + std::to_string(from.label_count) + ", found " +
                                  std::to_string(from.labels[i]));
    const uint64_t base = (window * from.label_count + from.labels[i]) * choices;
    made.cells[i] = numbers.of(base);
    uint64_t start = 1;
    for (size_t f = 1; f < fields; f++) {
      const SegmentColumn& segment = from.segments[f - 1];
      const uint64_t* found = std::lower_bound(segment.values, segment.values + segment.distinct, segment.keys[i]);
      const bool known = found != segment.values + segment.distinct && *found == segment.keys[i];
      made.cells[f * n + i] = numbers.of(base + start + (known ? static_cast<uint64_t>(found - segment.values) : 0));
      start += segment.distinct;
    }
  }
  std::vector<uint32_t> order(numbers.codes.size()), rank(order.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return numbers.codes[a] < numbers.codes[b]; });
  for (uint32_t i = 0; i < order.size(); i++) {
    rank[order[i]] = i;
    made.codes.push_back(numbers.codes[order[i]]);
  }
  for (uint32_t& cell : made.cells) cell = rank[cell];
  return made;
}

void add_histograms(const MeasuredSamples& from, const std::vector<uint32_t>& cells, uint32_t coarse_bits,
                    GroupedSamples& out) {
  const size_t n = from.size;
  const double *positive = from.counts, *negative = from.counts + n;
  std::vector<Entry> entries;
  entries.reserve(cells.size());
  for (size_t field = 0; field * n < cells.size(); field++)
    for (size_t i = 0; i < n; i++) {
      if (positive[i] == 0 && negative[i] == 0) continue;
      uint64_t bin = static_cast<uint64_t>(from.bins[i]);
      if (field) bin = (bin >> coarse_bits << coarse_bits) + (1u << coarse_bits >> 1);
      if (bin >> kBinBits)
        throw std::invalid_argument("expected a bin below 65536, found " + std::to_string(from.bins[i]));
      entries.push_back({(static_cast<uint64_t>(cells[field * n + i]) << kBinBits) + bin, static_cast<uint32_t>(i)});
    }
  sort_entries(entries, static_cast<uint64_t>(out.codes.size()) << kBinBits);
  for (size_t e = 0; e < entries.size(); e++) {
    const Entry& entry = entries[e];
    if (e == 0 || entry.code != entries[e - 1].code) {
      out.cell.push_back(static_cast<int64_t>(entry.code >> kBinBits));
      out.bin.push_back(static_cast<int64_t>(entry.code & ((1u << kBinBits) - 1)));
      out.counts.insert(out.counts.end(), {0.0, 0.0});
    }
    out.counts[out.counts.size() - 2] += positive[entry.sample];
    out.counts[out.counts.size() - 1] += negative[entry.sample];
  }
}

}  // namespace

GroupedSamples group_samples(const MeasuredSamples& from, uint32_t coarse_bits) {
  if (from.size >> 32)
    throw std::invalid_argument("expected fewer than 2^32 samples, found " + std::to_string(from.size));
  GroupedSamples out;
  out.windows = distinct(from.windows, from.size);
  Numbered numbered = number_cells(from, out.windows);
  out.codes = std::move(numbered.codes);
  out.sums.resize(out.codes.size() * from.width);
  for (size_t c = 0; c < numbered.cells.size(); c++) {
    double* to = out.sums.data() + numbered.cells[c] * from.width;
    const double* summands = from.sums + c % from.size;
    for (size_t k = 0; k < from.width; k++) to[k] += summands[k * from.size];
  }
  add_histograms(from, numbered.cells, coarse_bits, out);
  return out;
}

}  // namespace freshet
