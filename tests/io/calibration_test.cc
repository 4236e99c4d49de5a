// The file of a calibration: what is written comes back, every kind of damage is refused with its
// own text, and random damage is refused or read without believing the file.
// SPDX-License-Identifier: Apache-2.0
#include "lln/calibration.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "damage.h"
#include "expect_error.h"
#include "lln/error.h"
#include "scratch_folder.h"
#include "watched_allocation.h"

namespace lln {
namespace {

Calibration example() {
  return {.mode = Matching::exact,
          .layers = {{"encoder.0", 64, 511.5, {2.1F, 1.0F / 3}, {2.2F}},
                     {"decoder \"x\"\n", 8, 16, {1e-30F}, {std::nextafter(0.1F, 1.0F), 3e38F}}}};
}

TEST(CalibrationFile, WhatIsWrittenComesBack) {
  const io::ScratchFolder folder;
  save_calibration(example(), folder.file("c.json"));
  const Calibration found = load_calibration(folder.file("c.json"));
  EXPECT_EQ(found, example());
  EXPECT_EQ(found.layer("encoder.0").alpha[1], 1.0F / 3);
  test::expect_error([&] { found.layer("encoder.1"); },
                     {"the calibration has no layer 'encoder.1': found 'encoder.0', "},
                     ErrorCode::invalid_argument);
  EXPECT_EQ(folder.entries(), 1U);
}

TEST(CalibrationFile, OnlyUsableNumbersAreWritten) {
  const auto expect = [](const Calibration& c, const char* text) {
    test::expect_error([&] { to_json(c); }, {text}, ErrorCode::invalid_argument);
  };
  Calibration c = example();
  c.layers[1].name = "encoder.0";
  expect(c, "calibration of layer 'encoder.0': the name occurs twice");
  c = example();
  c.layers[0].alpha[0] = std::nanf("");
  expect(c, "alpha and beta must be positive f32 numbers");
  c = example();
  c.layers[0].beta.clear();
  expect(c, "at least one of each");
  c = example();
  c.layers[0].tokens = 0;
  expect(c, "dim and tokens must be positive");
  c = example();
  c.layers[0].name = "\xff";
  expect(c, "is not UTF-8");
}

// The text of a valid file with one place changed.
std::string changed(const std::string& from, const std::string& to) {
  std::string text =
      R"({"format": "lln-calibration", "version": 1, "mode": "entropy", "layers": [)"
      R"({"name": "a", "dim": 64, "tokens": 512, "alpha": [2, 2.5], "beta": [1.5]}]})";
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(CalibrationFile, EveryFaultHasItsText) {
  EXPECT_EQ(parse_calibration(changed("2.5", "2.5"), "c").layers[0].alpha[1], 2.5F);
  const struct {
    std::string from, to, text;
  } faults[] = {
      {"{\"format\"", "[{\"format\"", "the text is an array: expected an object"},
      {"]}]}", "]}", "not valid JSON at byte"},
      {"lln-calibration", "other", "the format is 'other': expected 'lln-calibration'"},
      {"\"version\": 1", "\"version\": 2", "version 2: this library reads version 1"},
      {"\"version\": 1", "\"version\": \"1\"", "version is the string '1': expected a positive"},
      {"\"version\": 1, ", "", "the field version is missing"},
      {"entropy", "ema", "the mode is 'ema': expected paper, per_head, exact or entropy"},
      {"\"mode\": \"entropy\"", "\"mode\": 3", "mode is the number 3: expected a string"},
      {"\"mode\"", "\"extra\"", "the field 'extra' is not known"},
      {"\"dim\": 64", "\"dim\": 0", "layer 0: dim is 0: expected a positive integer"},
      {"\"dim\": 64", "\"dim\": -1", "layer 0: dim is the number -1: expected a positive integer"},
      {"\"dim\": 64", "\"dim\": 1.5", "layer 0: dim is the number 1.5"},
      {"\"tokens\": 512", "\"tokens\": 0", "layer 0: tokens is the number 0"},
      {"\"tokens\": 512", "\"name\": \"b\"", "layer 0: the field name occurs twice"},
      {"[2, 2.5]", "[]", "layer 0: alpha is empty"},
      {"[2, 2.5]", "[2, 0]", "alpha holds the number 0: expected positive f32 numbers"},
      {"[2, 2.5]", "[2, 1e39]", "alpha holds the number 1e39"},
      {"[2, 2.5]", "[2, null]", "alpha holds null"},
      {"[2, 2.5]", "[[2]]", "alpha holds an array"},
      {"[2, 2.5]", "2", "alpha is the number 2: expected an array"},
      {"[1.5]", "[1e-50]", "beta holds the number 1e-50"},
      {", \"beta\": [1.5]", "", "layer 0: the field beta is missing"},
      {"}]}", "}, 7]}", "layers holds the number 7: expected objects"},
      {"}]}", "}, {\"name\": \"a\"}]}", "layer 1: the name 'a' occurs twice"},
      {"}]}", "}]} x", "not valid JSON at byte"},
  };
  for (const auto& fault : faults) {
    SCOPED_TRACE(fault.to);
    test::expect_error([&] { parse_calibration(changed(fault.from, fault.to), "c.json"); },
                       {"c.json: ", fault.text}, ErrorCode::io);
  }
}

TEST(CalibrationFile, FilesThatCannotBeOne) {
  const io::ScratchFolder folder;
  test::expect_error([&] { load_calibration(folder.file("none")); }, {"cannot be opened"},
                     ErrorCode::io);
  test::expect_error([&] { load_calibration(folder.path().string()); }, {"is not a regular file"},
                     ErrorCode::io);
  io::write_bytes(folder.file("empty"), "");
  test::expect_error([&] { load_calibration(folder.file("empty")); }, {"not valid JSON at byte"},
                     ErrorCode::io);
  std::filesystem::resize_file(folder.file("empty"), std::size_t{65} << 20);
  test::expect_error([&] { load_calibration(folder.file("empty")); },
                     {"has 68157440 bytes, a calibration has at most 67108864"}, ErrorCode::io);
}

TEST(CalibrationFile, DamagedTextIsRefusedOrReadInFull) {
  const std::vector<std::string> pieces = {"{",          "}",
                                           "[",          "]",
                                           ",",          ":",
                                           "\"",         "-",
                                           "0",          "1e39",
                                           "null",       "true",
                                           "\"dim\":",   "\"name\":",
                                           "\"alpha\":", "\xff",
                                           "\\u0000",    "[[[[",
                                           "1",          "9",
                                           "1e-60",      "18446744073709551615"};
  const std::string valid = to_json(example());
  std::mt19937 random(20240502);
  int accepted = 0, refused = 0;
  constexpr int kTexts = 20000;
  for (int i = 0; i < kTexts; ++i) {
    const std::string text = io::damaged(valid, pieces, random);
    test::largest_allocation_reset();
    try {
      const Calibration found = parse_calibration(text, "damaged");
      ASSERT_EQ(parse_calibration(to_json(found), "written"), found) << text;
      ++accepted;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::io) << text;
      EXPECT_EQ(std::string(e.what()).rfind("damaged: ", 0), 0U) << e.what();
      ++refused;
    }
    ASSERT_LE(test::largest_allocation(), 4 * text.size() + 4096) << text;
  }
  // The damage must reach both sides of the reader to mean anything.
  EXPECT_GT(accepted, kTexts / 100);
  EXPECT_GT(refused, kTexts / 2);
}

}  // namespace
}  // namespace lln
