// cachalot convert: a safetensors model as one GGUF file.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "base/check.h"
#include "base/error.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "convert/gguf_convert.h"

namespace cachalot {
namespace {

struct ConvertFlags {
  std::string model, out, type = "bf16";
  bool force = false, quiet = false;
};

int convert(const ConvertFlags& flags) {
  const auto format = format_of_name(flags.type);
  CACHALOT_CHECK(format.has_value(), "{}", flags.type);
  if (!flags.force && std::filesystem::exists(flags.out)) fail("{}: is there already; --force replaces it", flags.out);
  const auto checkpoint = Checkpoint::open(flags.model);
  ConvertResult result;
  {
    ProgressBar bar("Converting", !flags.quiet);
    ConvertOptions options{.format = *format, .progress = {}};
    options.progress = [&](size_t done, size_t total) { bar.update(done, total); };
    result = convert_to_gguf(*checkpoint, flags.out, options);
  }
  for (const std::string& note : result.notes) fmt::print(stderr, "note: {}\n", note);
  if (!flags.quiet) fmt::print(stderr, "{}: {} tensors, {:.1f} MB\n", flags.out, result.n_tensors, static_cast<double>(result.bytes) / 1e6);
  return kExitOk;
}

}  // namespace

void add_convert_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("convert", "Write a safetensors model as a GGUF file");
  auto flags = std::make_shared<ConvertFlags>();
  command->add_option("-m,--model", flags->model, "Directory (or file) of safetensors")->type_name("PATH")->required();
  command->add_option("-o,--out", flags->out, "GGUF file to write")->type_name("FILE")->required();
  command->add_option("--type,--outtype", flags->type, "Type of the matrices: f32, f16, bf16 or q8_0")
      ->type_name("TYPE")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8_0"}))
      ->default_str(flags->type);
  command->add_flag("--force", flags->force, "Replace a file that is there already");
  command->add_flag("-q,--quiet", flags->quiet, "No progress bar and no summary");
  command->callback([flags, &context] { context.action = [flags] { return convert(*flags); }; });
}

}  // namespace cachalot
