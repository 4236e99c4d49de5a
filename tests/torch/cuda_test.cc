// The LibTorch layer on a CUDA device: ops, every attention of the zoo, decoding, matching and
// training give what they give on the CPU, where other tests hold them against definitions.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/scratch_folder.h"
#include "lln_torch/models/weights.h"
#include "lln_torch/ops/attention.h"
#include "lln_torch/ops/decode.h"
#include "lln_torch/ops/instruments.h"
#include "lln_torch/ops/matching.h"
#include "lln_torch/train/autocast.h"
#include "lln_torch/train/json_lines.h"
#include "lln_torch/train/peak_memory.h"
#include "lln_torch/train/prefetch.h"
#include "lln_torch/train/step_cost.h"
#include "lln_torch/train/trainer.h"
#include "torch/zoo_cases.h"

namespace lln_torch {
namespace {

using zoo_cases::AttentionCase;
using zoo_cases::config_alone;
using zoo_cases::every_attention;
using zoo_cases::expect_near;
using zoo_cases::made;
using zoo_cases::mask_of;
using zoo_cases::name_of;
using zoo_cases::random_tokens;
using zoo_cases::run;
using zoo_cases::with_garbage;

const torch::Device kDevice(torch::kCUDA, 0);

// Products in f32 as f32: what is compared is the code, not TF32.
class OnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device for this test: torch sees none";
    prepare_torch(1, kDevice);
    at::globalContext().setFloat32MatmulPrecision("highest");
    at::globalContext().setAllowTF32CuDNN(false);
  }
};

// The tensors of a call, moved.
AttentionCall moved(AttentionCall call, const torch::Device& device) {
  for (Tensor* x :
       {&call.alpha, &call.beta, &call.mix, &call.lln_weight, &call.diag_weight, &call.key_mask,
        &call.key_lengths, &call.query_mask, &call.cu_seqlens, &call.cu_seqlens_k}) {
    if (x->defined()) *x = x->detach().to(device);
  }
  return call;
}

// o and the gradients of q, k, v, scales and weights.
std::vector<Tensor> attend_and_differentiate(const std::array<Tensor, 3>& qkv, AttentionCall call,
                                             const Tensor& g, const torch::Device& device) {
  std::vector<Tensor> leaves;
  const auto leaf = [&](const Tensor& x) {
    leaves.push_back(x.detach().to(device).requires_grad_());
    return leaves.back();
  };
  const Tensor q = leaf(qkv[0]), k = leaf(qkv[1]), v = leaf(qkv[2]);
  call = moved(call, device);
  for (Tensor* x : {&call.alpha, &call.beta, &call.mix, &call.lln_weight, &call.diag_weight}) {
    if (x->defined()) *x = leaf(*x);
  }
  const Tensor o = attention(q, k, v, call);
  std::vector<Tensor> all = torch::autograd::grad({o}, leaves, {g.to(device).to(o.scalar_type())},
                                                  false, false, /*allow_unused=*/true);
  all.insert(all.begin(), o.detach());
  for (Tensor& x : all) {
    if (x.defined()) x = x.to(at::kCPU).to(at::kDouble);
  }
  return all;
}

struct OpCase {
  std::string name;
  AttentionCall call;
  bool packed = false;
};

std::vector<OpCase> op_cases() {
  const auto scale = [](at::IntArrayRef sizes) { return at::rand(sizes) + 0.5; };
  std::vector<OpCase> cases;
  for (const bool causal : {false, true}) {
    for (const std::int64_t block : {0, 16}) {
      AttentionCall call;
      call.causal = causal;
      call.diag_block = block;
      call.alpha = scale({4});
      call.beta = scale({2});
      const std::string name = std::string(causal ? "causal " : "") + (block > 0 ? "diag " : "");
      cases.push_back({name + "plain", call});
      for (const char* feature : {"elu", "relu", "softplus", "power2"}) {
        AttentionCall other = call;
        other.feature = feature;
        cases.push_back({name + feature, other});
      }
      AttentionCall masked = call;
      masked.key_mask = mask_of({150, 61}, 150);
      cases.push_back({name + "masked", masked});
      AttentionCall lengths = call;
      lengths.key_lengths = at::tensor({150, 33}, at::kInt);
      cases.push_back({name + "lengths", lengths});
      AttentionCall packed = call;
      packed.cu_seqlens = at::tensor({0, 40, 40, 150}, at::kInt);
      cases.push_back({name + "packed", packed, true});
      if (block == 0) continue;
      for (const std::vector<std::int64_t>& sizes :
           std::vector<std::vector<std::int64_t>>{{4}, {4, 32}, {2, 4, 150}}) {
        AttentionCall mixed = call;
        mixed.mix = at::rand(sizes);
        cases.push_back({name + "mix of " + std::to_string(sizes.size()), mixed});
        AttentionCall weighed = call;
        weighed.lln_weight = at::rand(sizes);
        weighed.diag_weight = at::rand(sizes);
        cases.push_back({name + "weights of " + std::to_string(sizes.size()), weighed});
      }
    }
  }
  for (const char* matching : {"none", "per_head", "exact", "paper", "entropy"}) {
    AttentionCall call;
    call.matching = matching;
    call.diag_block = 64;
    cases.push_back({matching, call});
  }
  return cases;
}

