// Sums of gradients in buckets against one sum, steps of several ranks against those of one, and
// what ranks agree on.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "expect_error.h"
#include "io/scratch_folder.h"
#include "lln_torch/parallel/gradient_exchange.h"
#include "lln_torch/train/optimizer.h"
#include "lln_torch/train/prefetch.h"
#include "lln_torch/train/rank_state.h"
#include "lln_torch/train/train_step.h"
#include "lln_torch/train/trainer.h"
#include "small_models.h"
#include "thread_ranks.h"

namespace lln_torch {
namespace {

using test::on_watched_threads;
using testing::HasSubstr;

// A weight that is used twice, one that is used once, and one that is not.
struct ThreeWeights : torch::nn::Module {
  explicit ThreeWeights(at::ScalarType type = at::kFloat) {
    const auto options = at::TensorOptions().dtype(type);
    twice = register_parameter("twice", at::arange(12, options).view({3, 4}) / 7);
    once = register_parameter("once", at::arange(5, options) / 3);
    never = register_parameter("never", at::ones({2}, options));
  }
  at::Tensor loss(double x) const {
    return (twice * twice * x).sum() * x + (once * x).pow(2).sum() + twice.select(0, 1).sum();
  }
  at::Tensor twice, once, never;
};

at::Tensor all_gradients(const ThreeWeights& model) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : model.parameters()) flat.push_back(parameter.grad().flatten());
  return at::cat(flat).clone();
}

TEST(GradientExchange, IsTheWeightedMeanOverRanks) {
  const std::vector<double> weights = {3, 0, 5};
  ThreeWeights single(at::kDouble);
  Optimizer alone(single, {});
  for (int rank = 0; rank < 3; ++rank) {
    (single.loss(1 + rank) * (weights[static_cast<std::size_t>(rank)] / 8)).backward();
  }
  const at::Tensor expected = all_gradients(single);
  const double expected_loss =
      (single.loss(1).item<double>() * 3 + single.loss(3).item<double>() * 5) / 8;
  for (const std::int64_t bucket_bytes : {std::int64_t{1}, std::int64_t{64}, std::int64_t{4096}}) {
    std::vector<at::Tensor> found(3);
    std::vector<double> losses(3), stops(3);
    std::atomic<std::int64_t> buckets = 0;
    on_watched_threads(3, [&](const RankGroup& group) {
      const auto rank = static_cast<std::size_t>(group.rank());
      ThreeWeights model(at::kDouble);
      Optimizer optimizer(model, {});
      GradientExchange exchange(group, optimizer.parameters(), bucket_bytes);
      buckets = exchange.buckets();
      for (int step = 0; step < 3; ++step) {  // the same memory at every step
        optimizer.zero_gradients();
        const at::Tensor loss = model.loss(1 + group.rank()) * weights[rank];
        const bool stop = step == 2 && rank == 1;
        if (weights[rank] == 0) {  // a rank without a row
          exchange.begin(at::zeros({}, at::kDouble), 0, stop);
        } else {
          // In two parts, of which the second is sent.
          (loss * 0.25).backward();
          exchange.begin(loss.detach(), weights[rank], stop);
          (model.loss(1 + group.rank()) * weights[rank] * 0.75).backward();
        }
        const auto totals = exchange.finish();
        losses[rank] = totals.loss.item<double>();
        stops[rank] = totals.stop.item<double>();
      }
      found[rank] = all_gradients(model);
    });
    EXPECT_EQ(buckets, bucket_bytes == 1 ? 3 : bucket_bytes == 64 ? 2 : 1);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(at::allclose(found[rank], expected, 1e-12, 1e-14)) << bucket_bytes;
      EXPECT_TRUE(found[rank].equal(found[0])) << "all ranks have the same bits";
      EXPECT_NEAR(losses[rank], expected_loss, 1e-12);
      EXPECT_EQ(stops[rank], 1);
    }
  }
}

TEST(GradientExchange, PassesAfterItsEndSendNothing) {
  on_watched_threads(1, [](const RankGroup& group) {
    ThreeWeights model;
    Optimizer optimizer(model, {});
    {
      GradientExchange exchange(group, optimizer.parameters());
      model.loss(2).backward();  // not begun
      const at::Tensor before = all_gradients(model);
      optimizer.zero_gradients();
      exchange.begin(at::zeros({}), 1, false);
      model.loss(2).backward();
      exchange.finish();
      EXPECT_TRUE(all_gradients(model).equal(before));
    }
    model.loss(2).backward();
  });
}

