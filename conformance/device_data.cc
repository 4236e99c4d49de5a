// Copying a case to a device and its outputs back.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/device_data.h"

#include "lln/error.h"

namespace lln::conformance {
namespace {

std::size_t bytes_of(const IndexView& values) {
  return static_cast<std::size_t>(values.count) * (values.wide ? 8 : 4);
}

}  // namespace

CaseViews host_views(const Inputs& in, TensorSet& outputs) {
  return {in.views(), forward_views(outputs), backward_views(outputs, in)};
}

DeviceData::DeviceData(Device device, const Inputs& in, TensorSet& outputs, std::size_t shift)
    : device_(device), shift_(shift) {
  AttentionInputs& to = views_.in;
  const AttentionInputs from = in.views();
  to.q = copy(in.q);
  to.k = copy(in.k);
  to.v = copy(in.v);
  to.alpha = copy(in.alpha);
  to.beta = copy(in.beta);
  to.mix = copy(in.mix);
  to.lln_weight = copy(in.lln_weight);
  to.diag_weight = copy(in.diag_weight);
  to.state = {copy(in.state_lse), copy(in.state_values)};
  to.key_lengths = copy(from.key_lengths);
  to.cu_seqlens_q = copy(from.cu_seqlens_q);
  to.cu_seqlens_k = copy(from.cu_seqlens_k);
  to.block_origins = copy(from.block_origins);
  if (from.key_mask.given()) {
    const DeviceMemory& mask = place(std::as_bytes(std::span(in.key_mask)), shift);
    to.key_mask = on(device, from.key_mask);
    to.key_mask.data = reinterpret_cast<const std::uint8_t*>(mask.data());
  }
  views_.out = {output(outputs, "o"),
                {output(outputs, "key_lse"), output(outputs, "channel_values")}};
  AttentionGradients& grads = views_.grads;
  grads.g = copy(in.g);
  grads.dq = output(outputs, "dq");
  grads.dk = output(outputs, "dk");
  grads.dv = output(outputs, "dv");
  grads.dalpha = output(outputs, "dalpha");
  grads.dbeta = output(outputs, "dbeta");
  grads.dmix = output(outputs, "dmix");
  grads.dlln_weight = output(outputs, "dlln_weight");
  grads.ddiag_weight = output(outputs, "ddiag_weight");
  grads.dsaved = {copy(in.dsaved_lse), copy(in.dsaved_values)};
  grads.dstate = {output(outputs, "dstate_lse"), output(outputs, "dstate_values")};
}

DeviceMemory& DeviceData::place(std::span<const std::byte> bytes, std::size_t shift) {
  DeviceMemory& memory = memory_.emplace_back(device_, bytes.size(), shift);
  memory.write(bytes);
  return memory;
}

ConstView DeviceData::copy(const Tensor& tensor) {
  if (!tensor.given()) return {};
  ConstView view = on(device_, tensor.view());
  view.data = place(tensor.bytes(), shift_ * size_of(tensor.dtype())).data();
  return view;
}

IndexView DeviceData::copy(const IndexView& values) {
  if (!values.given()) return {};
  IndexView view = on(device_, values);
  view.data = place({static_cast<const std::byte*>(values.data), bytes_of(values)}, 0).data();
  return view;
}

View DeviceData::output(TensorSet& outputs, const char* name) {
  if (!outputs.has(name)) return {};
  Tensor& tensor = outputs.at(name);
  const DeviceMemory& memory = place(tensor.bytes(), shift_ * size_of(tensor.dtype()));
  outputs_.emplace_back(&tensor, &memory);
  View view = on(device_, tensor.view());
  view.data = memory.data();
  return view;
}

void DeviceData::fetch() {
  for (const auto& [tensor, memory] : outputs_) memory->read(tensor->writable_bytes());
  for (const DeviceMemory& memory : memory_) {
    if (memory.guards_untouched()) continue;
    throw Error(ErrorCode::internal, "a kernel wrote before or behind a tensor on the device");
  }
}

}  // namespace lln::conformance
