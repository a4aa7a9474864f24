// Steps of rows outside a store, as the store would step them: copies with their optimiser state.
#pragma once

#include <vector>

#include "freshet/optim.hpp"
#include "freshet/store.hpp"

namespace freshet {

// For one store group. Values are float32, whatever the precision of the store. Any thread may use it.
class RowSteps {
 public:
  explicit RowSteps(const std::vector<SlotSpec>& slots) : layout_(slots, false, false) {}

  const RowLayout& layout() const { return layout_; }

  // Step the rows of `mine`, values (n, S) and states (n, T), that are in `theirs` too, by the gradients (m, S) of
  // those; returns how many steps were made: none by a gradient that is not finite. Keys are sorted by bucket, (buckets
  // + 1) starts; those of `mine` are unique by (table, key), those of `theirs` stand one behind the other, a gradient
  // for each step.
  size_t step(const Keys& mine, float* values, float* states, const Keys& theirs, const float* gradients,
              uint32_t buckets) const;

 private:
  RowLayout layout_;
};

}  // namespace freshet
