#include "freshet/optim.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>

namespace freshet {

namespace {

constexpr u64 golden = 0x9e3779b97f4a7c15ull;
constexpr u32 line = 64;

// The finaliser of splitmix64 (Steele, Lea and Flood 2014; constants by Stafford, variant 13).
FRESHET_INLINE u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

FRESHET_INLINE float uniform(u64 stream, u32 j, float scale) {
  const u64 both = mix(stream + (j / 2 + 1) * golden);
  const u32 half = static_cast<u32>(j & 1 ? both >> 32 : both);
  return static_cast<float>(static_cast<i32>(half >> 8) - (1 << 23)) * scale;
}

// Noise for stochastic rounding of value j at a row's step: lowbias32 (Wellons 2018) of key, step count and j.
FRESHET_INLINE u32 noise(u32 seed, u32 j) {
  u32 x = seed + j * 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// beta^t by squaring, so that no two C libraries can disagree.
FRESHET_INLINE double power(double beta, u32 t) {
  double result = 1.0;
  for (; t; t >>= 1, beta *= beta)
    if (t & 1) result *= beta;
  return result;
}

FRESHET_INLINE void step_sgd(const Slot& s, float* v, const float* g, u32 n) {
  for (u32 i = 0; i < n; i++) v[i] -= s.lr * g[i];
}

FRESHET_INLINE void step_adagrad(const Slot& s, float* v, float* sum, const float* g, u32 n) {
  for (u32 i = 0; i < n; i++) {
    sum[i] += g[i] * g[i];
    v[i] -= s.lr * g[i] / (std::sqrt(sum[i]) + s.eps);
  }
}

FRESHET_INLINE void step_rowwise(const Slot& s, float* v, float* sum, const float* g, u32 n) {
  sum[0] += squared_sum(g, n) / static_cast<float>(n);
  const float rate = s.lr / (std::sqrt(sum[0]) + s.eps);
  for (u32 i = 0; i < n; i++) v[i] -= rate * g[i];
}

FRESHET_INLINE void step_adam(const Slot& s, float* v, float* state, const float* g, u32 n) {
  constexpr float most = 16777216.0f;  // a float counts to 2^24; by then both corrections are 1
  float* m = state + 1;
  float* q = state + 1 + n;
  state[0] = std::min(state[0] + 1.0f, most);
  const u32 t = static_cast<u32>(state[0]);
  const float c1 = static_cast<float>(1.0 - power(static_cast<double>(s.beta1), t));
  const float c2 = static_cast<float>(1.0 - power(static_cast<double>(s.beta2), t));
  for (u32 i = 0; i < n; i++) {
    m[i] = s.beta1 * m[i] + (1.0f - s.beta1) * g[i];
    q[i] = s.beta2 * q[i] + (1.0f - s.beta2) * g[i] * g[i];
    v[i] -= s.lr * (m[i] / c1) / (std::sqrt(q[i] / c2) + s.eps);
  }
}

FRESHET_INLINE void step_ftrl(const Slot& s, float* v, float* state, const float* g, u32 n) {
  float* z = state;
  float* sum = state + n;
  for (u32 i = 0; i < n; i++) {
    const float next = sum[i] + g[i] * g[i];
    const float root = std::sqrt(next);
    const float sigma = (root - std::sqrt(sum[i])) / s.lr;
    z[i] += g[i] - sigma * v[i];
    sum[i] = next;
    const float shrunk = z[i] - std::copysign(s.l1, z[i]);
    const float w = -shrunk / ((s.beta + root) / s.lr + s.l2);
    v[i] = std::abs(z[i]) <= s.l1 ? 0.0f : w;
  }
}

FRESHET_INLINE void step_values(const Slot& s, float* v, float* state, const float* g, u32 n) {
  switch (s.rule) {
    case Rule::sgd: return step_sgd(s, v, g, n);
    case Rule::adagrad: return step_adagrad(s, v, state, g, n);
    case Rule::rowwise_adagrad: return step_rowwise(s, v, state, g, n);
    case Rule::adam: return step_adam(s, v, state, g, n);
    case Rule::ftrl: return step_ftrl(s, v, state, g, n);
  }
}

// bf16 values are widened, stepped in float32 and rounded by chance, in pieces; row-wise sums need the whole gradient
// first, so that rule has its own loop.
FRESHET_INLINE void step_half(const Slot& s, u16* v, float* state, const float* g, u32 seed) {
  constexpr u32 piece = 64;
  float wide[piece];
  float rate = 0.0f;
  if (s.rule == Rule::rowwise_adagrad) {
    state[0] += squared_sum(g, s.width) / static_cast<float>(s.width);
    rate = s.lr / (std::sqrt(state[0]) + s.eps);
  }
  for (u32 at = 0; at < s.width; at += piece) {
    const u32 n = std::min(piece, s.width - at);
    for (u32 i = 0; i < n; i++) wide[i] = bf16_to_float(v[at + i]);
    if (s.rule == Rule::rowwise_adagrad)
      for (u32 i = 0; i < n; i++) wide[i] -= rate * g[at + i];
    else if (s.rule == Rule::adagrad)
      step_adagrad(s, wide, state + at, g + at, n);
    else
      step_sgd(s, wide, g + at, n);
    for (u32 i = 0; i < n; i++) v[at + i] = float_to_bf16_stochastic(wide[i], noise(seed, at + i));
  }
}

// Adam's and FTRL's state is cut in runs of `width`, so they take the row whole.
void step_half_whole(const Slot& s, u16* v, float* state, const float* g, u32 seed) {
  static thread_local std::vector<float> wide;
  wide.resize(s.width);
  for (u32 i = 0; i < s.width; i++) wide[i] = bf16_to_float(v[i]);
  step_values(s, wide.data(), state, g, s.width);
  for (u32 i = 0; i < s.width; i++) v[i] = float_to_bf16_stochastic(wide[i], noise(seed, i));
}

FRESHET_INLINE void step_slot(const Slot& s, u8* record, const float* gradient, u32 seed) {
  float* state = reinterpret_cast<float*>(record + s.state_at);
  const float* g = gradient + s.start;
  if (s.half) {
    u16* v = reinterpret_cast<u16*>(record + s.value_at);
    if (s.rule == Rule::adam || s.rule == Rule::ftrl) return step_half_whole(s, v, state, g, seed);
    return step_half(s, v, state, g, seed);
  }
  float* v = reinterpret_cast<float*>(record + s.value_at);
  // The common shapes are compiled for their width: the loops unroll to whole vectors.
  if (s.rule == Rule::rowwise_adagrad && s.width == 16) return step_rowwise(s, v, state, g, 16);
  if (s.rule == Rule::adagrad && s.width == 1) return step_adagrad(s, v, state, g, 1);
  step_values(s, v, state, g, s.width);
}

FRESHET_CLONES bool step_row(const Slot* slots, size_t count, u32 width, u8* record, const float* gradient) {
  if (!std::isfinite(squared_sum(gradient, width))) return false;
  Header* header = reinterpret_cast<Header*>(record);
  const u32 seed = static_cast<u32>(header->key ^ (header->key >> 32)) + (header->meta >> meta::count_shift) * 0x85ebca6bu;
  for (size_t i = 0; i < count; i++) step_slot(slots[i], record, gradient, seed);
  header->meta += 1u << meta::count_shift;
  return true;
}

FRESHET_CLONES void fill_uniform(u64 stream, u32 start, u32 n, float init, float* out) {
  const float scale = init * (1.0f / (1 << 23));
  for (u32 i = 0; i < n; i++) out[i] = uniform(stream, start + i, scale);
}

Rule rule_of(const std::string& name) {
  if (name == "sgd") return Rule::sgd;
  if (name == "adagrad") return Rule::adagrad;
  if (name == "rowwise_adagrad") return Rule::rowwise_adagrad;
  if (name == "adam") return Rule::adam;
  if (name == "ftrl") return Rule::ftrl;
  throw std::invalid_argument("expected an optimiser of sgd, adagrad, rowwise_adagrad, adam, ftrl; found " + name);
}

u32 state_floats(Rule rule, u32 width) {
  switch (rule) {
    case Rule::sgd: return 0;
    case Rule::adagrad: return width;
    case Rule::rowwise_adagrad: return 1;
    case Rule::adam: return 1 + 2 * width;
    case Rule::ftrl: return 2 * width;
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
    return static_cast<float>(found->second);
  };
  slot.lr = take("lr");
  if (slot.rule == Rule::adagrad || slot.rule == Rule::rowwise_adagrad) slot.accumulator = take("initial_accumulator");
  if (slot.rule != Rule::sgd && slot.rule != Rule::ftrl) slot.eps = take("eps");
  if (slot.rule == Rule::adam) slot.beta1 = take("beta1"), slot.beta2 = take("beta2");
  if (slot.rule == Rule::ftrl) slot.beta = take("beta"), slot.l1 = take("l1"), slot.l2 = take("l2");
  for (const auto& [name, value] : spec.parameters)
    if (!used.count(name)) throw std::invalid_argument(spec.rule + " takes no parameter " + name);
}

u32 round_up(u32 n, u32 to) { return (n + to - 1) / to * to; }

}  // namespace

u64 initial_stream(u64 seed, u8 table, u64 key) { return mix(mix(mix(seed + golden) + (table + 1u) * golden) ^ key); }

RowLayout::RowLayout(const std::vector<SlotSpec>& specs, bool half_last, bool serving) {
  if (specs.empty()) throw std::invalid_argument("a store group needs at least one slot");
  u32 state_floats_all = 0;
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
    slot.state_floats = serving ? 0 : state_floats(slot.rule, slot.width);
    state_floats_all += slot.state_floats;
    width_ += spec.width;
    slots_.push_back(slot);
  }
  Slot& last = slots_.back();
  last.half = half_last;
  head_floats_ = width_ - last.width;
  u32 state_at = static_cast<u32>(sizeof(Header)) + 4 * head_floats_;
  for (Slot& slot : slots_) {
    slot.value_at = static_cast<u32>(sizeof(Header)) + 4 * slot.start;
    slot.state_at = state_at;
    state_at += 4 * slot.state_floats;
  }
  head_end_ = static_cast<u32>(sizeof(Header)) + 4 * (head_floats_ + state_floats_all);
  tail_bytes_ = last.width * (half_last ? 2 : 4);
  const u32 close = round_up(head_end_ + tail_bytes_, 16);
  const u32 apart = round_up(round_up(head_end_, line) + tail_bytes_, line);
  const bool align = apart * 10 <= close * 13;
  tail_at_ = align ? round_up(head_end_, line) : head_end_;
  record_bytes_ = align ? apart : close;
  packed_bytes_ = head_end_ - 8 + tail_bytes_;
  last.value_at = tail_at_;
}

void RowLayout::initial(float* out, u64 key, u8 table, u64 seed) const {
  const u64 stream = initial_stream(seed, table, key);
  for (const Slot& s : slots_) {
    if (s.init == 0.0f)
      std::fill_n(out + s.start, s.width, 0.0f);
    else
      fill_uniform(stream, s.start, s.width, s.init, out + s.start);
    if (s.half)
      for (u32 i = 0; i < s.width; i++) out[s.start + i] = bf16_to_float(float_to_bf16(out[s.start + i]));
  }
}

void RowLayout::create(u8* record, u64 key, u8 table, u64 seed) const {
  static thread_local std::vector<float> values;
  values.resize(width_);
  initial(values.data(), key, table, seed);
  store(record, values.data());
  for (const Slot& s : slots_) {
    float* state = reinterpret_cast<float*>(record + s.state_at);
    std::fill_n(state, s.state_floats, s.rule == Rule::adam || s.rule == Rule::ftrl ? 0.0f : s.accumulator);
    if (s.rule != Rule::ftrl || s.state_floats == 0) continue;
    // FTRL's value follows from z alone: start with the z that yields the initial value.
    for (u32 i = 0; i < s.width; i++) {
      const float w = values[s.start + i];
      state[i] = w == 0.0f ? 0.0f : -w * (s.beta / s.lr + s.l2) - std::copysign(s.l1, w);
    }
  }
}

void RowLayout::load(const u8* record, float* out) const {
  if (head_floats_) std::memcpy(out, record + sizeof(Header), 4 * head_floats_);
  const Slot& last = slots_.back();
  if (!last.half) {
    std::memcpy(out + head_floats_, record + tail_at_, tail_bytes_);
    return;
  }
  const u16* half = reinterpret_cast<const u16*>(record + tail_at_);
  for (u32 i = 0; i < last.width; i++) out[head_floats_ + i] = bf16_to_float(half[i]);
}

void RowLayout::store(u8* record, const float* values) const {
  if (head_floats_) std::memcpy(record + sizeof(Header), values, 4 * head_floats_);
  const Slot& last = slots_.back();
  if (!last.half) {
    std::memcpy(record + tail_at_, values + head_floats_, tail_bytes_);
    return;
  }
  u16* half = reinterpret_cast<u16*>(record + tail_at_);
  for (u32 i = 0; i < last.width; i++) half[i] = float_to_bf16(values[head_floats_ + i]);
}

bool RowLayout::step(u8* record, const float* gradient) const {
  return step_row(slots_.data(), slots_.size(), width_, record, gradient);
}

void RowLayout::pack(const u8* record, u8* out) const {
  const u32 head = head_end_ - 8;
  std::memcpy(out, record + 8, head);
  std::memcpy(out + head, record + tail_at_, tail_bytes_);
  u32 word;
  std::memcpy(&word, out, 4);
  word &= meta::packed_mask;
  std::memcpy(out, &word, 4);
}

void RowLayout::unpack(u8* record, const u8* packed) const {
  const u32 head = head_end_ - 8;
  std::memcpy(record + 8, packed, head);
  std::memcpy(record + tail_at_, packed + head, tail_bytes_);
  reinterpret_cast<Header*>(record)->meta &= meta::packed_mask;
}

const char* RowLayout::packed_fault(const u8* packed, u8 table) const {
  u32 word;
  std::memcpy(&word, packed, 4);
  if ((word & meta::table_mask) != table) return "its meta word names another table";
  if (word & ~meta::packed_mask) return "its meta word has flags set that never leave memory";
  const u32 floats = (head_end_ - static_cast<u32>(sizeof(Header))) / 4;
  for (u32 i = 0; i < floats; i++) {
    float x;
    std::memcpy(&x, packed + 8 + 4 * i, 4);
    if (!std::isfinite(x)) return "it holds a value that is not finite";
  }
  const u8* tail = packed + 8 + 4 * floats;
  const Slot& last = slots_.back();
  for (u32 i = 0; i < last.width; i++) {
    u32 bits = 0;
    if (last.half)
      std::memcpy(reinterpret_cast<u8*>(&bits) + 2, tail + 2 * i, 2);
    else
      std::memcpy(&bits, tail + 4 * i, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return "it holds a value that is not finite";
  }
  for (const Slot& s : slots_) {
    // Sums of squares are never negative; nor is a count of steps.
    for (u32 i = 0; i < s.state_floats; i++) {
      float x;
      std::memcpy(&x, packed + s.state_at - 8 + 4 * i, 4);
      const bool signed_state = (s.rule == Rule::ftrl && i < s.width) || (s.rule == Rule::adam && i >= 1 && i <= s.width);
      if (!signed_state && x < 0.0f) return "its optimiser state holds a negative sum of squares";
    }
  }
  return nullptr;
}

}  // namespace freshet
