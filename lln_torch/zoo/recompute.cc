// Pieces that the backward pass computes again: one autograd node that keeps the inputs, and makes
// the graph of the piece only to walk it at once.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/recompute.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lln_torch/zoo/precision.h"

namespace lln_torch {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Piece = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

struct PieceHolder : public torch::CustomClassHolder {
  explicit PieceHolder(Piece held) : piece(std::move(held)) {}
  Piece piece;
};

struct Recomputed : public torch::autograd::Function<Recomputed> {
  static at::Tensor forward(AutogradContext* context, at::TensorList inputs, const Piece& piece) {
    context->save_for_backward(inputs.vec());
    context->saved_data["piece"] =
        c10::IValue::make_capsule(c10::make_intrusive<PieceHolder>(piece));
    const WithoutAutocast plain;
    return piece(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto capsule = context->saved_data["piece"].toCapsule();
    const Piece& piece = static_cast<const PieceHolder&>(*capsule).piece;
    variable_list inputs, asked;
    for (const at::Tensor& saved : context->get_saved_variables()) {
      inputs.push_back(saved.detach());
      if (!saved.requires_grad()) continue;
      inputs.back().requires_grad_();
      asked.push_back(inputs.back());
    }
    at::Tensor output;
    {
      const at::AutoGradMode with_graph(true);
      const WithoutAutocast plain;
      output = piece(inputs);
    }
    variable_list found = torch::autograd::grad({output}, asked, gradients, std::nullopt, false,
                                                /*allow_unused=*/true);
    variable_list result(inputs.size() + 1);  // the last one stands for the piece
    for (std::size_t i = 0, next = 0; i < inputs.size(); ++i) {
      if (inputs[i].requires_grad()) result[i] = found[next++];
    }
    return result;
  }
};

}  // namespace

at::Tensor recomputed(const Piece& piece, const std::vector<at::Tensor>& inputs) {
  return Recomputed::apply(at::TensorList(inputs), piece);
}

}  // namespace lln_torch
