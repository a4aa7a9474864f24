// The inputs of the dense part: where rows go in the model's input, and a batch.
// Letters: B samples, L labels, K experts, D dense columns, U unique rows of a group, S float slots of a row.
#pragma once

#include <cstdint>
#include <vector>

namespace freshet {

class RowLayout;

// One feature of a store group. A list is pooled: its rows' vectors and scalars are summed, or averaged over the
// elements that have a row.
struct FeaturePlan {
  int column = -1;    // first column of the input that takes its vector; -1: none
  bool mean = false;  // pooling of a list
};

// The places of the model's inputs in a group's rows. Scalars of all experts form one canonical run per sample
// ([wide L][cross L][linear L], those that exist); a group's rows hold a contiguous part of it.
struct GroupPlan {
  int slots = 0;         // S
  int scalar_slot = 0;   // first scalar in the row
  int scalar_first = 0;  // its place in the canonical run
  int scalars = 0;       // how many the row holds
  int vector_slot = 0;   // first float of the vector in the row
  int dim = 0;           // length of the vector; 0: none is read
  int count_slot = -1;   // float with the count of the row's steps (Rule::count); -1: none
  int sum = -1;          // first float of this dim's FM sum; groups of equal dim share one; -1: no FM
  std::vector<FeaturePlan> features;
};

struct DensePlan {
  bool standard = false;  // standardised by running mean and deviation
  int flag = -1;          // column of the input that is 1 where the number is missing; -1: none
};

// The input of the MLP: [dense values | missing flags | zeros to 16 | vectors | zeros to 16].
struct InputPlan {
  int width = 0;         // columns, a multiple of 16
  int vectors_from = 0;  // first column of vectors, a multiple of 16
  int scalars = 0;       // length of the canonical run
  int sums = 0;          // floats of all FM sums
  std::vector<DensePlan> dense;
  std::vector<GroupPlan> groups;
};

// One group's part of a batch. Occurrences are feature-major (freshet.model.inputs.GroupInputs).
struct GroupView {
  const float* rows = nullptr;         // (U, S)
  int64_t unique = 0;                  // U
  const int32_t* positions = nullptr;  // (N,) row of each occurrence; -1: no row
  int64_t occurrences = 0;             // N
  const uint32_t* starts = nullptr;    // (features + 1,)
  std::vector<const uint32_t*> ends;   // per feature: null, or (B,) ends of each sample's list
  // (features,) 1: the feature has one occurrence, or list, a request and not a sample. Null: none has. Serving only.
  const uint8_t* shared = nullptr;
  float* gradients = nullptr;        // (U, S), written whole; null when serving
  const int32_t* targets = nullptr;  // (N,) gradient row of each occurrence; null: its position
  // Copies of the rows that the lane may step within a batch, as the store will: `copies` is what `rows` points at.
  // Null: the batch is one step.
  const RowLayout* layout = nullptr;
  float* copies = nullptr;  // (U, S)
  float* states = nullptr;  // (U, T) their optimiser state
};

struct BatchView {
  int64_t size = 0;  // B
  std::vector<GroupView> groups;
  const uint32_t* request_ends = nullptr;  // (R,) where each request's samples end; null: nothing is shared
  int64_t requests = 0;                    // R
  const float* dense = nullptr;            // (B, D), NaN where missing
  const uint8_t* label = nullptr;          // (B,) or null when serving
  const float* value = nullptr;            // (B,)
  const float* weight = nullptr;           // (B,)
};

// Throws std::invalid_argument, which names the fault, unless every index of the batch is inside its arrays.
void check(const InputPlan& plan, const BatchView& batch, int labels);

// Throws std::invalid_argument unless the plan's columns and slots stay inside rows, input and canonical run.
void check(const InputPlan& plan);

}  // namespace freshet
