// The subcommands of `cachalot eval`, by subject.
#pragma once

#include "cli/commands.h"

namespace cachalot {

void add_eval_text_commands(CLI::App& eval, Context& context);  // ppl, kld
void add_eval_turns_command(CLI::App& eval, Context& context);
void add_eval_needle_command(CLI::App& eval, Context& context);
void add_eval_compare_command(CLI::App& eval, Context& context);

}  // namespace cachalot
