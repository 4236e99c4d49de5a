// Making the tensors. The Gaussian numbers are a block of a prime number of them, made once and
// repeated: no two rows of a tensor are alike, and a gigabyte is filled as fast as it is copied.
// SPDX-License-Identifier: Apache-2.0
#include "bench/problem_data.h"

#include <algorithm>
#include <cstring>

#include "conformance/data.h"
#include "conformance/decode.h"
#include "math/half.h"

namespace lln::bench {
namespace {

constexpr std::int64_t kBlock = 100003;

std::vector<float> make_gaussian_block() {
  std::vector<float> block(kBlock);
  for (std::int64_t i = 0; i < kBlock; ++i) {
    block[static_cast<std::size_t>(i)] =
        static_cast<float>(conformance::normal_number(1, static_cast<std::uint64_t>(i)));
  }
  return block;
}

void store(DType dtype, float value, std::byte* at) {
  const double wide = value;
  const std::uint16_t half = dtype == DType::f16 ? f16_from_f32(value) : bf16_from_f32(value);
  const void* from = &half;
  if (dtype == DType::f32) from = &value;
  if (dtype == DType::f64) from = &wide;
  std::memcpy(at, from, size_of(dtype));
}

std::vector<std::byte> gaussian_block(DType dtype) {
  static const std::vector<float> numbers = make_gaussian_block();
  std::vector<std::byte> block(numbers.size() * size_of(dtype));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    store(dtype, numbers[i], block.data() + i * size_of(dtype));
  }
  return block;
}

// Calls body(begin, end) for pieces of [0, bytes) on all threads, pages staying whole.
template <class Body>
void for_pieces(Parallel& threads, std::size_t bytes, const Body& body) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  struct Context {
    std::size_t bytes;
    const Body& body;
  } context{bytes, body};
  threads.run(
      static_cast<std::int64_t>((bytes + kPiece - 1) / kPiece),
      [](void* c, std::int64_t piece, int) {
        const auto& [size, call] = *static_cast<const Context*>(c);
        const std::size_t begin = static_cast<std::size_t>(piece) * kPiece;
        call(begin, std::min(begin + kPiece, size));
      },
      &context);
}

std::size_t bytes_of(DType dtype, const Shape& shape) {
  std::size_t bytes = size_of(dtype);
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes)) {
      throw std::bad_alloc();
    }
  }
  return bytes;
}

std::vector<std::int64_t> even_ends(std::int64_t tokens, std::int64_t sequences) {
  std::vector<std::int64_t> ends = {0};
  const std::int64_t each = sequences > 0 ? tokens / sequences : 0;
  for (std::int64_t s = 1; s <= sequences; ++s) ends.push_back(s < sequences ? s * each : tokens);
  return ends;
}

}  // namespace

ProblemData::ProblemData(const Problem& problem, Parallel& threads)
    : problem_(problem), threads_(threads) {
  options_.kind = problem.kind;
  if (problem.has_diag()) options_.diag_block = problem.diag_block;
  options_.causal = problem.causal;
  options_.feature = problem.feature;
  options_.power = problem.power;
  make_inputs();
  make_lengths();
  make_outputs();
  if (problem.op == Op::append || problem.op == Op::step) make_state();
  workspace_ = io::Bytes(lln::workspace_bytes(problem, {.parallel = &threads}));
  std::memset(workspace_.data(), 0, workspace_.size());
  if (problem.op == Op::backward) forward();  // leaves what the backward takes from it
}

void ProblemData::run() {
  if (state_) return decode();
  if (problem_.op != Op::backward) forward();
  if (problem_.op != Op::forward) backward();
}

Exec ProblemData::exec() {
  return {.parallel = &threads_, .workspace = {workspace_.data(), workspace_.size()}};
}

void ProblemData::forward() { attention_forward(in_, out_, options_, exec()); }

void ProblemData::backward() { attention_backward(in_, grads_, options_, exec()); }

void ProblemData::decode() {
  if (problem_.op == Op::append) {
    state_->reset();
    state_->append(in_, out_.o, exec());
  } else if (problem_.tokens_k == 0) {
    state_->read(in_, out_.o, exec());
  } else {
    state_->step(in_, out_.o, exec());
  }
}

