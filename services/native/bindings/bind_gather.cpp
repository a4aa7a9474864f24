#include <algorithm>
#include <cstring>

#include "freshet/mlp.hpp"
#include "model_batch.hpp"

namespace freshet {
namespace {

// One thread's scratch to gather rows into a model's input and to bring its gradient back, for models that torch runs.
class InputLane {
 public:
  explicit InputLane(const InputTuple& from) : plan_(input_plan(from)) {
    int dim = 0;
    for (const GroupPlan& g : plan_.groups) dim = std::max(dim, g.dim);
    pooled_ = Floats(dim + plan_.scalars);
    csum_.assign(plan_.groups.size(), nullptr);
  }

  void gather(nb::list groups, In2<float> dense, In<double> mean, In<double> scale, float limit, Out2<float> x,
              Out2<float> scalars) {
    const int64_t size = static_cast<int64_t>(x.shape(0));
    if (x.shape(1) != static_cast<size_t>(plan_.width) || scalars.shape(0) != x.shape(0) ||
        scalars.shape(1) != static_cast<size_t>(plan_.scalars))
      throw std::invalid_argument("expected x (B, width) and scalars (B, scalars)");
    if (mean.shape(0) != plan_.dense.size() || scale.shape(0) != plan_.dense.size())
      throw std::invalid_argument("expected a mean and a scale for each dense column");
    Batch batch(plan_, groups, dense, size);
    nb::gil_scoped_release free;
    check(plan_, batch.view, 0);
    std::memset(x.data(), 0, sizeof(float) * x.size());
    Gathered out;
    out.x = x.data();
    out.stride = plan_.width;
    out.scalars = scalars.data();
    out.pooled = pooled_.data();
    kernels().gather(Mode::kFloat, plan_, batch.view, {mean.data(), scale.data(), limit}, 0, static_cast<int>(size),
                     out);
  }

  void reduce(nb::list groups, In2<float> dense, In2<float> dx, In2<float> d_scalars, nb::list gradients) {
    const int64_t size = static_cast<int64_t>(dx.shape(0));
    if (dx.shape(1) != static_cast<size_t>(plan_.width - plan_.vectors_from) || d_scalars.shape(0) != dx.shape(0) ||
        d_scalars.shape(1) != static_cast<size_t>(plan_.scalars))
      throw std::invalid_argument("expected dx (B, width - vectors_from) and d_scalars (B, scalars)");
    Batch batch(plan_, groups, dense, size);
    batch.write_to(plan_, gradients);
    nb::gil_scoped_release free;
    check(plan_, batch.view, 0);
    for (size_t g = 0; g < plan_.groups.size(); ++g)
      std::memset(batch.view.groups[g].gradients, 0,
                  sizeof(float) * static_cast<size_t>(batch.view.groups[g].unique * plan_.groups[g].slots));
    Upstream up;
    up.dx = dx.data();
    up.stride = plan_.width - plan_.vectors_from;
    up.scalars = d_scalars.data();
    up.pooled = pooled_.data();
    kernels().reduce(plan_, batch.view, 0, static_cast<int>(size), up, csum_.data());
  }

 private:
  InputPlan plan_;
  Floats pooled_;
  std::vector<float*> csum_;
};

}  // namespace

void bind_gather(nb::module_& m) {
  nb::class_<InputLane>(m, "InputLane", "One thread's scratch to gather rows into a torch model's input and back.")
      .def(nb::init<const InputTuple&>(), nb::arg("input"))
      .def("gather", &InputLane::gather, "Write x (B, width) and scalars (B, scalars).")
      .def("reduce", &InputLane::reduce, "Write each group's row gradients (U, S), summed over occurrences.");
}

}  // namespace freshet
