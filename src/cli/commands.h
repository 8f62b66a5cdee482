// The commands of `cachalot`: each add_*_command gives the application its subcommand and flags. A chosen command leaves what it will do
// in Context::action, which main runs once all flags are read; its result is the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace cachalot {

// Exit codes of every command.
constexpr int kExitOk = 0;
constexpr int kExitError = 1;          // bad input, or a figure that a check refuses
constexpr int kExitUsage = 2;          // wrong flags
constexpr int kExitInterrupted = 130;  // Ctrl-C

struct Context {
  std::function<int()> action;
};

void add_run_command(CLI::App& app, Context& context);
void add_generate_command(CLI::App& app, Context& context);
void add_serve_command(CLI::App& app, Context& context);
void add_inspect_command(CLI::App& app, Context& context);
void add_tokenize_command(CLI::App& app, Context& context);
void add_convert_command(CLI::App& app, Context& context);
void add_eval_command(CLI::App& app, Context& context);
void add_pack_command(CLI::App& app, Context& context);
void add_bench_command(CLI::App& app, Context& context);
void add_engine_benchmarks(CLI::App& bench, Context& context);  // subcommands of bench
void add_quantize_command(CLI::App& app, Context& context);
void add_imatrix_command(CLI::App& app, Context& context);
void add_version_command(CLI::App& app, Context& context);

}  // namespace cachalot
