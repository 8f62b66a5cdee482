// cachalot imatrix: gathers an importance matrix from text, and merges and converts them.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "cli/backend.h"
#include "cli/commands.h"
#include "cli/load_tokenizer.h"
#include "cli/process.h"
#include "cli/read_file.h"
#include "cli/run_flags.h"
#include "ops/staged_ops.h"
#include "quant/imatrix_gather.h"

namespace cachalot {
namespace {

constexpr size_t kMaxText = 1u << 30;  // bytes

struct ImatrixFlags {
  std::string model, out, format = "auto", tokenizer, device = "cpu";
  std::vector<std::string> files, merged;
  int threads = 0, window = 512, windows = 0;
  bool head = false, no_bos = false, force = false, quiet = false;
};

ImatrixFormat format_of(const ImatrixFlags& flags) {
  if (flags.format == "auto") return flags.out.ends_with(".dat") ? ImatrixFormat::dat : ImatrixFormat::gguf;
  return flags.format == "dat" ? ImatrixFormat::dat : ImatrixFormat::gguf;
}

void gather(const ImatrixFlags& flags, ImportanceMatrix& sum) {
  const auto checkpoint = Checkpoint::open(flags.model);
  const Config config = read_config(*checkpoint);
  const Tokenizer tokenizer = flags.tokenizer.empty() ? tokenizer_of(*checkpoint, config.eos_ids) : load_tokenizer(flags.tokenizer);
  const auto device = make_ops(flags.device, {.n_threads = flags.threads, .f32 = true});
  const auto staged = device->host_memory() ? nullptr : make_staged_ops(*device);
  Ops& ops = staged ? *staged : *device;
  const bool live = !flags.quiet && stderr_is_terminal();
  for (const std::string& file : flags.files) {
    GatherOptions options{.window = flags.window, .max_windows = flags.windows, .head = flags.head};
    if (!flags.no_bos) options.bos_id = bos_before_text(tokenizer, config);
    if (live) options.progress = [&](int done, int total) { fmt::print(stderr, "\r\x1b[K{}: layer {}/{}", file, done + 1, total); };
    // llama-imatrix tokenizes with BOS, which the first window then holds by itself.
    std::vector<int> tokens = tokenizer.encode(read_input_file(file, kMaxText));
    if (options.bos_id >= 0) tokens.insert(tokens.begin(), options.bos_id);
    ImportanceMatrix one = gather_importance(*checkpoint, config, ops, tokens, options);
    one.datasets = {file};
    if (live) fmt::print(stderr, "\r\x1b[K");
    sum.add(one);
  }
}

int imatrix(const ImatrixFlags& flags) {
  if (flags.files.empty() && flags.merged.empty()) fail("expected text (-f) or importance matrices to merge (--in-file)");
  if (!flags.files.empty() && flags.model.empty()) fail("-m: expected a model to run the text through");
  if (!flags.force && std::filesystem::exists(flags.out)) fail("{}: is there already; --force replaces it", flags.out);
  ImportanceMatrix sum;
  sum.chunk_size = flags.window;
  for (const std::string& file : flags.merged) sum.add(ImportanceMatrix::read(file));
  if (!flags.files.empty()) gather(flags, sum);
  sum.write(flags.out, format_of(flags));
  if (flags.quiet) return kExitOk;
  int unseen = 0;
  for (const auto& [name, entry] : sum.entries) {
    const auto n = std::count(entry.counts.begin(), entry.counts.end(), 0);
    if (n > 0) fmt::print(stderr, "warning: {}: {} of {} experts saw no token\n", name, n, entry.counts.size());
    unseen += n > 0 ? 1 : 0;
  }
  write_out(fmt::format("{}: {} tensors, {} windows of {} tokens{}\n", flags.out, sum.entries.size(), sum.chunk_count, flags.window,
                        unseen > 0 ? fmt::format(", {} tensors with experts that saw no token", unseen) : ""));
  return kExitOk;
}

}  // namespace

void add_imatrix_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("imatrix", "Gather an importance matrix for quantize --imatrix, in llama.cpp's format");
  auto flags = std::make_shared<ImatrixFlags>();
  command->add_option("-m,--model", flags->model, "Model to run the text through")->type_name("PATH");
  command->add_option("-f,--file", flags->files, "UTF-8 text; may be given several times")->type_name("FILE");
  command->add_option("--in-file", flags->merged, "An importance matrix to add (GGUF or .dat); may be given several times")
      ->type_name("FILE");
  command->add_option("-o,--out", flags->out, "File to write")->type_name("FILE")->default_val("imatrix.gguf");
  command->add_option("--output-format", flags->format, "gguf, dat (before 2025), or auto: by the file's name")
      ->type_name("NAME")
      ->default_str("auto")
      ->check(CLI::IsMember({"auto", "gguf", "dat"}));
  command->add_option("--window", flags->window, "Tokens of a window")
      ->type_name("N")
      ->check(number_between(2, 1 << 20))
      ->default_str("512");
  command->add_option("--windows", flags->windows, "Windows of each text at most; 0: all")
      ->type_name("N")
      ->check(number_between(0, 1 << 30))
      ->default_str("0");
  command->add_flag("--process-output", flags->head, "Gather for output.weight too");
  command->add_flag("--no-bos", flags->no_bos, "Do not put BOS at the start of windows");
  command->add_option("--tokenizer", flags->tokenizer, "In place of the model's own")->type_name("PATH");
  command->add_option("--device", flags->device, "Where the model runs: cpu, cuda, cuda:N (in f32), or ref")
      ->type_name("NAME")
      ->default_str(flags->device);
  command->add_option("-t,--threads", flags->threads, "Threads; 0: one per core")
      ->type_name("N")
      ->check(number_between(0, 4096))
      ->default_str("0");
  command->add_flag("--force", flags->force, "Replace a file that is there already");
  command->add_flag("-q,--quiet", flags->quiet, "Print nothing");
  command->callback([flags, &context] { context.action = [flags] { return imatrix(*flags); }; });
}

}  // namespace cachalot
