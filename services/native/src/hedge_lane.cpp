#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "freshet/hedge.hpp"
#include "freshet/optim.hpp"
#include "hedge_start.hpp"

namespace freshet {

HedgeLane::HedgeLane(const HedgeModel& model, bool training)
    : sums(model.labels(), model.experts(), static_cast<int>(model.plan().input.dense.size()), model.heads().size),
      mlp(model.mlp, training && model.plan().mlp),
      model_(model),
      training_(training),
      bias_(model.state.bias),
      scale_(model.state.scale),
      teaches_(model.labels(), 1),
      step_sums_(model.labels(), model.experts(), 0, model.heads().size),
      steps_(model.plan().input.groups.size()),
      losses_(static_cast<size_t>(model.labels() * model.experts())),
      label_rows_(static_cast<size_t>(model.labels())) {
  const InputPlan& in = model.plan().input;
  const int64_t n = kChunk, L = model.labels(), LK = L * model.experts();
  int dim = 0;
  size_t features = 0;
  for (const GroupPlan& g : in.groups) {
    dim = std::max(dim, g.dim);
    features += g.features.size();
  }
  pool_stride_ = dim + in.scalars;
  if (!training) pools_ = Floats(static_cast<int64_t>(features) * pool_stride_);
  pools_of_.assign(features, -1);
  once_.assign(features, 0);
  if (model.plan().mlp) {
    x_ = Floats(n * in.width);
    logits_ = Floats(n * L);
    if (training) dx_ = Floats(n * (in.width - in.vectors_from));
    if (!training && !model.plan().hidden.empty()) {
      requests_.request_of.resize(kChunk);
      requests_.firsts.resize(kChunk);
      partial_ = Floats(n * (model.plan().hidden.front() + kStridePad));
      requests_.partial = partial_.data();
    }
  }
  scalars_ = Floats(n * in.scalars);
  sums_ = Floats(n * in.sums);
  squares_ = Floats(in.sums);
  fm_ = Floats(n);
  pooled_ = Floats(dim + in.scalars);
  z_ = Floats(n * LK);
  p_ = Floats(n * LK);
  s_ = Floats(n * LK);
  d_scalars_ = Floats(training ? n * in.scalars : 0);
  c_ = Floats(n);
  d_logits_ = Floats(n * L);
  columns_ = Floats(n * model.heads().columns);
  if (model.heads().counts_expert < 0) return;
  d_counts_ = Floats(n);
  const std::vector<bool>& early = model.plan().early;
  early_ = training && std::find(early.begin(), early.end(), true) != early.end();
}

void HedgeLane::clear() {
  std::fill(sums.all.begin(), sums.all.end(), 0.0);
  mlp.gradients.zero();
}

void HedgeLane::add(HedgeLane& other) {
  for (size_t i = 0; i < sums.all.size(); ++i) sums.all[i] += other.sums.all[i];
  model_.kernels.add(mlp.gradients.data(), other.mlp.gradients.data(), mlp.gradients.size());
  other.clear();
}

// The MLP's input of row `row` of the scratch.
void* HedgeLane::input(int row) {
  const int bytes = model_.mlp.mode() == Mode::kBf16 ? 2 : 4;
  return reinterpret_cast<char*>(x_.data()) + static_cast<int64_t>(row) * model_.plan().input.width * bytes;
}

// Which columns of the input a request's samples share: those of vectors of shared features. A chunk of one request
// multiplies them all the same, so that a sample's score does not depend on the others.
void HedgeLane::plan_requests(const BatchView& batch) {
  const InputPlan& in = model_.plan().input;
  std::fill(once_.begin(), once_.end(), uint8_t{0});
  requests_.shared.clear();
  requests_.own.clear();
  if (!batch.request_ends || !requests_.partial) return;
  enum : uint8_t { kZero, kOwn, kShared };  // a column beyond the others is zero in every sample
  std::vector<uint8_t> columns(static_cast<size_t>(in.width) + 1, kZero);
  for (size_t d = 0; d < in.dense.size(); ++d) {
    columns[d] = kOwn;
    if (in.dense[d].flag >= 0) columns[static_cast<size_t>(in.dense[d].flag)] = kOwn;
  }
  size_t feature = 0;
  for (size_t g = 0; g < in.groups.size(); ++g)
    for (size_t f = 0; f < in.groups[g].features.size(); ++f, ++feature) {
      const int column = in.groups[g].features[f].column, dim = in.groups[g].dim;
      if (column < 0) continue;
      const uint8_t* shared = batch.groups[g].shared;
      once_[feature] = shared && shared[f] && column % 2 == 0 && dim % 2 == 0;
      std::fill_n(&columns[static_cast<size_t>(column)], dim, once_[feature] ? kShared : kOwn);
    }
  for (int begin = 0, end = 0; begin < in.width; begin = end) {
    const uint8_t kind = columns[static_cast<size_t>(begin)];
    while (end < in.width && columns[static_cast<size_t>(end)] == kind) ++end;
    if (kind == kShared) requests_.shared.push_back({begin, end});
    if (kind == kOwn) requests_.own.push_back({begin & ~1, (end + 1) & ~1});
  }
}

// The requests of a chunk's samples.
void HedgeLane::find_requests(const BatchView& batch, int64_t first, int n) {
  const uint32_t* ends = batch.request_ends;
  int64_t r = std::upper_bound(ends, ends + batch.requests, static_cast<uint32_t>(first)) - ends, before = -1;
  requests_.requests = 0;
  for (int i = 0; i < n; ++i) {
    while (ends[r] <= first + i) ++r;
    if (r != before) requests_.firsts[static_cast<size_t>(requests_.requests++)] = i;
    before = r;
    requests_.request_of[static_cast<size_t>(i)] = requests_.requests - 1;
  }
}

void HedgeLane::forward(const BatchView& batch, int64_t first, int n) {
  const HedgePlan& plan = model_.plan();
  Gathered out;
  out.x = plan.mlp ? input(held_) : nullptr;
  out.stride = plan.input.width;
  out.scalars = scalars_.data();
  out.sums = sums_.data();
  out.squares = squares_.data();
  out.fm = plan.fm ? fm_.data() : nullptr;
  out.pooled = pooled_.data();
  out.pools = pools_.data();
  out.pools_of = pools_of_.data();
  out.pool_stride = pool_stride_;
  out.once = once_.data();
  const bool shares = !requests_.shared.empty();
  if (shares) find_requests(batch, first, n);
  const Mode mode = model_.mlp.mode();
  model_.kernels.gather(mode, plan.input, batch, model_.standard(), first, n, out);
  if (plan.mlp)
    model_.kernels.mlp_forward(mode, model_.mlp.view(nullptr), mlp.scratch(), held_, out.x, plan.input.width, n,
                               shares ? &requests_ : nullptr, logits_.data());
  const int L = model_.labels(), K = model_.experts();
  const HeadsLayout& heads = model_.heads();
  if (heads.columns) columns(batch, first, n);
  for (int i = 0; i < n; ++i)
    for (int l = 0; l < L; ++l)
      for (int k = 0; k < K; ++k) {
        const ExpertPlan& e = plan.experts[k];
        float z = e.scalar < 0 || e.counts ? 0.0f : scalars_.data()[i * plan.input.scalars + e.scalar + l];
        if (e.fm) z += fm_.data()[i];
        if (e.mlp) z += logits_.data()[i * L + l];
        if (e.linear) {
          const float* w =
              &model_.state.heads[static_cast<size_t>(l) * heads.size + heads.linear(heads.linear_of[k], 0)];
          const float* x = columns_.data() + i * heads.columns;
          for (int c = 0; c < heads.columns; ++c) z += w[c] * x[c];
        }
        z_.data()[(i * L + l) * K + k] = z;
      }
  if (heads.counts_expert >= 0) counts(batch, first, n);
}

// Dense columns for the linear weights, each standardised whatever its transform in the spec, then the missing flags.
void HedgeLane::columns(const BatchView& batch, int64_t first, int n) {
  const InputPlan& in = model_.plan().input;
  const Standard standard = model_.standard();
  const int D = static_cast<int>(in.dense.size()), C = model_.heads().columns;
  for (int i = 0; i < n; ++i) {
    float* x = columns_.data() + i * C;
    int flag = D;
    for (int d = 0; d < D; ++d) {
      const float value = batch.dense[(first + i) * D + d];
      const bool missing = !std::isfinite(value);
      x[d] = missing
                 ? 0.0f
                 : std::clamp(static_cast<float>((static_cast<double>(value) - standard.mean[d]) * standard.scale[d]),
                              -standard.limit, standard.limit);
      if (in.dense[d].flag >= 0) x[flag++] = missing ? 1.0f : 0.0f;
    }
  }
}

// Calls use(feature, group, row, factor) for the rows with a count of sample `b`, of request `r`; features are counted
// over the groups with counts.
template <typename Use>
inline void each_counted(const InputPlan& in, const BatchView& batch, int64_t b, int64_t r, const Use& use) {
  int feature = 0;
  for (size_t g = 0; g < in.groups.size(); ++g) {
    const GroupPlan& group = in.groups[g];
    const GroupView& view = batch.groups[g];
    if (group.count_slot < 0) continue;
    const int features = static_cast<int>(group.features.size());
    const int32_t* positions = view.positions;
    const float* rows = view.rows;
    const uint32_t* starts = view.starts;
    const int64_t slots = group.slots;
    for (int f = 0; f < features; ++f, ++feature) {
      const int64_t at = view.shared && view.shared[f] ? r : b;
      const uint32_t* ends = view.ends[static_cast<size_t>(f)];
      if (!ends) {
        const int32_t p = positions[starts[f] + at];
        if (p >= 0) use(feature, group, rows + p * slots, 1.0f);
        continue;
      }
      const uint32_t from = starts[f] + (at ? ends[at - 1] : 0), to = starts[f] + ends[at];
      float factor = 1.0f;
      if (group.features[static_cast<size_t>(f)].mean) {
        int held = 0;
        for (uint32_t o = from; o < to; ++o) held += positions[o] >= 0;
        factor = held ? 1.0f / static_cast<float>(held) : 0.0f;
      }
      for (uint32_t o = from; o < to; ++o)
        if (positions[o] >= 0) use(feature, group, rows + positions[o] * slots, factor);
    }
  }
}

void HedgeLane::counts(const BatchView& batch, int64_t first, int n) {
  const HeadsLayout& heads = model_.heads();
  const int L = model_.labels(), K = model_.experts(), expert = heads.counts_expert;
  const int scalar = model_.plan().experts[static_cast<size_t>(expert)].scalar;
  int64_t r = 0;
  for (int i = 0; i < n; ++i) {
    while (batch.request_ends && batch.request_ends[r] <= first + i) ++r;
    for (int l = 0; l < L; ++l) {
      const float* w = &model_.state.heads[static_cast<size_t>(l) * heads.size];
      const float *biases = w + heads.bias_at, *scales = w + heads.scale_at;
      float z = 0.0f;
      each_counted(model_.plan().input, batch, first + i, r,
                   [&](int feature, const GroupPlan& group, const float* row, float factor) {
                     const int at = feature * kCountBuckets + bucket_of_value(row[group.count_slot]);
                     z += factor * (biases[at] + scales[at] * row[group.scalar_slot + scalar - group.scalar_first + l]);
                   });
      z_.data()[(i * L + l) * K + expert] += z;
    }
  }
}

// Gradients of the expert counts from those at its outputs, `d_counts_`.
void HedgeLane::count_gradients(int64_t first, int n) {
  const HeadsLayout& heads = model_.heads();
  const int scalar = model_.plan().experts[static_cast<size_t>(heads.counts_expert)].scalar;
  for (int i = 0; i < n; ++i) {
    const int l = batch_.label[first + i];
    const float d = d_counts_.data()[i];
    double *biases = step_sums_.head(l) + heads.bias_at, *scales = step_sums_.head(l) + heads.scale_at;
    each_counted(model_.plan().input, batch_, first + i, 0,
                 [&](int feature, const GroupPlan& group, const float* row, float factor) {
                   const int at = feature * kCountBuckets + bucket_of_value(row[group.count_slot]);
                   const float g = d * factor;
                   biases[at] += g;
                   scales[at] += g * row[group.scalar_slot + scalar - group.scalar_first + l];
                 });
  }
}

// The stack's logit of one sample and label: z and bias (K,) of the experts.
float HedgeLane::stacked(int label, const float* z, const float* bias) const {
  const float* a = &model_.state.heads[static_cast<size_t>(label) * model_.heads().size];
  float sum = 0.0f;
  for (int k = 0; k < model_.heads().stacked; ++k) sum += a[k] * (z[k] + bias[k]);
  return sum;
}

// Mixture of the experts with the model's own biases, as it would be served.
void HedgeLane::predict(int n, float* predictions) const {
  const int L = model_.labels(), K = model_.experts(), stack = model_.heads().stack_expert;
  const std::vector<float>& w = model_.weights();
  const float* bias = model_.state.bias.data();
  float* z = const_cast<float*>(s_.data());
  float* p = const_cast<float*>(p_.data());
  for (int i = 0; i < n; ++i)
    for (int l = 0; l < L; ++l) {
      const float* from = z_.data() + (i * L + l) * K;
      float* to = z + (i * L + l) * K;
      for (int k = 0; k < K; ++k) to[k] = from[k] + bias[l * K + k];
      if (stack >= 0) to[stack] = stacked(l, from, bias + l * K);
    }
  for (int i = 0; i < n; ++i)
    for (int l = 0; l < L; ++l)
      if (model_.plan().losses[l] != Loss::kLogloss) {
        float sum = 0.0f;
        for (int k = 0; k < K; ++k) sum += w[l * K + k] * z[(i * L + l) * K + k];
        predictions[i * L + l] = static_cast<float>(sum * model_.state.scale[l]);
      }
  model_.kernels.logistic(z, p, z, static_cast<int64_t>(n) * L * K);
  for (int i = 0; i < n; ++i)
    for (int l = 0; l < L; ++l)
      if (model_.plan().losses[l] == Loss::kLogloss) {
        float sum = 0.0f;
        for (int k = 0; k < K; ++k) sum += w[l * K + k] * p[(i * L + l) * K + k];
        predictions[i * L + l] = sum;
      }
}

void HedgeLane::score(const BatchView& batch, float* predictions) {
  check(model_.plan().input, batch, model_.labels());
  if (batch.request_ends && training_)
    throw std::logic_error("a lane for training takes no requests: build the model for serving");
  std::fill(pools_of_.begin(), pools_of_.end(), -1);
  plan_requests(batch);
  for (int64_t first = 0; first < batch.size; first += kChunk) {
    const int n = static_cast<int>(std::min<int64_t>(kChunk, batch.size - first));
    forward(batch, first, n);
    predict(n, predictions + first * model_.labels());
  }
}

// Biases this step learns with: the model's, or for a label never seen before the starting values that its rows in
// this step suggest. Predictions do not use those.
void HedgeLane::start_biases(int64_t first, int64_t last) {
  const int L = model_.labels(), K = model_.experts();
  for (int l = 0; l < L; ++l) {
    double* seen = step_sums_.label(l);
    for (int64_t b = first; b < last; ++b) {
      if (batch_.label[b] != l) continue;
      const double w = batch_.weight[b], y = batch_.value[b];
      seen[0] += w;
      seen[1] += w * y;
      seen[2] += w * y * y;
    }
    Start start{model_.state.bias[l * K], model_.state.scale[l], true};
    const bool started = model_.state.started[l] > 0.0;
    if (!started) start = start_of(model_.plan().losses[l], &model_.state.label_sums[3 * l], seen);
    scale_[l] = start.scale;
    teaches_[l] = start.known;
    for (int k = 0; k < K; ++k) bias_[l * K + k] = started ? model_.state.bias[l * K + k] : start.bias;
  }
}

// Loss and its gradient g at every expert of each sample's label; the gradients that go on to rows, MLP and small
// weights.
void HedgeLane::losses(const BatchView& batch, int64_t first, int n) {
  const HedgePlan& plan = model_.plan();
  const HeadsLayout& heads = model_.heads();
  const int L = model_.labels(), K = model_.experts(), S = plan.input.scalars;
  float* z = z_.data();
  for (int i = 0; i < n; ++i) {  // keep only the logits of the label that the sample teaches
    const int l = batch.label[first + i];
    for (int k = 0; k < K; ++k) z[i * K + k] = z[(i * L + l) * K + k] + bias_[l * K + k];
    if (heads.stack_expert >= 0) {
      const float* a = &model_.state.heads[static_cast<size_t>(l) * heads.size];
      float sum = 0.0f;
      for (int k = 0; k < heads.stacked; ++k) sum += a[k] * z[i * K + k];
      z[i * K + heads.stack_expert] = sum;
    }
  }
  model_.kernels.logistic(z, p_.data(), s_.data(), static_cast<int64_t>(n) * K);
  std::memset(d_scalars_.data(), 0, sizeof(float) * static_cast<size_t>(n) * S);
  std::memset(d_logits_.data(), 0, sizeof(float) * static_cast<size_t>(n) * L);
  for (int i = 0; i < n; ++i) {
    const int l = batch.label[first + i];
    const float y = batch.value[first + i], weight = batch.weight[first + i];
    double* small = heads.size ? step_sums_.head(l) : nullptr;
    float c = 0.0f;
    bool finite = true;
    for (int k = 0; k < K; ++k) {
      const int j = i * K + k;
      float &loss = s_.data()[j], &g = p_.data()[j];
      if (plan.losses[l] == Loss::kLogloss) {
        loss -= y * z[j];
        g -= y;
      } else {
        number_loss(plan.losses[l], z[j] - y / static_cast<float>(scale_[l]), loss, g);
      }
      g *= weight;
      finite = finite && std::isfinite(loss) && std::isfinite(g * g);
    }
    // One sample must not make the weights infinite: it teaches nothing if an expert's loss or squared gradient is.
    const bool teaches = teaches_[l] && finite;
    if (teaches_[l] && !finite) model_.not_finite_samples.fetch_add(1, std::memory_order_relaxed);
    for (int k = 0; k < K; ++k) {
      float g = teaches ? p_.data()[i * K + k] : 0.0f;
      step_sums_.loss(l)[k] += teaches ? static_cast<double>(s_.data()[i * K + k]) * weight : 0.0;
      step_sums_.gradient(l)[k] += g;
      const ExpertPlan& e = plan.experts[k];
      if (e.linear)
        for (int x = 0; teaches && x < heads.columns; ++x)
          small[heads.linear(heads.linear_of[k], x)] += g * columns_.data()[i * heads.columns + x];
      if (e.counts) d_counts_.data()[i] = g;
      if (e.stack)
        for (int x = 0; teaches && x < heads.stacked; ++x) small[x] += g * z[i * K + x];  // else z may be infinite
      if (e.counts || e.stack) continue;
      g *= e.share;
      if (e.scalar >= 0) d_scalars_.data()[i * S + e.scalar + l] += g;
      if (e.fm) c += g;
      if (e.mlp) d_logits_.data()[i * L + l] += g;
    }
    c_.data()[i] = c;
  }
  if (heads.counts_expert >= 0) count_gradients(first, n);
}

void HedgeLane::backward(const BatchView& batch, int64_t first, int n) {
  const HedgePlan& plan = model_.plan();
  const int back = plan.input.width - plan.input.vectors_from;
  if (plan.mlp)
    model_.kernels.mlp_backward(model_.mlp.mode(), model_.mlp.view(learn_dense_ ? mlp.gradients.data() : nullptr),
                                mlp.scratch(), held_, input(held_), plan.input.width, n, d_logits_.data(), dx_.data(),
                                back);
  Upstream up;
  up.dx = plan.mlp ? dx_.data() : nullptr;
  up.stride = back;
  up.scalars = d_scalars_.data();
  up.sums = sums_.data();
  up.c = plan.fm ? c_.data() : nullptr;
  up.pooled = pooled_.data();
  std::vector<float*> csum;
  for (Steps& steps : steps_) csum.push_back(steps.csum.data());
  model_.kernels.reduce(plan.input, batch, first, n, up, csum.data());
}

// Weight gradients over the samples that the MLP's scratch holds: one product of a dense step's rows costs less than
// one of each step within the batch.
void HedgeLane::weight_gradients() {
  if (model_.plan().mlp && learn_dense_)
    model_.kernels.mlp_gradients(model_.mlp.mode(), model_.mlp.view(mlp.gradients.data()), mlp.scratch(), x_.data(),
                                 model_.plan().input.width, held_);
  held_ = 0;
}

void HedgeLane::count_dense(int64_t first, int64_t last) {
  const InputPlan& in = model_.plan().input;
  const int D = static_cast<int>(in.dense.size());
  const Standard standard = model_.standard();
  for (int d = 0; d < D; ++d) {
    if (!in.dense[d].standard && !model_.heads().columns) continue;
    double* to = sums.dense(d);
    for (int64_t b = first; b < last; ++b) {
      const float x = batch_.dense[b * D + d];
      if (!std::isfinite(x)) continue;
      const double away = x - standard.mean[d];
      to[0] += 1.0;
      to[1] += away;
      to[2] += away * away;
    }
  }
}

// Where steps end: of rows every kStepRows samples and of the dense weights every kDenseRows, but a new model's first
// ones have 1, 2, 4 samples and so on. Without `dense_steps` the batch is one dense step, and one of rows that cannot
// be stepped here is one step.
void HedgeLane::plan_steps(const BatchView& batch, bool dense_steps) {
  row_ends_.clear();
  dense_ends_.clear();
  at_ = 0;
  if (!in_steps_) {
    if (batch.size) row_ends_.push_back(batch.size), dense_ends_.push_back(1);
    return;
  }
  if (!dense_steps) {
    for (int64_t b = 0; b < batch.size;) row_ends_.push_back(b = std::min(batch.size, b + kStepRows));
    if (batch.size) dense_ends_.push_back(row_ends_.size());
    return;
  }
  int64_t step = model_.state.step;
  for (int64_t b = 0; b < batch.size; ++step) {
    const int64_t end = std::min(batch.size, b + dense_rows(step));
    while (b < end) row_ends_.push_back(b = std::min(end, b + kStepRows));
    dense_ends_.push_back(row_ends_.size());
  }
}

// Which gradient each occurrence of a group adds to: a row's own in each step that it occurs in.
void HedgeLane::plan_group(size_t g) {
  Steps& steps = steps_[g];
  GroupView& view = batch_.groups[g];
  const size_t unique = static_cast<size_t>(view.unique);
  steps.count.assign(unique, 0);
  steps.last.assign(unique, ~0u);
  steps.targets.resize(static_cast<size_t>(view.occurrences));
  steps.touched.clear();
  steps.gradient.clear();
  steps.ends.clear();
  int32_t* targets = steps.targets.data();
  uint32_t *count = steps.count.data(), *last = steps.last.data();
  int64_t first = 0;
  for (size_t s = 0; s < row_ends_.size(); first = row_ends_[s++]) {
    const int64_t end = row_ends_[s];
    for (size_t f = 0; f < view.ends.size(); ++f) {
      const uint32_t* ends = view.ends[f];
      const uint32_t from = view.starts[f] + (ends ? (first ? ends[first - 1] : 0) : static_cast<uint32_t>(first));
      const uint32_t to = view.starts[f] + (ends ? ends[end - 1] : static_cast<uint32_t>(end));
      for (uint32_t o = from; o < to; ++o) {
        const int32_t p = view.positions[o];
        targets[o] = -1;
        if (p < 0) continue;
        if (last[p] != s) {
          last[p] = static_cast<uint32_t>(s);
          steps.touched.push_back(static_cast<uint32_t>(p));
          steps.gradient.push_back(count[p]++);
        }
        targets[o] = static_cast<int32_t>(count[p] - 1);
      }
    }
    steps.ends.push_back(steps.touched.size());
  }
  std::vector<uint32_t>& starts = steps.made.starts;
  starts.resize(unique + 1);
  uint32_t sum = 0;
  for (size_t r = 0; r < unique; ++r) {
    starts[r] = sum;
    sum += count[r];
  }
  starts[unique] = sum;
  for (size_t i = 0; i < steps.touched.size(); ++i) steps.gradient[i] += starts[steps.touched[i]];
  for (int64_t o = 0; o < view.occurrences; ++o)
    if (targets[o] >= 0) targets[o] += static_cast<int32_t>(starts[view.positions[o]]);
  const size_t slots = static_cast<size_t>(model_.plan().input.groups[g].slots);
  steps.made.values.assign(sum * slots, 0.0f);
  steps.csum.assign(sum, 0.0f);
  if (early_) steps.counted.assign(sum, 0);
  view.targets = targets;
  view.gradients = steps.made.values.data();
}

void HedgeLane::begin(const BatchView& batch, bool learn_dense, bool in_steps, float* predictions, bool dense_steps) {
  const InputPlan& in = model_.plan().input;
  const int L = model_.labels();
  check(in, batch, L);
  batch_ = batch;
  learn_dense_ = learn_dense;
  std::fill(losses_.begin(), losses_.end(), 0.0);
  std::fill(label_rows_.begin(), label_rows_.end(), 0.0);
  in_steps_ = in_steps;
  plan_steps(batch_, dense_steps);
  for (size_t g = 0; g < in.groups.size(); ++g) {
    if (in_steps_) {
      if (!batch_.groups[g].layout) throw std::logic_error("steps within a batch need the layouts of its rows");
      plan_group(g);
      continue;
    }
    const GroupView& view = batch_.groups[g];
    std::memset(view.gradients, 0, sizeof(float) * static_cast<size_t>(view.unique * in.groups[g].slots));
    steps_[g].csum.assign(static_cast<size_t>(view.unique), 0.0f);
    if (early_) steps_[g].counted.assign(static_cast<size_t>(view.unique), 0);
  }
  // The first chunk last, as the first step takes its activations.
  ahead_ = false;
  for (int64_t first = batch_.size ? (batch_.size - 1) / kChunk * kChunk : -1; first >= 0; first -= kChunk) {
    const int n = static_cast<int>(std::min<int64_t>(kChunk, batch_.size - first));
    if (first && !in_steps_) continue;  // one step: its own forward predicts
    forward(batch_, first, n);
    predict(n, predictions + first * L);
    ahead_ = true;
  }
  predictions_ = predictions;
}

int64_t HedgeLane::next_rows() const {
  if (!more()) return 0;
  const size_t before = at_ ? dense_ends_[at_ - 1] : 0;
  return row_ends_[dense_ends_[at_] - 1] - (before ? row_ends_[before - 1] : 0);
}

void HedgeLane::advance() {
  const int L = model_.labels(), K = model_.experts();
  const size_t begin = at_ ? dense_ends_[at_ - 1] : 0, end = dense_ends_[at_++];
  const int64_t first = begin ? row_ends_[begin - 1] : 0, last = row_ends_[end - 1];
  std::fill(step_sums_.all.begin(), step_sums_.all.end(), 0.0);
  start_biases(first, last);
  for (size_t s = begin; s < end; ++s) row_step(s);
  weight_gradients();
  for (int l = 0; l < L; ++l) {
    label_rows_[l] += step_sums_.label(l)[0];
    for (int k = 0; k < K; ++k) losses_[l * K + k] += step_sums_.loss(l)[k];
    step_sums_.rows() += step_sums_.label(l)[0];
  }
  if (!learn_dense_) return;
  const size_t head = static_cast<size_t>(1 + 3 * L + 2 * L * K), dense = 3 * model_.plan().input.dense.size();
  for (size_t i = 0; i < head; ++i) sums.all[i] += step_sums_.all[i];
  for (size_t i = head; i < step_sums_.all.size(); ++i) sums.all[i + dense] += step_sums_.all[i];
  count_dense(first, last);
}

void HedgeLane::row_step(size_t step) {
  const int64_t begin = step ? row_ends_[step - 1] : 0, end = row_ends_[step];
  for (int64_t first = begin; first < end; first += kChunk) {
    const int n = static_cast<int>(std::min<int64_t>(kChunk, end - first));
    if (held_ + n > kChunk) weight_gradients();
    if (!ahead_) forward(batch_, first, n);
    if (!ahead_ && !in_steps_) predict(n, predictions_ + first * model_.labels());
    ahead_ = false;
    losses(batch_, first, n);
    backward(batch_, first, n);
    if (early_) note_counted(batch_, first, n);
    held_ += n;
  }
  for (size_t g = 0; g < batch_.groups.size(); ++g) finish_group(g, step);
}

// The rest of a step of a group's rows: FM's part that is a row's own, and the step itself where a later one needs it.
void HedgeLane::finish_group(size_t g, size_t step) {
  const GroupPlan& plan = model_.plan().input.groups[g];
  const GroupView& view = batch_.groups[g];
  const bool fm = model_.plan().fm && plan.sum >= 0;
  if (!in_steps_) {
    if (fm) model_.kernels.finish_reduce(plan, view, steps_[g].csum.data());
    if (early_)
      for (int64_t u = 0; u < view.unique; ++u)
        mark_uncounted(g, static_cast<size_t>(u), view.gradients + u * plan.slots);
    return;
  }
  Steps& steps = steps_[g];
  for (size_t i = step ? steps.ends[step - 1] : 0; i < steps.ends[step]; ++i) {
    const uint32_t row = steps.touched[i], at = steps.gradient[i];
    float* gradient = steps.made.values.data() + size_t{at} * plan.slots;
    float* values = view.copies + size_t{row} * plan.slots;
    const float c = steps.csum[at];
    if (fm && c != 0.0f)
      for (int d = 0; d < plan.dim; ++d) gradient[plan.vector_slot + d] -= c * values[plan.vector_slot + d];
    if (early_) mark_uncounted(g, at, gradient);
    if (at + 1 < steps.made.starts[row + 1]) {
      const float count = plan.count_slot < 0 ? 0.0f : values[plan.count_slot];
      view.layout->step_copy(values, view.states + size_t{row} * view.layout->state_floats(), gradient);
      if (early_ && plan.count_slot >= 0) values[plan.count_slot] = count;
    }
  }
}

// Note which gradients hold a sample that counts: all but positives that come early. See mark_uncounted.
void HedgeLane::note_counted(const BatchView& batch, int64_t first, int n) {
  const InputPlan& in = model_.plan().input;
  for (int64_t b = first; b < first + n; ++b) {
    if (model_.plan().early[batch.label[b]] && batch.value[b] > 0.0f) continue;
    for (size_t g = 0; g < in.groups.size(); ++g) {
      if (in.groups[g].count_slot < 0) continue;
      const GroupView& view = batch.groups[g];
      const int32_t* at = view.targets ? view.targets : view.positions;
      for (size_t f = 0; f < in.groups[g].features.size(); ++f) {
        const uint32_t* ends = view.ends[f];
        const auto place = static_cast<uint32_t>(b);
        const uint32_t from = view.starts[f] + (ends ? (b ? ends[b - 1] : 0) : place);
        const uint32_t to = view.starts[f] + (ends ? ends[b] : place + 1);
        for (uint32_t o = from; o < to; ++o)
          if (at[o] >= 0) steps_[g].counted[static_cast<size_t>(at[o])] = 1;
      }
    }
  }
}

// A step of early positives alone does not count: the negatives that were served with them come later, and would find
// counts that reveal these positives, as no request for a score does. The mark is a gradient above 0 of the count's
// slot, as large as the row's largest, so that it keeps its sign in every codec and changes no scale.
void HedgeLane::mark_uncounted(size_t g, size_t at, float* gradient) const {
  const GroupPlan& plan = model_.plan().input.groups[g];
  if (plan.count_slot < 0 || steps_[g].counted[at]) return;
  float largest = 0.0f;
  for (int i = 0; i < plan.slots; ++i) largest = std::max(largest, std::abs(gradient[i]));
  gradient[plan.count_slot] = largest;
}

void HedgeLane::forward_backward(const BatchView& batch, bool learn_dense, float* predictions, double* expert_losses,
                                 double* rows) {
  begin(batch, learn_dense, false, predictions);
  while (more()) advance();
  losses_of_batch(expert_losses, rows);
}

void HedgeLane::losses_of_batch(double* expert_losses, double* rows) const {
  std::copy(losses_.begin(), losses_.end(), expert_losses);
  std::copy(label_rows_.begin(), label_rows_.end(), rows);
}

}  // namespace freshet
