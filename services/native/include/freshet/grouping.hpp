// Samples of measures become a table of sums: one cell for each window, label, segment field and value that occurs, and
// a sparse histogram for each cell.
#pragma once

#include <vector>

#include "freshet/simd.hpp"

namespace freshet {

// A segment field of N samples.
struct SegmentColumn {
  const uint64_t* keys = nullptr;    // (N,)
  const uint64_t* values = nullptr;  // (V,) the distinct segments, rising; the first represents all others
  size_t distinct = 0;               // V, at least 1
};

// N samples. Their summands are in columns, one after the other.
struct MeasuredSamples {
  size_t size = 0;
  const int64_t* windows = nullptr;  // (N,)
  const uint8_t* labels = nullptr;   // (N,)
  uint64_t label_count = 1;          // above every label
  std::vector<SegmentColumn> segments;
  const double* sums = nullptr;  // (width, N)
  size_t width = 0;
  const int64_t* bins = nullptr;   // (N,) from 0 to 65535
  const double* counts = nullptr;  // (2, N) a sample of two zeros is in no histogram
};

// C cells and H entries of their histograms, as `evaluation/progressive.py` has them.
struct GroupedSamples {
  std::vector<int64_t> windows;  // (W,) distinct, rising
  // (C,) rising: (window's index * label_count + label) * choices + choice. Choices are 0 for all samples, then the
  // values of each segment in turn.
  std::vector<uint64_t> codes;
  std::vector<double> sums;        // (C, width), added in the order of the samples
  std::vector<int64_t> cell, bin;  // (H,) entries by cell, then bin
  std::vector<double> counts;      // (H, 2), added likewise
};

// Bins of segments are coarser: the middles of ranges of 2^coarse_bits. Throws std::invalid_argument for a label or a
// bin beyond its bounds, and for 2^32 samples or more.
GroupedSamples group_samples(const MeasuredSamples& samples, uint32_t coarse_bits);

}  // namespace freshet
