// Markdown, JSON, JSON lines and CSV.
#include "cli/bench_output.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>
#include <fstream>

#include "base/error.h"
#include "cli/backend.h"
#include "cli/build_commit.h"
#include "cli/read_file.h"
#include "cli/text_units.h"

namespace cachalot {
namespace {

using Json = nlohmann::ordered_json;

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string now_text() {
  std::tm parts{};
  const std::time_t now = std::time(nullptr);
  gmtime_r(&now, &parts);
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", parts);
}

// Figures beside the bare times; nothing where the peaks are not known.
struct Rates {
  double seconds = 0.0;  // the median repetition
  double bytes = 0.0, flops = 0.0;
  std::optional<double> bytes_share, flops_share, bound_ts, bound_share;
};
Rates rates_of(const BenchSubject& subject, const BenchResult& r) {
  Rates out;
  const double median_ts = spread_of(r.samples_ts()).median;
  out.seconds = r.test.tokens() / median_ts;
  out.bytes = r.cost.bytes() / out.seconds;
  out.flops = r.cost.flops / out.seconds;
  if (!subject.peaks.known() || r.bound_seconds <= 0.0) return out;
  out.bytes_share = 100.0 * out.bytes / subject.peaks.read;
  out.flops_share = 100.0 * out.flops / subject.peaks.flops;
  out.bound_ts = r.test.tokens() / r.bound_seconds;
  out.bound_share = 100.0 * r.bound_seconds / out.seconds;
  return out;
}

Json number_or_null(const std::optional<double>& value) { return value ? Json(*value) : Json(); }
std::string percent(const std::optional<double>& value) { return value ? fmt::format("{:.1f}%", *value) : "-"; }

std::string csv_cell(const Json& value) {
  if (value.is_null()) return "";
  if (!value.is_string()) return "\"" + value.dump() + "\"";
  std::string out = "\"";
  for (const char c : value.get<std::string>()) out += c == '"' ? "\"\"" : std::string(1, c);
  return out + "\"";
}

std::string dump(const Json& value, int indent) { return value.dump(indent, ' ', false, Json::error_handler_t::replace); }

}  // namespace

Json BenchOutput::record(const BenchSubject& subject, const BenchResult& r) {
  std::vector<double> ns(r.samples_ns.begin(), r.samples_ns.end());
  const Spread times = spread_of(ns), speed = spread_of(r.samples_ts());
  const Rates rates = rates_of(subject, r);
  const BuildCommit build = build_commit();
  return {{"build_commit", build.commit},
          {"build_number", build.number},
          {"cpu_info", cpu_name()},
          {"backends", backends_built()},
          {"devices", subject.device},
          {"model_filename", subject.file},
          {"model_type", subject.type},
          {"model_size", static_cast<uint64_t>(subject.stored_bytes)},
          {"model_n_params", static_cast<uint64_t>(subject.params)},
          {"n_batch", r.test.n_batch},
          {"n_ubatch", r.test.n_ubatch},
          {"n_threads", subject.n_threads},
          {"type_k", subject.kv_type},
          {"type_v", subject.kv_type},
          {"n_prompt", r.test.n_prompt},
          {"n_gen", r.test.n_gen},
          {"n_depth", r.test.n_depth},
          {"test_time", now_text()},
          {"avg_ns", static_cast<uint64_t>(times.mean)},
          {"stddev_ns", static_cast<uint64_t>(times.deviation)},
          {"avg_ts", speed.mean},
          {"stddev_ts", speed.deviation},
          {"samples_ns", r.samples_ns},
          {"samples_ts", r.samples_ts()},
          {"n_seqs", r.test.n_seqs},
          {"median_ts", speed.median},
          {"min_ts", speed.least},
          {"max_ts", speed.most},
          {"weight_bytes", r.cost.weight_bytes},
          {"kv_bytes", r.cost.kv_bytes},
          {"flops", r.cost.flops},
          {"bw_gbs", rates.bytes * 1e-9},
          {"bw_pct_peak", number_or_null(rates.bytes_share)},
          {"tflops", rates.flops * 1e-12},
          {"flops_pct_peak", number_or_null(rates.flops_share)},
          {"bound_ts", number_or_null(rates.bound_ts)},
          {"bound_pct", number_or_null(rates.bound_share)},
          {"peak_bw_gbs", subject.peaks.known() ? Json(subject.peaks.read * 1e-9) : Json()},
          {"peak_tflops", subject.peaks.known() ? Json(subject.peaks.flops * 1e-12) : Json()},
          {"peak_product", subject.peaks.product}};
}

void BenchOutput::add_row(const BenchSubject& subject, const BenchResult& r) {
  if (!has_header_) {
    write_out(fmt::format(
        "| {:<30} | {:>10} | {:>8} | {:<14} | {:>7} | {:>7} | {:>15} | {:>20} | {:>9} | {:>18} | {:>7} | {:>6} | {:>7} | {:>6} | "
        "{:>9} | {:>6} |\n",
        "model", "size", "params", "backend", "threads", "ubatch", "test", "t/s", "median", "min..max", "GB/s", "%peak", "TFLOP/s", "%peak",
        "bound t/s", "%bound"));
    std::string rule = "|";
    for (const int width : {30, -10, -8, 14, -7, -7, -15, -20, -9, -18, -7, -6, -7, -6, -9, -6})
      rule += width > 0 ? fmt::format(" {:->{}} |", "", width) : fmt::format(" {:->{}}: |", "", -width - 1);
    write_out(rule + "\n");
    has_header_ = true;
  }
  const Spread speed = spread_of(r.samples_ts());
  const Rates rates = rates_of(subject, r);
  write_out(fmt::format(
      "| {:<30} | {:>10} | {:>8} | {:<14} | {:>7} | {:>7} | {:>15} | {:>20} | {:>9.2f} | {:>18} | {:>7.2f} | {:>6} | {:>7.3f} | "
      "{:>6} | {:>9} | {:>6} |\n",
      subject.type, bytes_text(subject.stored_bytes), count_text(subject.params), subject.device, subject.n_threads, r.test.chunk(),
      r.test.name(), fmt::format("{:.2f} ± {:.2f}", speed.mean, speed.deviation), speed.median,
      fmt::format("{:.2f}..{:.2f}", speed.least, speed.most), rates.bytes * 1e-9, percent(rates.bytes_share), rates.flops * 1e-12,
      percent(rates.flops_share), rates.bound_ts ? fmt::format("{:.2f}", *rates.bound_ts) : "-", percent(rates.bound_share)));
}

void BenchOutput::add(const BenchSubject& subject, const BenchResult& result) {
  if (format_ == BenchFormat::markdown) {
    add_row(subject, result);
    return;
  }
  const Json one = record(subject, result);
  if (format_ == BenchFormat::json) records_.push_back(one);
  if (format_ == BenchFormat::json_lines) write_out(dump(one, -1) + "\n");
  if (format_ == BenchFormat::csv) {
    std::string names, cells;
    for (const auto& [key, value] : one.items()) {
      if (value.is_array()) continue;
      names += (names.empty() ? "" : ",") + key;
      cells += (cells.empty() ? "" : ",") + csv_cell(value);
    }
    write_out((has_header_ ? "" : names + "\n") + cells + "\n");
    has_header_ = true;
  }
}

void BenchOutput::finish() {
  if (format_ == BenchFormat::json) write_out(dump(records_, 2) + "\n");
  if (format_ != BenchFormat::markdown) return;
  const BuildCommit build = build_commit();
  write_out(fmt::format("\nbuild: {} ({})\n", build.commit, build.number));
}

}  // namespace cachalot
