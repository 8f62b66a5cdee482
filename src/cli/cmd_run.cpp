// cachalot run: one answer for -p or -f, or a conversation in the terminal.
#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/answer.h"
#include "cli/chat.h"
#include "cli/commands.h"
#include "cli/op_watch.h"
#include "cli/process.h"
#include "cli/read_file.h"
#include "cli/run_flags.h"
#include "cli/text_units.h"
#include "runtime/engine.h"
#include "text/chat_prompt.h"

namespace cachalot {
namespace {

constexpr size_t kMaxPromptBytes = 256u << 20, kMaxTemplateBytes = 1u << 20;

struct RunFlags {
  ModelFlags model;
  SamplingFlags sampling;
  std::optional<std::string> prompt;
  std::string file, system, chat_template_file;
  bool raw = false, chat = false, echo = false, special = false, json = false, quiet = false, trace = false, check_finite = false;
};

// A model and what this run makes of it. `watch` decorates model.ops and is what the engine runs on.
struct Session {
  explicit Session(const RunFlags& flags);

  LoadedModel model;
  std::unique_ptr<Ops> watch;
  std::optional<ChatTemplate> chat_template;
  SamplingOptions sampling;
  double kv_bytes = 0.0;
  std::unique_ptr<Engine> engine;
};

Session::Session(const RunFlags& flags) {
  ModelOptions options = flags.model.options();
  options.show_progress = !flags.quiet;
  model = load_model(options);
  if (!flags.chat_template_file.empty()) {
    model.chat_template = read_input_file(flags.chat_template_file, kMaxTemplateBytes);
    model.chat_template_name = flags.chat_template_file;
  }
  sampling = sampling_options(flags.sampling, model);
  if (!flags.raw && !model.chat_template.empty()) chat_template = ChatTemplate::parse(model.chat_template, model.chat_template_name);
  Ops* ops = model.ops.get();
  if (flags.trace) watch = make_printing_ops(*ops);
  if (flags.check_finite) watch = make_finite_ops(*ops);
  if (watch) ops = watch.get();
  const EngineOptions engine_flags = engine_options(flags.model, model);
  engine = make_engine(*ops, model.decoder, engine_flags, model.path);
  const KvLayout layout = model.config.kv_layout(kv_format_of(engine_flags.kv_cache_dtype, *ops), engine_flags.block_tokens);
  kv_bytes = static_cast<double>(layout.token_bytes()) * model.config.n_layers * engine_flags.block_tokens * engine->stats().blocks_total;
  if (engine->info().max_context < model.max_context)
    fmt::print(stderr, "cachalot: there is memory for a context of {} tokens, not {}\n", engine->info().max_context, model.max_context);
}

ChatPrompt make_prompt(const RunFlags& flags, const Session& session, const std::string& text) {
  const Tokenizer& tokenizer = *session.model.tokenizer;
  if (!session.chat_template) {
    if (flags.chat || !flags.system.empty())
      fail("{}: the model has no chat template; name one with --chat-template-file, or use --raw without --system", session.model.path);
    return {text, tokenizer.encode(text, {.add_bos = tokenizer.add_bos(), .parse_special = true})};
  }
  auto messages = nlohmann::ordered_json::array();
  if (!flags.system.empty()) messages.push_back({{"role", "system"}, {"content", flags.system}});
  messages.push_back({{"role", "user"}, {"content", text}});
  return make_chat_prompt(tokenizer, *session.chat_template, messages);
}

nlohmann::ordered_json logprobs_json(const Tokenizer& tokenizer, const std::vector<TokenEvent>& draws) {
  const auto entry = [&](int token, float logprob) {
    return nlohmann::ordered_json{{"id", token}, {"token", tokenizer.decode({&token, 1})}, {"logprob", logprob}};
  };
  auto list = nlohmann::ordered_json::array();
  for (const TokenEvent& draw : draws) {
    auto item = entry(draw.token, draw.logprob);
    item["top"] = nlohmann::ordered_json::array();
    for (const TokenLogprob& rival : draw.top) item["top"].push_back(entry(rival.token, rival.logprob));
    list.push_back(std::move(item));
  }
  return list;
}

void print_json(const Session& session, const Answer& answer, const std::vector<int>& prompt_ids) {
  const AnswerTimes& t = answer.times;
  nlohmann::ordered_json out{
      {"model", session.model.path},
      {"device", session.model.ops->name()},
      {"text", answer.text},
      {"token_ids", answer.ids},
      {"finish_reason", answer.interrupted ? "interrupted" : name_of(answer.finish)},
      {"stop_string", answer.stop_string.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(answer.stop_string)},
      {"prompt_token_ids", prompt_ids},
      {"prompt_tokens", t.n_prompt},
      {"completion_tokens", t.n_generated},
      {"seed", session.sampling.seed},
      {"timings",
       {{"load_ms", session.model.load_seconds * 1e3},
        {"first_token_ms", t.first_token_s * 1e3},
        {"prompt_n", t.n_prompt - t.n_reused},
        {"prompt_per_second", t.prompt_per_second()},
        {"predicted_n", t.n_generated},
        {"predicted_ms", t.decode_s * 1e3},
        {"predicted_per_second", t.decode_per_second()}}},
      {"peak_memory_bytes", peak_memory_bytes()},
  };
  if (!answer.draws.empty()) out["logprobs"] = logprobs_json(*session.model.tokenizer, answer.draws);
  write_out(out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void print_logprobs(const Tokenizer& tokenizer, const std::vector<TokenEvent>& draws) {
  const auto text = [&](int token) { return "\"" + printable(tokenizer.decode({&token, 1}), 40) + "\""; };
  for (const TokenEvent& draw : draws) {
    fmt::print(stderr, "{:8} {:9.4f}  {:<16}", draw.token, draw.logprob, text(draw.token));
    for (const TokenLogprob& rival : draw.top) fmt::print(stderr, "  {} {:.4f}", text(rival.token), rival.logprob);
    fmt::print(stderr, "\n");
  }
}

int run_once(const RunFlags& flags, Session& session, const std::string& text) {
  const ChatPrompt prompt = make_prompt(flags, session, text);
  Request request;
  request.prompt = prompt.ids;
  request.sampling = session.sampling;
  request.max_tokens = flags.sampling.max_tokens;
  request.ignore_eos = flags.sampling.ignore_eos;
  if (flags.echo && !flags.json) write_out(prompt.text);

  const InterruptGuard guard;
  const auto show = [&](std::string_view piece) {
    if (!flags.json) write_out(piece);
  };
  const Answer answer = generate_answer(*session.engine, *session.model.tokenizer, std::move(request),
                                        {.stops = flags.sampling.stop, .show_special = flags.special}, show);
  if (flags.json) {
    print_json(session, answer, prompt.ids);
  } else {
    write_out("\n");
    if (!answer.draws.empty()) print_logprobs(*session.model.tokenizer, answer.draws);
    if (!flags.quiet)
      fmt::print(stderr, "\n{}loaded in {}   seed {}   ended by {}\n", describe(answer.times), seconds_text(session.model.load_seconds),
                 session.sampling.seed, answer.interrupted ? "Ctrl-C" : name_of(answer.finish));
  }
  if (answer.finish == FinishReason::error) {
    if (flags.check_finite) fail("{}", answer.error);
    fail("{}: {}; --check-finite tells where numbers went wrong", session.model.path, answer.error);
  }
  return answer.interrupted ? kExitInterrupted : kExitOk;
}

int run(const RunFlags& flags) {
  if (flags.prompt || !flags.file.empty()) {
    // Read first: a wrong file name should not wait for a model to load.
    std::string text = flags.prompt        ? *flags.prompt
                       : flags.file == "-" ? read_standard_input(kMaxPromptBytes)
                                           : read_input_file(flags.file, kMaxPromptBytes);
    Session session(flags);
    return run_once(flags, session, text);
  }
  Session session(flags);
  if (!session.chat_template)
    fail("{}: the model has no chat template for a conversation; give a text to continue with -p, or a template with --chat-template-file",
         session.model.path);
  return run_chat(session.model, *session.chat_template, *session.engine,
                  {.system = flags.system,
                   .sampling = session.sampling,
                   .max_tokens = flags.sampling.max_tokens,
                   .ignore_eos = flags.sampling.ignore_eos,
                   .answer = {.stops = flags.sampling.stop, .show_special = flags.special},
                   .show_speed = !flags.quiet,
                   .kv_bytes = session.kv_bytes});
}

}  // namespace

void add_run_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("run", "Answer a prompt, or chat in the terminal");
  auto flags = std::make_shared<RunFlags>();
  command->footer(
      "With -p or -f: one answer on the standard output, then speed and memory on the standard error. A model with a chat template gets "
      "the\n"
      "prompt as a user's message; --raw lets it continue the text as it stands (control tokens in it count, BOS is put before it).\n"
      "Without: a chat. Ctrl-C ends an answer; /help lists commands. Examples:\n"
      "  cachalot run model.gguf\n"
      "  cachalot run -m model.gguf -p 'Why is the sky blue?'\n"
      "  cachalot run -m DeepSeek-V2-Lite/ --raw -p 'def fib(n):' -n 100 --temp 0");

  add_model_flags_or_argument(*command, flags->model);
  const char* prompt_group = "Prompt";
  CLI::Option* prompt = command->add_option("-p,--prompt", flags->prompt, "Answer this text")->type_name("TEXT")->group(prompt_group);
  CLI::Option* file = command->add_option("-f,--file", flags->file, "Answer the text of a file; - for the standard input")
                          ->type_name("PATH")
                          ->group(prompt_group)
                          ->excludes(prompt);
  command->add_option("--system", flags->system, "System message, before all others")->type_name("TEXT")->group(prompt_group);
  CLI::Option* raw = command->add_flag("--raw", flags->raw, "Without the chat template")->group(prompt_group);
  command->add_flag("--chat", flags->chat, "With the chat template, or not at all")->group(prompt_group)->excludes(raw);
  command->add_option("--chat-template-file", flags->chat_template_file, "Take the place of the model's chat template")
      ->type_name("PATH")
      ->group(prompt_group)
      ->excludes(raw);
  add_sampling_flags(*command, flags->sampling);
  add_cache_flags(*command, flags->model);

  const char* output_group = "Output";
  command->add_flag("--json", flags->json, "One JSON object: text, token ids, reason of the end, timings")->group(output_group);
  command->add_flag("--echo", flags->echo, "Print the prompt before the answer")->group(output_group);
  command->add_flag("--special", flags->special, "Print control tokens too")->group(output_group);
  command->add_flag("-q,--quiet", flags->quiet, "No progress, no speed")->group(output_group);
  CLI::Option* trace = command->add_flag("--trace", flags->trace, "Print each operation with its time (stderr)")->group(output_group);
  command->add_flag("--check-finite", flags->check_finite, "Stop at the first operation that gives NaN or infinity")
      ->group(output_group)
      ->excludes(trace);
  command->callback([flags, command, &context, prompt, file] {
    choose_model(*command, flags->model);
    if (flags->json && prompt->count() == 0 && file->count() == 0) throw CLI::ValidationError("--json needs -p or -f");
    context.action = [flags] { return run(*flags); };
  });
}

}  // namespace cachalot
