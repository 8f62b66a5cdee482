// cachalot serve: a model behind HTTP.
#include <fmt/format.h>
#include <pthread.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/open_engine.h"
#include "cli/read_file.h"
#include "cli/run_flags.h"
#include "cli/serve_flags.h"
#include "server/constraints.h"
#include "server/server.h"
#include "web/page_files.h"

namespace cachalot {
namespace {

constexpr size_t kMaxTemplateBytes = 1u << 20;

sigset_t watched_signals() {
  sigset_t set{};
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, signal);
  return set;
}

// SIGTERM and SIGINT begin the way down, the second ends it at once; while the model loads there is nothing to end well. SIGHUP looks for a
// new certificate. One thread waits for them, so that what they do is ordinary code.
class SignalThread {
 public:
  // All threads made before must have blocked watched_signals().
  SignalThread(server::Server& server, const std::atomic<bool>& loaded)
      : thread_([this, &server, &loaded] {
          const sigset_t set = watched_signals();
          while (true) {
            int signal = 0;
            if (sigwait(&set, &signal) != 0) continue;
            if (stopping_) return;
            if (signal == SIGHUP)
              server.reload_tls();
            else if (loaded)
              server.drain();
            else
              std::_Exit(128 + signal);
          }
        }) {}
  ~SignalThread() {
    stopping_ = true;
    pthread_kill(thread_.native_handle(), SIGHUP);
    thread_.join();
  }
  SignalThread(const SignalThread&) = delete;
  SignalThread& operator=(const SignalThread&) = delete;

 private:
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

std::unique_ptr<server::Service> make_service(const ServeFlags& flags, LoadedModel& model, Engine& engine) {
  if (!flags.chat_template_file.empty()) {
    model.chat_template = read_input_file(flags.chat_template_file, kMaxTemplateBytes);
    model.chat_template_name = flags.chat_template_file;
  }
  std::optional<ChatTemplate> chat_template;
  if (!model.chat_template.empty()) chat_template = ChatTemplate::parse(model.chat_template, model.chat_template_name);
  server::ServiceOptions options = service_options(flags);
  if (options.names.empty()) options.names.push_back(engine.info().model);
  options.defaults = sampling_options(flags.sampling, model);
  options.constraints = server::make_constraints(*model.tokenizer, engine.info().eos_ids);
  return std::make_unique<server::Service>(engine, *model.tokenizer, std::move(chat_template), std::move(options));
}

int serve(const ServeFlags& flags) {
  const sigset_t signals = watched_signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  server::ServerOptions options = server_options(flags);
  options.version = CACHALOT_VERSION;
  if (!flags.no_page)
    for (const web::PageFile& file : web::page_files()) options.files[std::string(file.path)] = {file.bytes, file.content_type};
  // Listening comes before loading: who watches sees a server that is not ready, not one that is not there. What is destroyed first stands
  // last.
  std::shared_ptr<LoadedModel> model;
  std::unique_ptr<Engine> engine;
  std::atomic<bool> loaded{false};
  server::Server server(std::move(options));
  const SignalThread signal_thread(server, loaded);
  server.start();
  if (!flags.quiet) fmt::print(stderr, "cachalot: loading {}; listening on {}\n", flags.model.model, server.address());
  model = std::make_shared<LoadedModel>(load_model(model_options(flags.model, flags.engine)));
  engine = make_engine(model, engine_options(flags));
  server.serve(make_service(flags, *model, *engine));
  loaded = true;
  if (!flags.quiet) fmt::print(stderr, "cachalot: {} is ready at {}\n", engine->info().model, server.address());
  server.wait();
  return kExitOk;
}

}  // namespace

void add_serve_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("serve", "Answer HTTP requests: the OpenAI and Anthropic interfaces, and a page");
  auto flags = std::make_shared<ServeFlags>();
  add_serve_flags(*command, *flags);
  command->footer(
      "Endpoints: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages (Anthropic), /v1/models, /tokenize, /detokenize,\n"
      "/health, /metrics; docs/server.md describes them. SIGTERM lets running answers end, a second one does not; SIGHUP reloads the\n"
      "certificate. Examples:\n"
      "  cachalot serve model.gguf\n"
      "  cachalot serve -m DeepSeek-V2-Lite/ --host 0.0.0.0 --port 8080 --api-key-file keys.txt");
  command->callback([flags, command, &context] {
    choose_model(*command, flags->model);
    context.action = [flags] { return serve(*flags); };
  });
}

}  // namespace cachalot
