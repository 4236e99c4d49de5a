# The front door. Every target works as the first command on a fresh Debian machine; what each one
# runs can be run by hand: the presets are in CMakePresets.json.
# SPDX-License-Identifier: Apache-2.0
SHELL := /bin/sh
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
SET ?= bench/sets/cpu.txt
PROGRAM := build/release/bin/lln
FOLDERS := include src cli conformance bench fuzz report python/ops lln_torch tests examples

# Files for clang-tidy, unless some are named. What is compiled once per vector target is left out:
# clang-tidy takes minutes on it.
TIDY ?= $(sort $(wildcard src/api/*.cc src/c/*.cc src/reference/*.cc src/io/*.cc cli/*.cc report/*.cc conformance/*.cc \
  $(filter-out bench/machine_loops.cc,$(wildcard bench/*.cc))))

.PHONY: help setup build torch demo bench results experiments-smoke wheel test format lint install clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: ## install the Debian packages that are missing (sudo only when not root)
	@tools/setup

build: setup ## build the library, the program and the tests: build/release/bin/lln
	@cmake --preset release
	@cmake --build --preset release -j $(JOBS)

torch: setup ## build with LibTorch too (torch from PyPI, into build/venv): lln train, eval, embed and more
	@tools/setup torch
	@tools/python_package torch
	@$(MAKE) --no-print-directory build

demo: setup ## LLN+Diag against softmax on long input, then build/demo.html: figures to look at
	@cmake --preset release
	@cmake --build --preset release -j $(JOBS) --target lln_cli
	@$(PROGRAM) demo --report build/demo.html

bench: build ## time the problems of SET (bench/sets/cpu.txt): a table, and build/bench.json
	@$(PROGRAM) bench --set $(SET) --json >build/bench.json.part
	@mv build/bench.json.part build/bench.json
	@python3 bench/page.py --table build/bench.json
	@echo "results: build/bench.json"

results: ## write docs/results.md and docs/results.html from the records of the experiments
	@python3 -B experiments/page.py

experiments-smoke: torch ## rerun the smallest experiment of each group on this CPU and compare with the records
	@experiments/run smoke --check --lln $(PROGRAM) --runs build/smoke

wheel: build ## build the wheel of the Python package: build/wheels
	@tools/setup wheel
	@tools/python_package wheel

test: torch ## all tests, those of the Python package, then the quick ones under the sanitizers
	@tools/setup test
	ctest --preset release -j $(JOBS)
	@tools/python_package test
	@cmake --preset asan
	@cmake --build --preset asan -j $(JOBS)
	ctest --preset asan -j $(JOBS)

format: ## rewrite the C++ and C files in the project's format
	@tools/setup lint
	@find $(FOLDERS) -name '*.h' -o -name '*.c' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' | xargs clang-format -i

lint: build ## check format, clang-tidy and the project's rules (TIDY="files" for some files only)
	@tools/setup lint
	@find $(FOLDERS) -name '*.h' -o -name '*.c' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' | xargs clang-format --dry-run --Werror
	@printf '%s\n' $(TIDY) | xargs -P $(JOBS) -n 1 clang-tidy -p build/release --quiet
	ctest --preset release -L rules

install: build ## install to PREFIX (/usr/local)
	@cmake --install build/release --prefix $(PREFIX)

clean: ## remove all builds
	@rm -rf build
