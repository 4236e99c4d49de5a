// HuggingFace's names and settings of BERT-type models, and the pooling of sentence-transformers.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/models/bert.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "io/safetensors.h"
#include "lln/error.h"
#include "lln_torch/data/wordpiece.h"
#include "lln_torch/models/heads.h"
#include "lln_torch/models/weights.h"

namespace lln_torch {
namespace {

namespace fs = std::filesystem;
using BertJson = nlohmann::json;

[[noreturn]] void fail_bert(const fs::path& path, const std::string& text) {
  throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {}", path.string(), text));
}

BertJson read_bert_json(const fs::path& path) {
  std::ifstream file(path);
  if (!file) fail_bert(path, "cannot be read");
  BertJson value = BertJson::parse(file, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) fail_bert(path, "is not JSON");
  return value;
}

std::int64_t bert_size(const fs::path& path, const BertJson& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end() || !found->is_number_integer() || found->get<std::int64_t>() < 1 ||
      found->get<std::int64_t>() > std::numeric_limits<std::int32_t>::max()) {
    fail_bert(path, fmt::format("{}: expected a positive integer, found {}", key,
                                found == config.end() ? "none" : found->dump()));
  }
  return found->get<std::int64_t>();
}

std::string bert_activation(const fs::path& path, const std::string& name) {
  if (name == "gelu" || name == "relu") return name;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return "gelu_tanh";
  fail_bert(path, fmt::format("hidden_act: expected gelu, gelu_new or relu, found {}", name));
}

// Parts of names: ours, then BertModel's.
constexpr std::pair<std::string_view, std::string_view> kBertNames[] = {
    {"tokens.", "embeddings.word_embeddings."},
    {"positions.", "embeddings.position_embeddings."},
    {"segments.", "embeddings.token_type_embeddings."},
    {"embedding_norm.", "embeddings.LayerNorm."},
    {"stack.layers.", "encoder.layer."},
    {"attention.query.", "attention.self.query."},
    {"attention.key.", "attention.self.key."},
    {"attention.value.", "attention.self.value."},
    {"attention.output.", "attention.output.dense."},
    {"attention_norm.", "attention.output.LayerNorm."},
    {"expand.", "intermediate.dense."},
    {"contract.", "output.dense."},
    {"feedforward_norm.", "output.LayerNorm."},
};

// "stack.layers.3.attention.query.weight" -> "encoder.layer.3.attention.self.query.weight"; empty
// where BERT has no such parameter.
std::string bert_name(std::string_view name) {
  std::string result;
  while (!name.empty()) {
    const auto* found =
        std::find_if(std::begin(kBertNames), std::end(kBertNames),
                     [&](const auto& pair) { return name.starts_with(pair.first); });
    if (found != std::end(kBertNames)) {
      result += found->second;
      name.remove_prefix(found->first.size());
    } else if (std::isdigit(static_cast<unsigned char>(name.front())) != 0) {
      const std::size_t dot = name.find('.') + 1;
      result += name.substr(0, dot);
      name.remove_prefix(dot);
    } else if (name == "weight" || name == "bias") {
      return result + std::string(name);
    } else {
      return "";
    }
  }
  return result;
}

bool belongs_to_head(std::string_view name, const std::string& prefix) {
  if (!name.starts_with(prefix)) return true;
  name.remove_prefix(prefix.size());
  return name.starts_with("pooler.") || name.starts_with("cls.") ||
         name.starts_with("classifier.") || name == "embeddings.position_ids";
}

}  // namespace

BodyConfig read_bert_config(const std::string& folder) {
  const fs::path path = fs::path(folder) / "config.json";
  const BertJson config = read_bert_json(path);
  const auto text = [&](const char* key, const char* otherwise) {
    const auto found = config.find(key);
    return found != config.end() && found->is_string() ? found->get<std::string>() : otherwise;
  };
  if (text("model_type", "none") != "bert") {
    fail_bert(path, "model_type: expected bert, found " + text("model_type", "none"));
  }
  if (text("position_embedding_type", "absolute") != "absolute") {
    fail_bert(path, "position_embedding_type: expected absolute, found " +
                        text("position_embedding_type", ""));
  }
  BodyConfig body;
  body.layers = bert_size(path, config, "num_hidden_layers");
  body.dim = bert_size(path, config, "hidden_size");
  body.heads = bert_size(path, config, "num_attention_heads");
  body.feedforward = bert_size(path, config, "intermediate_size");
  body.max_tokens = bert_size(path, config, "max_position_embeddings");
  body.vocabulary = bert_size(path, config, "vocab_size");
  body.segments = bert_size(path, config, "type_vocab_size");
  body.activation = bert_activation(path, text("hidden_act", "gelu"));
  body.norm_first = false;
  body.embedding_norm = true;
  body.norm_epsilon = config.value("layer_norm_eps", 1e-12);
  return body;
}

void load_bert_weights(TextBody& body, const std::string& folder) {
  const std::string path = (fs::path(folder) / "model.safetensors").string();
  const lln::io::SafetensorsReader file(path);
  constexpr const char* kMark = "embeddings.word_embeddings.weight";
  const std::string prefix = file.find(std::string("bert.") + kMark) != nullptr ? "bert." : "";
  NamedTensors targets = named_weights(body);
  std::vector<std::string> untrained;
  for (const auto& item : body.named_parameters()) {
    if (bert_name(item.key()).empty()) untrained.push_back(item.key());
  }
  if (!untrained.empty()) {
    fail_bert(path,
              fmt::format(
                  "has no weights for {}{}: expected an attention without parameters "
                  "of its own",
                  untrained.front(),
                  untrained.size() > 1 ? fmt::format(" and {} others", untrained.size() - 1) : ""));
  }
  std::erase_if(targets, [](const auto& item) { return bert_name(item.first).empty(); });
  std::vector<std::string> heads;
  for (const lln::io::TensorInfo& info : file.tensors()) {
    if (belongs_to_head(info.name, prefix)) heads.push_back(info.name);
  }
  const auto name_in_file = [&](const std::string& name) {
    std::string wanted = prefix + bert_name(name);
    // Files of 2018 call the parameters of norms gamma and beta.
    if (file.find(wanted) == nullptr && wanted.find("LayerNorm.") != std::string::npos) {
      const std::string stem = wanted.substr(0, wanted.rfind('.') + 1);
      const std::string old = stem + (wanted.ends_with("weight") ? "gamma" : "beta");
      if (file.find(old) != nullptr) return old;
    }
    return wanted;
  };
  load_tensors(targets, file, name_in_file, heads);
}

