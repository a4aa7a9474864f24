#include <algorithm>
#include <cmath>
#include <cstring>

#include "freshet/hedge.hpp"
#include "hedge_start.hpp"

namespace freshet {

HedgeLane::HedgeLane(const HedgeModel& model, bool training)
    : sums(model.labels(), model.experts(), static_cast<int>(model.plan().input.dense.size())),
      mlp(model.mlp, training && model.plan().mlp),
      model_(model),
      training_(training),
      bias_(model.state.bias),
      scale_(model.state.scale),
      teaches_(model.labels(), 1),
      batch_sums_(model.labels(), model.experts(), 0) {
  const InputPlan& in = model.plan().input;
  const std::int64_t n = kChunk, L = model.labels(), LK = L * model.experts();
  int dim = 0;
  std::size_t features = 0;
  for (const GroupPlan& g : in.groups) {
    dim = std::max(dim, g.dim);
    features += g.features.size();
  }
  pool_stride_ = dim + in.scalars;
  if (!training) pools_ = Floats(static_cast<std::int64_t>(features) * pool_stride_);
  pools_of_.assign(features, -1);
  if (model.plan().mlp) {
    x_ = Floats(n * in.width);
    logits_ = Floats(n * L);
    if (training) dx_ = Floats(n * (in.width - in.vectors_from));
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
  csum_.resize(in.groups.size());
}

void HedgeLane::clear() {
  std::fill(sums.all.begin(), sums.all.end(), 0.0);
  mlp.gradients.zero();
}

void HedgeLane::add(HedgeLane& other) {
  for (std::size_t i = 0; i < sums.all.size(); ++i) sums.all[i] += other.sums.all[i];
  model_.kernels.add(mlp.gradients.data(), other.mlp.gradients.data(), mlp.gradients.size());
  other.clear();
}

void HedgeLane::forward(const BatchView& batch, std::int64_t first, int n) {
  const HedgePlan& plan = model_.plan();
  Gathered out;
  out.x = plan.mlp ? x_.data() : nullptr;
  out.stride = plan.input.width;
  out.scalars = scalars_.data();
  out.sums = sums_.data();
  out.squares = squares_.data();
  out.fm = plan.fm ? fm_.data() : nullptr;
  out.pooled = pooled_.data();
  out.pools = pools_.data();
  out.pools_of = pools_of_.data();
  out.pool_stride = pool_stride_;
  const Mode mode = model_.mlp.mode();
  model_.kernels.gather(mode, plan.input, batch, model_.standard(), first, n, out);
  if (plan.mlp)
    model_.kernels.mlp_forward(mode, model_.mlp.view(nullptr), mlp.scratch(), x_.data(), plan.input.width, n, logits_.data());
  const int L = model_.labels(), K = model_.experts();
  for (int i = 0; i < n; ++i)
    for (int l = 0; l < L; ++l)
      for (int k = 0; k < K; ++k) {
        const ExpertPlan& e = plan.experts[k];
        float z = e.scalar < 0 ? 0.0f : scalars_.data()[i * plan.input.scalars + e.scalar + l];
        if (e.fm) z += fm_.data()[i];
        if (e.mlp) z += logits_.data()[i * L + l];
        z_.data()[(i * L + l) * K + k] = z;
      }
}

// Mixture of the experts with the model's own biases: what would be served.
void HedgeLane::predict(int n, float* predictions) const {
  const int L = model_.labels(), K = model_.experts();
  const std::vector<float>& w = model_.weights();
  const float* bias = model_.state.bias.data();
  float* z = s_.size() ? const_cast<float*>(s_.data()) : nullptr;
  float* p = const_cast<float*>(p_.data());
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < L * K; ++j) z[i * L * K + j] = z_.data()[i * L * K + j] + bias[j];
  model_.kernels.logistic(z, p, z, static_cast<std::int64_t>(n) * L * K);
  for (int i = 0; i < n; ++i)
    for (int l = 0; l < L; ++l) {
      const bool number = model_.plan().losses[l] != Loss::kLogloss;
      float sum = 0.0f;
      for (int k = 0; k < K; ++k) {
        const int j = l * K + k;
        sum += w[j] * (number ? z_.data()[i * L * K + j] + bias[j] : p[i * L * K + j]);
      }
      predictions[i * L + l] = number ? static_cast<float>(sum * model_.state.scale[l]) : sum;
    }
}

void HedgeLane::score(const BatchView& batch, float* predictions) {
  check(model_.plan().input, batch, model_.labels());
  if (batch.request_ends && training_) throw std::logic_error("a lane for training takes no requests: build the model for serving");
  std::fill(pools_of_.begin(), pools_of_.end(), -1);
  for (std::int64_t first = 0; first < batch.size; first += kChunk) {
    const int n = static_cast<int>(std::min<std::int64_t>(kChunk, batch.size - first));
    forward(batch, first, n);
    predict(n, predictions + first * model_.labels());
  }
}

// Biases this batch learns with: the model's, or for a label never seen before the starting values that its rows in
// this batch suggest. Predictions do not use those.
void HedgeLane::start_biases(const BatchView& batch) {
  const int L = model_.labels(), K = model_.experts();
  for (int l = 0; l < L; ++l) {
    double* seen = batch_sums_.label(l);
    for (std::int64_t b = 0; b < batch.size; ++b) {
      if (batch.label[b] != l) continue;
      const double w = batch.weight[b], y = batch.value[b];
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

// Loss and its gradient g at every expert of each sample's label; the gradients that go on to rows and MLP.
void HedgeLane::losses(const BatchView& batch, std::int64_t first, int n, HedgeSums& into) {
  const HedgePlan& plan = model_.plan();
  const int L = model_.labels(), K = model_.experts(), S = plan.input.scalars;
  float* z = z_.data();
  for (int i = 0; i < n; ++i) {  // keep only the logits of the label that the sample teaches
    const int l = batch.label[first + i];
    for (int k = 0; k < K; ++k) z[i * K + k] = z[(i * L + l) * K + k] + bias_[l * K + k];
  }
  model_.kernels.logistic(z, p_.data(), s_.data(), static_cast<std::int64_t>(n) * K);
  std::memset(d_scalars_.data(), 0, sizeof(float) * static_cast<std::size_t>(n) * S);
  std::memset(d_logits_.data(), 0, sizeof(float) * static_cast<std::size_t>(n) * L);
  for (int i = 0; i < n; ++i) {
    const int l = batch.label[first + i];
    const float y = batch.value[first + i], weight = batch.weight[first + i];
    float c = 0.0f;
    for (int k = 0; k < K; ++k) {
      const int j = i * K + k;
      float loss, g;
      if (plan.losses[l] == Loss::kLogloss) {
        loss = s_.data()[j] - y * z[j];
        g = p_.data()[j] - y;
      } else {
        number_loss(plan.losses[l], z[j] - y / static_cast<float>(scale_[l]), loss, g);
      }
      g = teaches_[l] ? g * weight : 0.0f;
      into.loss(l)[k] += teaches_[l] ? static_cast<double>(loss) * weight : 0.0;
      into.gradient(l)[k] += g;
      const ExpertPlan& e = plan.experts[k];
      g *= e.share;
      if (e.scalar >= 0) d_scalars_.data()[i * S + e.scalar + l] += g;
      if (e.fm) c += g;
      if (e.mlp) d_logits_.data()[i * L + l] += g;
    }
    c_.data()[i] = c;
  }
}

void HedgeLane::backward(const BatchView& batch, std::int64_t first, int n, bool learn_dense) {
  const HedgePlan& plan = model_.plan();
  const int back = plan.input.width - plan.input.vectors_from;
  if (plan.mlp)
    model_.kernels.mlp_backward(model_.mlp.mode(), model_.mlp.view(learn_dense ? mlp.gradients.data() : nullptr), mlp.scratch(),
                                x_.data(), plan.input.width, n, d_logits_.data(), dx_.data(), back);
  Upstream up;
  up.dx = plan.mlp ? dx_.data() : nullptr;
  up.stride = back;
  up.scalars = d_scalars_.data();
  up.sums = sums_.data();
  up.c = plan.fm ? c_.data() : nullptr;
  up.pooled = pooled_.data();
  std::vector<float*> csum;
  for (auto& sum : csum_) csum.push_back(sum.data());
  model_.kernels.reduce(plan.input, batch, first, n, up, csum.data());
}

void HedgeLane::count_dense(const BatchView& batch) {
  const InputPlan& in = model_.plan().input;
  const int D = static_cast<int>(in.dense.size());
  const Standard standard = model_.standard();
  for (int d = 0; d < D; ++d) {
    if (!in.dense[d].standard) continue;
    double* to = sums.dense(d);
    for (std::int64_t b = 0; b < batch.size; ++b) {
      const float x = batch.dense[b * D + d];
      if (!std::isfinite(x)) continue;
      const double away = x - standard.mean[d];
      to[0] += 1.0;
      to[1] += away;
      to[2] += away * away;
    }
  }
}

void HedgeLane::forward_backward(const BatchView& batch, bool learn_dense, float* predictions, double* expert_losses,
                                 double* rows) {
  const InputPlan& in = model_.plan().input;
  const int L = model_.labels(), K = model_.experts();
  check(in, batch, L);
  std::fill(batch_sums_.all.begin(), batch_sums_.all.end(), 0.0);
  start_biases(batch);
  for (std::size_t g = 0; g < in.groups.size(); ++g) {
    const GroupView& view = batch.groups[g];
    std::memset(view.gradients, 0, sizeof(float) * static_cast<std::size_t>(view.unique * in.groups[g].slots));
    csum_[g].assign(static_cast<std::size_t>(view.unique), 0.0f);
  }
  for (std::int64_t first = 0; first < batch.size; first += kChunk) {
    const int n = static_cast<int>(std::min<std::int64_t>(kChunk, batch.size - first));
    forward(batch, first, n);
    predict(n, predictions + first * L);
    losses(batch, first, n, batch_sums_);
    backward(batch, first, n, learn_dense);
  }
  for (std::size_t g = 0; g < in.groups.size(); ++g)
    if (model_.plan().fm && in.groups[g].sum >= 0) model_.kernels.finish_reduce(in.groups[g], batch.groups[g], csum_[g].data());
  for (int l = 0; l < L; ++l) {
    rows[l] = batch_sums_.label(l)[0];
    std::copy_n(batch_sums_.loss(l), K, expert_losses + l * K);
    batch_sums_.rows() += rows[l];
  }
  if (!learn_dense) return;
  for (std::size_t i = 0; i < batch_sums_.all.size(); ++i) sums.all[i] += batch_sums_.all[i];
  count_dense(batch);
}

}  // namespace freshet
