// Every attention behind one interface: a config in, a module out that takes tokens [batch, tokens,
// dim] and owns its projections. One file each, and one entry each in zoo/list.cc.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "lln_torch/config/settings.h"

namespace lln_torch {

using torch::Tensor;

// What a layer shows of itself to whoever asks: the instruments, and dumps of q and k.
struct Observation {
  std::int64_t layer = 0;
  std::string name;
  Tensor q, k;         // [batch, heads, tokens, channels]; undefined where an attention has none
  Tensor alpha, beta;  // [batch or 1, heads] of LLN
  Tensor key_mask;     // bool [batch, tokens], or undefined
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void observe(const Observation& observation) = 0;
};

// What the layers of one forward pass share.
struct Context {
  std::int64_t step = 0;  // of training; random features and plans are redrawn by it
  Observer* observer = nullptr;
  // Rotary positions for q and k, [tokens, channels]; undefined where positions are learned.
  Tensor rotary_cos, rotary_sin;
  // What a layer hands to the next (luna's slots), by the name of the attention.
  std::map<std::string, Tensor> carried;
};

struct AttentionConfig {
  std::string name = "lln+diag";  // of an entry of the zoo
  std::int64_t dim = 0;
  std::int64_t heads = 0;
  std::int64_t max_tokens = 0;  // the longest sequence; some attentions have parameters of its size
  bool causal = false;
  bool bias = true;        // of the projections
  std::int64_t layer = 0;  // its number, which random plans and observations carry
  std::uint64_t seed = 0;  // of random plans and features
};

class Attention : public torch::nn::Module {
 public:
  // x [batch, tokens, dim]; key_mask bool [batch, tokens], True where a token counts, or undefined.
  // -> [batch, tokens, dim]. Rows that the mask leaves out are finite and mean nothing; they change
  // no other row.
  virtual Tensor forward(const Tensor& x, const Tensor& key_mask, Context& context) = 0;
};

// An attention over q, k and v that are linear maps of the tokens, split into heads, which is most
// of them. Derived classes say what becomes of q, k and v; the projections, rotary positions,
// observation and the combination with block-diagonal attention are here.
class ProjectedAttention : public Attention {
 public:
  ProjectedAttention(const AttentionConfig& config, const Settings& options);
  Tensor forward(const Tensor& x, const Tensor& key_mask, Context& context) override;

 protected:
  // q, k, v [batch, heads, tokens, channels] -> the same shape.
  virtual Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                        Context& context) = 0;
  const AttentionConfig& config() const { return config_; }

 private:
  AttentionConfig config_;
  torch::nn::Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, output_{nullptr};
  // diag = "none", "average" (0.5), "learned" (one share per head and channel) or "gate" (a sigmoid
  // of a linear map of the token, per head and token), with diag_block tokens a block.
  std::string diag_;
  std::int64_t diag_block_ = 0;
  Tensor mix_;
  torch::nn::Linear gate_{nullptr};
};

// What the zoo knows of an attention without making one.
struct ZooEntry {
  const char* name;
  const char* summary;     // its definition in a line
  const char* cost;        // time and memory in N tokens, D channels, and its own sizes
  const char* parameters;  // beside the four projections
  const char* padding;     // what becomes of tokens that do not count
  bool causal;             // has a causal form
  bool takes_diag;         // can be combined with block-diagonal attention
  std::shared_ptr<Attention> (*make)(const AttentionConfig& config, const Settings& options);
};

std::span<const ZooEntry> zoo();
// Throws lln::Error that names the nearest entry.
const ZooEntry& find_attention(const std::string& name);
// `options` is the table [attention] of a config: keys of the entry and of ProjectedAttention.
std::shared_ptr<Attention> make_attention(const AttentionConfig& config, const Settings& options);

}  // namespace lln_torch
