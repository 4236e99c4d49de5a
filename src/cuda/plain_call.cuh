// What a plain kernel is given, the same for all of them: the call, where partial results lie in
// the workspace, and the tiles of a block in shared memory; and how tiles are loaded and stored.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device_call.h"
#include "cuda/plain_block.cuh"
#include "math/feature_map.h"

namespace lln::cuda::plain {

inline constexpr float kLog2E = 1.44269504088896341F;
inline constexpr float kLn2 = 0.693147180559945309F;

// Shaped like a weight of LLN+Diag or like alpha; not asked for where there is no data.
struct ParameterGradient {
  float* data = nullptr;
  std::int64_t shape[4] = {}, stride[4] = {};
  bool per_token = false;   // rows write it themselves
  float lln = 0, diag = 0;  // how g . LLN and g . Diag enter
};

// A state of the API or the gradient of one, natural logarithms; not given where there is no data.
struct SavedState {
  float* lse = nullptr;
  std::int64_t lse_sequence = 0, lse_head = 0;
  float* values = nullptr;
  std::int64_t sequence = 0, head = 0, row = 0;

  __host__ __device__ bool given() const { return lse != nullptr; }
  __device__ float& lse_at(std::int64_t s, std::int64_t hk, int l) const {
    return lse[s * lse_sequence + hk * lse_head + l];
  }
  __device__ float& value_at(std::int64_t s, std::int64_t hk, int l, int c) const {
    return values[s * sequence + hk * head + l * row + c];
  }
  // c in units of log2.
  __device__ float mass_at(std::int64_t s, std::int64_t hk, int l) const {
    const float c = lse_at(s, hk, l);
    return c == -kInfinity ? c : clamp_exponent(c) * kLog2E;
  }
};

// One state or one gradient of it for each of many slots.
struct States {
  float* m = nullptr;       // [slots, dim]: reference; or c, the log2 of the mass
  float* s = nullptr;       // [slots, dim]: mass against it; or t
  float* values = nullptr;  // [slots, dim, dim_v]: averages; or dC
};

// Statistics of rows, [heads, batch * tokens]: reference, 1 / mass (0: no valid key), delta.
struct RowStatistics {
  float* m = nullptr;
  float* inverse = nullptr;
  float* delta = nullptr;
};

struct PlainCall {
  DeviceCall call;
  bool causal, packed;
  int dim, dim_v;
  int group;                    // query heads that share a key head
  int tile;                     // tokens of a tile
  std::int64_t parts;           // blocks that share a piece of rows or keys
  std::int64_t batch;           // of the tensors
  std::int64_t q_jobs, k_jobs;  // pieces of rows and of keys, at most
  States pieces;                // of the keys of each piece; causal: `values` of those before it
  States before;                // causal: m and s of all keys before each piece
  States total;                 // [sequences, heads_k]: c in m; causal: with dsaved alone
  States row_pieces;  // t in s, dC in values, of the rows of each piece; causal: of later ones
  States row_total;   // [sequences, heads_k]; causal: on the given state, with dstate alone
  float* chunk_c;     // causal backward: c before every tile (chunk_index)
  RowStatistics lln, diag;
  float* alpha_sums;   // [q jobs, parts, heads]
  float* weight_sums;  // [q jobs, parts, heads, 2, dim_v + 1]: g * LLN, g * Diag and their totals
  float* beta_sums;    // [k jobs, parts, heads_k]
  SavedState saved;
  bool reads_saved;  // the backward is given the state
  SavedState state;  // of keys elsewhere, which all rows see
  SavedState dsaved, dstate;
  ParameterGradient dalpha, dbeta, weights[3];
  bool wants_weights;
  // Not null: [sequences, heads_k], nothing but the heads where it is not 0 is computed.
  const std::uint32_t* only;

