#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "freshet/hedge.hpp"
#include "freshet/row_steps.hpp"
#include "model_batch.hpp"

namespace freshet {
namespace {

const Kernels& chosen(const std::optional<std::string>& name) {
  if (!name) return kernels();
  if (const Kernels* table = kernels_named(name->c_str())) return *table;
  throw std::invalid_argument("kernels '" + *name + "' are unknown or this processor does not have them");
}

template <typename T>
auto array(nb::handle owner, T* data, size_t n) {
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {n}, owner));
}

nb::object named(nb::handle self, const std::string& name) {
  HedgeModel& m = nb::cast<HedgeModel&>(self);
  const auto all = [&](auto& values) { return array(self, values.data(), values.size()); };
  if (name == "weights") return array(self, m.mlp.weights().data(), m.mlp.weights().size());
  if (name == "first_moment") return array(self, m.mlp.first_moment().data(), m.mlp.first_moment().size());
  if (name == "second_moment") return array(self, m.mlp.second_moment().data(), m.mlp.second_moment().size());
  if (name == "bias") return all(m.state.bias);
  if (name == "bias_squares") return all(m.state.bias_squares);
  if (name == "loss") return all(m.state.loss);
  if (name == "started") return all(m.state.started);
  if (name == "scale") return all(m.state.scale);
  if (name == "label_sums") return all(m.state.label_sums);
  if (name == "dense") return all(m.state.dense);
  if (name == "heads") return all(m.state.heads);
  if (name == "heads_squares") return all(m.state.heads_squares);
  throw std::invalid_argument("the hedge has no array '" + name + "'");
}

void forward_backward(HedgeLane& lane, const HedgeModel& model, nb::list groups, In2<float> dense, In<uint8_t> label,
                      In<float> value, In<float> weight, bool learn_dense, nb::list gradients, Out2<float> predictions,
                      Out2<double> losses, Out<double> rows) {
  const size_t size = label.shape(0), L = model.labels(), K = model.experts();
  if (value.shape(0) != size || weight.shape(0) != size)
    throw std::invalid_argument("labels: index, value and weight differ in length");
  if (predictions.shape(0) != size || predictions.shape(1) != L || losses.shape(0) != L || losses.shape(1) != K ||
      rows.shape(0) != L)
    throw std::invalid_argument("expected predictions (B, L), losses (L, K) and rows (L,)");
  Batch batch(model.plan().input, groups, dense, static_cast<int64_t>(size));
  batch.write_to(model.plan().input, gradients);
  batch.view.label = label.data();
  batch.view.value = value.data();
  batch.view.weight = weight.data();
  nb::gil_scoped_release free;
  lane.forward_backward(batch.view, learn_dense, predictions.data(), losses.data(), rows.data());
}

// A batch whose rows a lane steps: its inputs and outputs, kept until it is done.
struct InSteps {
  Batch batch;
  std::vector<const RowSteps*> steps;
  std::vector<Out2<float>> copies, states;
  In<uint8_t> label;
  In<float> value, weight;
  Out2<float> predictions;
};

// Begin to train on a batch whose rows are stepped within it, in `copies` and with `states` of them.
InSteps* begin_steps(HedgeLane& lane, const HedgeModel& model, nb::list groups, In2<float> dense, In<uint8_t> label,
                     In<float> value, In<float> weight, bool learn_dense, bool dense_steps,
                     const std::vector<const RowSteps*>& steps, const std::vector<Out2<float>>& copies,
                     const std::vector<Out2<float>>& states, Out2<float> predictions) {
  const size_t size = label.shape(0), G = model.plan().input.groups.size();
  if (value.shape(0) != size || weight.shape(0) != size)
    throw std::invalid_argument("labels: index, value and weight differ in length");
  if (predictions.shape(0) != size || predictions.shape(1) != static_cast<size_t>(model.labels()))
    throw std::invalid_argument("expected predictions (B, L)");
  if (steps.size() != G || copies.size() != G || states.size() != G)
    throw std::invalid_argument("steps: expected layout, copies and states of each group");
  auto held = std::make_unique<InSteps>(InSteps{Batch(model.plan().input, groups, dense, static_cast<int64_t>(size)),
                                                steps, copies, states, label, value, weight, predictions});
  BatchView& view = held->batch.view;
  for (size_t g = 0; g < G; ++g) {
    GroupView& group = view.groups[g];
    const RowLayout& layout = steps[g]->layout();
    const size_t unique = static_cast<size_t>(group.unique),
                 slots = static_cast<size_t>(model.plan().input.groups[g].slots);
    if (layout.width() != slots || copies[g].shape(0) != unique || copies[g].shape(1) != slots)
      throw std::invalid_argument("steps: expected copies (U, S) as the group's rows");
    if (states[g].shape(0) != unique || states[g].shape(1) != layout.state_floats())
      throw std::invalid_argument("steps: expected states (U, " + std::to_string(layout.state_floats()) +
                                  ") of each row");
    group.layout = &layout;
    group.copies = copies[g].data();
    group.states = states[g].data();
  }
  view.label = label.data();
  view.value = value.data();
  view.weight = weight.data();
  nb::gil_scoped_release free;
  for (GroupView& group : view.groups) {
    const size_t unique = static_cast<size_t>(group.unique);
    std::copy_n(group.rows, unique * group.layout->width(), group.copies);
    group.layout->restore_counts(group.copies, group.states, unique);
    group.rows = group.copies;
  }
  lane.begin(view, learn_dense, true, held->predictions.data(), dense_steps);
  return held.release();
}

