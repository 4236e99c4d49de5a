// Parts of the training loop: schedules, AdamW and clipping, logs, and checkpoints whose every
// write fails once.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "expect_error.h"
#include "io/scratch_folder.h"
#include "lln_torch/train/checkpoint.h"
#include "lln_torch/train/json_lines.h"
#include "lln_torch/train/optimizer.h"
#include "lln_torch/train/run_folder.h"
#include "lln_torch/train/schedule.h"

namespace lln_torch {
namespace {

namespace fs = std::filesystem;
using lln::test::expect_error;
using testing::ElementsAre;
using testing::HasSubstr;

class Scratch : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.file(name); }
  lln::io::ScratchFolder folder_;
};

void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// ---- Schedules ---------------------------------------------------------------------------------

TEST(Schedule, WarmupEndsAtThePeak) {
  const Schedule s{.shape = "linear", .peak = 2, .warmup = 4, .steps = 12};
  EXPECT_DOUBLE_EQ(learning_rate(s, 0), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(s, 3), 2);
  EXPECT_DOUBLE_EQ(learning_rate(s, 4), 2);
  EXPECT_DOUBLE_EQ(learning_rate(s, 8), 1);
  EXPECT_DOUBLE_EQ(learning_rate(s, 11), 0.25);
  EXPECT_DOUBLE_EQ(learning_rate(s, 12), 0);
}

TEST(Schedule, LinearAndCosineEndAtTheirShare) {
  const Schedule linear{.shape = "linear", .peak = 1, .warmup = 0, .steps = 10, .final_share = 0.1};
  EXPECT_NEAR(learning_rate(linear, 10), 0.1, 1e-12);
  const Schedule cosine{.shape = "cosine", .peak = 1, .warmup = 0, .steps = 10, .final_share = 0.1};
  EXPECT_NEAR(learning_rate(cosine, 5), 0.55, 1e-12);
  EXPECT_NEAR(learning_rate(cosine, 10), 0.1, 1e-12);
}

// Values of torch.optim.lr_scheduler.OneCycleLR(max_lr=1, total_steps=11, pct_start=0.4), which
// puts its peak at pct_start * total_steps - 1.
TEST(Schedule, OneCycle) {
  const Schedule s{.shape = "one_cycle", .peak = 1, .warmup = 4, .steps = 11};
  EXPECT_NEAR(learning_rate(s, 0), 1 / 25.0, 1e-12);
  EXPECT_NEAR(learning_rate(s, 2), (1 + 1 / 25.0) / 2, 1e-12);
  EXPECT_NEAR(learning_rate(s, 4), 1, 1e-12);
  EXPECT_NEAR(learning_rate(s, 7), (1 + 1 / 250000.0) / 2, 1e-12);
  EXPECT_NEAR(learning_rate(s, 10), 1 / 250000.0, 1e-12);
}

TEST(Schedule, ConstantStays) {
  const Schedule s{.shape = "constant", .peak = 3, .warmup = 2, .steps = 5};
  EXPECT_DOUBLE_EQ(learning_rate(s, 0), 1.5);
  EXPECT_DOUBLE_EQ(learning_rate(s, 4), 3);
}

// ---- AdamW -------------------------------------------------------------------------------------

at::Tensor scalar(double value) { return at::full({}, value, at::kFloat); }

TEST(AdamW, EqualsTorchs) {
  at::manual_seed(1);
  torch::nn::Linear ours(7, 5), theirs(7, 5);
  {
    const at::NoGradGuard guard;
    theirs->weight.copy_(ours->weight);
    theirs->bias.copy_(ours->bias);
  }
  Optimizer optimizer(
      *ours,
      {.beta1 = 0.8, .beta2 = 0.95, .epsilon = 1e-6, .weight_decay = 0.1, .decay_all = true});
  torch::optim::AdamW expected(
      theirs->parameters(),
      torch::optim::AdamWOptions(1e-2).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1));
  for (int i = 0; i < 5; ++i) {
    const at::Tensor x = at::randn({3, 7});
    optimizer.zero_gradients();
    ours(x).square().sum().backward();
    optimizer.update(scalar(1e-2), scalar(0));
    expected.zero_grad();
    theirs(x).square().sum().backward();
    expected.step();
  }
  EXPECT_TRUE(at::allclose(ours->weight, theirs->weight, 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(ours->bias, theirs->bias, 1e-5, 1e-6));
}

