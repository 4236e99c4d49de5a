// The tensors of a file, or of several, read as the inputs of an attention call: which names there
// may be, in which dtypes and shapes, and how they become views. Apart from run.cc, which decides
// what to do with them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "lln/attention.h"
#include "lln/calibration.h"
#include "lln/moments.h"

namespace lln::cli {

// How the four dimensions of q, k, v, g and the outputs are ordered in files.
enum class FileLayout { bhnd, bnhd };

// Memory of one tensor, its shape in files, and its view for the library.
struct FileTensor {
  std::string dtype;                // as safetensors spells it
  std::vector<std::int64_t> shape;  // as in the file
  io::Bytes bytes;
  View view;  // of `bytes`; not for index and mask tensors

  io::TensorToWrite to_write(const std::string& name) const {
    return {name, dtype, shape, bytes.span()};
  }
};

// A tensor of [batch, head, token, channel] in the order of the layout, uninitialised.
FileTensor make_tensor(DType dtype, const Shape& shape, FileLayout layout);
// The same dtype, shapes and strides in new memory, uninitialised.
FileTensor make_like(const FileTensor& other);

struct FileRequest {
  Kind kind = Kind::lln_diag;
  FileLayout layout = FileLayout::bhnd;
  bool backward = false;  // g is needed
  bool causal = false;
  Feature feature = Feature::exp;
  std::optional<Matching> matching;
  std::optional<float> alpha, beta, mix;
  const CalibratedLayer* calibrated = nullptr;  // alpha and beta of every head
};

class AttentionFile {
 public:
  // Throws one Error that names every tensor that is missing, misshaped or given twice.
  AttentionFile(const io::TensorSource& file, const FileRequest& request);

  // Views of the memory held here. A number from a flag stands as one number per head.
  const AttentionInputs& inputs() const noexcept { return inputs_; }
  // By the names of the file; null when it is neither there nor made from a flag.
  const FileTensor* tensor(const std::string& name) const noexcept;
  const std::vector<std::string>& warnings() const noexcept { return warnings_; }

  // How alpha and beta are set: as requested; otherwise frozen where the file or a flag gives one
  // of them, per_head where nothing does. None for kinds without them.
  std::optional<Matching> matching() const noexcept { return matching_; }
  // Sets alpha and beta, [S, H] and [S, Hk] and all 1 before, in every mode but frozen, which has
  // them already.
  MatchingReport match(const AttentionOptions& options, const Exec& exec);

 private:
  FileTensor* find(const std::string& name) noexcept;
  FileTensor& add_per_head(const char* name, const std::vector<float>& values);
  void view_attention(FileLayout layout);
  void view_parameter(const char* name, ConstView& input, const std::vector<float>& otherwise);
  void add_scales();
  void view_weights(float mix);
  void view_keys();

  std::map<std::string, FileTensor> tensors_;
  AttentionInputs inputs_;
  std::optional<Matching> matching_;
  std::vector<std::string> warnings_;
};

}  // namespace lln::cli
