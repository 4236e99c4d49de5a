// Models for every kind of task: against definitions written out from the weights, with padding,
// with gradients, and as the settings say.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "expect_error.h"
#include "lln_torch/models/heads.h"
#include "lln_torch/models/weights.h"
#include "torch/small_models.h"

namespace lln_torch {
namespace {

using lln::test::expect_error;

constexpr std::int64_t kRows = 3, kTokens = 12;

Task text_task(TaskKind kind) {
  Task task{.name = "test", .kind = kind, .classes = 4, .vocabulary = kVocabulary};
  task.max_tokens = 16;
  if (kind == TaskKind::embedding) task.classes = 0;
  return task;
}

TensorBatch text_batch(std::int64_t tokens = kTokens) {
  at::manual_seed(1);
  TensorBatch batch;
  batch.ids = random_ids(kRows, tokens);
  batch.second_ids = random_ids(kRows, tokens);
  batch.labels = at::randint(0, 4, {kRows}, at::kLong);
  batch.scores = at::rand({kRows});
  return batch;
}

ModelOutput run_model(Model& model, const TensorBatch& batch, Observer* observer = nullptr) {
  Context context;
  context.observer = observer;
  return model.run(batch, context);
}

// --- the encoder, written out ---

struct Weights {
  NamedTensors all;
  Tensor operator()(const std::string& name) const { return all.at(name); }
  Tensor linear(const Tensor& x, const std::string& name) const {
    return at::matmul(x, all.at(name + ".weight").t()) + all.at(name + ".bias");
  }
  Tensor norm(const Tensor& x, const std::string& name) const {
    const Tensor centred = x - x.mean(-1, true);
    const Tensor scale = (centred.square().mean(-1, true) + 1e-5).rsqrt();
    return centred * scale * all.at(name + ".weight") + all.at(name + ".bias");
  }
};

// Heads, one after the other, of x [rows, tokens, dim].
Tensor written_attention(const Weights& w, const Tensor& x, const std::string& name) {
  const Tensor q = w.linear(x, name + ".query"), k = w.linear(x, name + ".key"),
               v = w.linear(x, name + ".value");
  std::vector<Tensor> heads;
  for (std::int64_t head = 0; head < 3; ++head) {
    const auto part = [&](const Tensor& all) { return all.narrow(2, head * 8, 8); };
    const Tensor logits = at::matmul(part(q), part(k).transpose(1, 2)) / std::sqrt(8.0);
    heads.push_back(at::matmul(logits.softmax(2), part(v)));
  }
  return w.linear(at::cat(heads, 2), name + ".output");
}

Tensor written_gelu(const Tensor& x) { return x * 0.5 * (1 + at::erf(x / std::sqrt(2.0))); }

Tensor written_encoder(const Weights& w, const Tensor& ids, const Tensor& segments, bool pre) {
  Tensor x = w("body.tokens.weight").index_select(0, ids.reshape({-1})).view({kRows, kTokens, 24});
  x = x + w("body.positions.weight").narrow(0, 0, kTokens);
  x = x + w("body.segments.weight").index_select(0, segments.reshape({-1})).view_as(x);
  if (!pre) x = w.norm(x, "body.embedding_norm");
  for (const std::string layer : {"body.stack.layers.0.", "body.stack.layers.1."}) {
    const auto feed = [&](const Tensor& y) {
      return w.linear(written_gelu(w.linear(y, layer + "expand")), layer + "contract");
    };
    if (pre) {
      x = x + written_attention(w, w.norm(x, layer + "attention_norm"), layer + "attention");
      x = x + feed(w.norm(x, layer + "feedforward_norm"));
    } else {
      x = w.norm(x + written_attention(w, x, layer + "attention"), layer + "attention_norm");
      x = w.norm(x + feed(x), layer + "feedforward_norm");
    }
  }
  return pre ? w.norm(x, "body.stack.norm") : x;
}

TEST(Encoder, IsWhatTheFormulaSays) {
  for (const bool pre : {true, false}) {
    const auto model = small_model(text_task(TaskKind::classes),
                                   pre ? "norm = 'pre'" : "norm = 'post'", "name = 'softmax'");
    TensorBatch batch = text_batch();
    batch.segments = at::randint(0, 2, {kRows, kTokens}, at::kLong);
    const Weights w{named_weights(*model)};
    const Tensor x = written_encoder(w, batch.ids, batch.segments, pre);
    const Tensor scores = w.linear(x.mean(1), "head.output");
    const ModelOutput output = run_model(*model, batch);
    expect_near(output.scores, scores, 1e-5);
    const Tensor picked = scores.log_softmax(1).gather(1, batch.labels.unsqueeze(1));
    expect_near(output.loss, -picked.mean(), 1e-5);
  }
}

TEST(Encoder, NoSegmentsAreSegmentsZero) {
  const auto model = small_model(text_task(TaskKind::classes), "", "name = 'lln'");
  TensorBatch batch = text_batch();
  const Tensor without = run_model(*model, batch).scores;
  batch.segments = at::zeros({kRows, kTokens}, at::kLong);
  expect_near(run_model(*model, batch).scores, without, 1e-6);
  batch.segments.select(1, 3).fill_(1);
  EXPECT_GT((run_model(*model, batch).scores - without).abs().max().item<float>(), 1e-3);
}

struct LayersSeen : Observer {
  std::vector<std::int64_t> layers;
  void observe(const Observation& observation) override {
    layers.push_back(observation.layer);
    EXPECT_EQ(observation.q.sizes(), (std::vector<std::int64_t>{kRows, 3, kTokens, 8}));
    EXPECT_EQ(observation.alpha.size(1), 3);
  }
};

TEST(Encoder, TheObserverSeesEveryLayer) {
  const auto model = small_model(text_task(TaskKind::classes), "", "name = 'lln+diag'");
  LayersSeen seen;
  run_model(*model, text_batch(), &seen);
  EXPECT_EQ(seen.layers, (std::vector<std::int64_t>{0, 1}));
}

TEST(Encoder, DropoutOnlyInTraining) {
  const auto model = small_model(text_task(TaskKind::classes), "dropout = 0.5", "name = 'lln'");
  const TensorBatch batch = text_batch();
  const Tensor first = run_model(*model, batch).scores;
  EXPECT_GT((run_model(*model, batch).scores - first).abs().max().item<float>(), 1e-3);
  model->eval();
  EXPECT_TRUE(at::equal(run_model(*model, batch).scores, run_model(*model, batch).scores));
}

// Every attention that has an encoder form trains in one: all parameters get gradients.
TEST(Encoder, EveryAttentionOfTheZoo) {
  for (const ZooEntry& entry : zoo()) {
    SCOPED_TRACE(entry.name);
    const auto model =
        small_model(text_task(TaskKind::classes), "", std::string("name = '") + entry.name + "'");
    TensorBatch batch = text_batch();
    batch.mask = at::ones({kRows, kTokens}, at::kBool);
    batch.mask.narrow(1, 9, 3).fill_(false);
    run_model(*model, batch).loss.backward();
    for (const auto& item : model->named_parameters()) {
      if (item.key().find(".attention.") != std::string::npos) continue;  // tests of the zoo
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_TRUE(item.value().grad().isfinite().all().item<bool>()) << item.key();
    }
  }
}

// --- padding ---

struct HeadCase {
  const char* name;
  TaskKind kind;
  const char* model;
};

void PrintTo(const HeadCase& c, std::ostream* out) { *out << c.name; }

class Heads : public testing::TestWithParam<HeadCase> {};

// Tokens after the end of a row change neither loss nor scores nor gradients.
TEST_P(Heads, PaddingChangesNothing) {
  const HeadCase& c = GetParam();
  const auto model =
      small_model(text_task(c.kind), c.model, "name = 'lln+diag'\ndiag = 'gate'\ndiag_block = 8");
  TensorBatch batch = text_batch();
  if (c.kind == TaskKind::masked_tokens) {
    batch.labels = at::full({kRows, kTokens}, kIgnoredLabel, at::kLong);
    batch.labels.select(1, 2).fill_(5);
    batch.labels.select(1, 7).fill_(6);
  }
  const ModelOutput alone = run_model(*model, batch);
  alone.loss.backward();
  NamedTensors gradients;
  for (const auto& item : model->named_parameters()) {
    if (item.value().grad().defined()) gradients[item.key()] = item.value().grad().clone();
  }
  model->zero_grad();
  const auto longer = [&](const Tensor& x, std::int64_t fill) {
    return at::cat({x, at::full({kRows, 4}, fill, x.options())}, 1);
  };
  batch.ids = longer(batch.ids, 9);
  batch.second_ids = longer(batch.second_ids, 11);
  batch.mask = longer(at::ones({kRows, kTokens}, at::kBool), 0);
  batch.second_mask = batch.mask;
  if (c.kind == TaskKind::masked_tokens) batch.labels = longer(batch.labels, kIgnoredLabel);
  const ModelOutput padded = run_model(*model, batch);
  padded.loss.backward();
  expect_near(padded.scores, alone.scores, 1e-5);
  expect_near(padded.loss, alone.loss, 1e-5);
  for (const auto& [name, gradient] : gradients) {
    SCOPED_TRACE(name);
    expect_near(model->named_parameters()[name].grad(), gradient, 1e-4);
  }
}

// A row does not depend on the others of its batch.
TEST_P(Heads, RowsAreApart) {
  const HeadCase& c = GetParam();
  if (c.kind == TaskKind::masked_tokens) return;  // has no row of its own in the scores
  const auto model = small_model(text_task(c.kind), c.model, "name = 'lln+diag'");
  const TensorBatch batch = text_batch();
  TensorBatch one = batch;
  for (Tensor* x : {&one.ids, &one.second_ids, &one.labels, &one.scores}) *x = x->narrow(0, 1, 1);
  expect_near(run_model(*model, one).scores, run_model(*model, batch).scores.narrow(0, 1, 1), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    Tasks, Heads,
    testing::Values(HeadCase{"masked", TaskKind::masked_tokens, ""},
                    HeadCase{"masked_tied", TaskKind::masked_tokens,
                             "tied_output = true\noutput_transform = true\nnorm = 'post'"},
                    HeadCase{"classes_mean", TaskKind::classes, "head = 'mlp'"},
                    HeadCase{"classes_cls", TaskKind::classes,
                             "pooling = 'cls'\nhead = 'pooler'\npositions = 'rotary'"},
                    HeadCase{"score", TaskKind::score, ""},
                    HeadCase{"matched_pair", TaskKind::matched_pair, ""},
                    HeadCase{"embedding", TaskKind::embedding, ""}),
    [](const auto& tested) { return tested.param.name; });

// --- heads, written out ---

TEST(MaskedTokens, TheLossIsOverPredictedPlaces) {
  const auto model = std::dynamic_pointer_cast<WordModel>(
      small_model(text_task(TaskKind::masked_tokens), "", "name = 'softmax'"));
  TensorBatch batch = text_batch();
  batch.labels = at::where(at::rand({kRows, kTokens}) < 0.3, random_ids(kRows, kTokens),
                           at::full({kRows, kTokens}, kIgnoredLabel, at::kLong));
  Context context;
  const Tensor scores = model->word_scores(model->body().forward(batch.ids, {}, {}, context));
  const Tensor logs = scores.log_softmax(2);
  double sum = 0;
  int count = 0;
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const auto label = batch.labels[r][t].item<std::int64_t>();
      if (label == kIgnoredLabel) continue;
      sum -= logs[r][t][label].item<double>();
      ++count;
    }
  }
  ASSERT_GT(count, 3);
  const ModelOutput output = run_model(*model, batch);
  EXPECT_EQ(output.scores.sizes(), (std::vector<std::int64_t>{count, kVocabulary}));
  EXPECT_NEAR(output.loss.item<double>(), sum / count, 1e-5);
}

TEST(MaskedTokens, FixedPlacesGiveTheSame) {
  at::manual_seed(3);
  const Tensor x = at::randn({4, 25, 6});
  Tensor labels = at::randint(0, 30, {4, 25}, at::kLong);
  labels.masked_fill_(at::rand({4, 25}) < 0.8, kIgnoredLabel);
  const Predicted exact = pick_predicted(x, labels, 0);
  const std::int64_t count = exact.labels.size(0);
  const Predicted fixed = pick_predicted(x, labels, 60);
  EXPECT_EQ(fixed.labels.size(0), 60);
  EXPECT_TRUE(at::equal(fixed.x.narrow(0, 0, count), exact.x));
  EXPECT_TRUE(at::equal(fixed.labels.narrow(0, 0, count), exact.labels));
  EXPECT_TRUE((fixed.labels.narrow(0, count, 60 - count) == kIgnoredLabel).all().item<bool>());
  // Where there are more than places, the first ones.
  const Predicted few = pick_predicted(x, labels, count - 2);
  EXPECT_TRUE(at::equal(few.labels, exact.labels.narrow(0, 0, count - 2)));
  EXPECT_TRUE(at::equal(few.x, exact.x.narrow(0, 0, count - 2)));
  const Predicted all = pick_predicted(x, labels, 100);
  EXPECT_EQ(all.labels.size(0), 100);
  const Tensor none = at::full({4, 25}, kIgnoredLabel, at::kLong);
  EXPECT_EQ(mean_cross_entropy(at::randn({100, 30}), none.reshape({-1})).item<float>(), 0);
  EXPECT_EQ(predicted_places(10, 100, 1), 1000);
  EXPECT_NEAR(static_cast<double>(predicted_places(64, 512, 0.15)), 4915 + 6 * 64.6, 3);
}

// Every row predicts a token, whatever the share: a share of one token of a row, or less, has the
// rows where chance chose none on top.
TEST(MaskedTokens, ShortRowsHaveAPlaceForTheirOneToken) {
  EXPECT_GE(predicted_places(4096, 8, 0.01), 4096);
  std::mt19937_64 random(5);
  for (const double share : {0.01, 0.05, 0.15}) {
    for (const std::int64_t tokens : {1, 4, 8, 20, 100}) {
      constexpr std::int64_t kManyRows = 2000;
      std::binomial_distribution<std::int64_t> chosen(tokens, share);
      std::int64_t labels = 0;
      for (std::int64_t row = 0; row < kManyRows; ++row) {
        labels += std::max<std::int64_t>(chosen(random), 1);
      }
      EXPECT_LE(labels, predicted_places(kManyRows, tokens, share)) << share << " " << tokens;
    }
  }
  Task task = text_task(TaskKind::masked_tokens);
  task.predicted_share = 0.15;
  expect_error([&] { small_model(task, "predicted_share = 0.1", "name = 'lln'"); },
               {"predicted_share: expected 0.15 to 1, found 0.1"});
}

TEST(MatchedPair, IsTheHeadOfLongRangeArena) {
  const auto model = small_model(text_task(TaskKind::matched_pair), "", "name = 'softmax'");
  const auto encoder = small_model(text_task(TaskKind::classes), "", "name = 'softmax'");
  TensorBatch batch = text_batch();
  const Weights w{named_weights(*model)};
  const auto pooled = [&](const Tensor& ids) {
    return written_encoder(w, ids, at::zeros_like(ids), true).mean(1);
  };
  const Tensor a = pooled(batch.ids), b = pooled(batch.second_ids);
  const Tensor hidden = w.linear(at::cat({a, b, a * b, a - b}, 1), "head.hidden").relu();
  expect_near(run_model(*model, batch).scores, w.linear(hidden, "head.output"), 1e-5);
  // Texts of different length are not joined.
  batch.second_ids = batch.second_ids.narrow(1, 0, 5);
  const Tensor shorter = run_model(*model, batch).scores;
  batch.mask = at::ones({kRows, kTokens}, at::kBool);
  batch.second_ids = at::cat({batch.second_ids, random_ids(kRows, 7)}, 1);
  batch.second_mask = batch.mask.clone();
  batch.second_mask.narrow(1, 5, 7).fill_(false);
  expect_near(run_model(*model, batch).scores, shorter, 1e-5);
}

TEST(Embedding, IsACosine) {
  const auto model =
      small_model(text_task(TaskKind::embedding), "score_range = 5.0", "name = 'softmax'");
  TensorBatch batch = text_batch();
  batch.scores = batch.scores * 5;
  const ModelOutput output = run_model(*model, batch);
  const Weights w{named_weights(*model)};
  const auto pooled = [&](const Tensor& ids) {
    return written_encoder(w, ids, at::zeros_like(ids), true).mean(1);
  };
  const Tensor a = pooled(batch.ids), b = pooled(batch.second_ids);
  const Tensor cosine = (a * b).sum(1) / (a.square().sum(1) * b.square().sum(1)).sqrt();
  expect_near(output.scores, cosine, 1e-5);
  expect_near(output.loss, (cosine - batch.scores / 5).square().mean(), 1e-5);
  Task scored = text_task(TaskKind::embedding);
  scored.score_range = 5;  // where the config does not say another
  expect_near(run_model(*small_model(scored, "", "name = 'softmax'"), batch).loss, output.loss,
              1e-6);
  Task labelled = text_task(TaskKind::embedding);
  labelled.classes = 2;
  const auto by_label = small_model(labelled, "", "name = 'softmax'");
  batch.labels = at::tensor({0, 1, 1}, at::kLong);
  const ModelOutput judged = run_model(*by_label, batch);
  const Tensor sure = (10 * judged.scores.to(at::kDouble)).sigmoid();
  const Tensor expected = at::where(batch.labels == 1, sure, 1 - sure).log().neg().mean();
  expect_near(judged.loss, expected, 1e-5);
}

// --- images ---

Task image_task() {
  Task task{.name = "images", .kind = TaskKind::classes, .classes = 3};
  task.channels = 2;
  task.height = 8;
  task.width = 12;
  return task;
}

// With layers that add nothing, tokens are the patches: a convolution by steps of its own size.
TEST(Vit, PatchesAreAConvolution) {
  for (const char* pooling : {"mean", "cls"}) {
    const auto model = small_model(
        image_task(), std::string("patch = 4\npooling = '") + pooling + "'", "name = 'softmax'");
    Weights w{named_weights(*model)};
    const at::NoGradGuard no_grad;
    for (auto& [name, tensor] : w.all) {
      if (name.find("contract") != std::string::npos ||
          name.find("attention.output") != std::string::npos) {
        tensor.zero_();
      }
    }
    TensorBatch batch;
    batch.pixels = at::randn({kRows, 2, 8, 12});
    batch.labels = at::zeros({kRows}, at::kLong);
    const bool cls = std::string(pooling) == "cls";
    Tensor x = at::conv2d(batch.pixels, w("body.patch.weight").view({24, 2, 4, 4}),
                          w("body.patch.bias"), 4)
                   .flatten(2)
                   .transpose(1, 2);
    EXPECT_EQ(x.size(1), 6);
    if (cls) x = at::cat({w("body.cls").expand({kRows, 1, 24}), x}, 1);
    x = w.norm(x + w("body.positions"), "body.stack.norm");
    const Tensor pooled = cls ? x.select(1, 0) : x.mean(1);
    expect_near(run_model(*model, batch).scores, w.linear(pooled, "head.output"), 1e-5);
    batch.pixels = batch.pixels.reshape({kRows, -1});  // as to_tensors gives them
    expect_near(run_model(*model, batch).scores, w.linear(pooled, "head.output"), 1e-5);
    batch.pixels = at::randn({kRows, 100});
    expect_error([&] { run_model(*model, batch); }, {"300 pixels in 3 rows", "2 x 8 x 12 = 192"});
  }
}

// --- settings ---

TEST(MakeModel, Refusals) {
  const Task task = text_task(TaskKind::classes);
  const auto make = [](const Task& which, const char* model) {
    return [=] { small_model(which, model, "name = 'softmax'"); };
  };
  expect_error(make(task, "positions = 'rotry'"), {"model.positions", "did you mean rotary?"});
  expect_error(make(task, "kind = 'decoder'"), {"model.kind", "\"encoder\"", "task test"});
  expect_error(make(task, "dropot = 0.1"), {"model.dropot", "did you mean dropout?"});
  expect_error(make(task, "max_tokens = 3"), {"model.max_tokens", "expected 16 to", "found 3"});
  expect_error(make(image_task(), "patch = 5"), {"model.patch", "8 x 12", "found 5"});
  expect_error(
      [&] {
        const Settings settings = Settings::from_toml("[model]\ndim = 24\nheads = 5\n", "test");
        make_model(settings.table("model"), settings.table("attention"), task);
      },
      {"model.heads", "a divisor of dim 24", "found 5"});
  expect_error(
      [&] {
        const auto model = small_model(task, "", "name = 'softmax'");
        run_model(*model, text_batch(17));
      },
      {"a row of 17 tokens", "at most 16"});
}

}  // namespace
}  // namespace lln_torch
