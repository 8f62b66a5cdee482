// cachalot eval needle: what a model still finds in long texts.
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "cli/cmd_eval.h"
#include "cli/eval_text.h"
#include "cli/load_tokenizer.h"
#include "cli/process.h"
#include "cli/read_file.h"
#include "eval/needle.h"

namespace cachalot {
namespace {

using Json = nlohmann::ordered_json;

// Text to hide needles in, when none is given.
constexpr const char* kHaystack =
    "The ferry leaves the harbour at eight in the morning and comes back before it is dark. "
    "On the hill above the village stands a small white chapel with a bell that nobody rings any more. "
    "In spring the river rises and the lower meadows stay under water for a week or two. "
    "The baker opens early, and the smell of bread goes down the street as far as the bridge. "
    "Most of the houses have green shutters, because the mill once sold that paint for little money. "
    "Every Thursday there is a market with cheese, apples, wool and second-hand tools. "
    "The school has two rooms, one for the younger children and one for those who can read. "
    "When the wind comes from the north, the fishermen stay at home and mend their nets. "
    "An old road leads through the forest to the next valley, but few people take it in winter. "
    "The library lends books for a month, and longer to those who ask politely. ";

struct NeedleFlags {
  ModelFlags model;
  std::string base_model, file;
  NeedleOptions options;
  bool json = false, quiet = false, no_bos = false;
};

std::vector<NeedleCell> run(const NeedleFlags& flags, const std::string& path, const std::string& haystack) {
  ModelOptions load = flags.model.options();
  load.path = path;
  load.max_context = *std::max_element(flags.options.lengths.begin(), flags.options.lengths.end());
  load.show_progress = !flags.quiet;
  const LoadedModel model = load_model(load);
  NeedleOptions options = flags.options;
  if (!flags.no_bos) options.bos_id = bos_before_text(*model.tokenizer, model.config);
  if (!flags.quiet && stderr_is_terminal())
    options.progress = [](int done, int total) { fmt::print(stderr, "\r{}/{} cells ", done, total); };
  std::vector<NeedleCell> cells = find_needles({*model.ops, model.decoder}, *model.tokenizer, haystack, options);
  end_progress(flags.quiet);
  return cells;
}

struct Sum {
  double recalled = 0.0, first = 0.0, log_p = 0.0, margin = 0.0;
};
Sum mean_of(const std::vector<NeedleCell>& cells) {
  Sum sum;
  const auto n = static_cast<double>(cells.size());
  for (const NeedleCell& c : cells) {
    sum.recalled += static_cast<double>(c.recalled) / c.trials / n;
    sum.first += static_cast<double>(c.first) / c.trials / n;
    sum.log_p += c.log_p / n;
    sum.margin += c.margin / n;
  }
  return sum;
}

Json cells_json(const std::string& model, const std::vector<NeedleCell>& cells) {
  const Sum mean = mean_of(cells);
  Json out{{"model", model}, {"recall", mean.recalled}, {"first", mean.first}, {"log_p", mean.log_p}, {"margin", mean.margin}};
  for (const NeedleCell& c : cells)
    out["cells"].push_back({{"length", c.length},
                            {"depth", c.depth},
                            {"trials", c.trials},
                            {"recalled", c.recalled},
                            {"first", c.first},
                            {"log_p", c.log_p},
                            {"margin", c.margin}});
  return out;
}

std::string grid(const std::string& model, const std::vector<NeedleCell>& cells, const NeedleOptions& options) {
  std::string out = "\n" + model + "\n\n| depth |";
  for (const int length : options.lengths) out += fmt::format(" {} |", length);
  out += "\n| ---: |";
  for (size_t i = 0; i < options.lengths.size(); ++i) out += " ---: |";
  out += "\n";
  const size_t n_depths = options.depths.size();
  for (size_t d = 0; d < n_depths; ++d) {
    out += fmt::format("| {:.0f}% |", 100.0 * options.depths[d]);
    for (size_t l = 0; l < options.lengths.size(); ++l) {
      const NeedleCell& c = cells[l * n_depths + d];
      out += fmt::format(" {}/{}, {}/{}, {:+.2f} |", c.recalled, c.trials, c.first, c.trials, c.margin);
    }
    out += "\n";
  }
  const Sum mean = mean_of(cells);
  return out + fmt::format("\nrecalled {:.1f}%, right answer first {:.1f}%, log p {:.3f}, margin {:+.3f} nats\n", 100.0 * mean.recalled,
                           100.0 * mean.first, mean.log_p, mean.margin);
}

int eval_needle(const NeedleFlags& flags) {
  for (const double depth : flags.options.depths)
    if (!(depth >= 0.0 && depth <= 1.0)) fail("--depths: found {}, expected 0 to 1", depth);
  const std::string haystack = flags.file.empty() ? kHaystack : read_input_file(flags.file, size_t{1} << 28);
  std::vector<std::pair<std::string, std::vector<NeedleCell>>> results;
  if (!flags.base_model.empty()) results.emplace_back(flags.base_model, run(flags, flags.base_model, haystack));
  results.emplace_back(flags.model.model, run(flags, flags.model.model, haystack));
  if (flags.json) {
    Json out{{"distractors", flags.options.distractors}, {"seed", flags.options.seed}};
    for (const auto& [model, cells] : results) out["models"].push_back(cells_json(model, cells));
    write_out(out.dump() + "\n");
    return kExitOk;
  }
  std::string out = fmt::format(
      "In each cell: trials whose answer was recalled exactly; those where it was the likeliest of {}; its margin in nats over the "
      "likeliest "
      "wrong one.\n",
      flags.options.distractors + 1);
  for (const auto& [model, cells] : results) out += grid(model, cells, flags.options);
  write_out(out);
  return kExitOk;
}

}  // namespace

void add_eval_needle_command(CLI::App& eval, Context& context) {
  CLI::App* command = eval.add_subcommand("needle", "Whether a fact hidden in a long text is found again, by length and depth");
  auto flags = std::make_shared<NeedleFlags>();
  add_model_flags(*command, flags->model);
  command->add_option("--base-model", flags->base_model, "Another model to do the same, shown first")->type_name("PATH");
  command->add_option("-f,--file", flags->file, "Text to hide needles in, in place of a built-in one")->type_name("FILE");
  command->add_option("--lengths", flags->options.lengths, "Tokens of the whole, separated by commas")
      ->type_name("N,...")
      ->delimiter(',')
      ->take_all()
      ->check(number_between(32, 1 << 24))
      ->default_str("512,1024");
  command->add_option("--depths", flags->options.depths, "Where the needle is: 0 at the beginning, 1 at the end")
      ->type_name("X,...")
      ->delimiter(',')
      ->take_all()
      ->default_str("0,0.25,0.5,0.75,1");
  command->add_option("--trials", flags->options.trials, "Needles of each length and depth")
      ->type_name("N")
      ->check(number_between(1, 10000))
      ->default_str("4");
  command->add_option("--distractors", flags->options.distractors, "Wrong answers that each right one is held against")
      ->type_name("N")
      ->check(number_between(1, 1000))
      ->default_str("7");
  command->add_option("--seed", flags->options.seed, "Of the needles")->type_name("N")->default_str("1");
  command->add_flag("--no-bos", flags->no_bos, "Run without BOS");
  add_output_flags(*command, flags->json, flags->quiet);
  command->callback([flags, &context] { context.action = [flags] { return eval_needle(*flags); }; });
}

}  // namespace cachalot
