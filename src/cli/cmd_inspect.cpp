// cachalot inspect: what a model file holds, without loading it.
#include "base/error.h"
#include "cli/commands.h"
#include "cli/model_report.h"
#include "cli/read_file.h"

namespace cachalot {
namespace {

struct InspectFlags {
  std::string model, model_by_flag;
  bool json = false, no_tensors = false;
};

int inspect(const InspectFlags& flags) {
  const auto checkpoint = Checkpoint::open(flags.model.empty() ? flags.model_by_flag : flags.model);
  const auto report = model_report(*checkpoint);
  write_out(flags.json ? report.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n"
                       : report_text(report, !flags.no_tensors));
  return kExitOk;
}

}  // namespace

void add_inspect_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("inspect", "Architecture, tensors, types and sizes of a model");
  auto flags = std::make_shared<InspectFlags>();
  CLI::Option* positional = command->add_option("path", flags->model, "GGUF file, or directory (or file) of safetensors")->type_name("");
  CLI::Option* named = command->add_option("-m,--model", flags->model_by_flag, "The same")->type_name("PATH");
  command->add_flag("--no-tensors", flags->no_tensors, "Leave out the list of tensors");
  command->add_flag("--json", flags->json, "As JSON");
  command->callback([flags, &context, positional, named] {
    if (positional->count() == 0 && named->count() == 0) throw CLI::RequiredError("a model");
    context.action = [flags] { return inspect(*flags); };
  });
}

}  // namespace cachalot