TEST(Sgd, IsTheGradientTimesTheRate) {
  torch::nn::Linear layer(3, 2);
  const at::Tensor weight = layer->weight.detach().clone(), bias = layer->bias.detach().clone();
  Optimizer optimizer(*layer, {.kind = OptimizerKind::sgd, .weight_decay = 0.5});
  layer(at::full({1, 3}, 2.0)).sum().backward();
  optimizer.update(scalar(0.1), scalar(1));  // skipped
  EXPECT_TRUE(at::equal(layer->weight, weight));
  optimizer.update(scalar(0.1), scalar(0));
  EXPECT_TRUE(at::allclose(layer->weight, weight - 0.1 * (2 + 0.5 * weight)));
  EXPECT_TRUE(at::allclose(layer->bias, bias - 0.1));
  EXPECT_EQ(optimizer.state().size(), 1U);  // step
  EXPECT_EQ(optimizer.state().at("step").item<double>(), 1);
}

TEST(AdamW, MatricesAloneDecay) {
  torch::nn::Linear layer(2, 2);
  at::Tensor weight = layer->weight.detach().clone(), bias = layer->bias.detach().clone();
  Optimizer optimizer(*layer, {.weight_decay = 0.5});
  optimizer.zero_gradients();
  optimizer.update(scalar(0.1), scalar(0));
  EXPECT_TRUE(at::allclose(layer->weight, weight * (1 - 0.05)));
  EXPECT_TRUE(at::equal(layer->bias, bias));
}

TEST(AdamW, ChangesNothingWhereItIsToldToSkip) {
  torch::nn::Linear layer(3, 2);
  Optimizer optimizer(*layer, {});
  layer(at::ones({1, 3})).sum().backward();
  const at::Tensor before = layer->weight.detach().clone();
  optimizer.update(scalar(0.1), scalar(1));
  EXPECT_TRUE(at::equal(layer->weight, before));
  EXPECT_EQ(optimizer.state().at("step").item<double>(), 0);
}

TEST(AdamW, ClipsToTheNorm) {
  torch::nn::Linear layer(4, 3);
  Optimizer optimizer(*layer, {});
  layer(at::full({2, 4}, 5.0)).sum().backward();
  const double norm =
      at::cat({layer->weight.grad().flatten(), layer->bias.grad()}).norm().item<double>();
  EXPECT_NEAR(optimizer.clip(1e9).item<double>(), norm, 1e-4);
  EXPECT_NEAR(optimizer.clip(0.5).item<double>(), norm, 1e-4);
  const double clipped =
      at::cat({layer->weight.grad().flatten(), layer->bias.grad()}).norm().item<double>();
  EXPECT_NEAR(clipped, 0.5, 1e-4);
}

// ---- Logs --------------------------------------------------------------------------------------

TEST_F(Scratch, LogsAreCutBack) {
  const std::string file = path("log.jsonl");
  {
    JsonLines log(file);
    for (int step = 1; step <= 4; ++step) log.append({{"step", step}, {"loss", 1.0 / step}});
  }
  write_text(path("copy"), "");
  std::ofstream(file, std::ios::app) << "{\"step\": 5, \"lo";  // as a killed run leaves it
  EXPECT_EQ(read_json_lines(file).size(), 4U);
  cut_back(file, 2);
  const auto rows = read_json_lines(file);
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[1]["step"], 2);
  JsonLines(file).append({{"step", 3}});
  EXPECT_EQ(read_json_lines(file).size(), 3U);
}

TEST_F(Scratch, LogsWithOtherLinesAreRefused) {
  write_text(path("log.jsonl"), "{\"step\": 1}\nnonsense\n");
  expect_error([&] { read_json_lines(path("log.jsonl")); }, {"log.jsonl:2", "nonsense"},
               lln::ErrorCode::io);
}

