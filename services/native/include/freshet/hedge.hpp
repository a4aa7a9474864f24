// The default model: a hedge of experts (wide, cross, FM, deep), its training step written out by hand.
//
// Every expert k of label l predicts z[l][k] from its own sums and bias and learns by its own loss; the prediction is
// Σ_k w[l][k] · p(z[l][k]) with w ∝ exp(-loss discounted by rows). A sample teaches one label.
#pragma once

#include <cstdint>
#include <vector>

#include "freshet/mlp.hpp"
#include "freshet/model_plan.hpp"

namespace freshet {

enum class Loss : int { kLogloss = 0, kHuber = 1, kMse = 2 };

struct ExpertPlan {
  int scalar = 0;    // first of its L scalars in the canonical run; -1: none
  bool fm = false;   // adds FM's output
  bool mlp = false;  // adds the MLP's output of the label
  // What of its gradient goes on to rows and MLP: 1 / (experts that read the same scalars and vectors). Rows that two
  // experts share learn from the mean of their losses, as fast as one expert's own rows would.
  float share = 1.0f;
};

struct HedgePlan {
  InputPlan input;
  std::vector<Loss> losses;  // per label
  std::vector<ExpertPlan> experts;
  std::vector<int> hidden;  // of the MLP, padded to 16
  bool fm = false, mlp = false;
  double discount = 0.999;  // of an expert's past loss, per row
  double dense_rate = 1e-3, bias_rate = 0.5;
  std::int64_t warmup_steps = 100, batch_rows = 256;
  float standard_limit = 10.0f;
};

// Everything small that a version holds beside the MLP's weights. Sizes: L · K unless said otherwise, label-major.
struct HedgeState {
  std::vector<float> bias;
  std::vector<double> bias_squares;  // Adagrad's accumulators
  std::vector<double> loss;          // discounted; the least of a label is 0
  std::vector<double> started;       // (L,) 1 when the biases have their starting values
  std::vector<double> scale;         // (L,) of a number's label: predictions are scale · z. 1 for a true/false label
  std::vector<double> label_sums;    // (L, 3) rows, Σ y, Σ y² until started
  std::vector<double> dense;         // (D, 3) count, mean, Σ (x - mean)²
  std::int64_t step = 0;
};

// Sums of a lane since the last step, additive over lanes and ranks, in one flat array.
struct HedgeSums {
  HedgeSums(int labels, int experts, int dense);
  std::vector<double> all;  // [rows | per label: rows, Σ y, Σ y² | loss (L, K) | g (L, K) | per dense: n, Σ d, Σ d²]
  double& rows() { return all[0]; }
  double* label(int l) { return &all[1 + 3 * l]; }
  double* loss(int l) { return &all[1 + 3 * labels + l * experts]; }
  double* gradient(int l) { return &all[1 + 3 * labels + (labels + l) * experts]; }
  double* dense(int d) { return &all[1 + 3 * labels + 2 * labels * experts + 3 * d]; }
  int labels, experts;
};

class HedgeLane;

class HedgeModel {
 public:
  HedgeModel(HedgePlan plan, bool training, bool bf16, const Kernels& kernels);

  // One update of all dense state from the sums of the lanes, which are zeroed. Not while a lane runs.
  void step(const std::vector<HedgeLane*>& lanes);
  // The same in parts that several threads take: first begin_step by one, then every part once, all at the same time.
  void begin_step(const std::vector<HedgeLane*>& lanes);
  void step_part(const std::vector<HedgeLane*>& lanes, int part, int parts);
  // To be called after `state` or the weights were written to.
  void refresh();
  bool finite() const;

  const HedgePlan& plan() const { return plan_; }
  int labels() const { return static_cast<int>(plan_.losses.size()); }
  int experts() const { return static_cast<int>(plan_.experts.size()); }
  Standard standard() const { return {dense_mean_.data(), dense_scale_.data(), plan_.standard_limit}; }
  const std::vector<float>& weights() const { return mixture_; }  // (L, K)

  HedgeState state;
  Mlp mlp;
  const Kernels& kernels;

 private:
  void step_label(int l, HedgeSums& sums);
  void start_label(int l, const double* seen);
  void refresh_heads();
  HedgePlan plan_;
  bool training_;
  double rows_ = 0.0;  // of the step that has begun
  std::vector<float> mixture_;
  std::vector<double> dense_mean_, dense_scale_;
};

// One thread's scratch and sums. The model outlives it.
class HedgeLane {
 public:
  explicit HedgeLane(const HedgeModel& model, bool training);

  // predictions (B, L). Serving; touches no sums. What samples of a request share may be given once (BatchView).
  void score(const BatchView& batch, float* predictions);
  // Forward, loss, backward: predictions as before the update, row gradients into the batch's groups, dense sums into
  // the lane unless !learn_dense. expert_losses (L, K) and rows (L) are this batch's, of weighted rows.
  void forward_backward(const BatchView& batch, bool learn_dense, float* predictions, double* expert_losses, double* rows);
  void clear();
  void add(HedgeLane& other);  // takes the other lane's sums and zeroes them

  HedgeSums sums;
  MlpLane mlp;

 private:
  void forward(const BatchView& batch, std::int64_t first, int n);
  void predict(int n, float* predictions) const;
  void losses(const BatchView& batch, std::int64_t first, int n, HedgeSums& batch_sums);
  void backward(const BatchView& batch, std::int64_t first, int n, bool learn_dense);
  void start_biases(const BatchView& batch);
  void count_dense(const BatchView& batch);

  const HedgeModel& model_;
  bool training_;
  Floats x_, scalars_, sums_, squares_, fm_, pooled_, logits_, z_, p_, s_, dx_, d_scalars_, c_, d_logits_;
  std::vector<float> bias_;    // (L, K) of this batch
  std::vector<double> scale_;  // (L,)
  std::vector<char> teaches_;  // (L,) whether the label has a scale yet
  std::vector<std::vector<float>> csum_;
  Floats pools_;  // lists that a request's samples share, pooled
  std::vector<std::int64_t> pools_of_;
  int pool_stride_ = 0;
  HedgeSums batch_sums_;
};

}  // namespace freshet
