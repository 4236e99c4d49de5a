// The step once more, every operation watched. C++ modules of torch have no hooks: a layer is named
// by the parameter that was used last, which every linear map, embedding and norm has.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/not_finite.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "lln_torch/train/autocast.h"
#include "lln_torch/train/instruments.h"

namespace lln_torch {
namespace {

constexpr std::size_t kMostNamed = 4;  // parameters, ids and layers that one message names

// The first operation with a NaN in its result, and the first with +infinity. Masks hold -infinity
// on purpose.
struct FirstFaults {
  std::optional<std::string> nan, infinity;
};

// What the callbacks of torch's profiler, which are plain functions, see of the watch.
struct WatchState {
  std::mutex lock;
  std::map<const void*, std::string> parameters;  // modules, by the storage of their parameters
  std::string last_parameter;
  FirstFaults faults;
  bool backward = false;
};
std::atomic<WatchState*> current_watch = nullptr;
thread_local bool inside_watch = false;

bool has_any(const at::Tensor& bad) { return bad.any().item<bool>(); }

// Memory that is not written yet may hold anything: what makes it, and views, are not looked at.
bool computes(std::string_view name) {
  constexpr std::array kOthers = {
      "empty",   "resize", "set_",    "view",       "as_strided", "slice", "select",  "transpose",
      "permute", "expand", "squeeze", "narrow",     "detach",     "alias", "reshape", "split",
      "chunk",   "unbind", "::t",     "contiguous", "clone",      "fill_", "zero_",   "resolve_"};
  return std::none_of(kOthers.begin(), kOthers.end(), [&](std::string_view other) {
    return other == "::t" ? name.ends_with(other) : name.find(other) != std::string_view::npos;
  });
}

template <class Values>
std::vector<at::Tensor> tensors_in(const Values& values) {
  std::vector<at::Tensor> found;
  for (const c10::IValue& value : values) {
    if (value.isTensor()) found.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) found.push_back(tensor);
    }
  }
  std::erase_if(found, [](const at::Tensor& t) {
    return !t.defined() || !t.is_floating_point() || t.numel() == 0 || !t.has_storage();
  });
  return found;
}

void note_operation(WatchState& watch, const at::RecordFunction& function,
                    const std::vector<at::Tensor>& tensors, const char* where) {
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor plain = tensor.detach();
    const auto note = [&](std::optional<std::string>& first, const at::Tensor& bad) {
      if (first || !has_any(bad)) return;
      first = fmt::format("{} of {}{}{}", where, function.name(),
                          watch.last_parameter.empty() ? "" : ", next to " + watch.last_parameter,
                          watch.backward ? ", in the backward pass" : "");
    };
    note(watch.faults.nan, at::isnan(plain));
    note(watch.faults.infinity, at::isposinf(plain));
  }
}

// What an operation reads: what it writes, in place or to an `out`, may hold anything before.
std::vector<c10::IValue> read_inputs(const at::RecordFunction& function) {
  std::vector<c10::IValue> read;
  const std::optional<c10::FunctionSchema> schema = function.operator_schema();
  const c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const c10::AliasInfo* const alias =
        schema && i < schema->arguments().size() ? schema->arguments()[i].alias_info() : nullptr;
    if (alias == nullptr || !alias->isWrite()) read.push_back(inputs[i]);
  }
  return read;
}

std::unique_ptr<at::ObserverContext> watch_begin(const at::RecordFunction& function) {
  WatchState* const watch = current_watch;
  if (watch == nullptr || inside_watch) return nullptr;
  inside_watch = true;
  {
    const std::lock_guard guard(watch->lock);
    const std::vector<at::Tensor> inputs = tensors_in(function.inputs());
    for (const at::Tensor& input : inputs) {
      const auto known = watch->parameters.find(input.storage().data());
      if (known != watch->parameters.end()) watch->last_parameter = known->second;
    }
    // Results of functions that are not torch's own are seen when the next one takes them.
    if (computes(function.name())) {
      note_operation(*watch, function, tensors_in(read_inputs(function)), "the input");
    }
  }
  inside_watch = false;
  return nullptr;
}

void watch_end(const at::RecordFunction& function, at::ObserverContext*) {
  WatchState* const watch = current_watch;
  if (watch == nullptr || inside_watch || !computes(function.name())) return;
  inside_watch = true;
  {
    const std::lock_guard guard(watch->lock);
    note_operation(*watch, function, tensors_in(function.outputs()), "the result");
  }
  inside_watch = false;
}

// While it lives every operation on every thread is watched.
class OperationWatch {
 public:
  explicit OperationWatch(const Model& model) {
    for (const auto& item : model.named_parameters()) {
      // Its module: which of weight and bias an operation takes last says nothing.
      state_.parameters[item.value().storage().data()] =
          item.key().substr(0, item.key().rfind('.'));
    }
    current_watch = &state_;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(watch_begin, watch_end)
                                        .needsInputs(true)
                                        .needsOutputs(true)
                                        .scopes({at::RecordScope::FUNCTION}));
  }
  ~OperationWatch() {
    at::removeCallback(handle_);
    current_watch = nullptr;
  }
  OperationWatch(const OperationWatch&) = delete;
  OperationWatch& operator=(const OperationWatch&) = delete;
  void begin_backward() {
    const std::lock_guard guard(state_.lock);
    state_.backward = true;
    state_.last_parameter.clear();
  }
  const FirstFaults& faults() const { return state_.faults; }

 private:
  WatchState state_;
  at::CallbackHandle handle_ = 0;
};