TEST_F(OnDevice, OpsAreThoseOfTheCpu) {
  at::manual_seed(1);
  struct {
    at::ScalarType type;
    double tolerance;
  } const types[] = {{at::kFloat, 2e-5}, {at::kBFloat16, 1.0 / 32}, {at::kHalf, 1.0 / 256}};
  for (const OpCase& one : op_cases()) {
    for (const auto& [type, tolerance] : types) {
      SCOPED_TRACE(testing::Message() << one.name << " " << type);
      const std::int64_t batch = one.packed ? 1 : 2;
      const std::array<Tensor, 3> qkv = {at::randn({batch, 4, 150, 64}).to(type),
                                         at::randn({batch, 2, 150, 64}).to(type),
                                         at::randn({batch, 2, 150, 32}).to(type)};
      const Tensor g = at::randn({batch, 4, 150, 32}).to(type);
      const std::array<Tensor, 3> wide = {qkv[0].to(at::kDouble), qkv[1].to(at::kDouble),
                                          qkv[2].to(at::kDouble)};
      AttentionCall wide_call = one.call;
      for (Tensor* x : {&wide_call.alpha, &wide_call.beta, &wide_call.mix, &wide_call.lln_weight,
                        &wide_call.diag_weight}) {
        if (x->defined()) *x = x->to(at::kDouble);
      }
      const auto expected = attend_and_differentiate(wide, wide_call, g, torch::kCPU);
      const auto found = attend_and_differentiate(qkv, one.call, g, kDevice);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
        if (found[i].defined()) {
          expect_near(found[i], expected[i], tolerance, "result " + std::to_string(i));
        }
      }
    }
  }
}

TEST_F(OnDevice, MomentsAndMatchingAreThoseOfTheCpu) {
  at::manual_seed(2);
  const Tensor q = at::randn({2, 4, 300, 64}), k = 0.7 * at::randn({2, 2, 300, 64});
  const Tensor mask = mask_of({300, 120}, 300);
  for (const char* mode : {"none", "paper", "per_head", "exact", "entropy"}) {
    SCOPED_TRACE(mode);
    const auto expected = match_moments(q, k, {.mode = mode, .tokens = {.key_mask = mask}});
    const auto found = match_moments(q.to(kDevice), k.to(kDevice),
                                     {.mode = mode, .tokens = {.key_mask = mask.to(kDevice)}});
    EXPECT_TRUE(found.first.device().is_cuda());
    expect_near(found.first.cpu(), expected.first, 1e-5, "alpha");
    expect_near(found.second.cpu(), expected.second, 1e-5, "beta");
  }
  const HeadMoments expected = head_moments(q), found = head_moments(q.to(kDevice));
  expect_near(found.mean, expected.mean, 1e-6, "means");
  expect_near(found.variance, expected.variance, 1e-6, "variances");
  const Tensor running = new_running_moments(2), there = new_running_moments(2, kDevice);
  for (int step = 0; step < 3; ++step) {
    update_moments(running, q * (step + 1), k, {}, 0.9);
    update_moments(there, q.to(kDevice) * (step + 1), k.to(kDevice), {}, 0.9);
  }
  expect_near(there.cpu(), running, 1e-6, "running moments");
  EXPECT_EQ(analyze(q.to(kDevice), k.to(kDevice)), analyze(q, k));
}

