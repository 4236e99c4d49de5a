// The file of a calibration: JSON that is walked by events, so that nesting is bounded by the
// states below, fields that occur twice are seen, and memory is a small multiple of the text.
//
//   {"format": "lln-calibration", "version": 1, "mode": "entropy", "layers": [
//     {"name": "encoder.0", "dim": 64, "tokens": 512, "alpha": [2.1, 2.2], "beta": [2.1, 2.2]}]}
// SPDX-License-Identifier: Apache-2.0
#include "lln/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "io/input_file.h"
#include "io/output_file.h"
#include "io/printable.h"
#include "lln/error.h"

namespace lln {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "lln-calibration";
constexpr std::uint64_t kVersion = 1;
// A million heads; a file that is longer is none of ours.
constexpr std::uint64_t kMostBytes = std::uint64_t{64} << 20;

bool is_scale(float x) { return std::isfinite(x) && x > 0; }

class CalibrationEvents final : public nlohmann::json_sax<Json> {
 public:
  explicit CalibrationEvents(const std::string& source) : source_(source) {}

  Calibration found;

  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override {
    return number(static_cast<double>(value), std::to_string(value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::top && field_ == "version") {
      if (value != kVersion) {
        fail(fmt::format("version {}: this library reads version {}", value, kVersion));
      }
      return true;
    }
    if (where_ == Where::layer && field_ == "dim") {
      if (value == 0 || value > kMostBytes) return unexpected(std::to_string(value));
      layer().dim = static_cast<std::int64_t>(value);
      return true;
    }
    return number(static_cast<double>(value), std::to_string(value));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    return number(value, text.substr(0, io::kMaxPrinted));
  }
  bool string(string_t& value) override {
    if (where_ == Where::top && field_ == "format") {
      if (value != kFormat) {
        fail(fmt::format("the format is {}: expected '{}'", io::printable(value), kFormat));
      }
      return true;
    }
    if (where_ == Where::top && field_ == "mode") return read_mode(value);
    if (where_ == Where::layer && field_ == "name") {
      if (!names_.insert(value).second) {
        fail(fmt::format("the name {} occurs twice", io::printable(value)));
      }
      layer().name = value;
      return true;
    }
    return unexpected("the string " + io::printable(value));
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool start_object(std::size_t) override {
    if (where_ == Where::outside) {
      where_ = Where::top;
    } else if (where_ == Where::layers) {
      where_ = Where::layer;
      found.layers.emplace_back();
      layer_fields_ = {};
    } else {
      return unexpected("an object");
    }
    return true;
  }
  bool key(string_t& value) override {
    if (where_ == Where::top) {
      open_field(value, kTopFields, top_fields_);
    } else {
      open_field(value, kLayerFields, layer_fields_);
    }
    return true;
  }
  bool end_object() override {
    if (where_ == Where::layer) {
      expect_all(kLayerFields, layer_fields_);
      where_ = Where::layers;
    } else {
      expect_all(kTopFields, top_fields_);
      where_ = Where::outside;
    }
    return true;
  }
  bool start_array(std::size_t) override {
    if (where_ == Where::top && field_ == "layers") {
      where_ = Where::layers;
    } else if (where_ == Where::layer && (field_ == "alpha" || field_ == "beta")) {
      where_ = Where::scales;
    } else {
      return unexpected("an array");
    }
    return true;
  }
  bool end_array() override {
    if (where_ == Where::layers) {
      where_ = Where::top;
      return true;
    }
    if (scales().empty()) fail(fmt::format("{} is empty", field_));
    where_ = Where::layer;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    throw Error(ErrorCode::io, fmt::format("{}: not valid JSON at byte {}", source_, position));
  }

 private:
  enum class Where { outside, top, layers, layer, scales };
  static constexpr std::array<std::string_view, 4> kTopFields = {"format", "version", "mode",
                                                                 "layers"};
  static constexpr std::array<std::string_view, 5> kLayerFields = {"name", "dim", "tokens", "alpha",
                                                                   "beta"};

  CalibratedLayer& layer() { return found.layers.back(); }
  std::vector<float>& scales() { return field_ == "alpha" ? layer().alpha : layer().beta; }

  [[noreturn]] void fail(const std::string& text) const {
    const bool inside = where_ == Where::layer || where_ == Where::scales;
    throw Error(ErrorCode::io,
                inside ? fmt::format("{}: layer {}: {}", source_, found.layers.size() - 1, text)
                       : fmt::format("{}: {}", source_, text));
  }

  // Says what was expected where the event arrived.
  bool unexpected(const std::string& what) const {
    switch (where_) {
      case Where::outside:
        fail(fmt::format("the text is {}: expected an object", what));
      case Where::layers:
        fail(fmt::format("layers holds {}: expected objects", what));
      case Where::scales:
        fail(fmt::format("{} holds {}: expected positive f32 numbers", field_, what));
      case Where::top:
      case Where::layer:
        break;
    }
    fail(fmt::format("{} is {}: expected {}", field_, what,
                     field_ == "version" || field_ == "tokens" ? "a positive number"
                     : field_ == "dim"                         ? "a positive integer"
                     : field_ == "alpha" || field_ == "beta" || field_ == "layers" ? "an array"
                                                                                   : "a string"));
  }

  bool number(double value, const std::string& text) {
    if (where_ == Where::scales) {
      // Beyond f32 the conversion is not defined.
      const bool fits = std::abs(value) <= std::numeric_limits<float>::max();
      if (!fits || !is_scale(static_cast<float>(value))) return unexpected("the number " + text);
      scales().push_back(static_cast<float>(value));
      return true;
    }
    if (where_ == Where::layer && field_ == "tokens" && std::isfinite(value) && value > 0) {
      layer().tokens = value;
      return true;
    }
    return unexpected("the number " + text);
  }

  bool read_mode(const std::string& name) {
    for (const Matching mode :
         {Matching::paper, Matching::per_head, Matching::exact, Matching::entropy}) {
      if (name != to_string(mode)) continue;
      found.mode = mode;
      return true;
    }
    fail(fmt::format("the mode is {}: expected paper, per_head, exact or entropy",
                     io::printable(name)));
  }

  template <std::size_t kSize>
  void open_field(const std::string& name, const std::array<std::string_view, kSize>& known,
                  std::array<bool, 5>& seen) {
    const auto at =
        static_cast<std::size_t>(std::find(known.begin(), known.end(), name) - known.begin());
    if (at == kSize) fail(fmt::format("the field {} is not known", io::printable(name)));
    if (seen[at]) fail(fmt::format("the field {} occurs twice", name));
    seen[at] = true;
    field_ = name;
  }

  template <std::size_t kSize>
  void expect_all(const std::array<std::string_view, kSize>& known,
                  const std::array<bool, 5>& seen) const {
    for (std::size_t i = 0; i < kSize; ++i) {
      if (!seen[i]) fail(fmt::format("the field {} is missing", known[i]));
    }
  }

  const std::string& source_;
  Where where_ = Where::outside;
  std::string field_;
  std::array<bool, 5> top_fields_ = {}, layer_fields_ = {};
  std::set<std::string> names_;
};

std::string numbers_text(const std::vector<float>& numbers) {
  std::string text;
  // Nine digits come back as the same f32.
  for (const float x : numbers) text += fmt::format("{}{:.9g}", text.empty() ? "" : ", ", x);
  return text;
}

// In quotes, escaped.
std::string name_text(const std::string& name) {
  try {
    return Json(name).dump();
  } catch (const Json::exception&) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the name of layer {} is not UTF-8", io::printable(name)));
  }
}

void check(const Calibration& calibration) {
  std::set<std::string_view> names;
  const auto fail = [](const CalibratedLayer& layer, const char* what) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("calibration of layer {}: {}", io::printable(layer.name), what));
  };
  for (const CalibratedLayer& layer : calibration.layers) {
    if (!names.insert(layer.name).second) fail(layer, "the name occurs twice");
    if (layer.dim < 1 || !(layer.tokens > 0) || !std::isfinite(layer.tokens)) {
      fail(layer, "dim and tokens must be positive");
    }
    for (const std::vector<float>* scales : {&layer.alpha, &layer.beta}) {
      if (scales->empty() || !std::all_of(scales->begin(), scales->end(), is_scale)) {
        fail(layer, "alpha and beta must be positive f32 numbers, at least one of each");
      }
    }
  }
}

}  // namespace