TEST_F(Scratch, OneProcessARun) {
  const RunFolder run(path("run/"));
  run.make();
  const RunLock lock(run);
  expect_error([&] { RunLock second(run); }, {"another process"}, lln::ErrorCode::io);
}

// ---- Checkpoints -------------------------------------------------------------------------------

Checkpoint checkpoint_of(std::int64_t step) {
  Checkpoint c;
  c.state.step = step;
  c.state.seed = 7;
  c.state.best = 0.1 + 0.2;
  c.state.loss_sum = 1.0 / 3;
  c.weights.emplace("layer.weight", at::full({3, 4}, static_cast<double>(step)));
  c.weights.emplace("layer.counts", at::arange(5));
  c.optimizer.emplace("step", scalar(static_cast<double>(step)));
  return c;
}

void expect_no_warning(const std::string& text) { ADD_FAILURE() << text; }

TEST_F(Scratch, CheckpointsComeBackAsTheyWere) {
  CheckpointFiles files;
  CheckpointStore store(path("c"), files);
  store.save(checkpoint_of(12));
  const auto found = newest_checkpoint(path("c"), expect_no_warning);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->state.step, 12);
  EXPECT_EQ(found->state.seed, 7U);
  EXPECT_EQ(found->state.best, 0.1 + 0.2);
  EXPECT_EQ(found->state.loss_sum, 1.0 / 3);
  EXPECT_TRUE(at::equal(found->weights.at("layer.weight"), at::full({3, 4}, 12.0)));
  EXPECT_TRUE(at::equal(found->weights.at("layer.counts"), at::arange(5)));
}

TEST_F(Scratch, TheNewestAndTheBestAreKept) {
  CheckpointFiles files;
  CheckpointStore store(path("c"), files);
  for (const std::int64_t step : {5, 10, 15, 20, 100000000}) {
    store.save(checkpoint_of(step));
    store.prune(2, 5);
  }
  EXPECT_THAT(checkpoint_steps(path("c")), ElementsAre(5, 20, 100000000));
}

// Fails at one call, and at all after it where the process is taken to be killed there.
class FailingFiles : public CheckpointFiles {
 public:
  FailingFiles(int call, bool killed) : left_(call), killed_(killed) {}
  bool failed() const { return left_ <= 0; }

  void make_folder(const std::string& p) override {
    count(p);
    CheckpointFiles::make_folder(p);
  }
  void write_tensors(const std::string& p,
                     std::span<const lln::io::TensorToWrite> tensors) override {
    if (left_ == 1) write_text(p, "half of a file");
    count(p);
    CheckpointFiles::write_tensors(p, tensors);
  }
  void write_text(const std::string& p, const std::string& text) override {
    count(p);
    CheckpointFiles::write_text(p, text);
  }
  void sync_folder(const std::string& p) override {
    count(p);
    CheckpointFiles::sync_folder(p);
  }
  void rename(const std::string& from, const std::string& to) override {
    count(to);
    CheckpointFiles::rename(from, to);
  }
  void remove(const std::string& p) override {
    count(p);
    CheckpointFiles::remove(p);
  }

 private:
  void count(const std::string& p) {
    --left_;
    if (left_ == 0 || (left_ < 0 && killed_)) {
      throw lln::Error(lln::ErrorCode::io, p + ": no space left on device");
    }
  }
  int left_;
  bool killed_;
};

TEST_F(Scratch, AFailureOfAnyWriteLosesNoEarlierCheckpoint) {
  for (const bool killed : {false, true}) {
    bool reached_the_end = false;
    for (int call = 1; !reached_the_end; ++call) {
      ASSERT_LT(call, 40);
      const std::string folder = path("c" + std::to_string(call) + (killed ? "k" : ""));
      CheckpointFiles good;
      CheckpointStore(folder, good).save(checkpoint_of(10));
      FailingFiles bad(call, killed);
      bool threw = false;
      try {
        CheckpointStore store(folder, bad);
        store.save(checkpoint_of(20));
        store.prune(1, -1);
      } catch (const lln::Error& e) {
        threw = true;
        EXPECT_THAT(e.what(), HasSubstr("no space left on device"));
      }
      EXPECT_EQ(threw, bad.failed());
      reached_the_end = !threw;
      const auto found = newest_checkpoint(folder, expect_no_warning);
      ASSERT_TRUE(found) << call;
      const auto step = static_cast<double>(found->state.step);
      EXPECT_TRUE(step == 10 || step == 20);
      EXPECT_TRUE(at::equal(found->weights.at("layer.weight"), at::full({3, 4}, step)));
      CheckpointStore again(folder, good);
      for (const auto& entry : fs::directory_iterator(folder)) {
        EXPECT_EQ(entry.path().filename().string().rfind("step-", 0), 0U) << entry.path();
      }
    }
  }
}

