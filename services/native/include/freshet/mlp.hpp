// Weights of the default MLP with their Adam state, packed for the kernels, and a lane's activations and gradients.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "freshet/model_kernels.hpp"

namespace freshet {

// 64-byte aligned floats, zeroed.
class Floats {
 public:
  Floats() = default;
  explicit Floats(int64_t n);
  float* data() { return data_.get(); }
  const float* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  void zero();

 private:
  struct Free {
    void operator()(float* p) const;
  };
  std::unique_ptr<float[], Free> data_;
  int64_t size_ = 0;
};

// Widths are padded to 16 by the caller. Parameters lie in one flat array: for each hidden layer W (K, N), b (N); then
// the head (L, K). Padded units have zero weights, so their gradients are zero and they stay zero.
struct MlpShape {
  int inputs = 0;
  int vectors_from = 0;  // gradients of earlier inputs are not wanted
  std::vector<int> hidden;
  int outputs = 0;

  int64_t parameters() const;
  int head_inputs() const { return hidden.empty() ? inputs : hidden.back(); }
};

// How the weights are stepped. The variance is corrected by its own number of steps, as some steps leave it as it is.
struct AdamStep {
  int64_t steps = 1, variance_steps = 1;  // this one counted, of the variance if it moves
  bool freezes_variance = false;
  double rate = 1e-3, momentum = 0.9, epsilon = 1e-8;
};

class Mlp {
 public:
  Mlp(MlpShape shape, Mode mode, bool training, const Kernels& kernels);

  const MlpShape& shape() const { return shape_; }
  Mode mode() const { return mode_; }
  std::span<float> weights() { return {weights_.data(), static_cast<size_t>(weights_.size())}; }
  std::span<float> first_moment() { return {first_.data(), static_cast<size_t>(first_.size())}; }
  std::span<float> second_moment() { return {second_.data(), static_cast<size_t>(second_.size())}; }

  // The inputs of the kernels; with `gradients` (flat, as the weights) also their outputs.
  MlpView view(float* gradients) const;

  // One Adam step on the mean of the lanes' gradients (flat, as the weights), which are zeroed.
  // Parts may run at the same time: each takes its share of every layer's inputs, and packs it. Returns false if a part
  // of the mean counted as 0, as its square is not finite.
  bool step(const std::vector<float*>& gradients, double rows, const AdamStep& adam, int part, int parts);

  // To be called after weights() were written to.
  void pack();

 private:
  void pack_rows(size_t layer, const LayerView& view, int from, int to);

  MlpShape shape_;
  Mode mode_;
  const Kernels& kernels_;
  Floats weights_, first_, second_;
  std::vector<Floats> panels_, transposed_;
};

class MlpLane {
 public:
  MlpLane(const Mlp& mlp, bool training);
  const MlpScratch& scratch() const { return scratch_; }
  Floats gradients;  // flat; empty when serving

 private:
  void* hold(int64_t floats);
  std::vector<Floats> held_;
  MlpScratch scratch_;
};

}  // namespace freshet
