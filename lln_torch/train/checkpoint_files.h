// What a checkpoint asks of the file system, each call done and on the disk when it returns. Behind
// an interface, so that tests can let every single one fail.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "io/safetensors.h"

namespace lln_torch {

// Every failure is an lln::Error (io) with the path and the reason.
class CheckpointFiles {
 public:
  virtual ~CheckpointFiles() = default;
  virtual void make_folder(const std::string& path);
  virtual void write_tensors(const std::string& path,
                             std::span<const lln::io::TensorToWrite> tensors);
  virtual void write_text(const std::string& path, const std::string& text);
  virtual void sync_folder(const std::string& path);
  virtual void rename(const std::string& from, const std::string& to);
  virtual void remove(const std::string& path);  // with all that is in it
};

}  // namespace lln_torch