TEST(RankShare, EveryRowOnce) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    std::int64_t next = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const BatchShare share = rank_share(8, 2, rank, ranks);
      EXPECT_EQ(share.first, next);
      EXPECT_GE(share.rows, 8 / ranks);
      EXPECT_LE(share.rows, 8 / ranks + 1);
      next += share.rows;
    }
    EXPECT_EQ(next, 8);
  }
}

TEST(RankState, IsThatOfTheFirst) {
  on_watched_threads(2, [](const RankGroup& group) {
    RunState state;
    state.seed = 7;
    if (group.first()) {
      state = {.step = 12,
               .seed = 7,
               .best = 0.25,
               .best_step = 8,
               .stale = 1,
               .evaluated_step = 12,
               .loss_sum = 1.5,
               .loss_count = 2,
               .seconds = 3};
    }
    EXPECT_TRUE(share_state(group, state, group.first()));
    EXPECT_EQ(state.step, 12);
    EXPECT_EQ(state.best, 0.25);
    EXPECT_EQ(state.best_step, 8);
    EXPECT_EQ(state.stale, 1);
    EXPECT_EQ(state.evaluated_step, 12);
    EXPECT_EQ(state.loss_sum, 1.5);
    EXPECT_EQ(state.loss_count, 2);
    const at::Tensor own = at::full({3}, group.rank(), at::kFloat);
    share_tensors(group, {{"w", own}});
    EXPECT_TRUE(own.equal(at::zeros({3})));
  });
}

TEST(RankState, AllRanksHearWhoseWeightsDiffer) {
  on_watched_threads(4, [](const RankGroup& group) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble, at::kBool}) {
      const at::Tensor own = at::ones({3, 2}, type);
      const NamedTensors tensors = {{"other", at::ones({2})}, {"own", own.t()}};
      expect_same(group, tensors, "the weights");
      if (group.rank() == 1 || group.rank() == 3) own[2][1].zero_();
      lln::test::expect_error([&] { expect_same(group, tensors, "the weights"); },
                              {"the weights of rank 1, rank 3 are not those of rank 0"},
                              lln::ErrorCode::invalid_argument);
    }
  });
}

TEST(RankState, RandomNumbersDifferByRankAndStep) {
  const auto drawn = [](std::int64_t step, int rank) {
    seed_step(3, step, rank);
    return at::rand({4});
  };
  EXPECT_TRUE(drawn(5, 1).equal(drawn(5, 1)));
  EXPECT_FALSE(drawn(5, 1).equal(drawn(5, 0)));
  EXPECT_FALSE(drawn(5, 1).equal(drawn(6, 1)));
}

// ---- steps and trainings -----------------------------------------------------------------------

// Rows of hidden tokens, of which some parts of a batch predict none.
Batch hidden_tokens(std::int64_t first, std::int64_t rows, bool predicts) {
  constexpr std::int64_t kTokens = 8;
  Batch batch;
  batch.rows = rows;
  batch.text.tokens = kTokens;
  for (std::int64_t i = first * kTokens; i < (first + rows) * kTokens; ++i) {
    batch.text.ids.push_back(static_cast<std::int32_t>(4 + i * i * 7 % (kVocabulary - 4)));
    batch.labels.push_back(predicts && i % 3 == 0 ? static_cast<std::int32_t>(4 + i % 30)
                                                  : kIgnoredLabel);
  }
  return batch;
}

std::shared_ptr<Model> word_model(const char* matching) {
  const Task task{.kind = TaskKind::masked_tokens, .vocabulary = kVocabulary, .max_tokens = 8};
  return small_model(
      task, "dropout = 0",
      std::string("name = \"lln+diag\"\ndiag_block = 4\nmatching = \"") + matching + "\"");
}

at::Tensor all_weights(const torch::nn::Module& model) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : model.parameters()) flat.push_back(parameter.flatten());
  return at::cat(flat).detach();
}

TEST(TrainStep, PartsWithoutPredictionsCountForNothing) {
  const std::vector<Batch> parts = {hidden_tokens(0, 2, true), hidden_tokens(2, 1, false),
                                    hidden_tokens(3, 3, true), hidden_tokens(6, 2, false)};
  const OptimizerOptions sgd{.kind = OptimizerKind::sgd};
  const auto alone = word_model("learned");
  Optimizer optimizer(*alone, sgd);
  TrainStep step(*alone, optimizer, {}, torch::kCPU);
  for (int i = 0; i < 3; ++i) step.run(parts, i, 0.1);
  const StepSums expected = step.take();
  // Threads that draw weights at once would share them out between them.
  const std::array models = {word_model("learned"), word_model("learned")};
  on_watched_threads(2, [&](const RankGroup& group) {
    const auto& model = models[static_cast<std::size_t>(group.rank())];
    Optimizer own(*model, sgd);
    // Buckets of every size: all are sent, also after a part that gives them nothing.
    GradientExchange exchange(group, own.parameters(), 1024);
    EXPECT_GT(exchange.buckets(), 3);
    TrainStep shared(*model, own, {}, torch::kCPU, &exchange);
    const auto first = parts.begin() + 2 * group.rank();
    for (int i = 0; i < 3; ++i) shared.run({first, first + 2}, i, 0.1);
    EXPECT_NEAR(shared.take().loss, expected.loss, 1e-5);
    expect_near(all_weights(*model), all_weights(*alone), 1e-6);
  });
}