  __host__ __device__ bool has_lln() const { return call.kind != Kind::diag; }
  __host__ __device__ bool has_diag() const { return call.kind != Kind::lln; }
  __device__ bool takes(std::int64_t s, std::int64_t hk) const {
    return only == nullptr || only[s * call.heads_k + hk] != 0;
  }
  __host__ __device__ int ld() const { return dim | 1; }
  __host__ __device__ int ld_v() const { return dim_v | 1; }
  __host__ __device__ std::int64_t state_size() const {
    return static_cast<std::int64_t>(dim) * dim_v;
  }
};

// Where a body works.
struct Place {
  bool exists = false;
  std::int64_t s = 0, job = 0;  // sequence and job
  DeviceSequence sequence = {};
  std::int64_t begin = 0, end = 0;  // rows or keys of the job, counted from the sequence's first
  std::int64_t h = 0, hk = 0;
  __device__ bool has_keys() const { return sequence.key_end > sequence.key_first; }
};

// The pieces of a sequence, for rows and for keys alike cut from the first token on, valid or not.
struct PieceList {
  std::int64_t first_job, count, tokens, piece;
};

template <bool kKeys>
__device__ PieceList pieces_of(const PlainCall& p, std::int64_t s, const DeviceSequence& sequence) {
  const Jobs& jobs = kKeys ? p.call.sequences.k_jobs : p.call.sequences.q_jobs;
  const std::int64_t tokens = kKeys ? sequence.k_tokens : sequence.q_tokens;
  const std::int64_t count = jobs.count(tokens);
  if (!p.packed) return {s * count, count, tokens, jobs.piece(tokens)};
  return {kKeys ? sequence.k_first_job : sequence.q_first_job, count, tokens, jobs.piece(tokens)};
}

template <bool kKeys>
__device__ Place place_of(const PlainCall& p, std::int64_t job, std::int64_t h, std::int64_t hk) {
  const Sequences& all = p.call.sequences;
  Place place;
  if (p.packed) {
    const JobPlace found = find_job<kKeys>(all, job);
    if (found.s < 0) return place;
    place.s = found.s;
    place.sequence = found.sequence;
  } else {
    const Jobs& jobs = kKeys ? all.k_jobs : all.q_jobs;
    place.s = job / jobs.count(kKeys ? all.tokens_k : all.tokens);
    place.sequence = sequence_at(all, place.s);
  }
  const PieceList pieces = pieces_of<kKeys>(p, place.s, place.sequence);
  place.exists = p.takes(place.s, hk);
  place.job = job;
  place.begin = (job - pieces.first_job) * pieces.piece;
  place.end =
      place.begin + pieces.piece < pieces.tokens ? place.begin + pieces.piece : pieces.tokens;
  place.h = h;
  place.hk = hk;
  return place;
}

// Block `index` of jobs x parts x heads, which also numbers partial sums: its own part of the
// piece.
template <bool kKeys>
__device__ Place part_place(const PlainCall& p, std::int64_t index) {
  const std::int64_t heads = kKeys ? p.call.heads_k : p.call.heads;
  const std::int64_t h = index % heads, part = index / heads % p.parts;
  Place place = place_of<kKeys>(p, index / heads / p.parts, h, kKeys ? h : h / p.group);
  if (!place.exists) return place;
  const Sequences& all = p.call.sequences;
  const std::int64_t piece =
      kKeys ? all.k_jobs.piece(place.sequence.k_tokens) : all.q_jobs.piece(place.sequence.q_tokens);
  const std::int64_t begin = place.begin + part * (piece / p.parts);
  const std::int64_t end = begin + piece / p.parts;
  place.begin = begin < place.end ? begin : place.end;
  place.end = end < place.end ? end : place.end;
  return place;
}

__device__ inline std::int64_t row_index(const PlainCall& p, const Place& place, std::int64_t row) {
  const std::int64_t tokens = p.call.sequences.tokens;
  return (place.h * p.batch + place.sequence.batch) * tokens + place.sequence.q_begin + row;
}

// Of the tile that begins at token `begin` of a piece: tiles of all jobs are apart, and there are
// at most batch * tokens / tile + jobs of them.
__device__ inline std::int64_t chunk_index(const PlainCall& p, const DeviceSequence& sequence,
                                           std::int64_t job, std::int64_t piece_begin,
                                           std::int64_t begin, std::int64_t hk) {
  const std::int64_t row =
      sequence.batch * p.call.sequences.tokens + sequence.q_begin + piece_begin;
  const std::int64_t chunk = row / p.tile + job + (begin - piece_begin) / p.tile;
  return (chunk * p.call.heads_k + hk) * p.dim;
}

__device__ inline float load(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  if (dtype == DType::f16) return __half2float(__ushort_as_half(bits));
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

__device__ inline void store(void* data, DType dtype, std::int64_t i, float value) {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[i] = value;
    return;
  }
  const std::uint16_t bits = dtype == DType::f16 ? __half_as_ushort(__float2half_rn(value))
                                                 : __bfloat16_as_ushort(__float2bfloat16_rn(value));
  static_cast<std::uint16_t*>(data)[i] = bits;
}

__device__ inline std::int64_t row_offset(const Rows& rows, std::int64_t b, std::int64_t h,
                                          std::int64_t n) {
  return b * rows.batch + h * rows.head + n * rows.token;
}

struct Exponent {
  float value;  // log2 of the feature
  float slope;
};

__device__ inline Exponent exponent_of(const PlainCall& p, float scale, float x) {
  const LogFeature<float> f = log_feature(p.call.feature, p.call.power, clamp_exponent(scale * x));
  return {clamp_exponent(f.value) * kLog2E, f.derivative};
}

// Elements by their place: rows of q, g and keys counted from the sequence's first.
struct Elements {
  const PlainCall& p;
  const Place& at;

