// The training loop on a small task of its own: resuming bit for bit, parts of batches, signals,
// early stop, and what is said of a loss that is not finite.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "expect_error.h"
#include "io/scratch_folder.h"
#include "lln_torch/models/weights.h"
#include "lln_torch/train/json_lines.h"
#include "lln_torch/train/not_finite.h"
#include "lln_torch/train/prefetch.h"
#include "lln_torch/train/run_model.h"
#include "lln_torch/train/trainer.h"

namespace lln_torch {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::int64_t kRowTokens = 6, kIds = 11;

// Is the sum of the ids even? A row depends on step and row alone. Rows have labels per token, some
// of them ignored, where `per_token`: parts of a batch then predict different numbers of them.
class SmallSource : public Source {
 public:
  explicit SmallSource(bool per_token = false) : per_token_(per_token) {
    task_.name = "parity";
    task_.kind = per_token ? TaskKind::masked_tokens : TaskKind::classes;
    task_.classes = 2;
    task_.vocabulary = kIds;
    task_.max_tokens = kRowTokens;
    task_.metrics =
        per_token ? std::vector<std::string>{"loss"} : std::vector<std::string>{"accuracy", "loss"};
    task_.chance = 0.5;
  }
  const Task& task() const override { return task_; }
  Batch train_batch(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                    std::int64_t rows) const override {
    return rows_from(step * batch_rows + first, rows);
  }
  std::int64_t validation_rows() const override { return 10; }
  Batch validation_batch(std::int64_t first, std::int64_t rows) const override {
    return rows_from(1'000'000 + first, rows);
  }
  double steps_per_epoch(std::int64_t) const override { return 100; }

 private:
  Batch rows_from(std::int64_t first, std::int64_t rows) const {
    Batch batch;
    batch.rows = rows;
    batch.text.tokens = kRowTokens;
    for (std::int64_t row = first; row < first + rows; ++row) {
      std::int64_t sum = 0;
      for (std::int64_t i = 0; i < kRowTokens; ++i) {
        const std::int64_t id = (row * 7 + i * i * 3 + row / 5) % kIds;
        sum += id;
        batch.text.ids.push_back(static_cast<std::int32_t>(id));
        if (per_token_) {
          batch.labels.push_back((row + i) % 3 == 0 ? static_cast<std::int32_t>(id % 2)
                                                    : kIgnoredLabel);
        }
      }
      if (!per_token_) batch.labels.push_back(static_cast<std::int32_t>(sum % 2));
    }
    return batch;
  }
  bool per_token_;
  Task task_;
};

class SmallModel : public Model {
 public:
  explicit SmallModel(double dropout = 0.2, bool per_token = false)
      : dropout_(dropout), per_token_(per_token) {
    tokens_ = register_module("tokens", torch::nn::Embedding(kIds, 8));
    key_ = register_module("key", torch::nn::Linear(8, 8));
    output_ = register_module("output", torch::nn::Linear(8, 2));
  }
  ModelOutput run(const TensorBatch& batch, Context& context) override {
    Tensor x = at::dropout(tokens_(batch.ids), dropout_, is_training());
    const Tensor k = key_(x).tanh();
    if (context.observer != nullptr) {
      const Tensor split = k.view({k.size(0), k.size(1), 2, 4}).transpose(1, 2);
      context.observer->observe({.layer = 0, .name = "softmax", .q = split, .k = split});
    }
    if (context.step == poisoned_step) x = x * std::numeric_limits<double>::infinity() * 0;
    ModelOutput output;
    output.labels = batch.labels.reshape({-1});
    const Tensor each = output_(x + k);
    output.scores = per_token_ ? each.reshape({-1, 2}) : each.mean(1);
    output.loss = at::cross_entropy_loss(output.scores, output.labels, {}, at::Reduction::Mean,
                                         kIgnoredLabel);
    // The slope of the root is infinite at 0, and 0 times that is NaN.
    if (context.step == steep_step) output.loss = output.loss + (k * 0).sqrt().sum();
    return output;
  }
  std::int64_t poisoned_step = -1;  // NaN in the forward pass
  std::int64_t steep_step = -1;     // in the backward pass alone

 private:
  double dropout_;
  bool per_token_;
  torch::nn::Embedding tokens_{nullptr};
  torch::nn::Linear key_{nullptr}, output_{nullptr};
};

class Training : public testing::Test {
 protected:
  void SetUp() override { prepare_torch(1, torch::kCPU); }

