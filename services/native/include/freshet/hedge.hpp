// The default model: a hedge of experts (wide, fast, cross, FM, deep, counts, stack), its training step written out by
// hand.
//
// Every expert k of label l predicts z[l][k] from its own sums and bias and learns by its own loss; the prediction is
// Σ_k w[l][k] · p(z[l][k]) with w ∝ exp(-loss discounted by rows). A sample teaches one label.
//
// - linear columns: wide, fast and FM also have a weight for each standardised dense column and for each missing flag.
// - counts: z = Σ_f b[f][n] + a[f][n] · w over the features f of a sample, where n is the bucket of how often the row
// was
//   stepped and w its scalar of the expert wide: how far the own weight of a rare id counts.
// - stack: z = Σ_k a[k] · (z[k] + bias[k]) over the other experts, begun at their mean.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "freshet/mlp.hpp"
#include "freshet/model_plan.hpp"

namespace freshet {

enum class Loss : int { kLogloss = 0, kHuber = 1, kMse = 2 };

struct ExpertPlan {
  int scalar = 0;       // first of its L scalars in the canonical run; -1: none
  bool fm = false;      // adds FM's output
  bool mlp = false;     // adds the MLP's output of the label
  bool linear = false;  // adds weights of the dense columns
  bool counts = false;  // is the expert counts: `scalar` is the one that it scales
  bool stack = false;   // is the stack, the last of the experts
  // What of its gradient goes on to rows and MLP: 1 / (experts that read the same scalars and vectors). Rows that two
  // experts share learn from the mean of their losses, as fast as one expert's own rows would.
  float share = 1.0f;
};

struct HedgePlan {
  InputPlan input;
  std::vector<Loss> losses;  // per label
  std::vector<bool> early;   // per label: its positives come before the negatives that were served with them
  std::vector<ExpertPlan> experts;
  std::vector<int> hidden;  // of the MLP, padded to 16
  bool fm = false, mlp = false;
  double discount = 0.999;  // of an expert's past loss, per row
  double dense_rate = 1e-3, momentum = 0.9, bias_rate = 0.5;
  int64_t warmup_steps = 100, batch_rows = 256;
  float standard_limit = 10.0f;

  bool has_linear() const;  // an expert has weights of dense columns
};

// Where the small weights of a label's experts stand in one run of floats: [stack | linear | bias of counts | scale of
// counts].
struct HeadsLayout {
  explicit HeadsLayout(const HedgePlan& plan);

  int stacked = 0;   // experts that the stack reads; 0: no stack
  int linears = 0;   // experts with weights of dense columns
  int columns = 0;   // dense columns, then missing flags
  int features = 0;  // of the groups that count steps, in their order, if there is an expert counts
  int linear_at = 0, bias_at = 0, scale_at = 0, size = 0;  // biases and scales of counts: (features, kCountBuckets)
  std::vector<int> linear_of;                              // per expert its place among the linear ones, or -1
  int counts_expert = -1, stack_expert = -1;

  int linear(int which, int column) const { return linear_at + which * columns + column; }
};

// Everything small that a version holds beside the MLP's weights. Sizes: L · K unless said otherwise, label-major.
struct HedgeState {
  std::vector<float> bias;
  std::vector<double> bias_squares;   // Adagrad's accumulators
  std::vector<double> loss;           // discounted; the least of a label is 0
  std::vector<double> started;        // (L,) 1 when the biases have their starting values
  std::vector<double> scale;          // (L,) of a number's label: predictions are scale · z. 1 for a true/false label
  std::vector<double> label_sums;     // (L, 3) rows, Σ y, Σ y² until started
  std::vector<double> dense;          // (D, 3) count, mean, Σ (x - mean)²
  std::vector<float> heads;           // (L, H) small weights: HeadsLayout
  std::vector<double> heads_squares;  // (L, H) Adagrad's accumulators
  int64_t step = 0;
  int64_t variance_step = 0;  // steps that moved Adam's second moment
};

// Sums of a lane since the last step, additive over lanes and ranks, in one flat array.
struct HedgeSums {
  HedgeSums(int labels, int experts, int dense, int heads);
  std::vector<double>
      all;  // [rows | per label: rows, Σ y, Σ y² | loss (L, K) | g (L, K) | per dense: n, Σ d, Σ d² | heads (L, H)]
  double& rows() { return all[0]; }
  double* label(int l) { return &all[1 + 3 * l]; }
  double* loss(int l) { return &all[1 + 3 * labels + l * experts]; }
  double* gradient(int l) { return &all[1 + 3 * labels + (labels + l) * experts]; }
  double* dense(int d) { return &all[1 + 3 * labels + 2 * labels * experts + 3 * d]; }
  double* head(int l) { return &all[1 + 3 * labels + 2 * labels * experts + 3 * dense_columns + l * heads]; }
  int labels, experts, dense_columns, heads;
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
  // The next step, and no other, leaves Adam's second moment as it is.
  void freeze_variance() { freeze_next_ = true; }
  // To be called after `state` or the weights were written to.
  void refresh();
  bool finite() const;