TEST(TrainStep, PartsWithoutPredictionsAreSeenByRunningMoments) {
  const std::array models = {word_model("ema"), word_model("ema")};
  on_watched_threads(2, [&](const RankGroup& group) {
    const auto& model = models[static_cast<std::size_t>(group.rank())];
    Optimizer optimizer(*model, {});
    GradientExchange exchange(group, optimizer.parameters());
    TrainStep step(*model, optimizer, {}, torch::kCPU, &exchange);
    const auto running = [&] {
      std::vector<at::Tensor> found;
      for (const at::Tensor& buffer : model->buffers()) {
        if (buffer.scalar_type() == at::kDouble) found.push_back(buffer.flatten());
      }
      return at::cat(found).clone();
    };
    const at::Tensor before = running();
    step.run({hidden_tokens(0, 2, group.first())}, 0, 0.1);
    EXPECT_FALSE(running().equal(before)) << group.rank();
  });
}

// One number that is learned; on one rank it is changed from outside.
class OneNumber : public Model {
 public:
  OneNumber() : weight_(register_parameter("weight", at::ones({1}))) {}
  ModelOutput run(const TensorBatch& batch, Context& context) override {
    if (context.step == changed_step) {
      const at::NoGradGuard no_gradients;
      weight_.add_(1e-3);
    }
    ModelOutput output;
    output.scores = batch.scores * weight_;
    output.labels = batch.scores;
    output.loss = at::mse_loss(output.scores, output.labels);
    return output;
  }
  std::int64_t changed_step = -1;

 private:
  Tensor weight_;
};

class Scores : public Source {
 public:
  explicit Scores(float scale = 1) : scale_(scale) {}
  const Task& task() const override { return task_; }
  Batch train_batch(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                    std::int64_t rows) const override {
    Batch batch;
    batch.rows = rows;
    for (std::int64_t i = 0; i < rows; ++i) {
      batch.scores.push_back(scale_ * static_cast<float>((step * batch_rows + first + i) % 7));
    }
    return batch;
  }
  std::int64_t validation_rows() const override { return 4; }
  Batch validation_batch(std::int64_t first, std::int64_t rows) const override {
    return train_batch(0, 4, first, rows);
  }
  double steps_per_epoch(std::int64_t batch_rows) const override {
    return 70 / static_cast<double>(batch_rows);
  }

 private:
  float scale_;
  Task task_{.name = "scores", .kind = TaskKind::score, .metrics = {"loss"}};
};

TEST(RankTraining, WeightsThatBecomeDifferentAreNotSaved) {
  const lln::io::ScratchFolder scratch;
  const RunFolder run(scratch.file("run"));
  run.make();
  on_watched_threads(2, [&](const RankGroup& group) {
    OneNumber model;
    if (group.rank() == 1) model.changed_step = 12;
    const Scores source;
    TrainSettings settings;
    settings.batch = 8;
    settings.schedule = {.shape = "constant", .peak = 1e-2, .warmup = 0, .steps = 30};
    settings.checkpoint_every = 5;
    settings.instruments_every = 0;
    CheckpointFiles files;
    lln::test::expect_error(
        [&] {
          train({.model = model,
                 .source = source,
                 .settings = settings,
                 .run = run,
                 .files = files,
                 .group = &group},
                {});
        },
        {"step 15: the weights of rank 1 are not those of rank 0"},
        lln::ErrorCode::invalid_argument);
  });
  EXPECT_EQ(checkpoint_steps(run.checkpoints()).back(), 10);
}

TEST(RankTraining, OtherDataHaveAnotherFingerprint) {
  const std::string own = data_fingerprint(Scores(), 8);
  EXPECT_EQ(own, data_fingerprint(Scores(), 8));
  EXPECT_NE(own, data_fingerprint(Scores(2), 8));
  EXPECT_THAT(own, HasSubstr("70 rows for training and 4 for validation"));
}

}  // namespace
}  // namespace lln_torch
