// The hot loops of the dense part, one table of functions per instruction set, chosen when the core is loaded.
#pragma once

#include <cstdint>
#include <vector>

#include "freshet/model_plan.hpp"

namespace freshet {

// Rows of a batch that pass through the model at a time: activations of a chunk stay in the core's own cache.
inline constexpr int kChunk = 256;

// Elements added to the leading dimension of activations, as a stride of a power of two falls on few cache sets.
inline constexpr int kStridePad = 16;

// How activations and packed weights are held.
enum class Mode : int {
  kFloat = 0,    // fp32
  kRounded = 1,  // values rounded to bf16 and kept as fp32: bf16 for processors without its instructions
  kBf16 = 2,     // bf16, multiplied in pairs by the processor's own instruction
};

struct Standard {  // per dense column: value = clamp((x - mean) * scale)
  const double* mean;
  const double* scale;
  float limit;  // of a standardised value, in standard deviations
};

// What gather writes for `n` samples.
struct Gathered {
  void* x = nullptr;         // (n, stride) input of the MLP in the mode's element; null: not wanted
  int stride = 0;            // elements
  float* scalars = nullptr;  // (n, plan.scalars) sums over features
  float* sums = nullptr;     // (n, plan.sums) FM's s = Σ v
  float* squares = nullptr;  // (plan.sums) scratch
  float* fm = nullptr;       // (n,) ½ Σ_d (s² − Σ v²); null: no FM
  float* pooled = nullptr;   // (largest dim + scalars) scratch
  // Lists that a request's samples share are pooled once: per feature of the plan, in the order of groups,
  // `pool_stride` floats and the request that they are of (-1: none yet). Null where no batch shares.
  float* pools = nullptr;
  int64_t* pools_of = nullptr;
  int pool_stride = 0;
  // Per feature of the plan, in the order of groups, 1: its vector goes into X at a request's first sample of these
  // only (RequestColumns). Null with `pools`.
  const uint8_t* once = nullptr;
};

// What reduce reads: gradients of the loss at the model's input, for `n` samples.
struct Upstream {
  const float* dx = nullptr;       // (n, stride) of the columns from vectors_from on; null: none
  int stride = 0;                  // floats
  const float* scalars = nullptr;  // (n, plan.scalars)
  const float* sums = nullptr;     // as gathered
  const float* c = nullptr;        // (n,) of FM's output; null: no FM
  float* pooled = nullptr;         // scratch as in Gathered
};

struct LayerView {
  int inputs;               // K, a multiple of 16
  int outputs;              // N, a multiple of 16
  const float* weights;     // (K, N)
  const float* bias;        // (N,)
  const float* panels;      // weights packed for the forward product
  const float* transposed;  // rows from `back_from` on, transposed and packed, for the backward product
  int back_from;            // first input whose gradient is wanted, a multiple of 16
  float* d_weights;         // (K, N) accumulated; null: not wanted
  float* d_bias;            // (N,)
};

struct MlpView {
  std::vector<LayerView> layers;  // hidden layers, ReLU each; may be empty
  int inputs;                     // of the head
  int outputs;                    // L
  const float* head;              // (L, inputs)
  float* d_head;                  // (L, inputs); null: not wanted
};

// Activations of one chunk; `Mode` elements unless said otherwise. Strides are outputs + kStridePad.
struct MlpScratch {
  std::vector<void*> hidden;       // per layer (kChunk, stride)
  std::vector<void*> delta;        // per layer (kChunk, stride)
  std::vector<void*> delta_pairs;  // kBf16: per layer its delta, rows interleaved in pairs and packed
  std::vector<void*> input_pairs;  // kBf16: per layer its input, rows interleaved in pairs
  float* last = nullptr;           // (kChunk, stride of the last layer) fp32
};

struct ColumnRange {  // [begin, end) of X, both even: kBf16 takes columns in pairs
  int begin, end;
};

// Where the columns of X lie that samples of a request share: the first layer's part of these is the same for all.
struct RequestColumns {
  std::vector<ColumnRange> shared, own;  // of a request, of a sample
  std::vector<int32_t> request_of;       // (kChunk,) request of each sample of the chunk, counted from 0
  std::vector<int32_t> firsts;           // (kChunk,) first sample of each request
  int requests = 0;                      // of the chunk
  float* partial = nullptr;              // (kChunk, outputs of the first layer + kStridePad) scratch
};

struct Kernels {
  const char* name;
  bool bf16;  // whether Mode::kBf16 may be used

  void (*gather)(Mode mode, const InputPlan& plan, const BatchView& batch, const Standard& standard, int64_t first,
                 int n, const Gathered& out);
  // Adds the samples' row gradients; `csum[g]` (U) collects Σc of single-valued occurrences, see finish_reduce.
  void (*reduce)(const InputPlan& plan, const BatchView& batch, int64_t first, int n, const Upstream& up,
                 float* const* csum);
  // Subtracts v · Σc.
  void (*finish_reduce)(const GroupPlan& plan, const GroupView& group, const float* csum);

  // x (n, stride) → logits (n, L). Activations are written to rows [row, row + n) of the scratch. With `of`, columns
  // that a request's samples share are read at its first sample, and are multiplied before the others.
  void (*mlp_forward)(Mode mode, const MlpView& mlp, const MlpScratch& scratch, int row, const void* x, int stride,
                      int n, const RequestColumns* of, float* logits);
  // d_logits (n, L) → gradients of head and biases (added), deltas in the same rows of the scratch, and dx (n,
  // dx_stride), columns from `back_from` of the first layer.
  void (*mlp_backward)(Mode mode, const MlpView& mlp, const MlpScratch& scratch, int row, const void* x, int stride,
                       int n, const float* d_logits, float* dx, int dx_stride);
  // Adds the gradients of the hidden layers' weights over rows [0, n) of the scratch, whose inputs are x (n, stride).
  void (*mlp_gradients)(Mode mode, const MlpView& mlp, const MlpScratch& scratch, const void* x, int stride, int n);
  // Rows [from, to), multiples of 16, of (K, N) weights → panels and transposed panels of a layer.
  void (*pack)(Mode mode, const float* weights, int inputs, int outputs, int back_from, int from, int to, float* panels,
               float* transposed);
  // p -= lr · m̂ / (√v̂ + epsilon) over [0, n), n a multiple of 16. The gradient is the lanes' sum, which `inverse` makes
  // a mean; each lane's is zeroed. `b1` and `b2` are the decays of mean and variance; with a `b2` of 1
  // the variance stays as it is.
  bool (*adam)(float* p, float* m, float* v, float* const* g, int lanes, int64_t n, float inverse, float rate,
               float root_correction, float epsilon, float b1, float b2);
  void (*add)(float* into, const float* from, int64_t n);
  // sigmoid and softplus of n logits: p = 1/(1+e^-z), s = log(1+e^z).
  void (*logistic)(const float* z, float* p, float* s, int64_t n);
};

// The best table for this processor. A test may ask for another one by name: "x86-64-v4", "x86-64-v3", "plain", …
const Kernels& kernels();
const Kernels* kernels_named(const char* name);  // null if unknown or not supported by this processor
std::vector<const char*> kernel_names();         // supported here, best first

// Floats that hold a (rows, columns) operand packed in panels of 64 columns.
constexpr int64_t panel_floats(int64_t rows, int64_t columns) { return rows * ((columns + 63) / 64) * 64; }

}  // namespace freshet