  const HedgePlan& plan() const { return plan_; }
  int labels() const { return static_cast<int>(plan_.losses.size()); }
  int experts() const { return static_cast<int>(plan_.experts.size()); }
  Standard standard() const { return {dense_mean_.data(), dense_scale_.data(), plan_.standard_limit}; }
  const std::vector<float>& weights() const { return mixture_; }  // (L, K)

  const HeadsLayout& heads() const { return heads_; }

  HedgeState state;
  Mlp mlp;
  const Kernels& kernels;
  // Since construction, what was left out because it was not finite: samples with such a loss or squared gradient,
  // which taught nothing; and steps with such squared gradients of the MLP, which counted as 0.
  mutable std::atomic<int64_t> not_finite_samples{0}, not_finite_steps{0};

 private:
  void step_label(int l, HedgeSums& sums);
  void start_label(int l, const double* seen);
  void step_heads(int l, HedgeSums& sums);
  void refresh_heads();
  HedgePlan plan_;
  HeadsLayout heads_;
  bool training_;
  double over_ = 0.0;                         // rows by which the step that has begun divides gradients
  std::atomic<int64_t> not_finite_step_{-1};  // the newest step counted
  bool frozen_ = false, freeze_next_ = false;
  std::vector<float> mixture_;
  std::vector<double> dense_mean_, dense_scale_;
};

// Samples of a step within a batch: rows are stepped after each such step, so that the next samples see the change.
inline constexpr int kStepRows = 16;
// Samples of a dense step of a lane: a few steps of rows, as a step of the MLP costs the same for one sample as for
// many.
inline constexpr int kDenseRows = 64;
// Samples of dense step number `step`: a new model's first ones have 1, 2, 4 and so on.
inline int64_t dense_rows(int64_t step) { return step < 6 ? int64_t{1} << step : kDenseRows; }

// Gradients of one group's rows in the order in which the store is to take them: a row has one for each step within the
// batch that it occurred in, one behind the other.
struct StepGradients {
  std::vector<uint32_t> starts;  // (U + 1,) first gradient of each row
  std::vector<float> values;     // (starts[U], S)
};

// One thread's scratch and sums. The model outlives it.
class HedgeLane {
 public:
  explicit HedgeLane(const HedgeModel& model, bool training);

  // predictions (B, L). Serving; touches no sums. What samples of a request share may be given once (BatchView).
  void score(const BatchView& batch, float* predictions);

  // Train on a batch: begin, then advance while `more`, with a step of the model after each or without. The batch stays
  // as it is until then. predictions (B, L) are from before all of it. in_steps: rows are stepped in copies every
  // kStepRows samples (groups need layouts), and `gradients` has each step's; else each group's `gradients` are
  // written, one sum a row. Dense sums go into the lane unless !learn_dense. Without dense_steps one `advance` makes
  // all steps of rows: the batch is one dense step.
  void begin(const BatchView& batch, bool learn_dense, bool in_steps, float* predictions, bool dense_steps = true);
  bool more() const { return at_ < dense_ends_.size(); }
  int64_t next_rows() const;  // samples of the next `advance`
  void advance();
  const StepGradients& gradients(size_t group) const { return steps_[group].made; }

