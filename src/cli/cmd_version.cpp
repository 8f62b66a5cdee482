// cachalot version: what this binary is.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/backend.h"
#include "cli/commands.h"
#include "cli/read_file.h"

namespace cachalot {

void add_version_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("version", "Version, build and devices");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "As JSON");
  command->callback([json, &context] {
    context.action = [json] {
      const nlohmann::ordered_json figures{
          {"version", CACHALOT_VERSION}, {"build", CACHALOT_BUILD_TYPE}, {"compiler", __VERSION__}, {"devices", backends_built()}};
      write_out(*json ? figures.dump() + "\n"
                      : fmt::format("cachalot {} ({}, compiler {}), devices: {}\n", CACHALOT_VERSION, CACHALOT_BUILD_TYPE, __VERSION__,
                                    backends_built()));
      return kExitOk;
    };
  });
}

}  // namespace cachalot
