// cachalot pack: a model's weights as the CPU backend keeps them, in a file that loads as fast as memory is filled.
#include <fmt/format.h>

#include "base/error.h"
#include "cli/backend.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/run_flags.h"
#include "cli/text_units.h"
#include "model/packed_model.h"

namespace cachalot {
namespace {

struct PackFlags {
  std::string model, out, device = "cpu";
  int threads = 0;
  bool force = false, quiet = false;
};

int pack(const PackFlags& flags) {
  const auto checkpoint = Checkpoint::open(flags.model);
  const auto ops = make_ops(flags.device, {.n_threads = flags.threads});
  PackModelResult result;
  {
    ProgressBar bar("packing", !flags.quiet);
    result = write_packed_model(*checkpoint, *ops, flags.out,
                                {.replace = flags.force, .progress = [&](size_t done, size_t total) { bar.update(done, total); }});
  }
  if (!flags.quiet)
    fmt::print(stderr, "{}: {} weights, {}, {}\n", result.file.string(), result.n_linears, bytes_text(static_cast<double>(result.bytes)),
               ops->packed_layout());
  return kExitOk;
}

}  // namespace

void add_pack_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("pack", "Write a model in the form in which this machine's CPU runs it, to load it in seconds");
  auto flags = std::make_shared<PackFlags>();
  command->footer(
      "DIR then takes the place of the model: cachalot run -m DIR. It holds all that is needed, and belongs to the form of weights of "
      "this\n"
      "version and kind of CPU; another one refuses it, as it does when the model has changed since.");
  command->add_option("model", flags->model, "GGUF file, or directory (or file) of safetensors")->type_name("MODEL")->required();
  command->add_option("-o,--out", flags->out, "Directory to write, made if it is not there")->type_name("DIR")->required();
  command->add_option("--device", flags->device, "Whose form: cpu")->type_name("NAME")->default_str(flags->device);
  command->add_option("-t,--threads", flags->threads, "CPU threads; 0: one per physical core")
      ->type_name("N")
      ->check(number_between(0, 1024));
  command->add_flag("--force", flags->force, "Replace a pack that is there already");
  command->add_flag("-q,--quiet", flags->quiet, "No progress bar and no summary");
  command->callback([flags, &context] { context.action = [flags] { return pack(*flags); }; });
}

}  // namespace cachalot