  static TrainSettings settings(std::int64_t steps) {
    TrainSettings s;
    s.batch = 8;
    s.schedule = {.shape = "cosine", .peak = 1e-2, .warmup = 3, .steps = steps};
    s.log_every = 3;
    s.evaluate_every = 4;
    s.evaluate_batch = 4;
    s.checkpoint_every = 5;
    s.instruments_every = 6;
    return s;
  }
  // One sitting; ends after `sitting` steps by a signal, as a user's.
  TrainEnd sit(const std::string& name, const TrainSettings& s,
               std::int64_t sitting = std::numeric_limits<std::int64_t>::max()) {
    at::manual_seed(3);
    SmallModel model;
    const SmallSource source;
    const RunFolder run(folder_ + "/" + name);
    run.make();
    CheckpointFiles files;
    const StopSignals signals;
    TrainEvents events;
    events.progress = [&](const TrainProgress& now) {
      if (now.step >= sitting) std::raise(SIGTERM);
    };
    events.warn = [&](const std::string& text) { warnings_.push_back(text); };
    return train({.model = model,
                  .source = source,
                  .settings = s,
                  .run = run,
                  .files = files,
                  .signals = &signals},
                 events);
  }
  std::string file(const std::string& run, std::int64_t step, const std::string& name) const {
    return lln::io::read_bytes(checkpoint_path(folder_ + "/" + run + "/checkpoints", step) + "/" +
                               name);
  }
  // Rows of a log without what measures time and memory.
  std::vector<nlohmann::ordered_json> rows(const std::string& run, const std::string& log) const {
    auto all = read_json_lines(folder_ + "/" + run + "/" + log);
    for (auto& row : all) {
      for (const char* name : {"tokens_per_second", "rows_per_second", "memory_bytes", "seconds"}) {
        row.erase(name);
      }
    }
    return all;
  }
  // What a training says that ends with a number that is not finite.
  std::string not_finite(SmallModel& model) const {
    const SmallSource source;
    const RunFolder run(folder_ + "/run");
    run.make();
    CheckpointFiles files;
    const TrainSettings s = settings(20);
    try {
      train({.model = model, .source = source, .settings = s, .run = run, .files = files}, {});
    } catch (const NotFinite& e) {
      return e.what();
    }
    return "no error";
  }
  lln::io::ScratchFolder scratch_;
  std::string folder_ = scratch_.path().string();
  std::vector<std::string> warnings_;
};

TEST_F(Training, ResumesBitForBit) {
  const TrainSettings s = settings(20);
  EXPECT_EQ(sit("whole", s), TrainEnd::finished);
  EXPECT_EQ(sit("parts", s, 3), TrainEnd::signal);
  EXPECT_EQ(sit("parts", s, 9), TrainEnd::signal);
  // What a kill leaves: rows after the checkpoint, and half of one.
  std::ofstream(folder_ + "/parts/metrics.jsonl", std::ios::app)
      << "{\"step\": 11, \"loss\": 0}\n{\"step\": 12";
  EXPECT_EQ(sit("parts", s), TrainEnd::finished);
  ASSERT_FALSE(file("whole", 20, "weights.safetensors").empty());
  EXPECT_EQ(file("whole", 20, "weights.safetensors"), file("parts", 20, "weights.safetensors"));
  EXPECT_EQ(file("whole", 20, "optimizer.safetensors"), file("parts", 20, "optimizer.safetensors"));
  EXPECT_EQ(rows("whole", "metrics.jsonl"), rows("parts", "metrics.jsonl"));
  EXPECT_EQ(rows("whole", "instruments.jsonl"), rows("parts", "instruments.jsonl"));
  EXPECT_EQ(rows("whole", "instruments.jsonl").front()["step"], 0);
  EXPECT_EQ(warnings_, std::vector<std::string>{});
  // A finished run has nothing left to do.
  EXPECT_EQ(sit("whole", s), TrainEnd::finished);
  EXPECT_EQ(rows("whole", "metrics.jsonl"), rows("parts", "metrics.jsonl"));
}

TEST_F(Training, ResumesBeforeADamagedCheckpoint) {
  TrainSettings s = settings(20);
  s.keep = 4;
  EXPECT_EQ(sit("whole", s), TrainEnd::finished);
  EXPECT_EQ(sit("parts", s, 12), TrainEnd::signal);
  const std::string newest = checkpoint_path(folder_ + "/parts/checkpoints", 12);
  fs::resize_file(newest + "/weights.safetensors", 100);
  EXPECT_EQ(sit("parts", s), TrainEnd::finished);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_THAT(warnings_[0], HasSubstr("step-00000012/weights.safetensors"));
  EXPECT_TRUE(fs::exists(folder_ + "/parts/checkpoints/damaged-00000012"));
  EXPECT_EQ(file("whole", 20, "weights.safetensors"), file("parts", 20, "weights.safetensors"));
}

TEST_F(Training, KeepsTheLastAndTheBest) {
  TrainSettings s = settings(20);
  s.keep = 1;
  sit("run", s);
  const auto state = load_run_state(checkpoint_path(folder_ + "/run/checkpoints", 20));
  std::vector<std::int64_t> expected = {state.best_step};
  if (state.best_step != 20) expected.push_back(20);
  EXPECT_EQ(checkpoint_steps(folder_ + "/run/checkpoints"), expected);
  EXPECT_EQ(state.best_step % 4, 0);
}

TEST_F(Training, AnUnwritableFolderIsSaid) {
  TrainSettings s = settings(4);
  fs::create_directories(folder_ + "/run");
  std::ofstream(folder_ + "/run/checkpoints") << "in the way";
  lln::test::expect_error([&] { sit("run", s); }, {"/run/checkpoints"}, lln::ErrorCode::io);
}

TEST_F(Training, StopsEarly) {
  TrainSettings s = settings(400);
  s.schedule.peak = 0;  // nothing can improve after the first evaluation
  s.patience = 2;
  EXPECT_EQ(sit("run", s), TrainEnd::early);
  EXPECT_EQ(rows("run", "metrics.jsonl").back()["step"], 12);
  EXPECT_EQ(sit("run", s), TrainEnd::early);
  EXPECT_EQ(rows("run", "metrics.jsonl").back()["step"], 12);
}

TEST_F(Training, RowsOfTheLog) {
  sit("run", settings(12));
  const auto all = read_json_lines(folder_ + "/run/metrics.jsonl");
  ASSERT_EQ(all.size(), 7U);  // steps 3, 4 (evaluated), 6, 8, 9, 12, 12
  EXPECT_EQ(all[0]["step"], 3);
  for (const char* name : {"loss", "learning_rate", "gradient_norm", "tokens_per_second"}) {
    EXPECT_GT(all[0][name].get<double>(), 0) << name;
  }
  EXPECT_EQ(all[1]["step"], 4);
  EXPECT_EQ(all[1]["chance"], 0.5);
  EXPECT_TRUE(all[1]["evaluation"].contains("accuracy"));
  EXPECT_TRUE(all[1]["evaluation"].contains("loss"));
  const auto heads = read_json_lines(folder_ + "/run/instruments.jsonl");
  ASSERT_EQ(heads.size(), 6U);  // two heads at steps 0, 6 and 12
  for (const char* name : {"temperature", "entropy", "gap"}) {
    EXPECT_TRUE(heads[0][name].is_number()) << name;
  }
  EXPECT_TRUE(heads[0]["alpha"].is_null());
}

TEST_F(Training, PartsOfABatchAreTheBatch) {
  const SmallSource source(/*per_token=*/true);
  const auto gradient = [&](std::int64_t parts) {
    at::manual_seed(5);
    SmallModel model(/*dropout=*/0, /*per_token=*/true);
    Optimizer optimizer(model, {});
    TrainStep step(model, optimizer, {.clip = 0}, torch::kCPU);
    step.run(batch_parts(source, 2, 12, parts), 0, 0);
    const StepSums sums = step.take();
    std::vector<Tensor> flat = {at::full({1}, sums.loss, at::kFloat)};
    for (const auto& item : model.named_parameters()) flat.push_back(item.value().grad().flatten());
    return at::cat(flat);
  };
  const std::vector<Batch> four = batch_parts(source, 2, 12, 4);
  EXPECT_NE(predictions_in(four[0]) * 4, predictions_in(batch_parts(source, 2, 12, 1)[0]) + 1);
  EXPECT_TRUE(at::allclose(gradient(1), gradient(4), 1e-5, 1e-7));
  EXPECT_TRUE(at::allclose(gradient(1), gradient(12), 1e-5, 1e-7));
}

TEST_F(Training, ALossThatIsNotFiniteIsExplained) {
  at::manual_seed(3);
  SmallModel model;
  model.poisoned_step = 4;
  const std::string text = not_finite(model);
  EXPECT_THAT(text, HasSubstr("step 5: the loss is nan"));
  EXPECT_THAT(text, HasSubstr("8 rows of 6 tokens, the first ids "));
  EXPECT_THAT(text, HasSubstr("next to key\n"));
  EXPECT_THAT(text, HasSubstr("layer 0 (softmax): largest |q|"));
  EXPECT_THAT(text, HasSubstr("entropy 1."));
  for (const auto& item : model.named_parameters()) {
    EXPECT_TRUE(at::isfinite(item.value()).all().item<bool>()) << item.key();
  }
}

TEST_F(Training, AGradientThatIsNotFiniteIsExplained) {
  at::manual_seed(3);
  SmallModel model;
  model.steep_step = 4;
  const std::string text = not_finite(model);
  EXPECT_THAT(text, HasSubstr("step 5: the loss is 0."));
  EXPECT_THAT(text, HasSubstr("the norm of the gradient nan"));
  EXPECT_THAT(text, HasSubstr("the first infinity is in the result of aten::div"));
  EXPECT_THAT(text, HasSubstr("the first NaN is in the result of aten::mul"));
  EXPECT_THAT(text, HasSubstr(", in the backward pass\n"));
  EXPECT_THAT(text, HasSubstr("gradients that are not finite: tokens.weight, key.weight"));
}

TEST_F(Training, WeightsThatAreNotFiniteAreNamed) {
  SmallModel model(0);
  model.named_parameters()["output.bias"].data()[1] = std::numeric_limits<float>::quiet_NaN();
  const std::string text = not_finite(model);
  EXPECT_THAT(text, HasSubstr("step 1: the loss is nan"));
  EXPECT_THAT(text, HasSubstr("weights that are not finite: output.bias"));
}

TEST(TrainStep, SideWorkChangesNothing) {
  prepare_torch(1, torch::kCPU);
  std::vector<double> losses[2];
  for (const bool beside : {false, true}) {
    const Settings config = Settings::from_toml(
        std::string("[data]\ntask = 'random-tokens'\nvocabulary = 20\ntokens = 24\ntrain_rows = 4\n"
                    "[model]\nlayers = 2\ndim = 24\nheads = 3\n[attention]\nname = 'lln+diag'\n"
                    "[train]\nsteps = 4\nbatch = 4\naccumulate = 2\nlearning_rate = 1e-2\n"
                    "side_work = ") +
            (beside ? "true" : "false"),
        "test");
    const RunModel run = make_run_model(config, "", torch::kCPU, /*begins=*/true);
    EXPECT_EQ(run.settings.step.side_work, beside);
    Optimizer optimizer(*run.model, run.settings.optimizer);
    TrainStep step(*run.model, optimizer, run.settings.step, torch::kCPU);
    for (std::int64_t i = 0; i < 4; ++i) {
      step.run(batch_parts(*run.source, i, 4, 2), i, 1e-2);
      losses[beside ? 1 : 0].push_back(step.take().loss);
    }
  }
  EXPECT_LT(losses[0].back(), losses[0].front());
  EXPECT_EQ(losses[1], losses[0]);
}

TEST(StopSignals, ASecondOneEndsTheProgram) {
  EXPECT_EXIT(
      {
        const StopSignals signals;
        std::raise(SIGINT);
        if (signals.arrived() != SIGINT) std::_Exit(1);
        std::raise(SIGTERM);
        std::_Exit(2);
      },
      testing::KilledBySignal(SIGTERM), "");
}

TEST(TrainSettings, FaultsNameTheKey) {
  const SmallSource source;
  const auto error_of = [&](const std::string& toml) {
    try {
      read_train_settings(Settings::from_toml(toml, "run.toml"), source);
    } catch (const lln::Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(error_of("batch = 10\naccumulate = 3"), HasSubstr("accumulate"));
  EXPECT_THAT(error_of("steps = 10\nepochs = 2"), HasSubstr("epochs"));
  EXPECT_THAT(error_of("steps = 10\nwarmup = 11"), HasSubstr("warmup"));
  EXPECT_THAT(error_of("schedule = \"cosin\""), HasSubstr("cosine"));
  EXPECT_THAT(error_of("patience = 1"), HasSubstr("evaluate_every"));
  const auto read = read_train_settings(Settings::from_toml("epochs = 0.5", "run.toml"), source);
  EXPECT_EQ(read.schedule.steps, 50);
}

}  // namespace
}  // namespace lln_torch
