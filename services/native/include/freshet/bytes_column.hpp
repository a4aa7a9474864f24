// N byte strings in one buffer, as `freshet.types.BytesColumn`: a checked view for reading, a builder for writing.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace freshet {

class BytesView {
 public:
  // Throws std::invalid_argument unless ends rise from 0 to data.size().
  BytesView(std::span<const uint8_t> data, std::span<const int64_t> ends) : data_(data), ends_(ends) {
    int64_t last = 0;
    for (const int64_t end : ends) {
      if (end < last) throw std::invalid_argument("ends of a bytes column must not fall");
      last = end;
    }
    if (last != static_cast<int64_t>(data.size())) {
      throw std::invalid_argument("the last end of a bytes column must be the length of its data");
    }
  }

  size_t size() const { return ends_.size(); }
  int64_t start(size_t i) const { return i ? ends_[i - 1] : 0; }
  int64_t end(size_t i) const { return ends_[i]; }
  std::span<const uint8_t> data() const { return data_; }
  std::span<const uint8_t> operator[](size_t i) const {
    return data_.subspan(static_cast<size_t>(start(i)), static_cast<size_t>(end(i) - start(i)));
  }

 private:
  std::span<const uint8_t> data_;
  std::span<const int64_t> ends_;
};

struct BytesColumn {
  std::vector<uint8_t> data;
  std::vector<int64_t> ends;

  void append(const uint8_t* p, size_t n) { data.insert(data.end(), p, p + n); }
  void close() { ends.push_back(static_cast<int64_t>(data.size())); }
  // Forget what was written since the last close().
  void rollback() { data.resize(ends.empty() ? 0 : static_cast<size_t>(ends.back())); }
};

}  // namespace freshet
