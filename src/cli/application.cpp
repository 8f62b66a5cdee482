// The table of commands, and what all of them share.
#include "cli/application.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/usage_error.h"

namespace cachalot {
namespace {

// Help without the environment variable beside every flag: they follow one rule, told in the footer.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(34); }
  [[nodiscard]] std::string make_option_opts(const CLI::Option* option) const override {
    std::string text;
    if (option->get_type_size() != 0) {
      if (!option->get_type_name().empty()) text += " " + option->get_type_name();
      if (option->get_required()) text += " (required)";
    }
    return text;
  }
  [[nodiscard]] std::string make_option_desc(const CLI::Option* option) const override {
    const std::string fallback = option->get_default_str();
    return option->get_description() + (fallback.empty() ? "" : " [" + fallback + "]");
  }
};

std::string environment_name(const std::string& flag) {
  std::string name = "CACHALOT_";
  for (const char c : flag) name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

// CACHALOT_MAX_TOKENS=20 is --max-tokens 20. Only the chosen command listens: a variable meant for one must not satisfy half of another.
void listen_to_environment(CLI::App& app, int argc, char** argv) {
  CLI::App* chosen = &app;
  for (int i = 1; i < argc; ++i) {
    const auto named = chosen->get_subcommands([&](const CLI::App* command) { return command->check_name(argv[i]); });
    if (named.empty()) break;
    chosen = named.front();
  }
  if (chosen == &app) return;
  for (CLI::Option* option : chosen->get_options()) {
    const auto& names = option->get_lnames();
    if (names.empty() || option == chosen->get_help_ptr()) continue;
    std::string variable = environment_name(names.front());
    for (const std::string& alias : names)
      if (std::getenv(environment_name(alias).c_str()) != nullptr) variable = environment_name(alias);
    option->envname(variable);
  }
}

// llama-bench's flags of several letters behind one dash, which would be read as flags of one letter each: -pg is --pg.
std::vector<std::string> arguments_of(int argc, char** argv) {
  constexpr std::array<std::string_view, 3> kLong{"-pg", "-npl", "-ub"};
  std::vector<std::string> out;
  for (int i = 1; i < argc; ++i) {
    const bool is_long = argc > 1 && std::string_view(argv[1]) == "bench" && std::find(kLong.begin(), kLong.end(), argv[i]) != kLong.end();
    out.push_back((is_long ? "-" : "") + std::string(argv[i]));
  }
  return out;
}

int report(int code, const std::string& message) {
  std::fflush(stdout);
  fmt::print(stderr, "cachalot: {}\n", message);
  return code;
}

int parse(CLI::App& app, int argc, char** argv, bool& finished) {
  finished = true;
  try {
    std::vector<std::string> arguments = arguments_of(argc, argv);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    app.parse(std::move(arguments));
    finished = false;
    return kExitOk;
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::ParseError& error) {
    return report(kExitUsage, fmt::format("{} (see {} --help)", usage_error_text(app, error), command_name(app)));
  }
}

}  // namespace

int run_application(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may grow no further is an error like a full disk
  CLI::App app("Runs DeepSeek-family language models (MLA + MoE) and the dense models around them.", "cachalot");
  app.formatter(std::make_shared<HelpFormatter>());
  app.option_defaults()->take_last();
  app.require_subcommand(1);
  app.get_formatter()->label("OPTIONS", "FLAGS");
  app.set_version_flag("-V,--version", "cachalot " CACHALOT_VERSION, "Print the version and exit");
  app.footer(
      "Each flag has an environment variable: CACHALOT_MAX_TOKENS=20 stands for --max-tokens 20; the flag wins.\n"
      "Exit codes: 0 done, 1 bad input, 2 wrong flags, 130 interrupted.");
  Context context;
  add_run_command(app, context);
  add_generate_command(app, context);
  add_serve_command(app, context);
  add_inspect_command(app, context);
  add_tokenize_command(app, context);
  add_convert_command(app, context);
  add_quantize_command(app, context);
  add_imatrix_command(app, context);
  add_pack_command(app, context);
  add_eval_command(app, context);
  add_bench_command(app, context);
  add_version_command(app, context);

  if (argc <= 1) {
    fmt::print(stderr, "{}", app.help());
    return kExitUsage;
  }
  if (argv[1][0] != '-' && app.get_subcommands([&](const CLI::App* command) { return command->check_name(argv[1]); }).empty())
    return report(kExitUsage, unknown_command(app, argv[1]) + " (see cachalot --help)");
  listen_to_environment(app, argc, argv);
  bool finished = false;
  int code = parse(app, argc, argv, finished);
  if (finished) return code;
  try {
    code = context.action();
  } catch (const Error& error) {
    return report(kExitError, error.what());
  } catch (const std::bad_alloc&) {
    return report(kExitError, "out of memory");
  } catch (const std::exception& error) {
    return report(kExitError, error.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return report(kExitError, "cannot write to the standard output");
  return code;
}

}  // namespace cachalot
