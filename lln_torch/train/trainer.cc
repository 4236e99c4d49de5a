// The loop. Everything that decides what happens next is in RunState, in the tensors of model and
// optimiser, and in torch's generators: a checkpoint holds these, and nothing else is carried from
// step to step.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "lln/error.h"
#include "lln_torch/models/weights.h"
#include "lln_torch/train/evaluation.h"
#include "lln_torch/train/instruments.h"
#include "lln_torch/train/json_lines.h"
#include "lln_torch/train/not_finite.h"
#include "lln_torch/train/peak_memory.h"
#include "lln_torch/train/prefetch.h"
#include "lln_torch/train/rank_state.h"

namespace lln_torch {
namespace {

using MetricsRow = nlohmann::ordered_json;
using TrainClock = std::chrono::steady_clock;

constexpr int kBatchesAhead = 8;

double seconds_since(TrainClock::time_point start) {
  return std::chrono::duration<double>(TrainClock::now() - start).count();
}

// MAGMA, which torch prefers for some factorisations, waits for the device, and aborts where it
// cannot start. torch warns of whoever chooses.
void prefer_cusolver() {
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  at::globalContext().setLinalgPreferredBackend(at::LinalgBackend::Cusolver);
}

// Rows and tokens per second of training, without what lies between the steps.
struct Speed {
  double rows = 0, tokens = 0, seconds = 0;
};

std::optional<GradientExchange> make_exchange(const TrainJob& job, const Optimizer& optimizer) {
  if (job.group == nullptr) return std::nullopt;
  return std::optional<GradientExchange>(std::in_place, *job.group, optimizer.parameters());
}

BatchShare share_of(const TrainJob& job) {
  const TrainSettings& settings = job.settings;
  if (job.group == nullptr) return rank_share(settings.batch, settings.accumulate, 0, 1);
  const int together = job.sequence != nullptr ? job.sequence->size() : 1;
  const int sets = job.group->size() / together;
  if (settings.batch < sets) {
    throw lln::Error(
        lln::ErrorCode::invalid_argument,
        fmt::format("train.batch = {}: expected a row at least for each of {} {}", settings.batch,
                    sets, together > 1 ? "sets of ranks that share rows" : "ranks"));
  }
  return rank_share(settings.batch, settings.accumulate, job.group->rank() / together, sets);
}

std::optional<SequenceCut> make_cut(const TrainJob& job) {
  if (job.sequence == nullptr) return std::nullopt;
  return std::optional<SequenceCut>(std::in_place, *job.sequence, job.model, job.source.task());
}

class Loop {
 public:
  Loop(const TrainJob& job, const TrainEvents& events);
  TrainEnd run();

 private:
  void resume();
  bool load();  // false where there is no checkpoint
  void agree_on_start(bool resumed);
  void step(Prefetch& batches);
  void take_sums();
  [[noreturn]] void report_not_finite(const StepSums& sums);
  void after_step();
  void log();
  void write_log();
  bool evaluate_now();  // false where a signal came
  bool evaluate_here();
  void measure();
  void agree_on_weights();
  void save();
  bool due(std::int64_t every) const { return every > 0 && state_.step % every == 0; }
  bool last() const { return state_.step == settings_.schedule.steps; }
  bool signalled() const { return job_.signals != nullptr && job_.signals->arrived() != 0; }
  // Of several ranks, whether all know that one has had a signal.
  bool stopped() const { return job_.group != nullptr ? stop_agreed_ : signalled(); }
  bool first() const { return job_.group == nullptr || job_.group->first(); }
  // Whether this rank has tokens of the rows that are evaluated.
  bool evaluates() const { return first() || (cut_ && job_.group->rank() < job_.sequence->size()); }
  bool exhausted() const { return settings_.patience > 0 && state_.stale >= settings_.patience; }
  std::pair<std::int64_t, bool> saving() const {
    return {state_.step, state_.evaluated_step == state_.step};
  }
  NamedTensors optimizer_tensors() const;

