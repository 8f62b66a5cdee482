// Declares the engine's flags under the names that users of vLLM and llama.cpp know.
#include "cli/engine_flags.h"

namespace cachalot {

void add_engine_flags(CLI::App& command, EngineFlags& f, const EngineFlagLimits& limits) {
  const char* group = "Engine";
  command.add_option("--max-num-seqs,--parallel", f.max_num_seqs, "Requests running at the same time")
      ->type_name("N")
      ->check(number_between(1, limits.seqs))
      ->default_str("16, on a GPU 256")
      ->group(group);
  command.add_option("--max-num-batched-tokens,--batch-size", f.max_num_batched_tokens, "Rows of a step")
      ->type_name("N")
      ->check(number_between(1, limits.batched_tokens))
      ->default_str("512, on a GPU 4096")
      ->group(group);
  command.add_option("--kv-cache-memory-bytes", f.kv_cache_bytes, "Memory for KV pages [what all requests need, or the device has left]")
      ->type_name("BYTES")
      ->check(number_between(0, 1e15))
      ->group(group);
  command
      .add_option("--swap-space", f.swap_gib,
                  "Host memory for the KV pages of requests that lost their place to more urgent ones; without it they are computed again")
      ->type_name("GIB")
      ->check(number_between(0, 1e6))
      ->default_str("0")
      ->group(group);
  command.add_flag("--no-enable-prefix-caching,--no-prefix-caching", f.no_prefix_caching, "Read every prompt from its beginning")
      ->group(group);
  command.add_flag("--batch-invariant", f.batch_invariant, "A request's tokens do not depend on what runs beside it")->group(group);
  command.add_option("--speculation,--spec-method", f.speculation, "Guess tokens ahead: off, ngram, mtp")
      ->type_name("NAME")
      ->check(CLI::IsMember({"off", "ngram", "mtp"}).description(""))
      ->default_str(f.speculation)
      ->group(group);
  command.add_option("--spec-tokens,--draft-max", f.max_draft_tokens, "Tokens guessed at most")
      ->type_name("N")
      ->check(number_between(1, 32))
      ->default_str(std::to_string(f.max_draft_tokens))
      ->group(group);
}

ModelOptions model_options(const ModelFlags& model, const EngineFlags& f) {
  ModelOptions out = model.options();
  out.batch_invariant = f.batch_invariant;
  out.mtp = f.speculation == "mtp";
  return out;
}

EngineOptions many_requests(const ModelFlags& model, const EngineFlags& f) {
  EngineOptions out;
  out.device = model.device;
  out.n_threads = model.threads;
  out.max_context = model.max_model_len;
  out.max_requests = f.max_num_seqs;
  out.max_step_tokens = f.max_num_batched_tokens;
  out.block_tokens = model.block_size;
  out.kv_bytes = f.kv_cache_bytes;
  out.swap_bytes = f.swap_gib * 0x1p30;
  out.kv_cache_dtype = model.kv_cache_dtype;
  out.prefix_cache = !f.no_prefix_caching;
  out.batch_invariant = f.batch_invariant;
  out.speculation = f.speculation;
  out.max_draft_tokens = f.max_draft_tokens;
  return out;
}

}  // namespace cachalot
