// Every attention behind one interface: a config in, a module out that takes tokens [batch, tokens,
// dim] and owns its projections. One file each, and one entry each in zoo/list.cc.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "lln_torch/config/settings.h"
#include "lln_torch/ops/side_work.h"

namespace lln_torch {

using torch::Tensor;

class Pieces;  // lln_torch/parallel/pieces.h

// What a layer shows of itself to whoever asks: the instruments, and dumps of q and k.
struct Observation {
  std::int64_t layer = 0;
  std::string name;
  Tensor q, k;         // [batch, heads, tokens, channels]; undefined where an attention has none
  Tensor alpha, beta;  // [batch or 1, heads] of LLN
  Tensor key_mask;     // bool [batch, tokens], or undefined
  // The matrix of its long-range part as the core's instruments name it (lln::parse_matrix);
  // where they do not know that, the softmax of the same q and k, which it stands for.
  std::string kind = "softmax";
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
  // The tokens are a piece of sequences whose other pieces are on other ranks; null: they are
  // whole.
  const Pieces* pieces = nullptr;
  // Layers may put work beside the work of the stream (side_work.h), which is for steps that are
  // captured in a CUDA graph.
  bool side_work = false;
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
  // Brings what is drawn at random up to a step of training. forward() does so itself while
  // training; a caller that captures forward() into a CUDA graph calls this before each replay,
  // since it draws on the CPU.
  virtual void begin_step(std::int64_t step);
  // Pieces of a sequence (Context::pieces) must begin at multiples of so many tokens; 0: this
  // attention needs its sequences whole.
  virtual std::int64_t piece_unit() const { return 0; }
};

// Parts of ProjectedAttention that an attention may not have.
struct ProjectionRules {
  bool takes_diag = true;  // the keys diag and diag_block; as in its ZooEntry
  bool shared_qk = false;  // one projection for q and k (reformer)
};

// An attention over q, k and v that are linear maps of the tokens, split into heads, which is most
// of them. Derived classes say what becomes of q, k and v; the projections, rotary positions,
// observation and the combination with block-diagonal attention are here.
//
// Keys of every attention that takes Diag: diag = "none" | "average" (0.5 each) | "learned" (one
// share per head and channel) | "scales" (two weights per head and channel) | "gate" (the share is
// a sigmoid of a linear map of the token, per head and token), and diag_block, tokens a block. A
// config name that ends in "+diag" makes "average" the default and refuses "none".
class ProjectedAttention : public Attention {
 public:
  ProjectedAttention(const AttentionConfig& config, const Settings& options,
                     const ProjectionRules& rules = {});
  Tensor forward(const Tensor& x, const Tensor& key_mask, Context& context) override;

  // The two ends of forward() for whoever does the middle otherwise (decoding token by token).
  struct Projected {
    Tensor q, k, v;  // [batch, heads, tokens, channels], views of [batch, tokens, dim]
  };
  Projected project(const Tensor& x, const Context& context);
  Tensor project_output(const Tensor& o);  // o as q -> [batch, tokens, dim]

  // Weights of the two parts, o = far * long range + near * block-diagonal, as the op takes them:
  // [heads, channels] or [batch, heads, tokens].
  struct PartWeights {
    Tensor far;   // undefined: 0.5
    Tensor near;  // undefined: 1 - far
  };
  PartWeights part_weights(const Tensor& x);

  // What an attention makes beside the projection of v, and what makes the state of its keys again
  // beside the gradients of the output's projection; nothing by default.
  struct Beside {
    Tensor alpha, beta;
    std::shared_ptr<StateAgain> state_again;
    std::optional<SideWork> work;  // joins before the others go
  };

  // What scores q.k of a softmax are multiplied by; nothing: 1/sqrt D. Not of Diag.
  virtual std::optional<double> score_scale() const { return std::nullopt; }

  const AttentionConfig& config() const { return config_; }
  std::int64_t channels() const { return config_.dim / config_.heads; }
  const std::string& diag() const { return diag_; }
  std::int64_t diag_block() const { return diag_ == "none" ? 0 : diag_block_; }

 protected:
  // q, k, v [batch, heads, tokens, channels] -> the same shape. key_mask is bool [batch, tokens] or
  // undefined; what stands in tokens that do not count may be anything finite.
  virtual Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                        Context& context) = 0;
  // Both parts: attend(), and block-diagonal attention where diag asks for it. For attentions that
  // have a faster way to the same.
  virtual Tensor attend_both(const Projected& projected, const Beside& beside, const Tensor& x,
                             const Tensor& key_mask, Context& context);
  // Of contexts with side_work: begins what needs q and k alone, beside the projection of v.
  virtual Beside begin_beside(const Projected& projected, const Tensor& key_mask,
                              const Context& context);
  // What an observation holds besides q, k and the mask: its kind, and alpha and beta.
  virtual void describe(Observation& observation) const;

 private:
  [[noreturn]] void refuse_pieces() const;
  Tensor heads_of(const Tensor& x) const;                             // [batch, tokens, dim] as q
  Projected project_scored(const Tensor& x, const Context& context);  // q and k

  AttentionConfig config_;
  torch::nn::Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, output_{nullptr};
  std::string diag_ = "none";
  std::int64_t diag_block_ = 0;
  Tensor diag_mix_;                       // [heads, channels] of "learned"
  Tensor diag_far_, diag_near_;           // [heads, channels] of "scales"
  torch::nn::Linear diag_gate_{nullptr};  // of "gate"
};

constexpr std::int64_t kDiagBlock = 64;
constexpr std::int64_t kLargestDiagBlock = 1 << 20;

// Softmax attention inside blocks of `block` tokens, counted from the first token that counts.
Tensor block_diagonal(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                      std::int64_t block, bool causal);

// x [batch, heads, tokens, channels] with 0 in the tokens that do not count: by selection, since
// what stands there may be infinite. x itself without a mask.
Tensor zero_padding(const Tensor& x, const Tensor& key_mask);

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
// The entry of that name, or of "NAME" for "NAME+diag" where NAME takes Diag. Throws lln::Error
// that names the nearest entry.
const ZooEntry& find_attention(const std::string& name);
// `options` is the table [attention] of a config: keys of the entry and of ProjectedAttention; its
// owner calls finish(). Throws lln::Error where config contradicts itself or the entry.
std::shared_ptr<Attention> make_attention(const AttentionConfig& config, const Settings& options);

}  // namespace lln_torch
