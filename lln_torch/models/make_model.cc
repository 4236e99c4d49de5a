// The keys of the table [model]: from a config and a task to a model.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "lln_torch/models/heads.h"

namespace lln_torch {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;

std::string model_kind(const Settings& model, const Task& task) {
  const bool pixels = task.vocabulary == 0;
  const bool next = task.kind == TaskKind::next_token;
  const std::string expected = next ? "decoder" : pixels ? "vit" : "encoder";
  const std::string kind = model.choice("kind", expected, {"encoder", "decoder", "vit"});
  if (kind != expected) {
    model.refuse("kind", fmt::format("\"{}\", because the task {} has {}", expected, task.name,
                                     next     ? "next tokens to predict"
                                     : pixels ? "pixels"
                                              : "token ids, of which not the next is predicted"));
  }
  return kind;
}

void read_images(const Settings& model, const Task& task, bool cls, BodyConfig& body) {
  body.channels = task.channels;
  body.height = task.height;
  body.width = task.width;
  body.patch = model.integer("patch", 4, 1, std::max<std::int64_t>(task.height, 1));
  if (task.height % body.patch != 0 || task.width % body.patch != 0) {
    model.refuse("patch", fmt::format("a divisor of both sides of images of {} x {}", task.height,
                                      task.width));
  }
  body.cls_token = cls;
  body.max_tokens =
      (task.height / body.patch) * (task.width / body.patch) + (body.cls_token ? 1 : 0);
}

BodyConfig read_body(const Settings& model, const Task& task, const std::string& kind, bool cls) {
  BodyConfig body;
  body.layers = model.integer("layers", 6, 1, 1000);
  body.dim = model.integer("dim", 384, 1, 1 << 16);
  body.heads = model.integer("heads", 6, 1, body.dim);
  if (body.dim % body.heads != 0) {
    model.refuse("heads", fmt::format("a divisor of dim {}", body.dim));
  }
  body.feedforward = model.integer("feedforward", 4 * body.dim, 1, 1 << 20);
  body.norm_first = model.choice("norm", "pre", {"pre", "post"}) == "pre";
  body.embedding_norm = kind != "vit" && model.flag("embedding_norm", !body.norm_first);
  body.norm_epsilon = model.number("norm_epsilon", 1e-5, 1e-20, 1);
  body.positions = model.choice("positions", "learned", {"learned", "rotary", "none"});
  if (body.positions == "rotary" && (body.dim / body.heads) % 2 != 0) {
    model.refuse("positions", fmt::format("\"learned\" or \"none\": rotary positions turn pairs of "
                                          "channels, and heads have {}",
                                          body.dim / body.heads));
  }
  body.activation = model.choice("activation", "gelu", {"gelu", "gelu_tanh", "relu"});
  body.dropout = model.number("dropout", 0, 0, 0.99);
  body.init_std = model.number("init_std", 0.02, 0, 10);
  body.seed = static_cast<std::uint64_t>(
      model.integer("seed", 0, 0, std::numeric_limits<std::int64_t>::max()));
  body.causal = kind == "decoder";
  if (kind == "vit") {
    read_images(model, task, cls, body);
  } else {
    body.vocabulary = model.integer("vocabulary", task.vocabulary, task.vocabulary, 1 << 30);
    body.max_tokens = model.integer("max_tokens", task.max_tokens, task.max_tokens, kMostTokens);
    body.segments = model.integer("segments", body.causal ? 0 : 2, 0, 1 << 16);
  }
  return body;
}

HeadConfig read_word_head(const Settings& model, const Task& task) {
  HeadConfig head;
  head.tied_output = model.flag("tied_output", false);
  head.output_transform = model.flag("output_transform", false);
  // Not less than the task predicts: labels beyond the places for them would be lost.
  head.predicted_share =
      model.number("predicted_share", task.predicted_share, task.predicted_share, 1);
  return head;
}

}  // namespace

std::shared_ptr<Model> make_model(const Settings& model, const Settings& attention,
                                  const Task& task) {
  const std::string kind = model_kind(model, task);
  if (task.kind == TaskKind::masked_tokens || task.kind == TaskKind::next_token) {
    return std::make_shared<WordModel>(read_body(model, task, kind, false),
                                       read_word_head(model, task), attention);
  }
  HeadConfig head;
  head.pooling = model.choice("pooling", "mean", {"mean", "cls"});
  const BodyConfig body = read_body(model, task, kind, head.pooling == "cls");
  if (task.kind == TaskKind::embedding) {
    head.score_range = model.number("score_range", task.score_range, 1e-6, 1e6);
  } else {
    const char* usual = task.kind == TaskKind::matched_pair ? "mlp" : "linear";
    head.head = model.choice("head", usual, {"linear", "mlp", "pooler"});
  }
  return make_pooled_model(body, head, attention, task);
}

}  // namespace lln_torch
