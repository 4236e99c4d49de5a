// Views of pictures: drawn at random as is usual for training (a crop of random area and aspect
// ratio), or the middle for validation; then resampled in both directions.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/augment.h"

#include <algorithm>
#include <cmath>

#include "lln_torch/data/resample.h"

namespace lln_torch {
namespace {

constexpr std::array<float, 3> kLuma = {0.299F, 0.587F, 0.114F};

// [rows, columns, channels] of the view, values 0 .. 255.
std::vector<float> resample_view(const Picture& picture, const View& view, std::int64_t size) {
  const ResampleWeights rows =
      resample_weights(picture.height, view.top, view.height, size, Filter::triangle);
  ResampleWeights columns =
      resample_weights(picture.width, view.left, view.width, size, Filter::triangle);
  if (view.flipped) std::reverse(columns.pixels.begin(), columns.pixels.end());
  const std::int64_t channels = picture.channels;
  const std::int64_t first_row = rows.pixels.front().first;
  const std::int64_t end_row =
      rows.pixels.back().first + static_cast<std::int64_t>(rows.pixels.back().weights.size());

  const std::int64_t wide = size * channels;
  std::vector<float> narrow(static_cast<std::size_t>((end_row - first_row) * wide));
  for (std::int64_t row = first_row; row < end_row; ++row) {
    const std::uint8_t* from = picture.bytes.data() + row * picture.width * channels;
    float* to = narrow.data() + (row - first_row) * wide;
    for (const ResampleWeights::Pixel& column : columns.pixels) {
      for (std::int64_t c = 0; c < channels; ++c) {
        float sum = 0;
        const std::uint8_t* at = from + column.first * channels + c;
        for (const float weight : column.weights) {
          sum += weight * static_cast<float>(*at);
          at += channels;
        }
        *to++ = sum;
      }
    }
  }
  std::vector<float> result(static_cast<std::size_t>(size * wide), 0);
  for (std::int64_t row = 0; row < size; ++row) {
    const ResampleWeights::Pixel& pixel = rows.pixels[static_cast<std::size_t>(row)];
    float* to = result.data() + row * wide;
    const float* from = narrow.data() + (pixel.first - first_row) * wide;
    for (const float weight : pixel.weights) {
      for (std::int64_t i = 0; i < wide; ++i) to[i] += weight * from[i];
      from += wide;
    }
  }
  return result;
}

float luma(const float* pixel, std::int64_t channels) {
  if (channels == 1) return *pixel;
  return kLuma[0] * pixel[0] + kLuma[1] * pixel[1] + kLuma[2] * pixel[2];
}

// In this order: brightness, contrast (around the mean), saturation (around each pixel's grey).
void change_colours(std::vector<float>& pixels, std::int64_t channels, const View& view) {
  const auto clamped = [](float x) { return std::clamp(x, 0.0F, 255.0F); };
  const auto brightness = static_cast<float>(view.brightness);
  const auto contrast = static_cast<float>(view.contrast);
  const auto saturation = static_cast<float>(view.saturation);
  if (view.brightness != 1) {
    for (float& x : pixels) x = clamped(x * brightness);
  }
  const auto step = static_cast<std::size_t>(channels);
  if (view.contrast != 1) {
    double sum = 0;
    for (std::size_t i = 0; i < pixels.size(); i += step) sum += luma(&pixels[i], channels);
    const auto mean =
        static_cast<float>(sum / (static_cast<double>(pixels.size()) / static_cast<double>(step)));
    for (float& x : pixels) x = clamped(mean + contrast * (x - mean));
  }
  if (view.saturation != 1 && channels == 3) {
    for (std::size_t i = 0; i < pixels.size(); i += step) {
      const float grey = luma(&pixels[i], channels);
      for (std::size_t c = 0; c < step; ++c) {
        pixels[i + c] = clamped(grey + saturation * (pixels[i + c] - grey));
      }
    }
  }
}

}  // namespace

Augmentation Augmentation::from_settings(const Settings& augment) {
  Augmentation result;
  result.enabled = augment.flag("enabled", result.enabled);
  if (!result.enabled) return result;
  result.smallest_crop = augment.number("smallest_crop", result.smallest_crop, 0.01, 1);
  result.flip = augment.flag("flip", result.flip);
  result.brightness = augment.number("brightness", result.brightness, 0, 1);
  result.contrast = augment.number("contrast", result.contrast, 0, 1);
  result.saturation = augment.number("saturation", result.saturation, 0, 1);
  return result;
}

View middle_view(std::int64_t height, std::int64_t width, double share) {
  const double side = share * static_cast<double>(std::min(height, width));
  return {.top = (static_cast<double>(height) - side) / 2,
          .left = (static_cast<double>(width) - side) / 2,
          .height = side,
          .width = side};
}

View random_view(const Augmentation& augmentation, std::int64_t height, std::int64_t width,
                 Random random) {
  View view = middle_view(height, width);
  if (!augmentation.enabled) return view;
  // Every draw is made whether or not it is used: a setting changes its own effect alone.
  constexpr int kCropTries = 10;
  const double area = static_cast<double>(height) * static_cast<double>(width);
  bool found = augmentation.smallest_crop >= 1;
  for (int i = 0; i < kCropTries; ++i) {
    const double share = random.uniform(augmentation.smallest_crop, 1);
    const double ratio = std::exp(random.uniform(std::log(0.75), -std::log(0.75)));
    const double crop_width = std::round(std::sqrt(area * share * ratio));
    const double crop_height = std::round(std::sqrt(area * share / ratio));
    const double left = random.uniform();
    const double top = random.uniform();
    const double spare_width = static_cast<double>(width) - crop_width;
    const double spare_height = static_cast<double>(height) - crop_height;
    if (found || spare_width < 0 || spare_height < 0 || crop_width < 1 || crop_height < 1) continue;
    view.left = std::floor(left * (spare_width + 1));
    view.top = std::floor(top * (spare_height + 1));
    view.width = crop_width;
    view.height = crop_height;
    found = true;
  }
  const auto factor = [&](double reach) { return 1 + reach * random.uniform(-1, 1); };
  view.flipped = random.chance(0.5) && augmentation.flip;
  view.brightness = factor(augmentation.brightness);
  view.contrast = factor(augmentation.contrast);
  view.saturation = factor(augmentation.saturation);
  return view;
}

void draw_view(const Picture& picture, const View& view, std::int64_t size,
               const Normalisation& normalisation, std::span<float> pixels) {
  std::vector<float> drawn = resample_view(picture, view, size);
  change_colours(drawn, picture.channels, view);
  const auto scale = static_cast<float>(1 / (255 * normalisation.deviation));
  const auto shift = static_cast<float>(normalisation.mean / normalisation.deviation);
  const auto channels = static_cast<std::size_t>(picture.channels);
  const auto plane = static_cast<std::size_t>(size * size);
  for (std::size_t i = 0; i < plane; ++i) {
    for (std::size_t c = 0; c < channels; ++c) {
      pixels[c * plane + i] = drawn[i * channels + c] * scale - shift;
    }
  }
}

}  // namespace lln_torch