ConstView ProblemData::gaussian(const Shape& shape) {
  io::Bytes& bytes = memory_.emplace_back(bytes_of(problem_.dtype, shape));
  const std::vector<std::byte> block = gaussian_block(problem_.dtype);
  // Every tensor starts elsewhere in the block, so that no two are alike.
  const std::size_t shift = memory_.size() * 7919 * size_of(problem_.dtype);
  for_pieces(threads_, bytes.size(), [&](std::size_t begin, std::size_t end) {
    while (begin < end) {
      const std::size_t at = (begin + shift) % block.size();
      const std::size_t count = std::min(end - begin, block.size() - at);
      std::memcpy(bytes.data() + begin, block.data() + at, count);
      begin += count;
    }
  });
  return view(static_cast<const void*>(bytes.data()), problem_.dtype, shape);
}

View ProblemData::zeros(DType dtype, const Shape& shape) {
  io::Bytes& bytes = memory_.emplace_back(bytes_of(dtype, shape));
  for_pieces(threads_, bytes.size(), [&](std::size_t begin, std::size_t end) {
    std::memset(bytes.data() + begin, 0, end - begin);
  });
  return view(static_cast<void*>(bytes.data()), dtype, shape);
}

void ProblemData::make_inputs() {
  const Problem& p = problem_;
  memory_.reserve(16);
  in_.q = gaussian({p.batch, p.heads, p.tokens, p.dim});
  in_.k = gaussian({p.batch, p.heads_k, p.tokens_k, p.dim});
  in_.v = gaussian({p.batch, p.heads_k, p.tokens_k, p.dim_v});
  if (!p.has_lln()) return;
  // 1.25 to 1.75: what moment matching gives for unit inputs.
  const auto parameter = [&](std::int64_t heads) -> ConstView {
    const DType dtype = p.dtype == DType::f64 ? DType::f64 : DType::f32;
    const View tensor = zeros(dtype, {1, heads, 1, 1});
    for (std::int64_t h = 0; h < heads; ++h) {
      const float value = 1.25F + 0.5F * static_cast<float>(h) / static_cast<float>(heads);
      store(dtype, value, static_cast<std::byte*>(tensor.data) + h * size_of(dtype));
    }
    return tensor;
  };
  in_.alpha = parameter(p.heads);
  in_.beta = parameter(p.heads_k);
}

void ProblemData::make_lengths() {
  const Problem& p = problem_;
  if (p.masked) {
    for (std::int64_t b = 0; b < p.batch; ++b) {
      key_lengths_.push_back(std::max<std::int64_t>(p.tokens_k - 1 - b % 7, 0));
    }
    in_.key_lengths = IndexView(std::span<const std::int64_t>(key_lengths_));
  }
  if (p.packed) {
    cu_seqlens_q_ = even_ends(p.tokens, p.sequences);
    cu_seqlens_k_ = even_ends(p.tokens_k, p.sequences);
    in_.cu_seqlens_q = IndexView(std::span<const std::int64_t>(cu_seqlens_q_));
    in_.cu_seqlens_k = IndexView(std::span<const std::int64_t>(cu_seqlens_k_));
  }
}

void ProblemData::make_state() {
  const Problem& p = problem_;
  const DecodeConfig config = conformance::decode_config(p, options_);
  io::Bytes& bytes = memory_.emplace_back(decode_state_bytes(config));
  state_.emplace(config, std::span(bytes.data(), bytes.size()));
  // An append without rows and a read without keys are given none.
  if (p.op == Op::append && p.tokens == 0) {
    in_.q = {};
    out_.o = {};
  }
  if (p.op == Op::step && p.tokens_k == 0) {
    in_.k = in_.v = {};
    in_.key_lengths = {};
  }
}

void ProblemData::make_outputs() {
  const Problem& p = problem_;
  out_.o = zeros(p.dtype, {p.batch, p.heads, p.tokens, p.dim_v});
  if (p.op != Op::backward && p.op != Op::train) return;
  if (p.has_lln()) {
    const DType dtype = p.dtype == DType::f64 ? DType::f64 : DType::f32;
    out_.saved.key_lse = zeros(dtype, {p.sequences, p.heads_k, 1, p.dim});
    out_.saved.channel_values = zeros(dtype, {p.sequences, p.heads_k, p.dim, p.dim_v});
    grads_.saved = out_.saved;
  }
  grads_.g = gaussian(out_.o.shape);
  grads_.dq = zeros(p.dtype, in_.q.shape);
  grads_.dk = zeros(p.dtype, in_.k.shape);
  grads_.dv = zeros(p.dtype, in_.v.shape);
}

}  // namespace lln::bench