// Train up to the next dense step; whether the batch goes on after it. The batch must be the one that was begun last.
bool advance_steps(HedgeLane& lane, const InSteps&) {
  nb::gil_scoped_release free;
  if (lane.more()) lane.advance();
  return lane.more();
}

// Losses (L, K) and rows (L) of the batch; returns how many gradients each group has, for `take_steps`.
std::vector<size_t> end_steps(const HedgeLane& lane, const InSteps& batch, Out2<double> losses, Out<double> rows) {
  if (losses.shape(0) != lane.labels() || losses.shape(1) != lane.experts() || rows.shape(0) != lane.labels())
    throw std::invalid_argument("expected losses (L, K) and rows (L,)");
  lane.losses_of_batch(losses.data(), rows.data());
  std::vector<size_t> made;
  for (size_t g = 0; g < batch.steps.size(); ++g) made.push_back(lane.gradients(g).starts.back());
  return made;
}

// The gradients that the batch has made of a group, (G, S), and how many each row has, (U,).
void take_steps(const HedgeLane& lane, size_t group, Out<uint32_t> counts, Out2<float> gradients) {
  const StepGradients& made = lane.gradients(group);
  if (counts.shape(0) + 1 != made.starts.size() || gradients.size() != made.values.size())
    throw std::invalid_argument("steps: expected counts (U,) and gradients (G, S)");
  for (size_t r = 0; r + 1 < made.starts.size(); ++r) counts.data()[r] = made.starts[r + 1] - made.starts[r];
  std::copy(made.values.begin(), made.values.end(), gradients.data());
}

void score(HedgeLane& lane, const HedgeModel& model, nb::list groups, In2<float> dense, Out2<float> predictions,
           const std::optional<std::tuple<In<uint32_t>, std::vector<In<uint8_t>>>>& requests) {
  if (predictions.shape(1) != static_cast<size_t>(model.labels()))
    throw std::invalid_argument("expected predictions (B, L)");
  std::optional<Sharing> sharing;
  if (requests) sharing = Sharing{std::get<0>(*requests), std::get<1>(*requests)};
  Batch batch(model.plan().input, groups, dense, static_cast<int64_t>(predictions.shape(0)),
              sharing ? &*sharing : nullptr);
  nb::gil_scoped_release free;
  lane.score(batch.view, predictions.data());
}

}  // namespace

