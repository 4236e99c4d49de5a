// One message holds a state as [sequences, heads_k, dim, 1 + dim_v]: c beside C.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/state_exchange.h"

#include <ATen/ATen.h>

#include <limits>

namespace lln_torch {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

at::Tensor column(const at::Tensor& lse) { return lse.transpose(2, 3); }
at::Tensor row(const at::Tensor& column) { return column.transpose(2, 3).contiguous(); }

// Of the sequences that are shared.
at::Tensor picked(const Pieces& pieces, const at::Tensor& x) {
  return pieces.shared().defined() ? x.index_select(0, pieces.shared().to(x.device())) : x;
}
// `x` with those sequences from `found`.
at::Tensor put_back(const Pieces& pieces, const at::Tensor& x, const at::Tensor& found) {
  if (!pieces.shared().defined()) return found;
  return x.index_copy(0, pieces.shared().to(x.device()), found);
}

at::Tensor pack_state(const Pieces& pieces, const TensorState& state) {
  return at::cat({column(picked(pieces, state.lse)), picked(pieces, state.values)}, 3);
}
at::Tensor c_of(const at::Tensor& packed) { return packed.narrow(3, 0, 1); }
at::Tensor values_of(const at::Tensor& packed) { return packed.narrow(3, 1, packed.size(3) - 1); }

// C / mass where there is any.
at::Tensor averages(const at::Tensor& sums, const at::Tensor& mass) {
  return at::where(mass > 0, sums / mass, at::zeros({}, sums.options()));
}

// Of the union of two sets of keys. Averages are divided by the sum of the two masses, not by that
// of their rounded logarithm.
at::Tensor merge_packed(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor largest = at::maximum(c_of(a), c_of(b));
  const at::Tensor of_a = share_of_mass(c_of(a), largest), of_b = share_of_mass(c_of(b), largest);
  const at::Tensor mass = of_a + of_b;
  return at::cat({at::where(mass > 0, largest + mass.log(), largest),
                  averages(of_a * values_of(a) + of_b * values_of(b), mass)},
                 3);
}

}  // namespace

at::Tensor share_of_mass(const at::Tensor& part, const at::Tensor& whole) {
  return at::where(part == kNothing, at::zeros({}, part.options()), (part - whole).exp());
}

StateMerge::StateMerge(const Pieces& pieces, TensorState own)
    : pieces_(pieces), own_(std::move(own)) {
  if (!pieces_.shares()) return;
  largest_ = picked(pieces_, own_.lse).clone(at::MemoryFormat::Contiguous);
  work_ = pieces_.group().begin_max(largest_);
}

void StateMerge::begin_sum() {
  if (!pieces_.shares()) return;
  pieces_.group().wait(work_);
  own_mass_ = share_of_mass(picked(pieces_, own_.lse), largest_);
  sums_ = at::cat({column(own_mass_), column(own_mass_) * picked(pieces_, own_.values)}, 3);
  work_ = pieces_.group().begin_sum(sums_);
}

StateMerge::Merged StateMerge::finish() {
  const at::Tensor alone = (own_.lse != kNothing).to(own_.lse.scalar_type());
  if (!pieces_.shares()) return {own_, alone};
  pieces_.group().wait(work_);
  const at::Tensor mass = row(c_of(sums_));
  const at::Tensor lse = at::where(mass > 0, largest_ + mass.log(), largest_);
  return {{put_back(pieces_, own_.lse, lse),
           put_back(pieces_, own_.values, averages(values_of(sums_), c_of(sums_)))},
          put_back(pieces_, alone, averages(own_mass_, mass))};
}

StateGradientSum::StateGradientSum(const Pieces& pieces, TensorState own)
    : pieces_(pieces), own_(std::move(own)) {
  if (!pieces_.shares()) return;
  sums_ = pack_state(pieces_, own_);
  work_ = pieces_.group().begin_sum(sums_);
}

TensorState StateGradientSum::finish() {
  if (!pieces_.shares()) return own_;
  pieces_.group().wait(work_);
  return {put_back(pieces_, own_.lse, row(c_of(sums_))),
          put_back(pieces_, own_.values, values_of(sums_))};
}