  // Losses (L, K) and rows (L) of the batch as far as it has been advanced, of weighted rows.
  void losses_of_batch(double* expert_losses, double* rows) const;

  // All of it at once: one step of rows, one dense step.
  void forward_backward(const BatchView& batch, bool learn_dense, float* predictions, double* expert_losses,
                        double* rows);
  size_t labels() const { return static_cast<size_t>(model_.labels()); }
  size_t experts() const { return static_cast<size_t>(model_.experts()); }
  void clear();
  void add(HedgeLane& other);  // takes the other lane's sums and zeroes them

  HedgeSums sums;
  MlpLane mlp;

 private:
  // The steps within a batch of one group.
  struct Steps {
    StepGradients made;
    std::vector<int32_t> targets;       // (N,) gradient of each occurrence
    std::vector<float> csum;            // (gradients,) see finish_reduce
    std::vector<uint32_t> touched;      // rows, step by step, each once a step
    std::vector<uint32_t> gradient;     // of each of `touched`
    std::vector<size_t> ends;           // (steps,) in `touched`
    std::vector<uint32_t> count, last;  // scratch: (U,)
    std::vector<uint8_t> counted;       // (gradients,) 1: a sample of the step counts, see mark_uncounted
  };

  void plan_steps(const BatchView& batch, bool dense_steps);
  void plan_group(size_t group);
  void row_step(size_t step);
  void finish_group(size_t group, size_t step);
  void note_counted(const BatchView& batch, int64_t first, int n);
  void mark_uncounted(size_t group, size_t at, float* gradient) const;
  void forward(const BatchView& batch, int64_t first, int n);
  void plan_requests(const BatchView& batch);
  void find_requests(const BatchView& batch, int64_t first, int n);
  void columns(const BatchView& batch, int64_t first, int n);
  void counts(const BatchView& batch, int64_t first, int n);
  void count_gradients(int64_t first, int n);
  float stacked(int label, const float* z, const float* bias) const;
  void predict(int n, float* predictions) const;
  void losses(const BatchView& batch, int64_t first, int n);
  void backward(const BatchView& batch, int64_t first, int n);
  void* input(int row);
  void weight_gradients();
  void start_biases(int64_t first, int64_t last);
  void count_dense(int64_t first, int64_t last);

  const HedgeModel& model_;
  bool training_;
  Floats x_, scalars_, sums_, squares_, fm_, pooled_, logits_, z_, p_, s_, dx_, d_scalars_, c_, d_logits_, columns_,
      d_counts_;
  std::vector<float> bias_;    // (L, K) of this step
  std::vector<double> scale_;  // (L,)
  std::vector<char> teaches_;  // (L,) whether the label has a scale yet
  Floats pools_;               // lists that a request's samples share, pooled
  std::vector<int64_t> pools_of_;
  int pool_stride_ = 0;
  std::vector<uint8_t> once_;  // per feature: see Gathered
  RequestColumns requests_;    // of the batch, and of the chunk at hand
  Floats partial_;
  HedgeSums step_sums_;  // of the step at hand

  // The batch at hand.
  BatchView batch_;
  float* predictions_ = nullptr;
  bool learn_dense_ = true, in_steps_ = false,
       ahead_ = false;  // ahead_: activations of its first samples are those of the first step
  bool early_ = false;  // some positives do not count
  int held_ = 0;        // samples of the dense step at hand in the MLP's scratch: their weight gradients are to come
  std::vector<int64_t> row_ends_;            // samples up to and with each step of rows
  std::vector<size_t> dense_ends_;           // steps of rows up to and with each dense step
  size_t at_ = 0;                            // dense steps made
  std::vector<Steps> steps_;                 // per group
  std::vector<double> losses_, label_rows_;  // (L, K), (L,) of the batch, as far as it has been advanced
};

}  // namespace freshet