Calibration parse_calibration(std::string_view text, const std::string& source) {
  CalibrationEvents events(source);
  Json::sax_parse(text.begin(), text.end(), &events);
  return std::move(events.found);
}

Calibration load_calibration(const std::string& path) {
  const io::InputFile file(path);
  if (file.bytes() > kMostBytes) {
    throw Error(ErrorCode::io, fmt::format("{}: has {} bytes, a calibration has at most {}", path,
                                           file.bytes(), kMostBytes));
  }
  std::string text(file.bytes(), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)), "the text");
  return parse_calibration(text, path);
}

std::string to_json(const Calibration& calibration) {
  check(calibration);
  std::string text =
      fmt::format("{{\"format\": \"{}\", \"version\": {}, \"mode\": \"{}\", \"layers\": [", kFormat,
                  kVersion, to_string(calibration.mode));
  for (std::size_t i = 0; i < calibration.layers.size(); ++i) {
    const CalibratedLayer& layer = calibration.layers[i];
    text += fmt::format(
        "{}\n {{\"name\": {}, \"dim\": {}, \"tokens\": {},\n  \"alpha\": [{}],\n"
        "  \"beta\": [{}]}}",
        i == 0 ? "" : ",", name_text(layer.name), layer.dim, layer.tokens,
        numbers_text(layer.alpha), numbers_text(layer.beta));
  }
  return text + "]}\n";
}

void save_calibration(const Calibration& calibration, const std::string& path) {
  const std::string text = to_json(calibration);
  const std::function<bool()> never = [] { return false; };
  io::OutputFile file(path, never);
  file.write(std::as_bytes(std::span(text)));
  file.rename_to_target();
}

}  // namespace lln
