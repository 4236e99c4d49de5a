// alpha and beta from moments of q and k.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <tuple>

#include "lln/moments.h"
#include "ops/attention.h"
#include "ops/errors.h"
#include "ops/exec.h"

namespace lln_torch {

Scales match(const lln::MatchingInputs& in, const Tensor& q, const std::string& mode, bool causal,
             lln::Feature feature) {
  const ScalarType type = scalar_type(wide_type(in.q.dtype));
  const std::int64_t sequences =
      in.cu_seqlens_q.given() ? in.cu_seqlens_q.count - 1 : in.q.shape[0];
  Scales scales{new_tensor(q, std::array{sequences, in.q.shape[1]}, type),
                new_tensor(q, std::array{sequences, in.k.shape[1]}, type)};
  lln::MatchingOptions options;
  options.mode = lln::parse_matching(mode);
  options.causal = causal;
  options.feature = feature;
  lln::Exec exec = exec_for(q, 2 * q.numel());
  const Workspace workspace(q, exec, [&] { return lln::matching_workspace_bytes(in); });
  lln::match_moments(in, {scale_view("alpha", scales.alpha), scale_view("beta", scales.beta)},
                     options, exec);
  return scales;
}

}  // namespace lln_torch
