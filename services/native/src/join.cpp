#include "freshet/join.hpp"

#include <limits>
#include <stdexcept>

namespace freshet::join {

namespace {

constexpr int64_t kBeginning = std::numeric_limits<int64_t>::min() / 4;
constexpr int64_t kLatestTime = int64_t{1} << 53;  // no sum of times up to here overflows; it fits a JSON number

uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64: a bijection
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBull;
  return x ^ (x >> 31);
}

}  // namespace

int64_t sample_id(const Key& impression, uint32_t label) {
  return static_cast<int64_t>(mix(mix(impression.lo + 0x9E37'79B9'7F4A'7C15ull * (label + 1ull)) ^ impression.hi));
}

bool kept(int64_t sample, double share) {
  const uint64_t hash = mix(static_cast<uint64_t>(sample) ^ 0x6A09'E667'F3BC'C909ull);
  return static_cast<double>(hash >> 11) * 0x1p-53 < share;
}

Joiner::Joiner(Plan plan)
    : plan_(std::move(plan)),
      labels_(plan_.labels.size()),
      watermark_(kBeginning),
      decided_(events_, aggregates()),
      late_(events_, 0) {
  if (labels_ == 0 || labels_ > kMaxLabels) throw std::invalid_argument("a join takes 1 to 32 labels");
  if (plan_.grace_ms < 0) throw std::invalid_argument("the grace must not be negative");
  if (!(plan_.negatives > 0 && plan_.negatives <= 1)) throw std::invalid_argument("negatives must be in (0, 1]");
  if (plan_.warm_up_waits < 0 || plan_.warm_up_waits == 1)
    throw std::invalid_argument("the warm-up must be 0 or at least 2 waits");
  gates_.resize(labels_);
  for (size_t label = 0; label < labels_; ++label) {
    int64_t window = 0;
    size_t depth = 0;
    for (int64_t at = static_cast<int64_t>(label); at >= 0; at = plan_.labels[static_cast<size_t>(at)].given) {
      if (at >= static_cast<int64_t>(labels_) || ++depth > labels_)
        throw std::invalid_argument("`given` must name another label, without a circle");
      if (plan_.labels[static_cast<size_t>(at)].window_ms < 0)
        throw std::invalid_argument("a window must not be negative");
      window = std::max(window, plan_.labels[static_cast<size_t>(at)].window_ms);
    }
    wait_.push_back(window + plan_.grace_ms);
    longest_wait_ = std::max(longest_wait_, wait_.back());
    gates_[label] |= 1u << label;
    if (plan_.labels[label].given >= 0) gates_[static_cast<size_t>(plan_.labels[label].given)] |= 1u << label;
    longest_window_ = std::max(longest_window_, window);
    decide_order_.push_back(static_cast<uint32_t>(label));
  }
  for (const AggregatePlan& plan_of : plan_.aggregates) {
    if (plan_of.label >= labels_ || !plan_.labels[plan_of.label].numeric)
      throw std::invalid_argument("an aggregate belongs to a numeric label");
    lasts_ |= plan_of.kind == Aggregate::kLast;
  }
  // A chain's waits never fall along it, so by (wait, depth in the chain) a label comes after the one it is given.
  const auto depth_of = [this](uint32_t label) {
    size_t depth = 0;
    for (int32_t at = plan_.labels[label].given; at >= 0; at = plan_.labels[static_cast<size_t>(at)].given) ++depth;
    return depth;
  };
  std::stable_sort(decide_order_.begin(), decide_order_.end(),
                   [&](uint32_t a, uint32_t b) { return depth_of(a) < depth_of(b); });
  // Ids outlive every decision by another grace, as an action may be dated up to a grace before its impression.
  horizon_ = longest_window_ + 2 * plan_.grace_ms;
  // An impression outlives every action in its windows, so that a replay of the action finds the impression, too.
  remembered_ = horizon_ + longest_window_;
  deadlines_.resize(labels_);
  held_.resize(labels_);
  counters_.resize(labels_ * kLabelCounterCount + kEventCounterCount);
  pending_.resize(labels_);
}

void Joiner::check_time(int64_t time) {
  if (time < 0 || time > kLatestTime) throw std::invalid_argument("an event's time must be in [0, 2^53] ms");
}

void Joiner::restart_at(int64_t watermark) { watermark_ = watermark; }

void Joiner::set_back(int64_t watermark) {
  if (watermark > watermark_) throw std::invalid_argument("the watermark can only be put back");
  set_back_from_ = watermark_;
  watermark_ = watermark;
  recalling_ = true;
}

void Joiner::end_recall() {
  recalling_ = false;
  for (Retained& retained : retained_) retained.sort();
}

void Joiner::counters(std::span<int64_t> out) const {
  if (out.size() != counters_.size()) throw std::invalid_argument("counters() needs an array of their number");
  std::copy(counters_.begin(), counters_.end(), out.begin());
}

void Joiner::set_counters(std::span<const int64_t> in) {
  if (in.size() != counters_.size()) throw std::invalid_argument("set_counters() needs an array of their number");
  std::copy(in.begin(), in.end(), counters_.begin());
}

void Joiner::pending(std::span<int64_t> out) const { std::copy(pending_.begin(), pending_.end(), out.begin()); }

void Joiner::no_value(size_t label, bool matched) {
  --count(label, matched ? kPositive : kNegative);
  ++count(label, kNoValue);
}

double* Joiner::aggregates_of(uint32_t entry) {
  const size_t need = (static_cast<size_t>(entry) + 1) * aggregates();
  if (aggregates_.size() < need) aggregates_.resize(std::max(need, aggregates_.size() * 2));
  if (lasts_ && last_times_.size() < need) last_times_.resize(std::max(need, last_times_.size() * 2));
  return aggregates_.data() + static_cast<size_t>(entry) * aggregates();
}

double* Joiner::waiting_values(uint32_t waiting) {
  const size_t need = (static_cast<size_t>(waiting) + 1) * aggregates();
  if (waiting_values_.size() < need) waiting_values_.resize(std::max(need, waiting_values_.size() * 2));
  return waiting_values_.data() + static_cast<size_t>(waiting) * aggregates();
}

}  // namespace freshet::join
