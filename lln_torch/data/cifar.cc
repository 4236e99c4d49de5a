// CIFAR-10 in grey: records of a label byte and 1,024 bytes, or the official binary batches (a
// label byte, then 1,024 bytes each of red, green and blue), turned grey as the Long Range Arena
// does it. The last tenth of the training set is the validation set; the test set is shown where
// the table [data] says validation_split = "test".
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "lln/error.h"
#include "lln_torch/data/example_order.h"
#include "lln_torch/data/generated.h"
#include "lln_torch/data/grey_pictures.h"
#include "lln_torch/data/image_sources.h"
#include "lln_torch/data/packed_file.h"

namespace lln_torch {
namespace {

constexpr std::int64_t kCifarClasses = 10;
constexpr std::uint64_t kMostCifarBytes = std::uint64_t{1} << 31;
const std::vector<std::string>& cifar_names() {
  static const std::vector<std::string> names = {
      "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"};
  return names;
}

struct CifarRecords {
  std::vector<std::uint8_t> pixels;  // [records, 1024]
  std::vector<std::int32_t> labels;

  std::int64_t size() const { return static_cast<std::int64_t>(labels.size()); }
  std::span<const std::uint8_t> picture(std::int64_t i) const {
    return std::span(pixels).subspan(static_cast<std::size_t>(i * kGreyPixels), kGreyPixels);
  }
};

// Appends a file of records with `planes` colours.
void read_cifar_file(const std::string& path, std::size_t planes, CifarRecords& records) {
  const std::vector<std::uint8_t> bytes = read_packed_file(path, kMostCifarBytes);
  const std::size_t record = 1 + planes * kGreyPixels;
  if (bytes.empty() || bytes.size() % record != 0) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: expected records of {} bytes (a label and {} x 32 x 32), "
                                 "found {} bytes, {} records and {} bytes left",
                                 path, record, planes, bytes.size(), bytes.size() / record,
                                 bytes.size() % record));
  }
  for (std::size_t i = 0; i < bytes.size() / record; ++i) {
    const std::uint8_t* at = bytes.data() + i * record;
    if (*at >= kCifarClasses) {
      throw lln::Error(lln::ErrorCode::io,
                       fmt::format("{}: record {} (byte {}): expected a label of 0 to 9, found {}",
                                   path, i, i * record, *at));
    }
    records.labels.push_back(*at++);
    if (planes == 1) {
      records.pixels.insert(records.pixels.end(), at, at + kGreyPixels);
      continue;
    }
    for (const std::uint8_t* red = at; red < at + kGreyPixels; ++red) {
      const double grey =
          0.2989 * red[0] + 0.5870 * red[kGreyPixels] + 0.1140 * red[2 * kGreyPixels];
      records.pixels.push_back(static_cast<std::uint8_t>(grey + 0.5));
    }
  }
}

CifarRecords read_cifar(const std::string& folder, bool test) {
  CifarRecords records;
  const std::string grey_name = test ? "cifar10_gray_test.bin" : "cifar10_gray_train.bin";
  const std::string grey = find_packed_file(folder, grey_name);
  if (!grey.empty()) {
    read_cifar_file(grey, 1, records);
    return records;
  }
  std::vector<std::string> names = {"test_batch.bin"};
  if (!test) {
    names.clear();
    for (int i = 1; i <= 5; ++i) names.push_back(fmt::format("data_batch_{}.bin", i));
  }
  for (const std::string& name : names) {
    std::string path = find_packed_file(folder, name);
    if (path.empty()) path = find_packed_file(folder + "/cifar-10-batches-bin", name);
    if (path.empty()) {
      throw lln::Error(lln::ErrorCode::io,
                       fmt::format("{}: neither {} (plain or .xz) nor {} of the official binary "
                                   "CIFAR-10 is there; give the folder with --data",
                                   folder, grey_name, name));
    }
    read_cifar_file(path, 3, records);
  }
  return records;
}

class CifarSource final : public Source {
 public:
  CifarSource(const Settings& data, const std::string& folder)
      : form_(GreyForm::from_settings(data)), records_(read_cifar(folder, false)), order_(0, 1) {
    const auto seed = static_cast<std::uint64_t>(data.integer("seed", 0, 0, INT64_MAX));
    const bool test =
        data.choice("validation_split", "validation", {"validation", "test"}) == "test";
    const std::int64_t held_out = data.integer(
        "validation_rows", std::max<std::int64_t>(1, records_.size() / 10), 1, records_.size() - 1);
    order_ = ExampleOrder(seed, records_.size() - held_out);
    if (test) {
      shown_ = read_cifar(folder, true);
    } else {
      first_shown_ = order_.examples();
    }
    describe();
  }

  const Task& task() const override { return task_; }
  Batch train_batch(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                    std::int64_t rows) const override {
    Batch batch;
    for (const OrderedRow& row : order_.rows(step, batch_rows, first, rows)) {
      append(records_, row.example, batch);
    }
    return batch;
  }
  std::int64_t validation_rows() const override { return shown().size() - first_shown_; }
  Batch validation_batch(std::int64_t first, std::int64_t rows) const override {
    Batch batch;
    for (const std::int64_t i : validation_examples(first, rows, validation_rows())) {
      append(shown(), first_shown_ + i, batch);
    }
    return batch;
  }
  double steps_per_epoch(std::int64_t batch_rows) const override {
    return order_.steps_per_epoch(batch_rows);
  }

 private:
  const CifarRecords& shown() const { return shown_.labels.empty() ? records_ : shown_; }

  void append(const CifarRecords& records, std::int64_t i, Batch& batch) const {
    form_.append(records.picture(i), batch);
    batch.labels.push_back(records.labels[static_cast<std::size_t>(i)]);
  }

  void describe() {
    task_.name = "cifar10-grey";
    task_.kind = TaskKind::classes;
    task_.classes = kCifarClasses;
    task_.metrics = {"accuracy", "loss"};
    task_.class_names = cifar_names();
    form_.describe(task_);
    const std::vector<std::int32_t> labels(shown().labels.begin() + first_shown_,
                                           shown().labels.end());
    const ClassBalance balance = class_balance(labels, kCifarClasses, cifar_names());
    task_.chance = balance.majority;
    task_.chance_text = balance.text;
  }

  GreyForm form_;
  CifarRecords records_;  // the training file: what is trained on, then what is held out
  CifarRecords shown_;    // the test file, where it is asked for
  ExampleOrder order_;
  std::int64_t first_shown_ = 0;
  Task task_;
};

}  // namespace

std::unique_ptr<Source> make_cifar_source(const Settings& data, const std::string& folder) {
  return std::make_unique<CifarSource>(data, folder);
}

}  // namespace lln_torch