TEST_F(OnDevice, DecodingReplaysTheCausalForward) {
  at::manual_seed(3);
  for (const std::int64_t block : {0, 16}) {
    const Tensor q = at::randn({2, 4, 45, 32}), k = at::randn({2, 2, 45, 32});
    const Tensor v = at::randn({2, 2, 45, 32});
    AttentionCall call;
    call.causal = true;
    call.diag_block = block;
    call.alpha = at::rand({4}) + 0.5;
    call.beta = at::rand({2}) + 0.5;
    const Tensor expected = attention(q, k, v, call);
    DecodeState state({.batch = 2,
                       .heads = 4,
                       .dim = 32,
                       .heads_k = 2,
                       .diag_block = block,
                       .alpha = call.alpha.to(kDevice),
                       .beta = call.beta.to(kDevice),
                       .device = kDevice});
    std::vector<Tensor> rows;
    const auto piece = [&](const Tensor& x, std::int64_t begin, std::int64_t end) {
      return x.slice(2, begin, end).to(kDevice);
    };
    rows.push_back(state.append(piece(q, 0, 20), piece(k, 0, 20), piece(v, 0, 20)));
    DecodeState other = state.fork();
    other.load(state.save());
    for (std::int64_t i = 20; i < 45; ++i) {
      rows.push_back(other.step(piece(q, i, i + 1), piece(k, i, i + 1), piece(v, i, i + 1)));
    }
    expect_near(at::cat(rows, 2).cpu(), expected, 2e-5, "rows");
    EXPECT_EQ(other.tokens()[0].item<std::int64_t>(), 45);
    EXPECT_EQ(state.tokens()[0].item<std::int64_t>(), 20);
  }
}

// A sum of outputs, and the gradients of parameters and tokens.
std::vector<Tensor> zoo_results(const AttentionConfig& config, const Tensor& x, const Tensor& mask,
                                const Tensor& weights, const torch::Device& device,
                                const std::string& toml = "") {
  const auto attention = made(config, toml);
  attention->to(device);
  const Tensor leaf = x.detach().to(device).requires_grad_();
  const Tensor there = mask.defined() ? mask.to(device) : mask;
  Tensor y = run(*attention, leaf, there);
  if (mask.defined()) y = y.masked_fill(there.logical_not().unsqueeze(-1), 0);
  std::vector<Tensor> wanted = attention->parameters();
  wanted.push_back(leaf);
  std::vector<Tensor> all = torch::autograd::grad({(y * weights.to(device)).sum()}, wanted, {},
                                                  std::nullopt, false, /*allow_unused=*/true);
  all.push_back(y.detach());
  for (Tensor& one : all) {
    if (one.defined()) one = one.cpu();
  }
  return all;
}

class ZooOnDevice : public OnDevice, public testing::WithParamInterface<AttentionCase> {};

TEST_P(ZooOnDevice, IsThatOfTheCpu) {
  const AttentionConfig config = config_alone(GetParam());
  for (const bool masked : {false, true}) {
    SCOPED_TRACE(masked ? "masked" : "all tokens count");
    const Tensor mask = masked ? mask_of({131, 40, 1}, 131) : Tensor();
    Tensor x = random_tokens(3, 131, config.dim);
    if (masked) x = with_garbage(x, mask, 3);
    const Tensor weights = at::randn_like(x);
    const auto expected = zoo_results(config, x, mask, weights, torch::kCPU);
    const auto found = zoo_results(config, x, mask, weights, kDevice);
    for (std::size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
      if (found[i].defined()) {
        expect_near(found[i], expected[i], 1e-3, "result " + std::to_string(i));
      }
    }
  }
}

