# Cachalot's everyday commands. On a bare Debian 12 with make and git, `make demo` is all a newcomer needs.
#   make demo       builds, and lets the trained tiny model of testdata/ write text
#   make test       builds and runs all tests            make bench     speed of each kernel
#   make lint       format, include rules, clang-tidy    make fuzz      each fuzz target for FUZZ_SECONDS
#   make test-gpu   the tests that need an NVIDIA GPU    make clean     removes build/
SHELL := /bin/bash
JOBS ?= $(shell nproc)
PRESET ?= release
BUILD := build/$(PRESET)
FUZZ_SECONDS ?= 60
TIDY ?= all
# Compiler cache entries serve every clone of the repository.
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1

.PHONY: build demo test bench lint lint-fast tidy test-gpu fuzz clean

build:
	@scripts/install-deps.sh build test
	@cmake --preset $(PRESET) --log-level=WARNING
	@cmake --build $(BUILD) -j $(JOBS)

demo:
	@scripts/install-deps.sh build test
	@cmake --preset $(PRESET) --log-level=WARNING
	@cmake --build $(BUILD) -j $(JOBS) --target cachalot
	@scripts/demo.sh $(BUILD)

test: build
	@ctest --test-dir $(BUILD) -j $(JOBS) -LE '^gpu$$' --output-on-failure --no-tests=error

bench:
	@scripts/install-deps.sh build test
	@cmake --preset $(PRESET) --log-level=WARNING
	@cmake --build $(BUILD) -j $(JOBS) --target bench_ops
	@$(BUILD)/bench/bench_ops $(BENCH_ARGS)

lint: lint-fast tidy

lint-fast:
	@scripts/install-deps.sh lint
	@scripts/lint.sh includes
	@scripts/lint.sh format

tidy:
	@scripts/install-deps.sh build test lint
	@cmake --preset $(PRESET) --log-level=WARNING
	@scripts/lint.sh tidy $(BUILD) $(TIDY)

test-gpu:
	@scripts/install-deps.sh build test
	@cmake --preset cuda --log-level=WARNING
	@cmake --build build/cuda -j $(JOBS) --target test_cuda
	@ctest --test-dir build/cuda -L '^gpu$$' --output-on-failure --no-tests=error

fuzz:
	@scripts/install-deps.sh build fuzz
	@cmake --preset fuzz --log-level=WARNING
	@cmake --build build/fuzz -j $(JOBS) --target $(basename $(notdir $(wildcard tests/fuzz/fuzz_*.cpp)))
	@scripts/fuzz.sh build/fuzz $(FUZZ_SECONDS) $(JOBS)

clean:
	@rm -rf build
