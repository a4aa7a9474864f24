#include "freshet/optim.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <utility>

namespace freshet {

namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
constexpr uint32_t kLine = 64;

// The finaliser of splitmix64 (Steele, Lea and Flood 2014; constants by Stafford, variant 13).
FRESHET_INLINE uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

FRESHET_INLINE float uniform(uint64_t stream, uint32_t j, float scale) {
  const uint64_t both = mix(stream + (j / 2 + 1) * kGolden);
  const uint32_t half = static_cast<uint32_t>(j & 1 ? both >> 32 : both);
  return static_cast<float>(static_cast<int32_t>(half >> 8) - (1 << 23)) * scale;
}

// Noise for stochastic rounding of value j at a row's step: lowbias32 (Wellons 2018) of key, step count and j.
FRESHET_INLINE uint32_t noise(uint32_t seed, uint32_t j) {
  uint32_t x = seed + j * 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// beta^t by squaring, so that no two C libraries can disagree.
FRESHET_INLINE double power(double beta, uint32_t t) {
  double result = 1.0;
  for (; t; t >>= 1, beta *= beta)
    if (t & 1) result *= beta;
  return result;
}

// A step leaves only finite floats: `packed_fault` refuses others, so a store with one could not start again. Squared
// gradients are finite, but not their sums, nor quotients by roots close to 0. Ordinary floats keep their bits.
constexpr float kMostSum = std::numeric_limits<float>::max();
constexpr float kMostValue = 0x1.fep127f;  // the largest bf16, which no rounding takes to infinity
FRESHET_INLINE float add_square(float sum, float squared) { return std::min(sum + squared, kMostSum); }
FRESHET_INLINE float bounded(float x) { return std::min(std::max(x, -kMostValue), kMostValue); }

// The per-step constants of a slot: the rate of rules that have one for the whole row (SGD, row-wise Adagrad),
// Adam's corrections of the bias towards 0, and the value of rule count.
struct Prepared {
  float rate = 0.0f, correct_mean = 1.0f, correct_square = 1.0f, value = 0.0f;
};

// Whether a row's floats all take one rate, which `prepare` has worked out.
constexpr bool has_one_rate(Rule rule) {
  return rule == Rule::sgd || rule == Rule::rowwise_adagrad || rule == Rule::rowwise_rmsprop;
}

FRESHET_INLINE Prepared prepare(const Slot& s, float* state, const float* gradient, float squared) {
  constexpr float most_steps = 16777216.0f;  // a float counts to 2^24; by then both corrections are 1
  Prepared p;
  if (s.rule == Rule::sgd) {
    p.rate = s.lr;
  } else if (s.rule == Rule::rowwise_adagrad) {
    state[0] = add_square(state[0], squared / static_cast<float>(s.width));
    p.rate = bounded(s.lr / (std::sqrt(state[0]) + s.eps));
  } else if (s.rule == Rule::rowwise_rmsprop) {
    state[0] = add_square(s.beta2 * state[0], (1.0f - s.beta2) * (squared / static_cast<float>(s.width)));
    p.rate = bounded(s.lr / (std::sqrt(state[0]) + s.eps));
  } else if (s.rule == Rule::adam) {
    state[0] = std::min(std::max(state[0], 0.0f) + 1.0f, most_steps);
    const uint32_t t = static_cast<uint32_t>(state[0]);
    p.correct_mean = static_cast<float>(1.0 - power(static_cast<double>(s.beta1), t));
    p.correct_square = static_cast<float>(1.0 - power(static_cast<double>(s.beta2), t));
  } else if (s.rule == Rule::count) {
    state[0] = std::min(std::max(state[0], 0.0f) + (gradient[0] > 0.0f ? 0.0f : 1.0f), most_steps);
    p.value = count_value(count_bucket(state[0]));
  }
  return p;
}

// Each rule steps N floats; `w` are the values, `g` the gradient, both local copies, and the loops become vectors.

template <uint32_t N>
FRESHET_INLINE void step_adagrad(const Slot& s, float* w, const float* g, float* sums) {
  float sum[N];
  std::memcpy(sum, sums, sizeof sum);
  for (uint32_t i = 0; i < N; i++) {
    sum[i] = add_square(sum[i], g[i] * g[i]);
    w[i] -= s.lr * g[i] / (std::sqrt(sum[i]) + s.eps);
  }
  std::memcpy(sums, sum, sizeof sum);
}

template <uint32_t N>
FRESHET_INLINE void step_adam(const Slot& s, const Prepared& p, float* w, const float* g, float* means,
                              float* squares) {
  float m[N], q[N];
  std::memcpy(m, means, sizeof m);
  std::memcpy(q, squares, sizeof q);
  for (uint32_t i = 0; i < N; i++) {
    m[i] = s.beta1 * m[i] + (1.0f - s.beta1) * g[i];
    q[i] = add_square(s.beta2 * q[i], (1.0f - s.beta2) * g[i] * g[i]);
    w[i] = bounded(w[i] - s.lr * (m[i] / p.correct_mean) / (std::sqrt(q[i] / p.correct_square) + s.eps));
  }
  std::memcpy(means, m, sizeof m);
  std::memcpy(squares, q, sizeof q);
}

template <uint32_t N>
FRESHET_INLINE void step_ftrl(const Slot& s, float* w, const float* g, float* evidence, float* sums) {
  float z[N], sum[N];
  std::memcpy(z, evidence, sizeof z);
  std::memcpy(sum, sums, sizeof sum);
  for (uint32_t i = 0; i < N; i++) {
    const float next = add_square(sum[i], g[i] * g[i]);
    const float root = std::sqrt(next);
    const float sigma = bounded((root - std::sqrt(sum[i])) / s.lr);
    z[i] = bounded(z[i] + (g[i] - sigma * w[i]));
    sum[i] = next;
    const float shrunk = z[i] - std::copysign(s.l1, z[i]);
    const float moved = -shrunk / ((s.beta + root) / s.lr + s.l2);
    w[i] = std::abs(z[i]) <= s.l1 ? 0.0f : bounded(moved);
  }
  std::memcpy(evidence, z, sizeof z);
  std::memcpy(sums, sum, sizeof sum);
}

// Step floats [at, at + N) of a slot. bf16 values are widened, stepped in float32 and rounded by chance.
template <uint32_t N>
FRESHET_INLINE void step_piece(const Slot& s, const Prepared& p, uint8_t* values, float* state, const float* gradient,
                               uint32_t at, uint32_t seed) {
  float w[N], g[N];
  std::memcpy(g, gradient + at, sizeof g);
  uint16_t half[N];
  if (s.half) {
    std::memcpy(half, values + 2 * at, sizeof half);
    for (uint32_t i = 0; i < N; i++) w[i] = bf16_to_float(half[i]);
  } else {
    std::memcpy(w, values + 4 * at, sizeof w);
  }
  switch (s.rule) {
    case Rule::adagrad:
      step_adagrad<N>(s, w, g, state + at);
      break;
    case Rule::adam:
      step_adam<N>(s, p, w, g, state + 1 + at, state + 1 + s.width + at);
      break;
    case Rule::ftrl:
      step_ftrl<N>(s, w, g, state + at, state + s.width + at);
      break;
    case Rule::count:
      std::fill_n(w, N, p.value);
      break;
    default:  // has_one_rate
      for (uint32_t i = 0; i < N; i++) w[i] -= p.rate * g[i];
  }
  if (s.half) {
    for (uint32_t i = 0; i < N; i++) half[i] = float_to_bf16_stochastic(w[i], noise(seed, at + i));
    std::memcpy(values + 2 * at, half, sizeof half);
  } else {
    std::memcpy(values + 4 * at, w, sizeof w);
  }
}

// The same for 16 floats of the rules that need nothing but a rate, the commonest case, without the copies.
FRESHET_INLINE void step_at_rate(float rate, uint8_t* values, const float* gradient) {
  f32x16 w, g;
  std::memcpy(&w, values, sizeof w);
  std::memcpy(&g, gradient, sizeof g);
  w -= rate * g;
  std::memcpy(values, &w, sizeof w);
}

FRESHET_INLINE void step_slot(const Slot& s, uint8_t* values, float* state, const float* gradient, float squared,
                              uint32_t seed) {
  const Prepared p = prepare(s, state, gradient, squared);
  uint32_t at = 0;
  if (!s.half && has_one_rate(s.rule))
    for (; at + 16 <= s.width; at += 16) step_at_rate(p.rate, values + 4 * at, gradient + at);
  for (; at + 16 <= s.width; at += 16) step_piece<16>(s, p, values, state, gradient, at, seed);
  for (; at + 4 <= s.width; at += 4) step_piece<4>(s, p, values, state, gradient, at, seed);
  for (; at < s.width; at++) step_piece<1>(s, p, values, state, gradient, at, seed);
}

constexpr size_t kMostSlots = 8;

// The first slots of a row where each is one float that Adagrad steps: four at a time cost what one costs.
struct Singles {
  size_t count = 0;  // 0, or 2 to 4
  float lr[4] = {}, eps[4] = {};

  FRESHET_INLINE Singles(const Slot* slots, size_t slots_before_last) {
    // Four floats are read of values, state and gradient. Those behind the singles are not written.
    if (slots_before_last < 2 || slots[slots_before_last].start + slots[slots_before_last].width < 4 ||
        slots[slots_before_last].state_start + slots[slots_before_last].state_floats < 4)
      return;
    while (count < 4 && count < slots_before_last && slots[count].rule == Rule::adagrad && slots[count].width == 1) {
      lr[count] = slots[count].lr;
      eps[count] = slots[count].eps;
      count++;
    }
    if (count == 1) count = 0;
  }

  template <uint32_t N>
  FRESHET_INLINE void step(uint8_t* values, float* sums, const float* gradient) const {
    float w[4], g[4], sum[4];
    std::memcpy(w, values, sizeof w);
    std::memcpy(g, gradient, sizeof g);
    std::memcpy(sum, sums, sizeof sum);
    for (uint32_t i = 0; i < 4; i++) {
      sum[i] = add_square(sum[i], g[i] * g[i]);
      w[i] -= lr[i] * g[i] / (std::sqrt(sum[i]) + eps[i]);
    }
    std::memcpy(values, w, 4 * N);
    std::memcpy(sums, sum, 4 * N);
  }

  FRESHET_INLINE void step(uint8_t* values, float* sums, const float* gradient) const {
    if (count == 2) step<2>(values, sums, gradient);
    if (count == 3) step<3>(values, sums, gradient);
    if (count == 4) step<4>(values, sums, gradient);
  }
};

FRESHET_INLINE bool step_row(const Slot* slots, size_t count, const Singles& singles, const Slot& last,
                             const Place& row, const float* gradient) {
  float squared[kMostSlots];
  bool finite = true;
  for (size_t i = 0; i + 1 < count; i++) {
    const float* g = gradient + slots[i].start;
    squared[i] = slots[i].width == 1 ? g[0] * g[0] : squared_sum(g, slots[i].width);
    finite = finite && std::isfinite(squared[i]);
  }
  const float* g = gradient + last.start;
  squared[count - 1] = last.width == 1 ? g[0] * g[0] : squared_sum(g, last.width);
  if (!finite || !std::isfinite(squared[count - 1])) return false;
  uint32_t seed = 0;
  if (row.header) {
    const uint64_t key = row.header->key;
    seed = static_cast<uint32_t>(key ^ (key >> 32)) + (row.header->meta >> meta::kCountShift) * 0x85ebca6bu;
    row.header->meta += 1u << meta::kCountShift;
  }
  singles.step(row.values, row.state, gradient);
  for (size_t i = singles.count; i + 1 < count; i++)
    step_slot(slots[i], row.values + 4 * slots[i].start, row.state + slots[i].state_start, gradient + slots[i].start,
              squared[i], seed);
  step_slot(last, row.last, row.state + last.state_start, g, squared[count - 1], seed);
  return true;
}

FRESHET_INLINE void step_rows(const Slot* slots, size_t count, const Slot& last, const Place* rows,
                              const float* gradients, size_t n, uint8_t* stepped) {
  const Singles singles(slots, count - 1);
  const uint32_t width = last.start + last.width;
  for (size_t i = 0; i < n; i++)
    stepped[i] = rows[i].values != nullptr && step_row(slots, count, singles, last, rows[i], gradients + i * width);
}

FRESHET_CLONES void step_any(const Slot* slots, size_t count, const Place* rows, const float* gradients, size_t n,
                             uint8_t* stepped) {
  step_rows(slots, count, slots[count - 1], rows, gradients, n, stepped);
}

// The commonest rows again, so that the compiler knows what else each row would ask: a vector of 16 stepped by row-wise
// Adagrad, behind any other slots or none. The arithmetic is written once, above.
FRESHET_INLINE void step_16(const Slot* slots, size_t count, bool half, const Place* rows, const float* gradients,
                            size_t n, uint8_t* stepped) {
  Slot last = slots[count - 1];
  last.rule = Rule::rowwise_adagrad;
  last.width = 16;
  last.half = half;
  step_rows(slots, count, last, rows, gradients, n, stepped);
}
FRESHET_CLONES void step_vector_16(const Slot* slots, size_t, const Place* rows, const float* gradients, size_t n,
                                   uint8_t* stepped) {
  step_16(slots, 1, false, rows, gradients, n, stepped);
}
FRESHET_CLONES void step_half_16(const Slot* slots, size_t, const Place* rows, const float* gradients, size_t n,
                                 uint8_t* stepped) {
  step_16(slots, 1, true, rows, gradients, n, stepped);
}
FRESHET_CLONES void step_more_and_vector_16(const Slot* slots, size_t count, const Place* rows, const float* gradients,
                                            size_t n, uint8_t* stepped) {
  step_16(slots, count, false, rows, gradients, n, stepped);
}

FRESHET_CLONES void fill_uniform(uint64_t stream, uint32_t start, uint32_t n, float init, float* out) {
  const float scale = init * (1.0f / (1 << 23));
  for (uint32_t i = 0; i < n; i++) out[i] = uniform(stream, start + i, scale);
}

constexpr std::pair<const char*, Rule> kRules[] = {
    {"sgd", Rule::sgd},    {"adagrad", Rule::adagrad}, {"rowwise_adagrad", Rule::rowwise_adagrad},
    {"adam", Rule::adam},  {"ftrl", Rule::ftrl},       {"rowwise_rmsprop", Rule::rowwise_rmsprop},
    {"count", Rule::count}};

Rule rule_of(const std::string& name) {
  std::string known;
  for (const auto& [text, rule] : kRules) {
    if (name == text) return rule;
    known += std::string(known.empty() ? "" : ", ") + text;
  }
  throw std::invalid_argument("expected an optimiser of " + known + "; found " + name);
}

uint32_t state_floats_of(Rule rule, uint32_t width) {
  switch (rule) {
    case Rule::sgd:
      return 0;
    case Rule::adagrad:
      return width;
    case Rule::rowwise_adagrad:
      return 1;
    case Rule::rowwise_rmsprop:
      return 1;
    case Rule::count:
      return 1;
    case Rule::adam:
      return 1 + 2 * width;
    case Rule::ftrl:
      return 2 * width;
  }
  return 0;
}

void read_parameters(Slot& slot, const SlotSpec& spec) {
  std::set<std::string> used;
  const auto take = [&](const char* name) {
    const auto found = spec.parameters.find(name);
    if (found == spec.parameters.end())
      throw std::invalid_argument(spec.rule + " needs the parameter " + name + ", which is missing");
    used.insert(name);
    const float value = static_cast<float>(found->second);
    if (value == 0.0f && found->second > 0.0) return std::numeric_limits<float>::denorm_min();  // it may be a divisor
    return value;
  };
  if (slot.rule != Rule::count) slot.lr = take("lr");
  if (slot.rule == Rule::rowwise_rmsprop) slot.beta2 = take("decay");
  if (slot.rule == Rule::adagrad || slot.rule == Rule::rowwise_adagrad || slot.rule == Rule::rowwise_rmsprop)
    slot.accumulator = take("initial_accumulator");
  if (slot.rule != Rule::sgd && slot.rule != Rule::ftrl && slot.rule != Rule::count) slot.eps = take("eps");
  if (slot.rule == Rule::adam) slot.beta1 = take("beta1"), slot.beta2 = take("beta2");
  if (slot.rule == Rule::ftrl) slot.beta = take("beta"), slot.l1 = take("l1"), slot.l2 = take("l2");
  for (const auto& [name, value] : spec.parameters)
    if (!used.count(name)) throw std::invalid_argument(spec.rule + " takes no parameter " + name);
}

uint32_t round_up(uint32_t n, uint32_t to) { return (n + to - 1) / to * to; }

}  // namespace

uint64_t initial_stream(uint64_t seed, uint8_t table, uint64_t key) {
  return mix(mix(mix(seed + kGolden) + (table + 1u) * kGolden) ^ key);
}

RowLayout::RowLayout(const std::vector<SlotSpec>& specs, bool half_last, bool serving) {
  if (specs.empty() || specs.size() > kMostSlots)
    throw std::invalid_argument("a store group needs 1 to " + std::to_string(kMostSlots) + " slots, found " +
                                std::to_string(specs.size()));
  for (const SlotSpec& spec : specs) {
    if (spec.start != width_ || spec.width == 0 || spec.width > 65536)
      throw std::invalid_argument("slots must follow one another and hold 1 to 65536 floats; found start " +
                                  std::to_string(spec.start) + ", width " + std::to_string(spec.width));
    Slot slot;
    slot.rule = rule_of(spec.rule);
    slot.start = spec.start;
    slot.width = spec.width;
    slot.init = spec.init;
    read_parameters(slot, spec);
    slot.state_start = state_floats_;
    slot.state_floats = serving ? 0 : state_floats_of(slot.rule, slot.width);
    state_floats_ += slot.state_floats;
    width_ += spec.width;
    slots_.push_back(slot);
  }
  Slot& last = slots_.back();
  last.half = half_last;
  head_floats_ = width_ - last.width;
  head_end_ = static_cast<uint32_t>(sizeof(Header)) + 4 * (head_floats_ + state_floats_);
  tail_bytes_ = last.width * (half_last ? 2 : 4);
  packed_bytes_ = head_end_ - 8 + tail_bytes_;
  const uint32_t apart = round_up(round_up(head_end_, kLine) + tail_bytes_, kLine),
                 close = round_up(head_end_ + tail_bytes_, 4);
  const bool fits = close <= kLine && kLine * 10 <= close * 13;
  const bool align = apart * 10 <= close * 13;
  tail_at_ = align && !fits ? round_up(head_end_, kLine) : head_end_;
  record_bytes_ = fits ? kLine : align ? apart : close;
  step_ = step_of(slots_);
}

RowLayout::Step RowLayout::step_of(const std::vector<Slot>& slots) {
  const Slot& last = slots.back();
  if (last.rule != Rule::rowwise_adagrad || last.width != 16) return step_any;
  if (slots.size() == 1) return last.half ? step_half_16 : step_vector_16;
  return last.half ? step_any : step_more_and_vector_16;
}

void RowLayout::initial(float* out, uint64_t key, uint8_t table, uint64_t seed) const {
  const uint64_t stream = initial_stream(seed, table, key);
  for (const Slot& s : slots_) {
    if (s.init == 0.0f)
      std::fill_n(out + s.start, s.width, 0.0f);
    else
      fill_uniform(stream, s.start, s.width, s.init, out + s.start);
    if (s.half)
      for (uint32_t i = 0; i < s.width; i++) out[s.start + i] = bf16_to_float(float_to_bf16(out[s.start + i]));
  }
}

void RowLayout::create(Row row, uint64_t key, uint8_t table, uint64_t seed) const {
  static thread_local std::vector<float> values;
  values.resize(width_);
  initial(values.data(), key, table, seed);
  store(row, values.data());
  initial_state(values.data(), state(row));
}

void RowLayout::initial_state(const float* values, float* out) const {
  for (const Slot& s : slots_) {
    float* state = out;
    out += s.state_floats;
    std::fill_n(state, s.state_floats, s.rule == Rule::adam || s.rule == Rule::ftrl ? 0.0f : s.accumulator);
    if (s.rule != Rule::ftrl || s.state_floats == 0) continue;
    // FTRL's value follows from z alone: start with the z that yields the initial value.
    for (uint32_t i = 0; i < s.width; i++) {
      const float w = values[s.start + i];
      state[i] = w == 0.0f ? 0.0f : bounded(-w * (s.beta / s.lr + s.l2) - std::copysign(s.l1, w));
    }
  }
}

void RowLayout::load(Row row, float* out) const {
  copy_words(out, row.head + sizeof(Header), head_floats_);
  const Slot& last = slots_.back();
  if (!last.half) {
    copy_words(out + head_floats_, row.tail, last.width);
    return;
  }
  const uint16_t* half = reinterpret_cast<const uint16_t*>(row.tail);
  for (uint32_t i = 0; i < last.width; i++) out[head_floats_ + i] = bf16_to_float(half[i]);
}

void RowLayout::store(Row row, const float* values) const {
  copy_words(row.head + sizeof(Header), values, head_floats_);
  const Slot& last = slots_.back();
  if (!last.half) {
    std::memcpy(row.tail, values + head_floats_, tail_bytes_);
    return;
  }
  uint16_t* half = reinterpret_cast<uint16_t*>(row.tail);
  for (uint32_t i = 0; i < last.width; i++) half[i] = float_to_bf16(values[head_floats_ + i]);
}

void RowLayout::restore_counts(float* values, const float* states, size_t n) const {
  for (const Slot& slot : slots_) {
    if (slot.rule != Rule::count) continue;
    for (size_t i = 0; i < n; i++)
      std::fill_n(values + i * width_ + slot.start, slot.width,
                  count_value(count_bucket(std::max(states[i * state_floats_ + slot.state_start], 0.0f))));
  }
}

void RowLayout::pack(Row row, uint8_t* out) const {
  const uint32_t head = head_end_ - 8;
  copy_words(out, row.head + 8, head / 4);
  if (tail_bytes_ % 4 == 0)
    copy_words(out + head, row.tail, tail_bytes_ / 4);
  else
    std::memcpy(out + head, row.tail, tail_bytes_);
  uint32_t word;
  std::memcpy(&word, out, 4);
  word &= meta::kPackedMask;
  std::memcpy(out, &word, 4);
}

void RowLayout::unpack(Row row, const uint8_t* packed) const {
  const uint32_t head = head_end_ - 8;
  std::memcpy(row.head + 8, packed, head);
  std::memcpy(row.tail, packed + head, tail_bytes_);
  row.header().meta &= meta::kPackedMask;
}

const char* RowLayout::packed_fault(const uint8_t* packed, uint8_t table) const {
  uint32_t word;
  std::memcpy(&word, packed, 4);
  if ((word & meta::kTableMask) != table) return "its meta word names another table";
  if (word & ~meta::kPackedMask) return "its meta word has flags set that never leave memory";
  const uint32_t floats = (head_end_ - static_cast<uint32_t>(sizeof(Header))) / 4;
  for (uint32_t i = 0; i < floats; i++) {
    float x;
    std::memcpy(&x, packed + 8 + 4 * i, 4);
    if (!std::isfinite(x)) return "it holds a value that is not finite";
  }
  const uint8_t* tail = packed + 8 + 4 * floats;
  const Slot& last = slots_.back();
  for (uint32_t i = 0; i < last.width; i++) {
    uint32_t bits = 0;
    if (last.half)
      std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, tail + 2 * i, 2);
    else
      std::memcpy(&bits, tail + 4 * i, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return "it holds a value that is not finite";
  }
  for (const Slot& s : slots_) {
    // Sums of squares are never negative; nor is a count of steps.
    for (uint32_t i = 0; i < s.state_floats; i++) {
      float x;
      std::memcpy(&x, packed + 8 + 4 * (head_floats_ + s.state_start + i), 4);
      const bool signed_state =
          (s.rule == Rule::ftrl && i < s.width) || (s.rule == Rule::adam && i >= 1 && i <= s.width);
      if (!signed_state && x < 0.0f) return "its optimiser state holds a negative sum of squares";
    }
  }
  return nullptr;
}

}  // namespace freshet
