// What the tiled families share on the host: how sequences are cut into jobs, how scratch memory is
// laid out, and which calls must go to the plain family although the problem does not show it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_launch.h"

namespace lln::cuda {

// The least of kTiledWidths that holds dim and dim_v; 0 where none does.
int tiled_width(const Problem& p);

// The widest tiles of LLN take more shared memory than many devices have: those of the forward pass
// and, in the backward pass, those of 128 channels, too.
inline constexpr int kWideLlnBytes = 220 * 1024;

// The jobs of the sums over keys and, in the backward pass, over rows.
Jobs key_jobs(const Problem& p);
Jobs row_sum_jobs(const Problem& p);

// Scratch memory, in the order in which it is used.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t count) {
    T* const at = reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return at;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

// Sums in so many slots; `exponents`: with a reference each.
Partials take_partials(Layout& layout, const Problem& p, std::int64_t slots,
                       bool exponents = false);

// A state, or the gradient of one, in memory of the caller. Kernels write those that the call gives
// out alone: saved in the forward pass, dstate in the backward.
StateView state_view(const AttentionSaved& saved);
StateView state_view(const AttentionState& state);

// What all tiled families refuse; empty where they do not.
std::string tiled_refusal(const Problem& p);

// Whether the problem's device is known, and its blocks have less shared memory than this.
bool lacks_shared_memory(const Problem& p, int bytes);

// Whether the rows of a tensor begin at multiples of 16 bytes.
bool has_whole_pieces(const ConstView& view);
// Whether the tensors are aligned and no gradient of a parameter is asked for: those are for
// parameter_gradients.h.
bool tiled_takes(const Call& call);
const Kernel& plain_kernel(Op op);
// The same tensors without the channels that are padding: the plain kernels know nothing of it, and
// need not, since they take rows of any length and distance.
Call without_padding(const Call& call);
// On the plain kernels, what tiled_takes() does not take.
void run_plain(const Call& call);

// Enough for every call of a problem, in the tiled families and in the plain one; and for one call.
std::size_t tiled_bytes(const Problem& p, int workers);
std::size_t tiled_call_bytes(const Call& call, int workers);

// A call with its scratch memory laid out and its table of sequences under way, and its launches.
struct TiledWork {
  TiledCall tiled;
  TiledPlan plan;
};
// row_piece_log2: of the pieces of passes over rows that do not depend on each other, so many rows
// a piece; 0: as many as fill the device with blocks.
TiledWork prepare_tiled(const Call& call, int row_piece_log2 = 0);

// What a family of Diag has for the LLN part of another one: its kernels without LLN add to the
// results of that part in place.
struct DiagPart {
  std::string (*refusal)(const Problem&);
  TiledWork (*prepare)(const Call&);  // scratch memory of diag_part_bytes() is at the workspace
  void (*launch)(const Problem&, const TiledWork&);
};
std::size_t diag_part_bytes(const Problem& p);
TiledWork prepare_diag_part(const Call& call);

}  // namespace lln::cuda