void bind_model(nb::module_& m) {
  m.def("kernel_names", &kernel_names,
        "Instruction sets of the dense part's hot loops that this processor has, best first.");

  nb::class_<HedgeModel>(m, "HedgeModel", "Dense state of the default model, shared by its lanes.")
      .def(
          "__init__",
          [](HedgeModel* self, const InputTuple& input, const std::vector<int>& losses, const std::vector<bool>& early,
             const std::vector<std::tuple<int, bool, bool, float, bool, bool, bool>>& experts,
             const std::vector<int>& hidden, double discount, double dense_rate, double momentum, int64_t warmup_steps,
             int64_t batch_rows, double bias_rate, bool training, bool bf16,
             const std::optional<std::string>& kernels) {
            HedgePlan plan;
            plan.input = input_plan(input);
            for (const int loss : losses) plan.losses.push_back(static_cast<Loss>(loss));
            plan.early = early;
            for (const auto& [scalar, fm, mlp, share, linear, counts, stack] : experts) {
              plan.experts.push_back({scalar, fm, mlp, linear, counts, stack, share});
              plan.fm |= fm;
              plan.mlp |= mlp;
            }
            plan.hidden = hidden;
            plan.discount = discount;
            plan.dense_rate = dense_rate;
            plan.momentum = momentum;
            plan.warmup_steps = warmup_steps;
            plan.batch_rows = batch_rows;
            plan.bias_rate = bias_rate;
            new (self) HedgeModel(std::move(plan), training, bf16, chosen(kernels));
          },
          nb::kw_only(), nb::arg("input"), nb::arg("losses"), nb::arg("early"), nb::arg("experts"), nb::arg("hidden"),
          nb::arg("discount"), nb::arg("dense_rate"), nb::arg("momentum"), nb::arg("warmup_steps"),
          nb::arg("batch_rows") = 256, nb::arg("bias_rate"), nb::arg("training"), nb::arg("bf16"),
          nb::arg("kernels").none() = nb::none())
      .def(
          "array", [](nb::handle self, const std::string& name) { return named(self, name); },
          "A view of one flat array of the state; call refresh() after writing to it.")
      .def("refresh", &HedgeModel::refresh, nb::call_guard<nb::gil_scoped_release>(),
           "Take in what was written to the arrays.")
      .def("finite", &HedgeModel::finite, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "mixture", [](const HedgeModel& self) { return self.weights(); }, "Weights of the experts, (L · K).")
      .def(
          "step",
          [](HedgeModel& self, const std::vector<HedgeLane*>& lanes) {
            nb::gil_scoped_release free;
            self.step(lanes);
          },
          "One update from the sums of the lanes, which are zeroed. Not while a lane runs.")
      .def("begin_step", &HedgeModel::begin_step,
           "The small things of a step, in a few microseconds; then every part once.")
      .def(
          "step_part",
          [](HedgeModel& self, const std::vector<HedgeLane*>& lanes, int part, int parts) {
            nb::gil_scoped_release free;
            self.step_part(lanes, part, parts);
          },
          "A part of the step that has begun; several threads may take theirs at the same time.")
      .def_prop_rw(
          "steps", [](const HedgeModel& self) { return self.state.step; },
          [](HedgeModel& self, int64_t n) { self.state.step = n; })
      .def_prop_rw(
          "variance_steps", [](const HedgeModel& self) { return self.state.variance_step; },
          [](HedgeModel& self, int64_t n) { self.state.variance_step = n; }, "Steps that moved Adam's second moment.")
      .def_prop_ro(
          "not_finite",
          [](const HedgeModel& self) {
            return nb::make_tuple(self.not_finite_samples.load(), self.not_finite_steps.load());
          },
          "Samples that taught nothing, and steps with gradients of the MLP that counted as 0: a square was not "
          "finite.")
      .def("freeze_variance", &HedgeModel::freeze_variance,
           "The next step, and no other, leaves Adam's second moment as it is.")
      .def_prop_ro("kernels", [](const HedgeModel& self) { return self.kernels.name; });

  m.def(
      "dense_steps",
      [](int64_t rows, int64_t step) {
        int64_t steps = 0;
        for (int64_t b = 0; b < rows; ++steps) b += dense_rows(step + steps);
        return steps;
      },
      "Dense steps of a batch of so many rows that begins after so many.");

  nb::class_<InSteps>(m, "InSteps", "A batch that a lane steps rows of.");

  nb::class_<HedgeLane>(m, "HedgeLane", "One thread's scratch and gradient sums.")
      .def(nb::init<const HedgeModel&, bool>(), nb::keep_alive<1, 2>(), nb::arg("model"), nb::arg("training"))
      .def("forward_backward", &forward_backward)
      .def("begin_steps", &begin_steps, nb::rv_policy::take_ownership)
      .def("advance_steps", &advance_steps)
      .def("end_steps", &end_steps)
      .def("take_steps", &take_steps)
      .def("score", &score, nb::arg("model"), nb::arg("groups"), nb::arg("dense"), nb::arg("predictions"),
           nb::arg("requests").none() = nb::none(),
           "Predict; `requests` is (ends of each request's samples, per group which features have one occurrence a "
           "request).")
      .def("add", &HedgeLane::add, nb::call_guard<nb::gil_scoped_release>(), "Take another lane's sums and zero them.")
      .def("clear", &HedgeLane::clear, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "gradients",
          [](nb::handle self) {
            HedgeLane& lane = nb::cast<HedgeLane&>(self);
            return array(self, lane.mlp.gradients.data(), static_cast<size_t>(lane.mlp.gradients.size()));
          },
          "View of the flat weight gradients, summed over rows.")
      .def(
          "sums",
          [](nb::handle self) {
            HedgeLane& lane = nb::cast<HedgeLane&>(self);
            return array(self, lane.sums.all.data(), lane.sums.all.size());
          },
          "View of the other sums: rows, labels, losses, bias gradients, dense columns.");
}

}  // namespace freshet
