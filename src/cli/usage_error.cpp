// CLI11's errors, said as the other errors are: what was found, what was expected.
#include "cli/usage_error.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace cachalot {
namespace {

// Letters to insert, remove, replace or swap with their neighbour.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before_last(b.size() + 1), last(b.size() + 1), now(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) now[j] = std::min(now[j], before_last[j - 2] + 1);
    }
    before_last.swap(last);
    last.swap(now);
  }
  return last[b.size()];
}

// The commands that were named, outermost first.
std::vector<const CLI::App*> named_commands(const CLI::App& app) {
  std::vector<const CLI::App*> out{&app};
  while (!out.back()->get_subcommands().empty()) out.push_back(out.back()->get_subcommands().front());
  return out;
}

std::string unknown_argument(const CLI::App& command, const std::vector<std::string>& extras) {
  const auto flag = std::find_if(extras.begin(), extras.end(), [](const std::string& text) { return text.size() > 1 && text[0] == '-'; });
  if (flag == extras.end())
    return fmt::format("found \"{}\", which belongs to no flag; a text of several words needs quotes", printable(extras.front()));
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  const std::string name = flag->substr(0, flag->find('=')), near = nearest_word(name, names);
  return fmt::format("no flag \"{}\"{}", printable(name), near.empty() ? "" : fmt::format("; did you mean {}?", near));
}

}  // namespace

std::string nearest_word(std::string_view word, const std::vector<std::string>& candidates) {
  if (word.size() > 64) return {};
  std::string best;
  size_t least = std::min<size_t>(3, std::max<size_t>(2, word.size() / 3 + 1));
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance >= least) continue;
    least = distance;
    best = candidate;
  }
  return best;
}

std::string unknown_command(const CLI::App& app, std::string_view name) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) names.push_back(command->get_name());
  const std::string near = nearest_word(name, names);
  return fmt::format("no command \"{}\"{}", printable(name), near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near));
}

std::string command_name(const CLI::App& app) {
  std::string name;
  for (const CLI::App* command : named_commands(app)) name += (name.empty() ? "" : " ") + command->get_name();
  return name;
}

std::string usage_error_text(const CLI::App& app, const CLI::ParseError& error) {
  std::string text = error.what();
  std::replace(text.begin(), text.end(), '\n', ' ');
  const auto commands = named_commands(app);
  std::vector<std::string> extras;
  for (const CLI::App* command : commands)
    for (std::string& extra : command->remaining()) extras.push_back(std::move(extra));
  // What is missing may be what was misspelt.
  const bool missing = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  if ((missing || dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) && !extras.empty())
    return unknown_argument(*commands.back(), extras);
  constexpr std::string_view kConversion = "Could not convert: ";
  if (const size_t equals = text.find(" = "); text.starts_with(kConversion) && equals != std::string::npos)
    return fmt::format("{}: found {}, expected a number of another kind", text.substr(kConversion.size(), equals - kConversion.size()),
                       printable(text.substr(equals + 3)));
  return printable(text, 400);
}

}  // namespace cachalot
