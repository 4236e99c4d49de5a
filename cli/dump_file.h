// Queries and keys of a model, dumped to a file: which tensors make a layer, in which dtypes and
// shapes, and how they become views. What lln analyze and lln calibrate read; apart from
// attention_file.h, which reads all inputs of one attention call.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention_file.h"
#include "io/tensor_source.h"
#include "lln/calibration.h"
#include "lln/tensor.h"

namespace CLI {  // NOLINT(readability-identifier-naming): named by its library
class App;
}

namespace lln::cli {

// Where a dump is and how it is read, filled by the command line.
struct DumpOptions {
  std::string file;                           // safetensors; or
  std::vector<std::string> q_files, k_files;  // .npy, one of each for a layer
  std::string q_name = "q", k_name = "k";
  std::string layout = "bhnd";
};

// FILE, --q, --k, --q-name, --k-name and --layout.
void add_dump_options(CLI::App& command, DumpOptions& options);
// The part of a help text about the tensors of a dump.
extern const char* const kDumpHelp;
// A UsageError where the options contradict each other.
std::unique_ptr<io::TensorSource> open_dump(const DumpOptions& options);
// All files that the options name.
std::vector<std::string> input_paths(const DumpOptions& options);

// One layer with the memory of its tensors.
struct DumpLayer {
  std::string name;   // what stands before .q and .k; empty where the tensors are just q and k
  FileTensor q = {};  // view: [batch, heads, tokens, dim]
  FileTensor k = {};  // view: [batch, heads_k, tokens_k, dim], heads a multiple of heads_k
  // view: f32 [1 or batch, heads, 1, 1], not given() where FILE has none.
  FileTensor alpha = {}, beta = {};
};

// What a verb asks of every layer.
struct DumpNeeds {
  bool scales = false;        // alpha and beta, all above zero
  bool equal_tokens = false;  // as many keys as queries
  // Has every layer by name, and its alpha and beta stand in place of those of the file.
  const Calibration* calibration = nullptr;
};

class DumpFile {
 public:
  // `file` and the calibration outlive this object. Throws one Error that names every fault of
  // names, dtypes and shapes, before any data are read.
  DumpFile(const io::TensorSource& file, const DumpOptions& options, const DumpNeeds& needs = {});

  const std::string& path() const noexcept { return file_.path(); }
  // In the order of their names, numbers inside them by value: layer.2 before layer.10.
  const std::vector<std::string>& layers() const noexcept { return layers_; }
  // One layer at a time, so that a dump may be larger than memory. f64 is rounded to f32. Throws
  // an Error with the place of the first infinity or NaN.
  DumpLayer read(std::size_t layer) const;

 private:
  std::string tensor_name(const std::string& layer, const std::string& part) const;
  void find_layers();
  std::string no_layers_text() const;
  void check_layer(const std::string& layer, std::vector<std::string>& faults) const;
  const CalibratedLayer* calibrated(const std::string& layer) const;
  FileTensor read_rows(const std::string& name) const;
  FileTensor read_scale(const std::string& name) const;

  const io::TensorSource& file_;
  std::string q_name_, k_name_;
  FileLayout layout_;
  DumpNeeds needs_;
  std::vector<std::string> layers_;
};

}  // namespace lln::cli