TEST_F(Scratch, AStepSavedAgainIsNeverMissing) {
  CheckpointFiles good;
  bool reached_the_end = false;
  for (int call = 1; !reached_the_end; ++call) {
    ASSERT_LT(call, 40);
    const std::string folder = path("again" + std::to_string(call));
    CheckpointStore(folder, good).save(checkpoint_of(10));
    FailingFiles bad(call, /*killed=*/true);
    try {
      CheckpointStore(folder, bad).save(checkpoint_of(10));
    } catch (const lln::Error&) {
    }
    reached_the_end = !bad.failed();
    CheckpointStore next_start(folder, good);
    const auto found = newest_checkpoint(folder, expect_no_warning);
    ASSERT_TRUE(found) << call;
    EXPECT_EQ(found->state.step, 10);
  }
}

TEST_F(Scratch, AFullDiskLosesNoEarlierCheckpoint) {
  CheckpointFiles files;
  CheckpointStore store(path("c"), files);
  store.save(checkpoint_of(10));
  struct rlimit before {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  struct rlimit small = before;
  small.rlim_cur = 300;
  std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  Checkpoint large = checkpoint_of(20);
  large.weights.emplace("large", at::ones({1000}));
  std::string text;
  try {
    store.save(large);
  } catch (const lln::Error& e) {
    text = e.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(text, HasSubstr("File too large"));
  EXPECT_THAT(text, HasSubstr("earlier ones are untouched"));
  EXPECT_THAT(checkpoint_steps(path("c")), ElementsAre(10));
  EXPECT_TRUE(newest_checkpoint(path("c"), expect_no_warning));
}

TEST_F(Scratch, ADamagedCheckpointIsPassedOver) {
  CheckpointFiles files;
  CheckpointStore store(path("c"), files);
  for (const char* name : {"weights.safetensors", "optimizer.safetensors", "state.json"}) {
    store.save(checkpoint_of(10));
    store.save(checkpoint_of(20));
    const std::string file = checkpoint_path(path("c"), 20) + "/" + name;
    std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekg(0, std::ios::end);
    const auto place = static_cast<std::streamoff>(damaged.tellg()) - 6;
    damaged.seekg(place);
    const int old = damaged.get();
    damaged.seekp(place);
    damaged.put(static_cast<char>(old ^ 1));
    damaged.close();
    std::vector<std::string> warnings;
    const auto found =
        newest_checkpoint(path("c"), [&](const std::string& text) { warnings.push_back(text); });
    ASSERT_TRUE(found) << name;
    EXPECT_EQ(found->state.step, 10) << name;
    ASSERT_EQ(warnings.size(), 1U);
    EXPECT_THAT(warnings[0], HasSubstr("step-00000020"));
  }
  store.set_aside_after(10);
  EXPECT_THAT(checkpoint_steps(path("c")), ElementsAre(10));
}

TEST_F(Scratch, TensorsThatDoNotFitAreAllNamed) {
  NamedTensors to = {{"a", at::zeros({2})}, {"b", at::zeros({3})}};
  const NamedTensors from = {{"b", at::ones({4})}, {"c", at::ones({1})}};
  expect_error([&] { copy_tensors(from, to, "file"); },
               {"file: a is missing", "b is Float [4]: expected Float [3]", "c was not expected"},
               lln::ErrorCode::io);
}

}  // namespace
}  // namespace lln_torch