  const TrainJob& job_;
  const TrainSettings& settings_;
  const TrainEvents& events_;
  Optimizer optimizer_;
  std::optional<GradientExchange> exchange_;
  std::optional<SequenceCut> cut_;
  TrainStep step_;
  BatchShare share_;
  // Of rank 0 alone, as are the logs.
  std::optional<CheckpointStore> store_;
  RunState state_;
  std::optional<JsonLines> metrics_, instruments_;
  // The step that was saved last, and whether it had been evaluated.
  std::optional<std::pair<std::int64_t, bool>> saved_;
  double gradient_norm_ = 0;
  bool stop_agreed_ = false;
  bool sums_pending_ = false;  // of steps that the device has done since they were read
  Speed speed_;
  TrainClock::time_point start_ = TrainClock::now();
  std::int64_t first_step_ = 0;
  double seconds_before_ = 0;
};

Loop::Loop(const TrainJob& job, const TrainEvents& events)
    : job_(job),
      settings_(job.settings),
      events_(events),
      optimizer_(job.model, job.settings.optimizer),
      exchange_(make_exchange(job, optimizer_)),
      cut_(make_cut(job)),
      step_(job.model, optimizer_, job.settings.step, job.device, exchange_ ? &*exchange_ : nullptr,
            cut_ ? &*cut_ : nullptr),
      share_(share_of(job)) {
  state_.seed = settings_.seed;
  if (first()) store_.emplace(job.run.checkpoints(), job.files);
  resume();
  first_step_ = state_.step;
  seconds_before_ = state_.seconds;
  if (!first()) return;
  cut_back(job.run.metrics(), state_.step - (state_.step == 0 ? 1 : 0));
  cut_back(job.run.instruments(), state_.step - (state_.step == 0 ? 1 : 0));
  metrics_.emplace(job.run.metrics());
  instruments_.emplace(job.run.instruments());
}

NamedTensors Loop::optimizer_tensors() const {
  NamedTensors tensors = optimizer_.state();
  const auto [cpu, cuda] = random_states(job_.device);
  tensors.emplace("random.cpu", cpu);
  if (cuda.defined()) tensors.emplace("random.cuda", cuda);
  return tensors;
}

void Loop::resume() {
  const bool resumed = first() && load();
  if (job_.group != nullptr) agree_on_start(resumed);
  if (state_.step > 0) saved_ = saving();
}

// Rank 0 alone reads files of the run: the others may be on another machine.
void Loop::agree_on_start(bool resumed) {
  const RankGroup& group = *job_.group;
  if (share_state(group, state_, resumed)) {
    share_tensors(group, named_weights(job_.model));
    share_tensors(group, optimizer_.state());
  }
  agree_on_weights();
}

// Before they are evaluated or saved: ranks whose weights differ train no model at all.
void Loop::agree_on_weights() {
  if (job_.group == nullptr) return;
  expect_same(*job_.group, named_weights(job_.model),
              fmt::format("step {}: the weights", state_.step));
}

bool Loop::load() {
  const std::optional<Checkpoint> found = newest_checkpoint(job_.run.checkpoints(), events_.warn);
  if (!found) {
    if (checkpoint_steps(job_.run.checkpoints()).empty()) return false;
    throw lln::Error(lln::ErrorCode::io, job_.run.checkpoints() +
                                             ": none of the checkpoints can be read; to begin "
                                             "again remove the folder");
  }
  if (found->state.seed != settings_.seed) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("{}: the checkpoint is of seed {}, the config says {}",
                                 job_.run.path(), found->state.seed, settings_.seed));
  }
  const std::string what = checkpoint_path(job_.run.checkpoints(), found->state.step);
  copy_tensors(found->weights, named_weights(job_.model), what + "/weights.safetensors");
  NamedTensors optimizer = optimizer_tensors();
  copy_tensors(found->optimizer, optimizer, what + "/optimizer.safetensors");
  set_random_states(optimizer.at("random.cpu"),
                    job_.device.is_cuda() ? optimizer.at("random.cuda") : Tensor(), job_.device);
  state_ = found->state;
  store_->set_aside_after(state_.step);
  return true;
}