TEST_P(ZooOnDevice, RunsUnderBf16Autocast) {
  const AttentionConfig config = config_alone(GetParam());
  const auto attention = made(config);
  attention->to(kDevice);
  attention->eval();
  const Tensor x = (0.5 * random_tokens(2, 128, config.dim)).to(kDevice).requires_grad_();
  const Tensor exact = run(*attention, x).detach();
  Tensor y;
  {
    const AutocastScope scope(at::kCUDA, true);
    y = run(*attention, x);
  }
  const double relative =
      ((y.to(at::kFloat) - exact).norm() / exact.norm()).detach().item<double>();
  EXPECT_LT(relative, 0.05);
  y.to(at::kFloat).square().sum().backward();
  EXPECT_TRUE(at::isfinite(x.grad()).all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(All, ZooOnDevice, testing::ValuesIn(every_attention()),
                         [](const auto& made_case) { return name_of(made_case.param); });

// Also weights and scales that learn.
constexpr std::array kLlnVariants{
    "centred_keys=true", "wide=24",         "two_sided=true", "chain=\"contrast\"",
    "diag=\"learned\"",  "diag=\"scales\"", "diag=\"gate\"",  "matching=\"learned\""};

TEST_F(OnDevice, VariantsOfLlnAreThoseOfTheCpu) {
  const AttentionConfig config = config_alone({"lln+diag", false});
  const Tensor mask = mask_of({131, 40, 1}, 131);
  const Tensor x = with_garbage(random_tokens(3, 131, config.dim), mask, 3);
  const Tensor weights = at::randn_like(x);
  for (const char* variant : kLlnVariants) {
    SCOPED_TRACE(variant);
    const auto expected = zoo_results(config, x, mask, weights, torch::kCPU, variant);
    const auto found = zoo_results(config, x, mask, weights, kDevice, variant);
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect_near(found[i], expected[i], 1e-3, "result " + std::to_string(i));
    }
  }
}

// In 16 bits torch takes the logarithms of maps other than the exponential there, and the core the
// maps themselves on the CPU.
TEST_F(OnDevice, FeatureMapsInBf16AreThoseOfTheCpu) {
  const AttentionConfig config = config_alone({"lln+diag", false});
  const Tensor mask = mask_of({131, 40, 1}, 131);
  const Tensor x = with_garbage(random_tokens(3, 131, config.dim), mask, 3);
  const Tensor weights = at::randn_like(x);
  for (const char* variant :
       {"feature=\"elu\"\nmatching=\"learned\"", "feature=\"elu\"\nmatching=\"frozen\"\nbeta=0.5",
        "feature=\"relu\"", "feature=\"softplus\"", "feature=\"power\"",
        "feature=\"elu\"\nchain=\"contrast\""}) {
    SCOPED_TRACE(variant);
    const auto expected = zoo_results(config, x, mask, weights, torch::kCPU, variant);
    const AutocastScope scope(at::kCUDA, true);
    const auto found = zoo_results(config, x, mask, weights, kDevice, variant);
    // The gradient of the tokens, and what came out.
    for (std::size_t i = found.size() - 2; i < found.size(); ++i) {
      const Tensor off = found[i].to(at::kFloat) - expected[i];
      EXPECT_LT(off.norm().item<double>(), 0.1 * expected[i].norm().item<double>()) << i;
    }
  }
}

// Causal, weights by channel are those of two calls of the core there, and of one on the CPU.
TEST_F(OnDevice, CausalWeightsThatLearnAreThoseOfTheCpu) {
  const AttentionConfig config = config_alone({"lln+diag", true});
  const Tensor x = random_tokens(3, 131, config.dim), weights = at::randn_like(x);
  for (const char* variant : {"diag=\"learned\"", "diag=\"scales\"", "diag=\"gate\""}) {
    SCOPED_TRACE(variant);
    const auto expected = zoo_results(config, x, {}, weights, torch::kCPU, variant);
    const auto found = zoo_results(config, x, {}, weights, kDevice, variant);
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect_near(found[i], expected[i], 1e-3, "result " + std::to_string(i));
    }
  }
}

class TrainOnDevice : public OnDevice {
 protected:
  // Settings of a small training on random tokens, and its losses, step by step.
  static Settings config(const std::string& attention, bool next, bool graph, bool bf16) {
    return Settings::from_toml(
        // Few rows, which are learned by heart: the losses then depend on every update.
        "[data]\ntask = 'random-tokens'\nvocabulary = 50\ntokens = 96\ntrain_rows = 8\n" +
            std::string(next ? "predict = 'next'\n" : "") +
            "[model]\nlayers = 2\ndim = 48\nheads = 3\n[attention]\nname = '" + attention +
            "'\n[train]\nsteps = 12\nbatch = 4\nwarmup = 2\nlearning_rate = 3e-3\nlog_every = 1\n"
            "checkpoint_every = 6\nprecision = '" +
            (bf16 ? "bf16" : "f32") + "'\ncuda_graph = " + (graph ? "true" : "false"),
        "test");
  }
  static std::vector<double> losses(const Settings& config, const torch::Device& device) {
    const RunModel run = make_run_model(config, "", device, /*begins=*/true);
    Optimizer optimizer(*run.model, run.settings.optimizer);
    TrainStep step(*run.model, optimizer, run.settings.step, device);
    run.model->train();
    std::vector<double> all;
    for (std::int64_t i = 0; i < 12; ++i) {
      step.run(batch_parts(*run.source, i, 4, 1), i, learning_rate(run.settings.schedule, i));
      all.push_back(step.take().loss);
    }
    return all;
  }
};

