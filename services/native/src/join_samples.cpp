#include "freshet/join_samples.hpp"

#include <stdexcept>
#include <unordered_map>

namespace freshet::join {

void SampleBuffer::push(const ReadySample& sample, const double* aggregates) {
  ServedEvent& event = events_[sample.event];
  ++event.refs;
  bytes_ += event.prefix + (sample.element_end - sample.element_begin) + (event.size - event.suffix);
  samples_.push_back(sample);
  aggregates_.insert(aggregates_.end(), aggregates, aggregates + aggregate_count_);
}

// By the time of the request's first impression here, so that a request's samples are together; within a request
// by time and place. A total order, so that it does not depend on the order of decisions.
std::vector<uint32_t> SampleBuffer::order() const {
  std::unordered_map<uint64_t, int64_t> first;
  first.reserve(samples_.size());
  for (const ReadySample& sample : samples_) {
    const auto [at, added] = first.try_emplace(events_[sample.event].request, sample.time);
    if (!added) at->second = std::min(at->second, sample.time);
  }
  struct Place {
    int64_t first;
    uint64_t request;
    int64_t time, offset;
    uint32_t element, label, index;
    auto operator<=>(const Place&) const = default;
  };
  std::vector<Place> places;
  places.reserve(samples_.size());
  for (size_t i = 0; i < samples_.size(); ++i) {
    const ReadySample& sample = samples_[i];
    const ServedEvent& event = events_[sample.event];
    places.push_back({first[event.request], event.request, sample.time, event.offset, sample.element, sample.label,
                      static_cast<uint32_t>(i)});
  }
  if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
  std::vector<uint32_t> order;
  order.reserve(places.size());
  for (const Place& place : places) order.push_back(place.index);
  return order;
}

void SampleBuffer::take(const Samples& out) {
  if (out.ids.size() != samples_.size() || out.payload.size() != bytes_ ||
      out.aggregates.size() != samples_.size() * aggregate_count_)
    throw std::invalid_argument("take() needs arrays of the size that ready() returned");
  uint8_t* to = out.payload.data();
  size_t n = 0;
  for (const uint32_t at : order()) {
    const ReadySample& sample = samples_[at];
    const ServedEvent& event = events_[sample.event];
    const uint8_t* from = events_.data(sample.event);
    to = std::copy(from, from + event.prefix, to);
    to = std::copy(from + sample.element_begin, from + sample.element_end, to);
    to = std::copy(from + event.suffix, from + event.size, to);
    out.ids[n] = sample.id;
    out.times[n] = sample.time;
    out.requests[n] = event.request;
    out.values[n] = sample.value;
    out.weights[n] = sample.weight;
    out.labels[n] = sample.label;
    out.schemas[n] = event.schema;
    out.ends[n] = to - out.payload.data();
    std::copy_n(aggregates_.begin() + static_cast<ptrdiff_t>(at * aggregate_count_), aggregate_count_,
                out.aggregates.begin() + static_cast<ptrdiff_t>(n * aggregate_count_));
    ++n;
  }
  discard();
}

void SampleBuffer::discard() {
  for (const ReadySample& sample : samples_) events_.release(sample.event);
  samples_.clear();
  aggregates_.clear();
  bytes_ = 0;
}

}  // namespace freshet::join
