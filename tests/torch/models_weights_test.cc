// Weights as files: what is written is what is read, and a file that does not fit changes nothing
// and is refused in one message. Batches as tensors.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/models/weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "expect_error.h"
#include "torch/small_models.h"

namespace lln_torch {
namespace {

using lln::test::expect_error;

Task class_task(std::int64_t classes) {
  Task task{.name = "test", .kind = TaskKind::classes, .classes = classes};
  task.vocabulary = kVocabulary;
  task.max_tokens = 16;
  return task;
}

std::string test_file(const std::string& name) {
  return (std::filesystem::path(testing::TempDir()) / name).string();
}

NamedTensors copies(const torch::nn::Module& module) {
  NamedTensors tensors = named_weights(module);
  for (auto& [name, tensor] : tensors) tensor = tensor.detach().clone();
  return tensors;
}

void change(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : named_weights(module)) tensor.add_(1);
}

void expect_same(const NamedTensors& found, const NamedTensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    EXPECT_TRUE(at::equal(found.at(name), tensor)) << name;
  }
}

// Buffers too: running moments are f64.
TEST(Weights, RoundTrip) {
  const auto model = small_model(class_task(4), "", "name = 'lln'\nmatching = 'ema'");
  const NamedTensors before = copies(*model);
  EXPECT_TRUE(before.contains("body.stack.layers.1.attention.running"));
  const std::string path = test_file("round_trip.safetensors");
  save_weights(*model, path);
  change(*model);
  load_weights(*model, path);
  expect_same(copies(*model), before);
}

TEST(Weights, SixteenBitsAreRead) {
  const auto model = small_model(class_task(4), "", "name = 'softmax'");
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    NamedTensors rounded = copies(*model);
    for (auto& [name, tensor] : rounded) tensor = tensor.to(type);
    const std::string path = test_file("sixteen.safetensors");
    write_tensors(rounded, path);
    change(*model);
    load_weights(*model, path);
    for (auto& [name, tensor] : rounded) tensor = tensor.to(at::kFloat);
    expect_same(copies(*model), rounded);
  }
}

TEST(Weights, EveryFaultInOneMessage) {
  const auto model = small_model(class_task(4), "", "name = 'softmax'");
  NamedTensors tensors = copies(*model);
  tensors.erase("head.output.bias");
  tensors["body.tokens.weight"] = at::zeros({kVocabulary + 1, 24});
  tensors["body.more"] = at::zeros({2});
  const std::string path = test_file("faults.safetensors");
  write_tensors(tensors, path);
  const NamedTensors before = copies(*model);
  expect_error([&] { load_weights(*model, path); },
               {path, "head.output.bias is missing", "body.more is unexpected",
                "body.tokens.weight is [41, 24], expected [40, 24]"},
               lln::ErrorCode::io);
  expect_same(copies(*model), before);
  expect_error([&] { load_weights(*model, test_file("absent.safetensors")); }, {"absent"},
               lln::ErrorCode::io);
}

TEST(Weights, TheBodyUnderAnotherHead) {
  const auto first = small_model(class_task(4), "", "name = 'lln+diag'");
  const auto second = small_model(class_task(7), "head = 'mlp'", "name = 'lln+diag'");
  change(*second);
  const std::string path = test_file("body.safetensors");
  save_weights(*first, path);
  const NamedTensors before = copies(*second);
  load_body(*second, path);
  const NamedTensors source = copies(*first);
  for (const auto& [name, tensor] : copies(*second)) {
    EXPECT_TRUE(at::equal(tensor, name.starts_with("body.") ? source.at(name) : before.at(name)))
        << name;
  }
  const auto longer = small_model(class_task(4), "max_tokens = 20", "name = 'lln+diag'");
  expect_error([&] { load_body(*longer, path); },
               {"body.positions.weight is [16, 24], expected [20, 24]"}, lln::ErrorCode::io);
}

TEST(ToTensors, ShapesAndFaults) {
  Batch batch;
  batch.rows = 2;
  batch.text = {.tokens = 3, .ids = {1, 2, 3, 4, 5, 6}, .mask = {1, 1, 1, 1, 0, 0}};
  batch.labels = {7, 8};
  TensorBatch tensors = to_tensors(batch, at::kCPU);
  EXPECT_EQ(tensors.ids.scalar_type(), at::kLong);
  EXPECT_TRUE(at::equal(tensors.ids, at::tensor({1, 2, 3, 4, 5, 6}, at::kLong).view({2, 3})));
  EXPECT_EQ(tensors.mask.scalar_type(), at::kBool);
  EXPECT_EQ(tensors.mask.sum().item<std::int64_t>(), 4);
  EXPECT_EQ(tensors.labels.sizes(), (std::vector<std::int64_t>{2}));
  EXPECT_FALSE(tensors.segments.defined());
  EXPECT_FALSE(tensors.pixels.defined());
  batch.labels = {-100, 1, 2, 3, -100, 5};
  EXPECT_EQ(to_tensors(batch, at::kCPU).labels.sizes(), (std::vector<std::int64_t>{2, 3}));
  // The tensors are their own: a batch may be filled again at once.
  batch.text.ids.assign(6, 0);
  EXPECT_EQ(tensors.ids.sum().item<std::int64_t>(), 21);
  batch.text.ids.pop_back();
  expect_error([&] { to_tensors(batch, at::kCPU); }, {"5 ids", "expected 6 for [2, 3]"});
}

}  // namespace
}  // namespace lln_torch