  __device__ float q(std::int64_t row, int l) const { return row_of(p.call.q, row, l); }
  __device__ float g(std::int64_t row, int c) const { return row_of(p.call.g, row, c); }
  __device__ float k(std::int64_t key, int l) const { return key_of(p.call.k, key, l); }
  __device__ float v(std::int64_t key, int c) const { return key_of(p.call.v, key, c); }
  __device__ bool valid(std::int64_t key) const {
    return key_valid(p.call.sequences, at.sequence, key);
  }
  __device__ float alpha() const { return scale_at(p.call.alpha, at.s, at.h); }
  __device__ float beta() const { return scale_at(p.call.beta, at.s, at.hk); }
  __device__ float lln_weight(std::int64_t row, int c) const {
    return weight(p.call.lln_weight, row, c);
  }
  __device__ float diag_weight(std::int64_t row, int c) const {
    return weight(p.call.diag_weight, row, c);
  }
  __device__ void store_row(const Rows& rows, std::int64_t row, int c, float value) const {
    const std::int64_t n = at.sequence.q_begin + row;
    store(rows.data, p.call.dtype, row_offset(rows, at.sequence.batch, at.h, n) + c, value);
  }
  __device__ void store_key(const Rows& rows, std::int64_t key, int c, float value) const {
    const std::int64_t n = at.sequence.k_begin + key;
    store(rows.data, p.call.dtype, row_offset(rows, at.sequence.batch, at.hk, n) + c, value);
  }

 private:
  __device__ float row_of(const Rows& rows, std::int64_t row, int c) const {
    const std::int64_t n = at.sequence.q_begin + row;
    return load(rows.data, p.call.dtype, row_offset(rows, at.sequence.batch, at.h, n) + c);
  }
  __device__ float key_of(const Rows& rows, std::int64_t key, int c) const {
    const std::int64_t n = at.sequence.k_begin + key;
    return load(rows.data, p.call.dtype, row_offset(rows, at.sequence.batch, at.hk, n) + c);
  }
  // A part alone has weight 1.
  __device__ float weight(const Weight& w, std::int64_t row, int c) const {
    if (p.call.kind != Kind::lln_diag) return 1;
    return weight_at(w, at.sequence.batch, at.h, at.sequence.q_begin + row, c);
  }
};

// Hands out shared memory, or only counts it. Two types, and no null pointers: the compiler must be
// able to see that what a body reads is shared memory.
struct SharedMemory {
  float* memory;
  __host__ __device__ float* take(int count) {
    float* const piece = memory;
    memory += count;
    return piece;
  }
};

struct CountedMemory {
  int floats = 0;
  __host__ __device__ float* take(int count) {
    floats += count;
    return nullptr;
  }
};

template <class Memory>
__host__ __device__ Running take_running(Memory& memory, int count) {
  float* const m = memory.take(count);
  float* const s = memory.take(count);
  float* const keep = memory.take(count);
  return {m, s, keep, memory.take(count)};
}

// Tiles of tokens that a kernel asks for.
enum TileSet : unsigned {
  kTileX = 1,   // [tile, dim]: queries, weights of rows
  kTileK = 2,   // [tile, dim]: keys, weights of keys
  kTileV = 4,   // [tile, dim_v]: values
  kTileY = 8,   // [tile, dim]: dq or dk
  kTileW = 16,  // [tile, dim_v]: o or g
  kTileZ = 32,  // [tile, dim_v]: dv, or the rows of one part
};

struct TokenSpan {
  std::int64_t begin, end;  // empty where end <= begin
};

struct Tiles {
  // Tiles that are not asked for have no room.
  template <class Memory>
  __host__ __device__ Tiles(Memory& memory, const PlainCall& p, unsigned set)
      : ld(p.ld()), ld_v(p.ld_v()), ld_p(p.tile + 1) {
    constexpr int kSpanFloats = sizeof(TokenSpan) / sizeof(float);
    seen = reinterpret_cast<TokenSpan*>(memory.take(p.tile * kSpanFloats));  // first: aligned
    x = memory.take((set & kTileX) != 0 ? p.tile * ld : 0);
    k = memory.take((set & kTileK) != 0 ? p.tile * ld : 0);
    y = memory.take((set & kTileY) != 0 ? p.tile * ld : 0);
    v = memory.take((set & kTileV) != 0 ? p.tile * ld_v : 0);
    w = memory.take((set & kTileW) != 0 ? p.tile * ld_v : 0);
    z = memory.take((set & kTileZ) != 0 ? p.tile * ld_v : 0);
    stage = memory.take(kStage * kStageLd);
    pairs = memory.take(p.tile * ld_p);
    dpairs = memory.take(p.tile * ld_p);
    scratch = memory.take(kThreads);
    row = take_running(memory, p.tile);
    delta = memory.take(p.tile);
    sums = memory.take(p.tile);
    dots = memory.take(p.tile);
    diag_dots = memory.take(p.tile);
    channel = take_running(memory, p.dim);
    c = memory.take(p.dim);
    t = memory.take(p.dim);
    lln_sums = memory.take(p.dim_v + 1);
    diag_sums = memory.take(p.dim_v + 1);
  }

