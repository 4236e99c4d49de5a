// Attentions that look at some of the tokens, longformer, bigbird, reformer and informer, against
// their definitions: which keys a query sees is a list of numbers here.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <limits>
#include <set>

#include "lln/error.h"
#include "tests/torch/zoo_definition.h"

namespace lln_torch::definition {
namespace {

// Seen by token i of n: the band, the global tokens, once each; all, where i is global.
Case longformer_case(std::int64_t window, std::int64_t global, bool causal) {
  const auto head = [=](const Values&, std::int64_t, const Rows& q, const Rows& k, const Rows& v) {
    Rows o;
    for (std::int64_t i = 0; i < std::ssize(q); ++i) {
      std::set<std::int64_t> seen;
      for (std::int64_t j = 0; j < std::ssize(q); ++j) {
        const bool linked = std::abs(i - j) <= window || j < global || i < global;
        if (linked && (!causal || j <= i)) seen.insert(j);
      }
      o.push_back(attend_to(q[i], k, v, {seen.begin(), seen.end()}));
    }
    return o;
  };
  return {.config = small("longformer", causal),
          .options = fmt::format("window = {}\nglobal_tokens = {}\n", window, global),
          .definition = [head](const Values& values, const Rows& x) {
            return projected(values, x, 2, head);
          }};
}

TEST(Longformer, IsItsDefinition) {
  check(longformer_case(5, 2, false));
  check(longformer_case(5, 0, false));
  check(longformer_case(1, 7, false));   // more global tokens than a block holds
  check(longformer_case(60, 1, false));  // a band wider than the sequence
}

TEST(Longformer, CausalFormIsItsDefinition) {
  check(longformer_case(5, 2, true));
  check(longformer_case(60, 0, true));
}

// Blocks are numbered from the first token; the random ones of a head are rows of the buffer plan.
Case bigbird_case(std::int64_t block, std::int64_t global, std::int64_t random) {
  const auto head = [=](const Values& values, std::int64_t h, const Rows& q, const Rows& k,
                        const Rows& v) {
    const Rows plan = random == 0 ? Rows(48, Row()) : rows_of(values.at("plan")[h].to(at::kDouble));
    Rows o;
    for (std::int64_t i = 0; i < std::ssize(q); ++i) {
      const std::int64_t mine = i / block;
      std::vector<std::int64_t> seen;
      for (std::int64_t j = 0; j < std::ssize(q); ++j) {
        const std::int64_t other = j / block;
        const bool planned = std::count(plan[mine].begin(), plan[mine].end(), other) > 0;
        if (mine < global || other < global || std::abs(mine - other) <= 1 || planned) {
          seen.push_back(j);
        }
      }
      o.push_back(attend_to(q[i], k, v, seen));
    }
    return o;
  };
  return {.config = small("bigbird"),
          .options = fmt::format("block = {}\nglobal_blocks = {}\nrandom_blocks = {}\n", block,
                                 global, random),
          .definition = [head](const Values& values, const Rows& x) {
            return projected(values, x, 2, head);
          }};
}

TEST(BigBird, IsItsDefinition) {
  check(bigbird_case(4, 2, 3));
  check(bigbird_case(3, 1, 2));
  check(bigbird_case(5, 0, 1));
  check(bigbird_case(4, 2, 0));
  check(bigbird_case(16, 2, 3));  // fewer other blocks than asked for
  check(bigbird_case(64, 2, 3));  // one block is all
}

TEST(BigBird, PlanIsOfLayerHeadAndSeed) {
  const auto plan = [](std::int64_t layer, std::uint64_t seed) {
    AttentionConfig config = small("bigbird");
    config.max_tokens = 4000;
    config.layer = layer;
    config.seed = seed;
    return make_attention(config, Settings::from_toml("block = 50", "options"))
        ->named_buffers()["plan"];
  };
  const Tensor first = plan(0, 3);
  EXPECT_EQ(first.sizes(), at::IntArrayRef({2, 80, 3}));
  EXPECT_TRUE(at::equal(first, plan(0, 3)));
  EXPECT_FALSE(at::equal(first, plan(1, 3)));
  EXPECT_FALSE(at::equal(first, plan(0, 4)));
  EXPECT_FALSE(at::equal(first[0], first[1]));
  const Rows blocks = rows_of(first[0].to(at::kDouble));
  for (std::int64_t i = 0; i < 80; ++i) {
    EXPECT_EQ(std::set<double>(blocks[i].begin(), blocks[i].end()).size(), 3u) << i;
    for (const double j : blocks[i]) {
      EXPECT_TRUE(j >= 2 && j < 80 && std::abs(j - static_cast<double>(i)) > 1) << i << ' ' << j;
    }
  }
}

// One round: tokens sorted by (bucket, place) and cut into chunks; -> o and log of the sum of each.
struct Round {
  Rows o;
  Row sums;
};

Round reformer_round(const Rows& q, const Rows& v, const Rows& rotation, std::int64_t chunk,
                     bool causal) {
  const std::int64_t n = std::ssize(q);
  std::vector<std::pair<std::int64_t, std::int64_t>> order;  // (bucket, place)
  for (std::int64_t i = 0; i < n; ++i) {
    Row turned = product({q[i]}, rotation)[0];
    const std::size_t half = turned.size();
    for (std::size_t b = 0; b < half; ++b) turned.push_back(-turned[b]);
    order.emplace_back(std::max_element(turned.begin(), turned.end()) - turned.begin(), i);
  }
  std::sort(order.begin(), order.end());
  Round round{Rows(n), Row(n)};
  for (std::int64_t s = 0; s < n; ++s) {
    const std::int64_t i = order[s].second;
    Row scores;
    Rows values;
    for (std::int64_t t = std::max<std::int64_t>(0, (s / chunk - 1) * chunk);
         t < std::min(n, (s / chunk + 1) * chunk); ++t) {
      const std::int64_t j = order[t].second;
      if (causal && j > i) continue;
      scores.push_back(i == j ? -5e4 : dot(q[i], q[j]) / std::sqrt(dot(q[j], q[j])));
      values.push_back(v[j]);
    }
    const double highest = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (const double score : scores) sum += std::exp(score - highest);
    round.sums[i] = highest + std::log(sum);
    round.o[i] = mean_by(softmax(scores), values);
  }
  return round;
}

Case reformer_case(std::int64_t chunk, std::int64_t rounds, bool causal) {
  const auto head = [=](const Values& values, std::int64_t h, const Rows& q, const Rows&,
                        const Rows& v) {
    std::vector<Round> all;
    for (std::int64_t r = 0; r < rounds; ++r) {
      const Rows rotation = rows_of(values.at("rotations")[h][r]);
      all.push_back(reformer_round(q, v, rotation, chunk, causal));
    }
    Rows o;
    for (std::size_t i = 0; i < q.size(); ++i) {
      Row sums;
      Rows outputs;
      for (const Round& round : all) {
        sums.push_back(round.sums[i]);
        outputs.push_back(round.o[i]);
      }
      o.push_back(mean_by(softmax(sums), outputs));
    }
    return o;
  };
  return {.config = small("reformer", causal),
          .options = fmt::format("chunk = {}\nrounds = {}\n", chunk, rounds),
          .definition = [head](const Values& values,
                               const Rows& x) { return projected(values, x, 2, head); },
          .f32_tolerance = 0};
}

TEST(Reformer, IsItsDefinition) {
  check(reformer_case(4, 2, false));
  check(reformer_case(7, 3, false));
  check(reformer_case(64, 1, false));
}

TEST(Reformer, CausalFormIsItsDefinition) {
  check(reformer_case(4, 2, true));
  check(reformer_case(64, 2, true));
}

TEST(Reformer, HasNoKeyProjectionAndChecksBuckets) {
  const auto module = make_attention(small("reformer"), Settings());
  EXPECT_FALSE(module->named_parameters().contains("key.weight"));
  EXPECT_THROW(make_attention(small("reformer"), Settings::from_toml("buckets = 5", "options")),
               lln::Error);
}

// Queries by max - mean of their scores with the sampled keys, those of the highest priorities.
Case informer_case(double factor) {
  const auto head = [=](const Values& values, std::int64_t, const Rows& q, const Rows& k,
                        const Rows& v) {
    const std::int64_t n = std::ssize(q);
    const std::int64_t u = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(std::ceil(factor * std::log(static_cast<double>(n)))), 1, n);
    const Row priorities = rows_of(values.at("sample.priorities").unsqueeze(0))[0];
    std::vector<std::int64_t> sample = range(0, n);
    std::sort(sample.begin(), sample.end(),
              [&](std::int64_t a, std::int64_t b) { return priorities[a] > priorities[b]; });
    sample.resize(u);
    Row measure;
    for (const Row& row : q) {
      double highest = -std::numeric_limits<double>::infinity(), mean = 0;
      for (const std::int64_t j : sample) {
        const double score = dot(row, k[j]) / std::sqrt(static_cast<double>(row.size()));
        highest = std::max(highest, score);
        mean += score / static_cast<double>(u);
      }
      measure.push_back(highest - mean);
    }
    std::vector<std::int64_t> active = range(0, n);
    std::sort(active.begin(), active.end(),
              [&](std::int64_t a, std::int64_t b) { return measure[a] > measure[b]; });
    Rows o(n, mean_by(Row(n, 1.0 / static_cast<double>(n)), v));
    for (std::int64_t a = 0; a < u; ++a) {
      o[active[a]] = attend_to(q[active[a]], k, v, range(0, n));
    }
    return o;
  };
  return {.config = small("informer"),
          .options = fmt::format("factor = {}\n", factor),
          .definition = [head](const Values& values,
                               const Rows& x) { return projected(values, x, 2, head); },
          .f32_tolerance = 0};
}

TEST(Informer, IsItsDefinition) {
  check(informer_case(2.5));
  check(informer_case(1));
  check(informer_case(100));  // all are active: softmax attention
}

TEST(Informer, SampleIsRedrawnInTrainingAlone) {
  const auto module =
      make_attention(small("informer"), Settings::from_toml("redraw_steps = 10", "options"));
  const auto priorities = [&] { return module->named_buffers()["sample.priorities"].clone(); };
  const Tensor x = at::randn({1, 20, 12}), first = priorities();
  Context context{.step = 25};
  module->eval();
  module->forward(x, {}, context);
  EXPECT_TRUE(at::equal(first, priorities()));
  module->train();
  module->forward(x, {}, context);
  const Tensor later = priorities();
  EXPECT_FALSE(at::equal(first, later));
  context.step = 29;
  module->forward(x, {}, context);
  EXPECT_TRUE(at::equal(later, priorities()));
  module->begin_step(9);
  EXPECT_TRUE(at::equal(first, priorities()));
}

TEST(Sparse, CostGrowsWithTheWindowAndNotWithTheSquare) {
  // One byte for each pair of tokens would be 4 GiB.
  for (const char* name : {"longformer", "bigbird", "reformer", "transformer-ls"}) {
    AttentionConfig config = small(name);
    config.dim = 8;
    config.max_tokens = 1 << 16;
    const auto module = make_attention(config, Settings());
    const at::NoGradGuard no_gradients;
    Context context;
    const Tensor o = module->forward(at::randn({1, 1 << 16, 8}), {}, context);
    EXPECT_TRUE(at::isfinite(o).all().item<bool>()) << name;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    EXPECT_LT(usage.ru_maxrss, 3 << 20) << "KiB, " << name;
  }
}

TEST(Sparse, SequencesLongerThanThePlanAreRefused) {
  for (const char* name : {"bigbird", "informer", "skyformer", "linformer", "synthesizer"}) {
    const auto module = make_attention(small(name), Settings());
    Context context;
    try {
      module->forward(at::randn({1, 49, 12}), {}, context);
      ADD_FAILURE() << name;
    } catch (const lln::Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("49"), std::string::npos) << text;
      EXPECT_NE(text.find("48"), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace lln_torch::definition