TrainEnd Loop::run() {
  job_.model.train();
  if (state_.step == 0) measure();
  // A signal may have come between the last step and its evaluation.
  if (state_.step > 0 && state_.evaluated_step != state_.step) after_step();
  Prefetch batches(job_.source, state_.step, settings_.schedule.steps, share_, kBatchesAhead);
  while (!last() && !exhausted()) {
    if (stopped()) {
      agree_on_weights();
      save();
      return TrainEnd::signal;
    }
    step(batches);
    after_step();
  }
  save();
  if (last()) {
    return state_.evaluated_step == state_.step ? TrainEnd::finished : TrainEnd::signal;
  }
  return TrainEnd::early;
}

void Loop::step(Prefetch& batches) {
  // A device works on while the next batch is waited for, so the wait is part of the step.
  const TrainClock::time_point begin = TrainClock::now();
  const std::vector<Batch> parts = batches.next();
  if (job_.group != nullptr) seed_step(settings_.seed, state_.step, job_.group->rank());
  step_.run(parts, state_.step, learning_rate(settings_.schedule, state_.step), signalled());
  if (job_.group != nullptr) average_running(*job_.group, job_.model);
  ++state_.step;
  ++state_.loss_count;
  sums_pending_ = true;
  const bool look = job_.device.is_cpu() || last() || due(settings_.log_every) ||
                    due(settings_.evaluate_every) || due(settings_.checkpoint_every) || stopped();
  if (look) take_sums();
  speed_.seconds += seconds_since(begin);
  for (const Batch& part : parts) {
    speed_.rows += static_cast<double>(part.rows);
    speed_.tokens += tokens_in(part);
  }
}

void Loop::take_sums() {
  // On a GPU this waits for the exchanges, too.
  if (job_.group != nullptr) job_.group->set_waiting(true);
  const StepSums sums = step_.take();
  if (job_.group != nullptr) job_.group->set_waiting(false);
  if (sums.bad_step) report_not_finite(sums);
  sums_pending_ = false;
  stop_agreed_ = stop_agreed_ || sums.stop;
  state_.loss_sum += sums.loss;
  gradient_norm_ = sums.gradient_norm;
}

void Loop::report_not_finite(const StepSums& sums) {
  if (!first()) {
    throw NotFinite(fmt::format("step {}: loss or gradient are not finite: rank 0 says more",
                                *sums.bad_step + 1));
  }
  BatchShare whole = rank_share(settings_.batch, settings_.accumulate, 0, 1);
  if (job_.group != nullptr) whole.parts *= job_.group->size();
  throw NotFinite(describe_not_finite(job_.model, batch_parts(job_.source, *sums.bad_step, whole),
                                      sums, settings_.step, job_.device,
                                      job_.source.task().kind == TaskKind::next_token));
}

void Loop::after_step() {
  state_.seconds = seconds_before_ + seconds_since(start_);
  const bool fresh = state_.step != first_step_;  // otherwise what a signal left over
  if (fresh && (due(settings_.log_every) || last())) log();
  if (fresh && due(settings_.instruments_every)) measure();
  const bool evaluated = due(settings_.evaluate_every) || last();
  if (evaluated || due(settings_.checkpoint_every)) agree_on_weights();
  if (evaluated && !evaluate_now()) return;
  if (due(settings_.checkpoint_every)) save();
}

void Loop::log() {
  if (first()) write_log();
  state_.loss_sum = 0;
  state_.loss_count = 0;
  speed_ = {};
}

void Loop::write_log() {
  // Of the whole batch, as if other ranks' rows were like those here.
  const double whole = static_cast<double>(share_.batch_rows) / static_cast<double>(share_.rows);
  const double steps_here = static_cast<double>(state_.step - first_step_);
  TrainProgress now;
  now.step = state_.step;
  now.steps = settings_.schedule.steps;
  now.loss = state_.loss_sum / static_cast<double>(state_.loss_count);
  now.learning_rate = learning_rate(settings_.schedule, state_.step - 1);
  now.gradient_norm = gradient_norm_;
  now.rows_per_second = whole * speed_.rows / speed_.seconds;
  now.tokens_per_second = whole * speed_.tokens / speed_.seconds;
  now.seconds_left = seconds_since(start_) / steps_here * static_cast<double>(now.steps - now.step);
  now.memory_bytes = peak_memory(job_.device);
  metrics_->append(
      {{"step", now.step},
       {"loss", now.loss},
       {"learning_rate", now.learning_rate},
       {"gradient_norm", now.gradient_norm},
       {"tokens_per_second",
        now.tokens_per_second > 0 ? MetricsRow(now.tokens_per_second) : MetricsRow(nullptr)},
       {"rows_per_second", now.rows_per_second},
       {"memory_bytes", now.memory_bytes},
       {"seconds", state_.seconds}});
  events_.progress(now);
}