TEST_F(TrainOnDevice, LossesAreThoseOfTheCpu) {
  for (const char* attention : {"lln+diag", "lln", "softmax", "diag"}) {
    SCOPED_TRACE(attention);
    const auto expected = losses(config(attention, false, false, false), torch::kCPU);
    const auto found = losses(config(attention, false, false, false), kDevice);
    EXPECT_LT(expected.back(), expected.front() - 0.1);
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-2) << i;
  }
}

// Kernels that add with atomics in any order leave the last digits open.
TEST_F(TrainOnDevice, AGraphChangesNothing) {
  ASSERT_EQ(step_graph_obstacle(), "");
  for (const AttentionCase& one : every_attention()) {
    SCOPED_TRACE(name_of(one));
    const auto expected = losses(config(one.name, one.causal, false, true), kDevice);
    const auto found = losses(config(one.name, one.causal, true, true), kDevice);
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 2e-2) << i;
  }
}

TEST_F(TrainOnDevice, AGraphChangesNothingInVariantsOfLln) {
  for (const std::string variant : kLlnVariants) {
    SCOPED_TRACE(variant);
    std::vector<double> all[2];
    for (const bool graph : {false, true}) {
      Settings settings = config("lln+diag", false, graph, true);
      settings.set("attention.matching=entropy");
      settings.set("attention." + variant);
      all[graph ? 1 : 0] = losses(settings, kDevice);
    }
    for (std::size_t i = 0; i < all[0].size(); ++i) EXPECT_NEAR(all[1][i], all[0][i], 2e-2) << i;
  }
}

TEST_F(TrainOnDevice, SideWorkChangesNothing) {
  for (const char* attention : {"lln+diag", "lln"}) {
    std::vector<double> all[2];
    for (const bool beside : {false, true}) {
      Settings settings = config(attention, false, true, true);
      settings.set(std::string("train.side_work=") + (beside ? "true" : "false"));
      all[beside ? 1 : 0] = losses(settings, kDevice);
    }
    for (std::size_t i = 0; i < all[0].size(); ++i) EXPECT_NEAR(all[1][i], all[0][i], 2e-2) << i;
  }
}

TEST_F(TrainOnDevice, ResumesWhereItStopped) {
  const lln::io::ScratchFolder scratch;
  const auto sit = [&](const std::string& name, std::int64_t steps) {
    Settings settings = config("lln+diag", false, true, true);
    settings.set("model.dropout=0.1");
    const RunModel made_run = make_run_model(settings, "", kDevice, /*begins=*/true);
    TrainSettings train_settings = made_run.settings;
    train_settings.schedule.steps = 12;
    const RunFolder folder((scratch.path() / name).string());
    folder.make();
    CheckpointFiles files;
    const StopSignals signals;
    TrainEvents events;
    std::int64_t first = 0;
    events.progress = [&](const TrainProgress& now) {
      if (first == 0) first = now.step;
      if (now.step >= steps) std::raise(SIGTERM);
    };
    train({.model = *made_run.model,
           .source = *made_run.source,
           .settings = train_settings,
           .run = folder,
           .device = kDevice,
           .files = files,
           .signals = &signals},
          events);
    std::vector<double> all;
    for (const auto& row : read_json_lines(folder.metrics())) {
      if (row.contains("loss")) all.push_back(row["loss"].get<double>());
    }
    return std::pair(first, all);
  };
  const auto [begin, whole] = sit("whole", 100);
  EXPECT_EQ(begin, 1);
  sit("parts", 5);
  const auto [again, parts] = sit("parts", 100);
  EXPECT_EQ(again, 6);
  ASSERT_EQ(parts.size(), whole.size());
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(parts[i], whole[i], 2e-2) << i;
}

TEST_F(TrainOnDevice, ACostHasTimeAndMemory) {
  const RunModel run_model =
      make_run_model(config("lln+diag", false, true, true), "", kDevice, /*begins=*/true);
  const StepCost cost = measure_step_cost(run_model, kDevice, 0.01);
  EXPECT_GT(cost.seconds, 0);
  EXPECT_EQ(cost.tokens, 4 * 96);
  EXPECT_GE(cost.memory_bytes, 16 * run_model.parameters);
  Settings huge = config("kvt", false, false, true);
  huge.set("data.tokens=4000000");
  const RunModel too_large = make_run_model(huge, "", kDevice, /*begins=*/true);
  EXPECT_THROW(measure_step_cost(too_large, kDevice, 0.01), c10::OutOfMemoryError);
}

}  // namespace
}  // namespace lln_torch