std::vector<std::string> parameters_with(const Model& model, bool gradients) {
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor tensor = gradients ? item.value().grad() : item.value().detach();
    if (tensor.defined() && !at::isfinite(tensor).all().item<bool>()) names.push_back(item.key());
  }
  return names;
}

double largest_gradient(const Model& model) {
  double largest = 0;
  for (const Tensor& parameter : model.parameters()) {
    if (!parameter.grad().defined() || parameter.numel() == 0) continue;
    largest = std::max(largest, parameter.grad().abs().max().item<double>());
  }
  return largest;
}

std::string few(const std::vector<std::string>& names) {
  const std::size_t shown = std::min(kMostNamed, names.size());
  return fmt::format("{}{}",
                     fmt::join(names.begin(), names.begin() + static_cast<long>(shown), ", "),
                     names.size() > shown ? fmt::format(" and {} more", names.size() - shown) : "");
}

std::string batch_text(const std::vector<Batch>& parts) {
  std::int64_t rows = 0;
  for (const Batch& part : parts) rows += part.rows;
  const Batch& first = parts.front();
  std::string text = fmt::format("{} rows", rows);
  if (!first.text.ids.empty()) {
    const std::size_t shown = std::min<std::size_t>(8, first.text.ids.size());
    text += fmt::format(
        " of {} tokens, the first ids {}", first.text.tokens,
        fmt::join(first.text.ids.begin(), first.text.ids.begin() + static_cast<long>(shown), " "));
  }
  if (!first.pixels.empty()) {
    const auto [low, high] = std::minmax_element(first.pixels.begin(), first.pixels.end());
    text += fmt::format(
        " of {} pixels from {:.3g} to {:.3g}",
        first.pixels.size() / static_cast<std::size_t>(std::max<std::int64_t>(1, first.rows)), *low,
        *high);
  }
  return text;
}

std::string number_or_dash(const nlohmann::ordered_json& value) {
  return value.is_number() ? fmt::format("{:.3g}", value.get<double>()) : "-";
}

// A line for each layer: the size of q and k, and means of the instruments over its heads.
std::string layers_text(const Recorder& recorder, bool causal) {
  std::string text;
  for (const ObservedLayer& layer : recorder.layers()) {
    if (!layer.q.defined()) continue;
    text += fmt::format("\n  layer {} ({}): largest |q| {:.3g}, |k| {:.3g}", layer.layer,
                        layer.attention, layer.q.abs().max().item<double>(),
                        layer.k.abs().max().item<double>());
    const auto heads = measure_layers({layer}, causal);
    for (const char* name : {"temperature", "entropy", "gap", "alpha", "beta"}) {
      double sum = 0;
      std::int64_t count = 0;
      for (const auto& head : heads) {
        if (!head[name].is_number()) continue;
        sum += head[name].get<double>();
        ++count;
      }
      const nlohmann::ordered_json mean =
          count > 0 ? nlohmann::ordered_json(sum / static_cast<double>(count)) : nullptr;
      text += fmt::format(", {} {}", name, number_or_dash(mean));
    }
  }
  return text.empty() ? "" : "\nlayers, the first row:" + text;
}

}  // namespace

std::string describe_not_finite(Model& model, const std::vector<Batch>& parts, const StepSums& sums,
                                const StepOptions& options, const torch::Device& device,
                                bool causal) {
  // Without the sign of a NaN, which means nothing.
  const auto plain = [](double x) { return std::isnan(x) ? "nan" : fmt::format("{:.4g}", x); };
  std::string text = fmt::format(
      "step {}: the loss is {} and the norm of the gradient {}\nbatch: {}", *sums.bad_step + 1,
      plain(sums.bad_loss), plain(sums.bad_gradient_norm), batch_text(parts));
  const std::vector<std::string> weights = parameters_with(model, /*gradients=*/false);
  if (!weights.empty()) text += "\nweights that are not finite: " + few(weights);

  Recorder recorder(1, 512);
  FirstFaults faults;
  bool seen = false;
  for (const auto& item : model.named_parameters()) item.value().mutable_grad().reset();
  for (const Batch& part : parts) {
    const TensorBatch tensors = to_tensors(part, device);
    Context context;
    context.step = *sums.bad_step;
    context.observer = recorder.layers().empty() ? &recorder : nullptr;
    OperationWatch watch(model);
    Tensor loss;
    {
      const AutocastScope scope(device.type(), options.bf16);
      loss = model.run(tensors, context).loss;
    }
    if (std::isfinite(loss.item<double>())) {
      watch.begin_backward();
      loss.backward();
    }
    faults = watch.faults();
    seen = faults.nan || faults.infinity;
    if (seen) break;
  }
  if (!seen) {
    const double largest = largest_gradient(model);
    text += fmt::format(
        "\nthe same batch, run again, gives finite numbers, the largest gradient {:.3g}: {}",
        largest,
        largest > std::sqrt(std::numeric_limits<float>::max()) / 10
            ? "the sum of their squares overflows"
            : "what is random in the model decides");
  } else if (faults.infinity) {
    text += "\nthe first infinity is in " + *faults.infinity;
  }
  if (faults.nan) text += "\nthe first NaN is in " + *faults.nan;
  const std::vector<std::string> gradients = parameters_with(model, /*gradients=*/true);
  if (!gradients.empty()) text += "\ngradients that are not finite: " + few(gradients);
  text += layers_text(recorder, causal);
  text += "\nA lower learning rate, more warmup or a smaller clip help most often.";
  return text;
}

}  // namespace lln_torch