bool Loop::evaluate_now() {
  const bool done = evaluates() && evaluate_here();
  if (job_.group == nullptr) return done;
  const bool all_done = share_state(*job_.group, state_, done);
  if (!all_done) stop_agreed_ = true;
  return all_done;
}

bool Loop::evaluate_here() {
  EvaluationOptions options;
  options.rows = settings_.evaluate_rows;
  options.batch = settings_.evaluate_batch;
  options.bf16 = settings_.step.bf16;
  options.step = state_.step;
  options.cut = cut_ ? &*cut_ : nullptr;
  options.interrupted = [&] {
    if (job_.group != nullptr) job_.group->work_done();
    return stopped() || signalled();
  };
  const std::optional<Evaluation> found = evaluate(job_.model, job_.source, job_.device, options);
  if (!found) return false;
  if (!first()) return true;  // rank 0 says what follows
  state_.evaluated_step = state_.step;
  const auto& [metric, value] = found->metrics.front();
  const bool better =
      std::isfinite(value) && (!state_.best || is_better(metric, value, *state_.best));
  if (better) {
    state_.best = value;
    state_.best_step = state_.step;
  }
  state_.stale = better ? 0 : state_.stale + 1;
  MetricsRow values;
  values["loss"] = found->loss;
  for (const auto& [name, number] : found->metrics) values[name] = number;
  const MetricsRow row = {{"step", state_.step},
                          {"evaluation", values},
                          {"rows", found->rows},
                          {"chance", job_.source.task().chance},
                          {"best", better}};
  metrics_->append(row);
  events_.evaluated(row);
  if (better) save();
  return true;
}

void Loop::measure() {
  if (settings_.instruments_every == 0 || !first()) return;
  const at::NoGradGuard no_gradients;
  const SameRandomNumbers same(job_.device);
  const std::int64_t rows = std::min(settings_.instruments_rows, job_.source.validation_rows());
  Recorder recorder(rows, settings_.instruments_tokens);
  Context context;
  context.step = state_.step;
  context.observer = &recorder;
  job_.model.eval();
  job_.model.run(to_tensors(job_.source.validation_batch(0, rows), job_.device), context);
  job_.model.train();
  const bool causal = job_.source.task().kind == TaskKind::next_token;
  for (const MetricsRow& head : measure_layers(recorder.layers(), causal)) {
    MetricsRow row = {{"step", state_.step}};
    row.update(head);
    instruments_->append(row);
  }
}

void Loop::save() {
  if (saved_ == saving()) return;
  if (sums_pending_) take_sums();  // a step that is not finite must not become a checkpoint
  saved_ = saving();
  if (!first()) return;
  state_.seconds = seconds_before_ + seconds_since(start_);
  metrics_->sync();
  instruments_->sync();
  store_->save({state_, named_weights(job_.model), optimizer_tensors()});
  store_->prune(settings_.keep, state_.best_step);
  if (job_.group != nullptr) job_.group->work_done();
}

}  // namespace

void prepare_torch(int threads, const torch::Device& device) {
  // Also where it is the number that torch has: setting it is what a resumed run does, and it tells
  // MKL to keep to it.
  at::set_num_threads(threads > 0 ? threads : at::get_num_threads());
  if (!device.is_cpu()) {
    prefer_cusolver();
    return;
  }
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  // Filling new memory with NaN, to show reads of it, is for torch's own tests.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

TrainEnd train(const TrainJob& job, const TrainEvents& events) {
  Loop loop(job, events);
  return loop.run();
}

}  // namespace lln_torch
