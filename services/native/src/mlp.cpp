#include "freshet/mlp.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

namespace freshet {

Floats::Floats(int64_t n) : size_(n) {
  const size_t bytes = static_cast<size_t>(std::max<int64_t>(n, 1)) * sizeof(float);
  data_.reset(static_cast<float*>(::operator new(bytes, std::align_val_t{64})));
  zero();
}
void Floats::zero() {
  if (size_) std::memset(data_.get(), 0, static_cast<size_t>(size_) * sizeof(float));
}
void Floats::Free::operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }

int64_t MlpShape::parameters() const {
  int64_t n = 0, k = inputs;
  for (const int width : hidden) {
    n += k * width + width;
    k = width;
  }
  return n + k * outputs;
}

Mlp::Mlp(MlpShape shape, Mode mode, bool training, const Kernels& kernels)
    : shape_(std::move(shape)), mode_(shape_.hidden.empty() ? Mode::kFloat : mode), kernels_(kernels) {
  weights_ = Floats(shape_.parameters());
  if (training) {
    first_ = Floats(shape_.parameters());
    second_ = Floats(shape_.parameters());
  }
  int64_t k = shape_.inputs;
  int from = shape_.vectors_from;
  for (const int width : shape_.hidden) {
    panels_.emplace_back(panel_floats(k, width));
    transposed_.emplace_back(panel_floats(width, std::max<int64_t>(k - from, 0)));
    k = width;
    from = 0;
  }
}

MlpView Mlp::view(float* gradients) const {
  MlpView view;
  int64_t at = 0;
  int k = shape_.inputs, from = shape_.vectors_from;
  const auto part = [&](int64_t offset) { return gradients ? gradients + offset : nullptr; };
  for (size_t i = 0; i < shape_.hidden.size(); ++i) {
    const int width = shape_.hidden[i];
    const int64_t bias = at + static_cast<int64_t>(k) * width;
    view.layers.push_back({k, width, weights_.data() + at, weights_.data() + bias, panels_[i].data(),
                           transposed_[i].data(), from, part(at), part(bias)});
    at = bias + width;
    k = width;
    from = 0;
  }
  view.inputs = k;
  view.outputs = shape_.outputs;
  view.head = weights_.data() + at;
  view.d_head = part(at);
  return view;
}

bool Mlp::step(const std::vector<float*>& gradients, double rows, const AdamStep& adam, int part, int parts) {
  const double c1 = 1.0 - std::pow(adam.momentum, static_cast<double>(adam.steps));
  const double c2 = 1.0 - std::pow(0.999, static_cast<double>(std::max<int64_t>(adam.variance_steps, 1)));
  std::vector<float*> of_range(gradients.size());
  bool finite = true;
  const auto range = [&](int64_t at, int64_t n) {  // a multiple of 16
    for (size_t i = 0; i < gradients.size(); ++i) of_range[i] = gradients[i] + at;
    if (rows > 0.0)
      finite &= kernels_.adam(weights_.data() + at, first_.data() + at, second_.data() + at, of_range.data(),
                              static_cast<int>(of_range.size()), n, static_cast<float>(1.0 / rows),
                              static_cast<float>(adam.rate / c1), static_cast<float>(1.0 / std::sqrt(c2)),
                              static_cast<float>(adam.epsilon), static_cast<float>(adam.momentum),
                              adam.freezes_variance ? 1.0f : 0.999f);
    else
      for (float* g : of_range) std::fill_n(g, n, 0.0f);
  };
  const MlpView all = view(nullptr);
  int64_t at = 0;
  for (const LayerView& l : all.layers) {
    const int blocks = l.inputs / 16, from = blocks * part / parts * 16, to = blocks * (part + 1) / parts * 16;
    // Stepped and packed a few rows at a time: each pass finds the data of the last one in the first cache.
    for (int row = from; row < to; row += 16) {
      range(at + static_cast<int64_t>(row) * l.outputs, static_cast<int64_t>(16) * l.outputs);
      if (rows > 0.0) pack_rows(static_cast<size_t>(&l - all.layers.data()), l, row, row + 16);
    }
    at += static_cast<int64_t>(l.inputs) * l.outputs;
    if (part == 0) range(at, l.outputs);
    at += l.outputs;
  }
  if (part == 0) range(at, shape_.parameters() - at);
  return finite;
}

void Mlp::pack_rows(size_t i, const LayerView& l, int from, int to) {
  kernels_.pack(mode_, l.weights, l.inputs, l.outputs, l.back_from, from, to, panels_[i].data(), transposed_[i].data());
}

void Mlp::pack() {
  const MlpView all = view(nullptr);
  for (size_t i = 0; i < all.layers.size(); ++i) pack_rows(i, all.layers[i], 0, all.layers[i].inputs);
}

void* MlpLane::hold(int64_t floats) {
  held_.emplace_back(floats);
  return held_.back().data();
}

MlpLane::MlpLane(const Mlp& mlp, bool training) {
  const MlpShape& shape = mlp.shape();
  if (training) gradients = Floats(shape.parameters());
  int k = shape.inputs;
  for (const int width : shape.hidden) {
    const int64_t rows = static_cast<int64_t>(kChunk) * (width + kStridePad);
    scratch_.hidden.push_back(hold(rows));
    scratch_.delta.push_back(training ? hold(rows) : nullptr);
    const bool pairs = training && mlp.mode() == Mode::kBf16;
    scratch_.delta_pairs.push_back(pairs ? hold(panel_floats(kChunk / 2, width)) : nullptr);
    scratch_.input_pairs.push_back(pairs ? hold(static_cast<int64_t>(kChunk / 2) * k) : nullptr);
    k = width;
  }
  scratch_.last = static_cast<float*>(hold(static_cast<int64_t>(kChunk) * (k + kStridePad)));
}

}  // namespace freshet
