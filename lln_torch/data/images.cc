// JPEG folders and tars as a task: files are listed once, decoded when a batch needs them and kept
// while there is room. Training sees random views, validation the middle of each picture.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "lln/error.h"
#include "lln_torch/data/augment.h"
#include "lln_torch/data/example_order.h"
#include "lln_torch/data/image_files.h"
#include "lln_torch/data/image_sources.h"
#include "lln_torch/data/picture_cache.h"

namespace lln_torch {
namespace {

std::string images_path(const Settings& data, const std::string& folder) {
  const std::string name = data.text("set", "");
  if (name.empty()) {
    std::error_code ignored;
    if (std::filesystem::is_directory(folder, ignored) &&
        !std::filesystem::exists(std::filesystem::path(folder) / "train", ignored)) {
      data.refuse("set", "a folder or a tar in " + folder + ", which has no folder train itself");
    }
    return folder;
  }
  return (std::filesystem::path(folder) / name).string();
}

class ImagesSource final : public Source {
 public:
  ImagesSource(const Settings& data, const std::string& folder)
      : files_(images_path(data, folder)),
        size_(data.integer("size", 224, 8, 4096)),
        channels_(data.flag("grey", false) ? 1 : 3),
        middle_(data.number("middle", 1, 0.1, 1)),
        augmentation_(Augmentation::from_settings(data.table("augment"))),
        normalisation_{data.number("mean", 0.5, 0, 1), data.number("deviation", 0.5, 1e-3, 1e3)},
        seed_(static_cast<std::uint64_t>(data.integer("seed", 0, 0, INT64_MAX))),
        order_(0, 1),
        cache_(static_cast<std::uint64_t>(data.integer("cache_mb", 1024, 0, 1 << 24)) << 20) {
    choose_validation(data);
    order_ = ExampleOrder(seed_, static_cast<std::int64_t>(train_.size()));
    describe();
  }

  const Task& task() const override { return task_; }
  Batch train_batch(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                    std::int64_t rows) const override {
    Batch batch = empty_batch(rows);
    for (const OrderedRow& row : order_.rows(step, batch_rows, first, rows)) {
      const ImageFile& file = *train_[static_cast<std::size_t>(row.example)];
      const std::shared_ptr<const Picture> picture = decoded(file);
      const View view =
          random_view(augmentation_, picture->height, picture->width,
                      Random(seed_, Stream("image view"), static_cast<std::uint64_t>(row.number)));
      append(*picture, view, file, batch);
    }
    return batch;
  }
  std::int64_t validation_rows() const override { return static_cast<std::int64_t>(shown_.size()); }
  Batch validation_batch(std::int64_t first, std::int64_t rows) const override {
    Batch batch = empty_batch(rows);
    for (const std::int64_t i : validation_examples(first, rows, validation_rows())) {
      const ImageFile& file = *shown_[static_cast<std::size_t>(i)];
      const std::shared_ptr<const Picture> picture = decoded(file);
      append(*picture, middle_view(picture->height, picture->width, middle_), file, batch);
    }
    return batch;
  }
  double steps_per_epoch(std::int64_t batch_rows) const override {
    return order_.steps_per_epoch(batch_rows);
  }

 private:
  // The validation set is a folder of its own, or a part of train that no seed changes.
  void choose_validation(const Settings& data) {
    const std::vector<ImageFile>& train = files_.files(Split::train);
    const bool test =
        data.choice("validation_split", "validation", {"validation", "test"}) == "test";
    const bool own_folder = !files_.files(Split::validation).empty();
    std::int64_t held_out = 0;
    const auto all = static_cast<std::int64_t>(train.size());
    if (!own_folder)
      held_out = data.integer("validation_rows", std::max<std::int64_t>(all / 10, 1), 1, all - 1);
    const Permutation order(0, Stream("images held out"), all);
    for (std::int64_t i = 0; i < all; ++i) {
      const ImageFile* file = &train[static_cast<std::size_t>(order[i])];
      (i < held_out ? shown_ : train_).push_back(file);
    }
    // Files in the order of their names, so that a longer validation set changes little else.
    std::sort(train_.begin(), train_.end());
    std::sort(shown_.begin(), shown_.end());
    if (!test && !own_folder) return;
    shown_.clear();
    for (const ImageFile& file : files_.files(test ? Split::test : Split::validation)) {
      shown_.push_back(&file);
    }
    if (shown_.empty()) data.refuse("validation_split", "validation: there is no folder test");
  }

  void describe() {
    task_.name = "images";
    task_.kind = TaskKind::classes;
    task_.classes = static_cast<std::int64_t>(files_.classes().size());
    task_.max_tokens = size_ * size_;
    task_.channels = channels_;
    task_.height = size_;
    task_.width = size_;
    task_.metrics = {"accuracy", "loss"};
    task_.class_names = files_.classes();
    std::vector<std::int32_t> labels;
    for (const ImageFile* file : shown_) labels.push_back(file->label);
    const ClassBalance balance = class_balance(labels, task_.classes, files_.classes());
    task_.chance = balance.majority;
    task_.chance_text = balance.text;
  }

  Batch empty_batch(std::int64_t rows) const {
    Batch batch;
    batch.pixels.reserve(
        static_cast<std::size_t>(std::max<std::int64_t>(rows, 0) * channels_ * size_ * size_));
    return batch;
  }

  std::shared_ptr<const Picture> decoded(const ImageFile& file) const {
    // A file is known by where its entry lies: the lists of files never change.
    return cache_.get(reinterpret_cast<std::uintptr_t>(&file), [&] {
      return decode_jpeg(files_.read(file), files_.full_name(file), channels_, size_);
    });
  }

  void append(const Picture& picture, const View& view, const ImageFile& file, Batch& batch) const {
    const auto pixels = static_cast<std::size_t>(channels_ * size_ * size_);
    batch.pixels.resize(batch.pixels.size() + pixels);
    draw_view(picture, view, size_, normalisation_, std::span(batch.pixels).last(pixels));
    batch.labels.push_back(file.label);
    ++batch.rows;
  }

  ImageFiles files_;
  std::int64_t size_;
  std::int64_t channels_;
  double middle_;  // share of the shorter side that validation shows
  Augmentation augmentation_;
  Normalisation normalisation_;
  std::uint64_t seed_;
  std::vector<const ImageFile*> train_;
  std::vector<const ImageFile*> shown_;
  ExampleOrder order_;
  mutable PictureCache cache_;
  Task task_;
};

}  // namespace

std::unique_ptr<Source> make_images_source(const Settings& data, const std::string& folder) {
  return std::make_unique<ImagesSource>(data, folder);
}

}  // namespace lln_torch
