#include "freshet/hedge.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "freshet/optim.hpp"
#include "hedge_start.hpp"

namespace freshet {
namespace {

// From so many values of a dense column on, a step adds at most so many times its sum of squares about the mean: one
// wild value (1e9) would make all others alike for ever. A column at a new level is followed within some tens of steps.
constexpr double kDenseRowsKnown = 256.0, kDenseGrowth = 3.0;

// Added to the variance: a column that never changes standardises to 0.
constexpr double kVarianceFloor = 1e-12;

// Adagrad's step sizes of the small weights, one setting for all streams (ADR 0023).
constexpr double kStackRate = 0.02, kLinearRate = 0.1, kCountBiasRate = 0.05, kCountScaleRate = 0.02;

MlpShape shape_of(const HedgePlan& plan) {
  if (!plan.mlp) return {0, 0, {}, 0};
  return {plan.input.width, plan.input.vectors_from, plan.hidden, static_cast<int>(plan.losses.size())};
}

void check_plan(const HedgePlan& plan) {
  check(plan.input);
  const int L = static_cast<int>(plan.losses.size());
  if (L < 1 || L > 255 || plan.experts.empty())
    throw std::invalid_argument("hedge plan: expected 1 to 255 labels and an expert");
  for (const int width : plan.hidden)
    if (width < 16 || width % 16) throw std::invalid_argument("hedge plan: hidden widths must be multiples of 16");
  for (const ExpertPlan& e : plan.experts) {
    if (e.scalar < -1 || (e.scalar >= 0 && e.scalar + L > plan.input.scalars))
      throw std::invalid_argument("hedge plan: an expert's scalars leave the run");
    if ((e.fm && !plan.fm) || (e.mlp && !plan.mlp))
      throw std::invalid_argument("hedge plan: an expert uses a part that is off");
    if (e.counts && e.scalar < 0) throw std::invalid_argument("hedge plan: the expert counts needs a scalar");
    if (e.stack && (&e != &plan.experts.back() || plan.experts.size() < 2))
      throw std::invalid_argument("hedge plan: the stack is the last of several experts");
  }
}

std::vector<float*> gradients_of(const std::vector<HedgeLane*>& lanes) {
  std::vector<float*> gradients;
  for (HedgeLane* lane : lanes) gradients.push_back(lane->mlp.gradients.data());
  return gradients;
}

Mode mode_of(bool bf16, const Kernels& kernels) {
  return !bf16 ? Mode::kFloat : kernels.bf16 ? Mode::kBf16 : Mode::kRounded;
}

}  // namespace

HedgeSums::HedgeSums(int l, int k, int d, int h)
    : all(static_cast<size_t>(1 + 3 * l + 2 * l * k + 3 * d + l * h), 0.0),
      labels(l),
      experts(k),
      dense_columns(d),
      heads(h) {}

bool HedgePlan::has_linear() const {
  return std::any_of(experts.begin(), experts.end(), [](const ExpertPlan& e) { return e.linear; });
}

HeadsLayout::HeadsLayout(const HedgePlan& plan) {
  for (size_t k = 0; k < plan.experts.size(); ++k) {
    const ExpertPlan& e = plan.experts[k];
    linear_of.push_back(e.linear ? linears++ : -1);
    if (e.counts) counts_expert = static_cast<int>(k);
    if (e.stack) stack_expert = static_cast<int>(k);
  }
  if (stack_expert >= 0) stacked = static_cast<int>(plan.experts.size()) - 1;
  if (linears > 0) {
    columns = static_cast<int>(plan.input.dense.size());
    for (const DensePlan& d : plan.input.dense) columns += d.flag >= 0;
  }
  if (counts_expert >= 0)
    for (const GroupPlan& g : plan.input.groups) features += g.count_slot < 0 ? 0 : static_cast<int>(g.features.size());
  linear_at = stacked;
  bias_at = linear_at + linears * columns;
  scale_at = bias_at + features * kCountBuckets;
  size = scale_at + features * kCountBuckets;
}

HedgeModel::HedgeModel(HedgePlan plan, bool training, bool bf16, const Kernels& k)
    : mlp((check_plan(plan), shape_of(plan)), mode_of(bf16, k), training, k),
      kernels(k),
      plan_(std::move(plan)),
      heads_(plan_),
      training_(training) {
  const size_t L = plan_.losses.size(), LK = L * plan_.experts.size(), D = plan_.input.dense.size();
  state.bias.assign(LK, 0.0f);
  state.bias_squares.assign(LK, 0.0);
  state.loss.assign(LK, 0.0);
  state.started.assign(L, 0.0);
  state.scale.assign(L, 1.0);
  state.label_sums.assign(3 * L, 0.0);
  state.dense.assign(3 * D, 0.0);
  const size_t H = static_cast<size_t>(heads_.size);
  state.heads.assign(L * H, 0.0f);
  state.heads_squares.assign(L * H, 0.0);
  for (size_t l = 0; l < L; ++l) {
    std::fill_n(&state.heads[l * H], heads_.stacked, heads_.stacked ? 1.0f / static_cast<float>(heads_.stacked) : 0.0f);
    std::fill_n(state.heads.begin() + static_cast<ptrdiff_t>(l * H) + heads_.scale_at, heads_.features * kCountBuckets,
                1.0f);
  }
  refresh();
}

void HedgeModel::refresh_heads() {
  const int L = labels(), K = experts();
  mixture_.assign(static_cast<size_t>(L) * K, 0.0f);
  for (int l = 0; l < L; ++l) {
    const double* loss = &state.loss[l * K];
    const double least = *std::min_element(loss, loss + K);
    double total = 0.0;
    for (int k = 0; k < K; ++k) total += std::exp(least - loss[k]);
    for (int k = 0; k < K; ++k) mixture_[l * K + k] = static_cast<float>(std::exp(least - loss[k]) / total);
  }
  const size_t D = plan_.input.dense.size();
  dense_mean_.assign(D, 0.0);
  dense_scale_.assign(D, 0.0);  // nothing is known of a column that was never seen: it reads 0
  for (size_t d = 0; d < D; ++d) {
    const double* seen = &state.dense[3 * d];
    dense_mean_[d] = seen[1];
    if (seen[0] > 1.0) dense_scale_[d] = 1.0 / std::sqrt(std::max(seen[2], 0.0) / seen[0] + kVarianceFloor);
  }
}

void HedgeModel::refresh() {
  // Versions from before gradients were checked may hold an infinite moment, which stops its weight for ever.
  for (std::vector<double>* squares : {&state.bias_squares, &state.heads_squares})
    for (double& x : *squares)
      if (!std::isfinite(x)) x = 0.0;
  const auto first = mlp.first_moment(), second = mlp.second_moment();
  for (size_t i = 0; i < first.size(); ++i)
    if (!std::isfinite(first[i]) || !std::isfinite(second[i])) first[i] = second[i] = 0.0f;
  refresh_heads();
  if (plan_.mlp) mlp.pack();
}

void HedgeModel::start_label(int l, const double* seen) {
  double* before = &state.label_sums[3 * l];
  const Start start = start_of(plan_.losses[l], before, seen);
  for (int k = 0; k < 3; ++k) before[k] += seen[k];
  state.scale[l] = start.scale;
  state.started[l] = start.known ? 1.0 : 0.0;
  std::fill_n(&state.bias[l * experts()], experts(), start.bias);
  if (heads_.stack_expert >= 0) state.bias[l * experts() + heads_.stack_expert] = 0.0f;  // it reads the others' biases
}

void HedgeModel::step_label(int l, HedgeSums& sums) {
  const int K = experts();
  const double rows = sums.label(l)[0];
  if (rows <= 0.0) return;
  double* loss = &state.loss[l * K];
  const double discount = std::pow(plan_.discount, rows);
  for (int k = 0; k < K; ++k) loss[k] = loss[k] * discount + sums.loss(l)[k];
  const double least = *std::min_element(loss, loss + K);
  for (int k = 0; k < K; ++k) loss[k] -= least;
  if (state.started[l] == 0.0) return start_label(l, sums.label(l));
  step_heads(l, sums);
  for (int k = 0; k < K; ++k) {
    if (k == heads_.stack_expert) continue;
    const double g = sums.gradient(l)[k];
    double& squares = state.bias_squares[l * K + k];
    squares += g * g;
    if (squares > 0.0) state.bias[l * K + k] -= static_cast<float>(plan_.bias_rate * g / std::sqrt(squares));
  }
}

// Adagrad for the small weights of a label.
void HedgeModel::step_heads(int l, HedgeSums& sums) {
  const auto step = [&](int from, int to, double rate) {
    float* weights = &state.heads[static_cast<size_t>(l) * heads_.size];
    double* squares = &state.heads_squares[static_cast<size_t>(l) * heads_.size];
    const double* gradients = sums.head(l);
    for (int i = from; i < to; ++i) {
      const double g = gradients[i];
      if (g == 0.0) continue;
      squares[i] += g * g;
      if (squares[i] > 0.0) weights[i] -= static_cast<float>(rate * g / std::sqrt(squares[i]));
    }
  };
  if (!heads_.size) return;
  step(0, heads_.linear_at, kStackRate);
  step(heads_.linear_at, heads_.bias_at, kLinearRate);
  step(heads_.bias_at, heads_.scale_at, kCountBiasRate);
  step(heads_.scale_at, heads_.size, kCountScaleRate);
}

void HedgeModel::begin_step(const std::vector<HedgeLane*>& lanes) {
  if (!training_) throw std::logic_error("this model was built for serving: it cannot step");
  if (lanes.empty()) throw std::invalid_argument("a step needs at least one lane");
  HedgeSums& all = lanes.front()->sums;
  for (size_t i = 1; i < lanes.size(); ++i)
    for (size_t j = 0; j < all.all.size(); ++j) all.all[j] += lanes[i]->sums.all[j];
  const double rows = all.rows();
  frozen_ = std::exchange(freeze_next_, false);
  // A step of few rows is a small one. Were each a mean of its own rows, a click that comes alone would count as much
  // as the hundreds of negatives that come together: predictions of several times the truth were seen. Adam's epsilon
  // is divided as a row's gradient is: a step of few rows would be the smaller the larger batches may be.
  over_ = rows > 0.0 ? std::max(rows, static_cast<double>(plan_.batch_rows)) : 0.0;
  if (rows > 0.0) {
    state.step += 1;
    if (!frozen_) state.variance_step += 1;
    for (int l = 0; l < labels(); ++l) step_label(l, all);
    for (size_t d = 0; d < plan_.input.dense.size(); ++d) {  // Chan et al. 1979: merge counts, means and squares
      double* seen = &state.dense[3 * d];
      const double* more = all.dense(static_cast<int>(d));
      if (more[0] <= 0.0) continue;
      double away = more[1] / more[0];
      const double total = seen[0] + more[0];
      double squares = more[2] - more[1] * away + away * away * seen[0] * more[0] / total;
      const double most = kDenseGrowth * seen[2];
      if (seen[0] >= kDenseRowsKnown && seen[2] > kVarianceFloor * seen[0] && squares > most) {
        away *= std::sqrt(most / squares);
        squares = most;
      }
      seen[2] = std::max(seen[2] + squares, 0.0);  // equal numbers have rounding errors only, below 0 too
      seen[1] += away * more[0] / total;
      seen[0] = total;
    }
    refresh_heads();
  }
  for (HedgeLane* lane : lanes) std::fill(lane->sums.all.begin(), lane->sums.all.end(), 0.0);
}

void HedgeModel::step_part(const std::vector<HedgeLane*>& lanes, int part, int parts) {
  if (part < 0 || part >= parts) throw std::invalid_argument("a step's part must be one of its parts");
  if (!plan_.mlp) return;
  const double warm =
      std::min(1.0, static_cast<double>(state.step) / static_cast<double>(std::max<int64_t>(plan_.warmup_steps, 1)));
  const double epsilon = 1e-8 / static_cast<double>(std::max<int64_t>(plan_.batch_rows, 1));
  const AdamStep adam{state.step, state.variance_step, frozen_, plan_.dense_rate * warm, plan_.momentum, epsilon};
  if (!mlp.step(gradients_of(lanes), over_, adam, part, parts) && not_finite_step_.exchange(state.step) != state.step)
    not_finite_steps++;  // by one part of the step alone
}

void HedgeModel::step(const std::vector<HedgeLane*>& lanes) {
  begin_step(lanes);
  step_part(lanes, 0, 1);
}

bool HedgeModel::finite() const {
  const auto all = [](const auto& values) {
    return std::all_of(values.begin(), values.end(), [](auto x) { return std::isfinite(x); });
  };
  Mlp& own = const_cast<HedgeModel*>(this)->mlp;
  return all(state.bias) && all(state.heads) && all(state.loss) && all(state.scale) && all(state.dense) &&
         all(state.bias_squares) && all(state.heads_squares) && all(own.weights()) && all(own.first_moment()) &&
         all(own.second_moment());
}

}  // namespace freshet
