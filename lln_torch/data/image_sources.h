// Tasks whose examples are pictures from files.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"

namespace lln_torch {

std::unique_ptr<Source> make_cifar_source(const Settings& data, const std::string& folder);
std::unique_ptr<Source> make_images_source(const Settings& data, const std::string& folder);

}  // namespace lln_torch
