// One stream beside all others of a device, so that pieces of work have an order among themselves.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/ops/side_work.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <map>
#include <mutex>

namespace lln_torch {
namespace {

c10::Stream side_stream(const c10::Device& device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;
  const std::lock_guard lock(mutex);
  const auto found = streams.find(device.index());
  if (found != streams.end()) return found->second;
  const c10::impl::VirtualGuardImpl streams_of(device.type());
  return streams.emplace(device.index(), streams_of.getStreamFromGlobalPool(device)).first->second;
}

// What `behind` is given from now on waits for what `first` has by now.
void order_streams(const c10::Stream& first, const c10::Stream& behind) {
  c10::Event done(first.device_type());
  done.record(first);
  done.block(behind);
}

}  // namespace

SideWork::SideWork(const c10::Device& device) {
  if (!device.is_cuda()) return;
  stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  side_ = side_stream(device);
  order_streams(*stream_, *side_);
}

SideWork::SideWork(SideWork&& other) noexcept
    : stream_(std::exchange(other.stream_, std::nullopt)),
      side_(std::exchange(other.side_, std::nullopt)) {}

SideWork::~SideWork() {
  try {
    join();
  } catch (const std::exception&) {
    // The device has failed, and says so to whoever asks it next.
  }
}

void SideWork::join() {
  if (const auto side = std::exchange(side_, std::nullopt)) order_streams(*side, *stream_);
}

void StateAgain::remember(const PieceCall& call) {
  call_ = call;
  call_.kind = "lln";
  call_.q = call.q.narrow(2, 0, 0);
}

void StateAgain::begin() {
  if (!call_.k.defined() || work_) return;
  const at::Tensor& k = call_.k;
  const std::int64_t dim_v = call_.v.size(3);
  const auto options = call_.beta.options();
  state_ = {at::empty({k.size(0), k.size(1), 1, k.size(3)}, options),
            at::empty({k.size(0), k.size(1), k.size(3), dim_v}, options)};
  rows_ = at::empty({call_.q.size(0), call_.q.size(1), 0, dim_v}, k.options());
  work_.emplace(k.device());
  work_->run([&] { piece_forward(call_, {}, rows_, state_); });
}

TensorState StateAgain::take() {
  work_.reset();
  call_ = {};
  rows_.reset();
  return std::exchange(state_, {});
}

}  // namespace lln_torch
