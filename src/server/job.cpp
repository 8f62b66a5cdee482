// Job.
#include "server/job.h"

#include <fmt/format.h>

#include <random>

namespace cachalot::server {
namespace {

ApiError refusal(const Refused& refused) {
  using Reason = Refused::Reason;
  ApiError error(400, refused.what());
  switch (refused.reason) {
    case Reason::invalid: break;
    case Reason::too_long: error.code = "context_length_exceeded"; break;
    case Reason::queue_full:
      error.status = 429;
      error.code = "queue_full";
      error.retry_after_seconds = std::max(refused.retry_after_seconds, 1.0);
      break;
    case Reason::shutting_down:
      error.status = 503;
      error.code = "shutting_down";
      error.retry_after_seconds = std::max(refused.retry_after_seconds, 1.0);
      break;
  }
  return error;
}

double seconds_since(Clock::time_point then, Clock::time_point now) { return std::chrono::duration<double>(now - then).count(); }

uint64_t fresh_seed() {
  static thread_local std::mt19937_64 random{std::random_device{}()};
  return random();
}

}  // namespace

Job::Job(const Service& service, EventHub& hub, JobObserver& observer, std::shared_ptr<Exchange> exchange, Prepared prepared,
         std::unique_ptr<AnswerWriter> writer)
    : service_(service),
      hub_(hub),
      observer_(observer),
      exchange_(exchange),
      home_(std::move(exchange)),
      prepared_(std::move(prepared)),
      writer_(std::move(writer)),
      priority_(prepared_.params.priority.value_or(service.options().default_priority)),
      started_(Clock::now()),
      last_token_(started_) {
  home_->counted = true;
}

void Job::start() {
  CommonParams& params = prepared_.params;
  const auto n = static_cast<size_t>(params.n);
  choices_.reserve(prepared_.prompts.size() * n);
  if (!params.has_seed) params.sampling.seed = fresh_seed();
  try {
    for (size_t p = 0; p < prepared_.prompts.size(); ++p) {
      for (size_t k = 0; k < n; ++k) {
        Choice& choice = choices_.emplace_back(service_.tokenizer(), prepared_.answer);
        choice.index = static_cast<int>(choices_.size() - 1);
        choice.prompt = prepared_.prompts[p];
        choice.use.prompt = static_cast<int>(choice.prompt.size());
        if (prepared_.echo) choice.echo = &prepared_.prompt_texts[p];
        Request request;
        request.prompt = prepared_.prompts[p];
        request.sampling = params.sampling;
        request.sampling.seed += k;  // answers to one prompt differ
        // One token is drawn and not shown when only the prompt was asked about.
        request.max_tokens = std::max(service_.answer_limit(request.prompt.size(), params), 1);
        request.min_tokens = params.min_tokens;
        request.ignore_eos = params.ignore_eos;
        request.stop_tokens = params.stop_tokens;
        request.priority = priority_;
        request.timeout_seconds = service_.options().timeout_seconds;
        request.use_prefix_cache = params.use_prefix_cache;
        request.cache_salt = params.cache_salt;
        request.prompt_logprobs = params.prompt_logprobs;
        if (prepared_.constraint) request.constraint = prepared_.constraint();
        choice.id = hub_.submit(std::move(request), exchange_->io_thread(), shared_from_this(), choice.index);
      }
    }
  } catch (const Refused& refused) {
    give_up(refusal(refused));
  } catch (const ApiError& error) {
    give_up(error);
  }
  exchange_->on_closed([weak = weak_from_this()] {
    const auto job = weak.lock();
    if (!job || job->ended_) return;
    job->ended_ = true;
    job->exchange_->keep_alive({});
    job->cancel_all();
    job->report(499, "abort");
    job->exchange_.reset();
  });
  if (params.stream) {
    exchange_->begin_stream("text/event-stream; charset=utf-8");
    exchange_->keep_alive(writer_->keep_alive());
    out_.clear();
    writer_->start(out_);
    exchange_->write(out_);
  }
}

void Job::give_up(const ApiError& error) {
  ended_ = true;
  cancel_all();
  report(error.status, "refused");
  throw error;
}

void Job::on_event(int index, const TokenEvent& event) {
  // Events of a submission that failed midway, or of a client that is gone, have no place to go.
  if (ended_) return;
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (choice.done) return;
  delta_.clear();
  if (event.token >= 0) take_token(choice, event);
  if (!choice.done && event.finish == FinishReason::error) {
    fail(ApiError(event.request_at_fault ? 400 : 500, event.error.empty() ? "the engine failed" : event.error));
    return;
  }
  if (!choice.done && event.finish == FinishReason::timeout) {
    fail(ApiError(504, "The request took longer than the server allows", "", "timeout"));
    return;
  }
  if (!choice.done && event.finish != FinishReason::none) settle(choice, event.finish, event.usage);
  send(choice);
}

void Job::take_token(Choice& choice, const TokenEvent& event) {
  const auto now = Clock::now();
  if (choice.use.completion == 0)
    observer_.on_first_token(priority_, seconds_since(started_, now));
  else
    observer_.on_token_gap(priority_, seconds_since(last_token_, now));
  last_token_ = now;
  any_token_ = true;
  ++choice.use.completion;
  if (!event.prompt_logprobs.empty()) choice.prompt_logprobs = event.prompt_logprobs;
  const CommonParams& params = prepared_.params;
  if (params.max_tokens == 0) {  // only the prompt was asked about
    choice.use.completion = 0;
    service_.engine().cancel(choice.id);
    settle(choice, FinishReason::length, event.usage);
    return;
  }
  if (event.is_end_token) return;
  if (params.logprobs) choice.logged.push_back({event.token, event.logprob, event.top});
  if (params.return_token_ids) choice.token_ids.push_back(event.token);
  const bool goes_on = choice.stream.push(event.token, delta_);
  const bool enough_calls = choice.stream.tool_calls() >= prepared_.max_tool_calls && !choice.stream.inside_call();
  if (goes_on && !enough_calls) return;
  if (event.finish == FinishReason::none) service_.engine().cancel(choice.id);
  settle(choice, FinishReason::stop, event.usage);
}

void Job::settle(Choice& choice, FinishReason reason, const RequestUsage& usage) {
  choice.stream.finish(delta_);
  choice.done = true;
  ++n_done_;
  choice.use.cached = usage.n_cached;
  choice.use.reasoning = choice.stream.reasoning_tokens();
  choice.queued_seconds = usage.queued_seconds;
  choice.first_token_seconds = usage.first_token_seconds;
  choice.seconds = usage.seconds;
  switch (reason) {
    case FinishReason::length: choice.finish_reason = "length"; break;
    case FinishReason::cancelled: choice.finish_reason = "abort"; break;
    default: choice.finish_reason = choice.stream.tool_calls() > 0 ? "tool_calls" : "stop"; break;
  }
}

void Job::send(Choice& choice) {
  if (!prepared_.wants_reasoning) delta_.reasoning.clear();
  if (prepared_.params.stream) {
    out_.clear();
    if (!delta_.empty() || (!choice.logged.empty() && choice.done) || (choice.echo != nullptr && choice.done))
      writer_->delta(choice, delta_, out_);
    if (choice.done) writer_->finish(choice, out_);
    if (!out_.empty()) exchange_->write(out_);
  } else {
    choice.reasoning += delta_.reasoning;
    choice.content += delta_.content;
    for (ToolCallDelta& call : delta_.calls) {
      if (static_cast<size_t>(call.index) >= choice.calls.size()) choice.calls.push_back({std::move(call.id), std::move(call.name), {}});
      choice.calls.back().arguments += call.arguments;
    }
  }
  if (n_done_ == choices_.size()) complete();
}

void Job::complete() {
  ended_ = true;
  // The exchange may outlive this, or end with it.
  const auto exchange = std::move(exchange_);
  exchange->on_closed({});
  if (prepared_.params.stream) {
    out_.clear();
    writer_->end(total(), out_);
    exchange->write(out_);
    exchange->end_stream();
  } else {
    exchange->respond_json(200, writer_->whole(choices_, total()));
  }
  report(200, choices_.front().finish_reason);
}

void Job::fail(const ApiError& error) {
  ended_ = true;
  cancel_all();
  const auto exchange = std::move(exchange_);
  exchange->on_closed({});
  if (prepared_.params.stream) {
    out_.clear();
    writer_->fail(error, out_);
    exchange->write(out_);
    exchange->end_stream();
  } else {
    exchange->respond_error(error);
  }
  report(error.status, "error");
}

void Job::abort() {
  if (ended_) return;
  if (!prepared_.params.stream) {
    ApiError error(503, "The server is shutting down", "", "shutting_down");
    error.retry_after_seconds = 1.0;
    fail(error);
    return;
  }
  for (Choice& choice : choices_) {
    if (choice.done || ended_) continue;
    service_.engine().cancel(choice.id);
    delta_.clear();
    settle(choice, FinishReason::cancelled, {});
    send(choice);
  }
}

void Job::post_abort() {
  home_->post([self = shared_from_this()] { self->abort(); });
}

void Job::post_failure(ApiError (*make)()) {
  home_->post([self = shared_from_this(), make] {
    if (!self->ended_) self->fail(make());
  });
}

void Job::cancel_all() {
  for (const Choice& choice : choices_)
    if (choice.id >= 0 && !choice.done) service_.engine().cancel(choice.id);
}

TokenUse Job::total() const {
  TokenUse use;
  const auto n = static_cast<size_t>(prepared_.params.n);
  for (size_t i = 0; i < choices_.size(); ++i) {
    const TokenUse& one = choices_[i].use;
    // A prompt counts once, however many answers it has.
    if (i % n == 0) {
      use.prompt += one.prompt;
      use.cached += one.cached;
    }
    use.completion += one.completion;
    use.reasoning += one.reasoning;
  }
  return use;
}

void Job::report(int status, const std::string& reason) {
  JobReport report{.job = this,
                   .exchange = home_.get(),
                   .priority = priority_,
                   .streamed = prepared_.params.stream,
                   .status = status,
                   .reason = reason,
                   .use = total(),
                   .n = static_cast<int>(choices_.size()),
                   .max_tokens = prepared_.params.max_tokens,
                   .requested = static_cast<int>(prepared_.prompts.size()) * prepared_.params.n,
                   .queued_seconds = choices_.empty() ? 0.0 : choices_.front().queued_seconds,
                   .first_token_seconds = choices_.empty() ? 0.0 : choices_.front().first_token_seconds,
                   .seconds = seconds_since(started_, Clock::now()),
                   .reasons = {}};
  for (const Choice& choice : choices_) report.reasons.push_back(choice.done ? choice.finish_reason : reason);
  observer_.on_end(report);
}

}  // namespace cachalot::server
