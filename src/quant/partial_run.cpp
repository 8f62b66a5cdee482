// The state of a run as JSON.
#include "quant/partial_run.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/error.h"
#include "base/mapped_file.h"
#include "io/atomic_file.h"

namespace cachalot {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::ordered_json;

constexpr int kStateVersion = 1;

Json to_json(const MatrixRecord& r) {
  return {{"name", r.name},
          {"scheme", name_of(r.scheme)},
          {"wanted", name_of(r.wanted)},
          {"method", r.method},
          {"bits", r.bits},
          {"n", r.n_weights},
          {"of_outputs", r.error_is_of_outputs},
          {"error", r.error},
          {"notes", r.notes}};
}

MatrixRecord matrix_from(const Json& json) {
  const auto scheme = [&](const char* key) {
    const auto text = json.at(key).get<std::string>();
    const auto found = scheme_of_name(text);
    if (!found) fail("{}: found \"{}\", expected a type", key, printable(text));
    return *found;
  };
  MatrixRecord r{.name = json.at("name"), .scheme = scheme("scheme"), .wanted = scheme("wanted"), .method = json.at("method")};
  r.bits = json.at("bits");
  r.n_weights = json.at("n");
  r.error = json.at("error");
  r.error_is_of_outputs = json.at("of_outputs");
  r.notes = json.at("notes").get<std::vector<std::string>>();
  return r;
}

// The entry of a folder is on the disk.
void sync_folder(const fs::path& path) {
  const int descriptor = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  (void)::fsync(descriptor);
  ::close(descriptor);
}

}  // namespace

PartialRun::PartialRun(fs::path out, Json facts, Start start) : out_(std::move(out)), facts_(std::move(facts)) {
  while (!out_.has_filename() && out_.has_parent_path()) out_ = out_.parent_path();  // "dir/" is "dir"
  folder_ = out_;
  folder_ += ".partial";
  std::error_code error;
  const bool there = fs::exists(folder_, error);
  if (start == Start::resume) {
    if (!there) fail("--resume: {} is not there: no run was interrupted", folder_.string());
    load();
    return;
  }
  if (there && start == Start::fresh && is_begun())
    fail("{}: an earlier run was interrupted; --resume goes on with it, --force begins anew", folder_.string());
  fs::remove_all(folder_, error);
  fs::create_directories(folder_, error);
  if (error) fail("{}: cannot make the folder: {}", folder_.string(), error.message());
  save(-1, {});
}

// Whether the folder holds pieces that are worth going on with, as far as its state can be read.
bool PartialRun::is_begun() const {
  try {
    return Json::parse(read_text_file(state_file())).at("layers").get<int>() >= 0;
  } catch (const Json::exception&) {
    return true;
  } catch (const Error&) {
    return true;
  }
}

void PartialRun::load() {
  const std::string file = state_file().string();
  try {
    const Json state = Json::parse(read_text_file(state_file()));
    if (state.at("version") != kStateVersion) fail("found version {}, expected {}", state.at("version").dump(), kStateVersion);
    for (const auto& [key, value] : facts_.items()) {
      const Json found = state.at("facts").value(key, Json());
      if (found != value)
        fail("{}: found {}, expected {}: this run would make another model; --force begins anew", key, found.dump(), value.dump());
    }
    layers_done_ = state.at("layers");
    for (const Json& matrix : state.at("matrices")) result_.matrices.push_back(matrix_from(matrix));
    for (const Json& e : state.at("experts")) result_.experts.push_back({e.at(0), e.at(1), e.at(2), e.at(3)});
  } catch (const Json::exception& error) {
    fail("{}: not the state of an interrupted run: {}", file, printable(error.what(), 200));
  } catch (const Error& error) {
    fail("{}: {}", file, error.what());
  }
}

void PartialRun::save(int layers_done, const LayerResult& result) {
  layers_done_ = layers_done;
  Json state{
      {"version", kStateVersion}, {"facts", facts_}, {"layers", layers_done}, {"matrices", Json::array()}, {"experts", Json::array()}};
  for (const MatrixRecord& r : result.matrices) state["matrices"].push_back(to_json(r));
  for (const ExpertLoad& e : result.experts) state["experts"].push_back({e.layer, e.expert, e.tokens, e.starved});
  write_atomically(state_file(), state.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

void PartialRun::commit_file(const std::string& name) {
  std::error_code error;
  fs::rename(folder_ / name, out_, error);
  if (error) fail("{}: cannot put the finished file in its place: {}", out_.string(), error.message());
  sync_folder(out_.parent_path());
  fs::remove_all(folder_, error);
}

void PartialRun::commit() {
  std::error_code error;
  fs::path old;
  if (fs::exists(out_, error)) {
    old = out_;
    old += fmt::format(".old{}", ::getpid());
    fs::rename(out_, old, error);
    if (error) fail("{}: cannot move what is there out of the way: {}", out_.string(), error.message());
  }
  fs::rename(folder_, out_, error);
  if (error) {
    std::error_code ignored;
    if (!old.empty()) fs::rename(old, out_, ignored);
    fail("{}: cannot put the finished model in its place: {}", out_.string(), error.message());
  }
  fs::remove(out_ / state_file().filename(), error);
  sync_folder(out_.parent_path());
  if (!old.empty()) fs::remove_all(old, error);
}

}  // namespace cachalot
