// Which tensors a file must and may have for an attention call, and everything that is wrong with
// those of one file, in one message. Shapes are told in the order of the file's dimensions; what
// the numbers in the tensors mean (NaN, lengths, divisibility) is checked by the library.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention_file.h"

namespace lln::cli {

class AttentionFileCheck {
 public:
  AttentionFileCheck(const io::TensorSource& file, const FileRequest& request)
      : file_(file), request_(request) {}

  void check_all();  // throws one Error with every fault
  std::vector<std::string> warnings() const;
  static bool known(std::string_view name);
  bool used(std::string_view name) const;  // by this kind and operation
  bool has(std::string_view name) const;   // in the file, and used
  std::optional<Matching> matching() const;

 private:
  using Dimension = std::optional<std::int64_t>;  // none: any size
  using Form = std::vector<Dimension>;
  using Forms = std::vector<Form>;
  using Names = std::vector<std::string_view>;

  static std::string to_text(const Forms& forms);
  void measure();
  void required(const char* name, const Names& types, const Forms& forms);
  void optional(const std::string& name, const Names& types, const Forms& forms);
  // `flag`: what gives it on the command line, null where nothing does.
  void parameter(const std::string& name, const char* flag, const Forms& forms);
  void missing(const std::string& name, const Names& types, const Forms& forms,
               const std::string& otherwise);
  void check_scales();
  void check_weights();
  void check_packing();

  const io::TensorSource& file_;
  const FileRequest& request_;
  // Sizes that other tensors must agree with; none where the tensor that sets them is wrong.
  Dimension batch_, heads_, tokens_, dim_, heads_k_, tokens_k_, dim_v_, sequences_;
  std::vector<std::string> faults_;
};

}  // namespace lln::cli