SentenceEncoder::SentenceEncoder(const std::string& folder, const Settings& attention,
                                 const torch::Device& device)
    : attention_name_(attention.text("name", "softmax")), device_(device) {
  Settings used = attention;
  if (!attention.has("name")) used.set("name=" + attention_name_);
  body_ = std::make_shared<TextBody>(read_bert_config(folder), used);
  used.finish();
  load_bert_weights(*body_, folder);
  body_->to(device);
  body_->eval();
  const fs::path root(folder);
  tokenizer_ = load_wordpiece((root / "vocab.txt").string());
  if (tokenizer_->vocabulary() > config().vocabulary) {
    fail_bert(root / "vocab.txt", fmt::format("{} pieces, but the model has {}",
                                              tokenizer_->vocabulary(), config().vocabulary));
  }
  max_tokens_ = config().max_tokens;
  if (fs::exists(root / "sentence_bert_config.json")) {
    const BertJson rules = read_bert_json(root / "sentence_bert_config.json");
    const auto most = rules.find("max_seq_length");
    if (most != rules.end() && most->is_number_integer()) set_max_tokens(most->get<std::int64_t>());
  }
  if (fs::exists(root / "1_Pooling" / "config.json")) {
    const BertJson rules = read_bert_json(root / "1_Pooling" / "config.json");
    if (rules.value("pooling_mode_cls_token", false)) pooling_ = "cls";
    if (pooling_ == "mean" && !rules.value("pooling_mode_mean_tokens", true)) {
      fail_bert(root / "1_Pooling" / "config.json", "expected pooling by mean or by [CLS]");
    }
  }
  if (fs::exists(root / "modules.json")) {
    normalized_ =
        read_bert_json(root / "modules.json").dump().find("Normalize") != std::string::npos;
  }
}

void SentenceEncoder::set_max_tokens(std::int64_t most) {
  if (most < 3 || most > config().max_tokens) {
    throw lln::Error(
        lln::ErrorCode::invalid_argument,
        fmt::format("max_tokens: expected 3 to {}, found {}", config().max_tokens, most));
  }
  max_tokens_ = most;
}

Tensor SentenceEncoder::embed_rows(std::span<const EncodedRow* const> rows, Observer* observer) {
  std::size_t tokens = 0;
  for (const EncodedRow* row : rows) tokens = std::max(tokens, row->ids.size());
  const auto count = static_cast<std::int64_t>(rows.size());
  const auto width = static_cast<std::int64_t>(tokens);
  Tensor ids = at::full({count, width}, tokenizer_->special().pad, at::kLong);
  Tensor mask = at::zeros({count, width}, at::kBool);
  for (std::int64_t row = 0; row < count; ++row) {
    const std::vector<std::int32_t>& source = rows[static_cast<std::size_t>(row)]->ids;
    std::copy(source.begin(), source.end(), ids[row].mutable_data_ptr<std::int64_t>());
    mask[row].narrow(0, 0, static_cast<std::int64_t>(source.size())).fill_(true);
  }
  const bool padded = !mask.all().item<bool>();
  ids = ids.to(device_);
  mask = padded ? mask.to(device_) : Tensor();
  Context context;
  context.observer = observer;
  const Tensor x = body_->forward(ids, mask, {}, context);
  const Tensor pooled = pool_tokens(x, mask, pooling_).to(at::kFloat);
  return normalized_ ? unit_rows(pooled) : pooled;
}

Tensor SentenceEncoder::embed(std::span<const std::string> texts, std::int64_t batch,
                              Observer* observer) {
  const at::NoGradGuard no_grad;
  std::vector<EncodedRow> rows;
  rows.reserve(texts.size());
  for (const std::string& text : texts) {
    rows.push_back(
        make_row(tokenizer_->special(), tokenizer_->encode(text), {}, false, max_tokens_));
  }
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return rows[a].ids.size() > rows[b].ids.size();
  });
  Tensor result = at::empty({static_cast<std::int64_t>(rows.size()), config().dim}, at::kFloat);
  const auto step = static_cast<std::size_t>(std::max<std::int64_t>(batch, 1));
  for (std::size_t first = 0; first < order.size(); first += step) {
    std::vector<const EncodedRow*> some;
    std::vector<std::int64_t> places;
    for (std::size_t i = first; i < std::min(first + step, order.size()); ++i) {
      some.push_back(&rows[order[i]]);
      places.push_back(static_cast<std::int64_t>(order[i]));
    }
    result.index_copy_(0, at::tensor(places), embed_rows(some, observer).to(at::kCPU));
  }
  return result;
}

Tensor unit_rows(const Tensor& x) { return x / x.norm(2, 1, true).clamp_min(1e-12); }

Tensor cosines(const Tensor& embeddings) {
  const Tensor unit = unit_rows(embeddings);
  return at::mm(unit, unit.t());
}

}  // namespace lln_torch