StateScan::StateScan(const Pieces& pieces, TensorState own, int tag)
    : pieces_(pieces), own_(std::move(own)), tag_(tag) {
  if (!pieces_.shares()) return;
  known_ = pack_state(pieces_, own_);
  begin_round();
}

void StateScan::begin_round() {
  const RankGroup& group = pieces_.group();
  if (distance_ >= group.size()) return;
  const int to = group.rank() + distance_, from = group.rank() - distance_;
  if (from >= 0) arriving_ = at::empty_like(known_);
  passed_ =
      group.begin_pass(known_, to < group.size() ? to : -1, arriving_, from >= 0 ? from : -1, tag_);
}

TensorState StateScan::finish() {
  TensorState before{at::full_like(own_.lse, kNothing), at::zeros_like(own_.values)};
  if (!pieces_.shares()) return before;
  const RankGroup& group = pieces_.group();
  while (distance_ < group.size()) {
    group.wait(passed_);
    if (group.rank() >= distance_) {
      before_ = before_.defined() ? merge_packed(arriving_, before_) : arriving_;
      known_ = merge_packed(arriving_, known_);
    }
    distance_ *= 2;
    begin_round();
  }
  if (!before_.defined()) return before;
  return {put_back(pieces_, before.lse, row(c_of(before_))),
          put_back(pieces_, before.values, values_of(before_).contiguous())};
}

// A message is [sequences, heads_k, dim, 2 + dim_v]: the reference, T, G.
namespace {

at::Tensor form_of(const at::Tensor& packed) { return packed.narrow(3, 1, packed.size(3) - 1); }

// `near` lies before `far`, so that its reference is the smaller one.
at::Tensor add_forms(const at::Tensor& near, const at::Tensor& far) {
  const at::Tensor shrink = share_of_mass(c_of(near), c_of(far));
  // A reference without keys is that of no form: nothing is read of it.
  const at::Tensor shrunk =
      at::where(shrink > 0, shrink * form_of(far), at::zeros({}, far.options()));
  return at::cat({c_of(near), form_of(near) + shrunk}, 3);
}

}  // namespace

GradientScan::GradientScan(const Pieces& pieces, const TensorState& before,
                           const TensorState& dbefore, int tag)
    : pieces_(pieces), dim_v_(before.values.size(3)), tag_(tag) {
  if (!pieces_.shares()) return;
  const at::Tensor g = picked(pieces_, dbefore.values);
  const at::Tensor t = (picked(pieces_, before.values) * g).sum(3, /*keepdim=*/true) -
                       column(picked(pieces_, dbefore.lse));
  known_ = at::cat({column(picked(pieces_, before.lse)), t, g}, 3);
  begin_round();
}

void GradientScan::begin_round() {
  const RankGroup& group = pieces_.group();
  if (distance_ >= group.size()) return;
  const int to = group.rank() - distance_, from = group.rank() + distance_;
  if (from < group.size()) arriving_ = at::empty_like(known_);
  passed_ =
      group.begin_pass(known_, to >= 0 ? to : -1, arriving_, from < group.size() ? from : -1, tag_);
}

TensorState GradientScan::finish(const TensorState& own) {
  if (!pieces_.shares()) return {};
  const RankGroup& group = pieces_.group();
  while (distance_ < group.size()) {
    group.wait(passed_);
    if (group.rank() + distance_ < group.size()) {
      after_ = after_.defined() ? add_forms(after_, arriving_) : arriving_;
      known_ = add_forms(known_, arriving_);
    }
    distance_ *= 2;
    begin_round();
  }
  if (!after_.defined()) return {};
  const at::Tensor shrink = share_of_mass(column(picked(pieces_, own.lse)), c_of(after_));
  const at::Tensor form =
      at::where(shrink > 0, shrink * form_of(after_), at::zeros({}, after_.options()));
  const at::Tensor t = form.narrow(3, 0, 1), g = form.narrow(3, 1, dim_v_);
  const at::Tensor dc = (picked(pieces_, own.values) * g).sum(3, /*keepdim=*/true) - t;
  return {put_back(pieces_, at::zeros_like(own.lse), row(dc)),
          put_back(pieces_, at::zeros_like(own.values), g.contiguous())};
}

}  // namespace lln_torch
