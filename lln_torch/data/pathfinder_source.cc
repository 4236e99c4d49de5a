// Pathfinder-32 as a task: pictures are made when they are asked for.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "lln_torch/data/generated.h"
#include "lln_torch/data/grey_pictures.h"
#include "lln_torch/data/pathfinder.h"

namespace lln_torch {

std::unique_ptr<Source> make_pathfinder_source(const Settings& data,
                                               const std::string& /*folder*/) {
  PathfinderShape shape;
  // With more dashes than this, both contours hardly ever find their way in 32 x 32 pixels.
  shape.contour_length = data.integer("contour_length", shape.contour_length, 2, 16);
  shape.distractors = data.integer("distractors", shape.distractors, 0, 20);
  shape.distractor_length = data.integer("distractor_length", shape.distractor_length, 1, 8);
  const GreyForm form = GreyForm::from_settings(data);
  const GeneratedSplits splits = GeneratedSplits::from_settings(data, 160'000, 20'000, 20'000);

  Task task;
  task.name = "pathfinder32";
  task.kind = TaskKind::classes;
  task.classes = 2;
  task.metrics = {"accuracy", "loss"};
  task.class_names = {"apart", "connected"};
  task.chance = 0.5;
  task.chance_text = "a coin: 50.0%, connected or not";
  form.describe(task);

  return make_generated_source(
      std::move(task), splits, [=](Split split, const std::vector<std::int64_t>& indices) {
        Batch batch;
        for (const std::int64_t index : indices) {
          const PathfinderPicture picture =
              make_pathfinder(example_random(splits, Stream("pathfinder"), split, index), shape);
          form.append(picture.pixels, batch);
          batch.labels.push_back(picture.label);
        }
        return batch;
      });
}

}  // namespace lln_torch