  int ld, ld_v, ld_p;
  TokenSpan* seen;  // [tile]: keys of the block-diagonal part that each row sees
  float *x, *k, *y, *v, *w, *z;
  float* stage;
  float *pairs, *dpairs;        // [tile, tile]: rows by keys
  float* scratch;               // [kThreads]
  Running row;                  // [tile]
  float* delta;                 // [tile]
  float* sums;                  // [tile]: of dalpha or dbeta
  float *dots, *diag_dots;      // [tile]: g . LLN and g . Diag
  Running channel;              // [dim]
  float *c, *t;                 // [dim]
  float *lln_sums, *diag_sums;  // [dim_v + 1]
};

// The keys of a tile from `begin` on: exponents in tiles.k (-inf where not valid) or the keys
// themselves (0 there), values in tiles.v (0 there).
template <bool kExponents, class Block>
__device__ void load_keys(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                          std::int64_t begin) {
  const Elements e{p, at};
  const float beta = kExponents ? e.beta() : 1.0F;
  for_each_element(block, p.tile, p.dim, [&](int r, int l) {
    const bool valid = e.valid(begin + r);
    float& to = tiles.k[r * tiles.ld + l];
    if (kExponents) {
      to = valid ? exponent_of(p, beta, e.k(begin + r, l)).value : -kInfinity;
    } else {
      to = valid ? e.k(begin + r, l) : 0.0F;
    }
  });
  for_each_element(block, p.tile, p.dim_v, [&](int r, int c) {
    tiles.v[r * tiles.ld_v + c] = e.valid(begin + r) ? e.v(begin + r, c) : 0.0F;
  });
}

// `rows` queries from `begin` on in tiles.x: exponents or the queries themselves; the rest is 0.
template <bool kExponents, class Block>
__device__ void load_queries(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                             std::int64_t begin, int rows) {
  const Elements e{p, at};
  const float alpha = kExponents ? e.alpha() : 1.0F;
  for_each_element(block, p.tile, p.dim, [&](int r, int l) {
    float x = 0;
    if (r < rows) x = e.q(begin + r, l);
    tiles.x[r * tiles.ld + l] = kExponents ? exponent_of(p, alpha, x).value : x;
  });
}

// g times the weight of a part in tiles.w; 0 where there is no row, or one of causal LLN that sees
// no key.
template <bool kDiag, class Block>
__device__ void load_g(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                       std::int64_t begin, int rows) {
  const Elements e{p, at};
  for_each_element(block, p.tile, p.dim_v, [&](int r, int c) {
    float x = 0;
    const bool sees = kDiag || !p.causal || p.state.given() || begin + r >= at.sequence.key_first;
    if (r < rows && sees) {
      x = e.g(begin + r, c);
      x *= kDiag ? e.diag_weight(begin + r, c) : e.lln_weight(begin + r, c);
    }
    tiles.w[r * tiles.ld_v + c] = x;
  });
}

template <class Block>
__device__ void clear(Block& block, float* tile, int count) {
  for_each(block, count, [&](int i) { tile[i] = 0; });
}

}  // namespace lln::cuda::plain
