// PartialRun: the folder in which a model directory, or a file, comes into being, beside its place ("OUT.partial"), and the small file in
// it that says how far it is and of what, so that an interrupted run can go on and a different one is not mistaken for it.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

#include "quant/layer_quantizer.h"

namespace cachalot {

class PartialRun {
 public:
  // What a run finds there: nothing is done by that.
  enum class Start : uint8_t {
    fresh,   // refuses to if an earlier run was interrupted that has finished something
    resume,  // goes on with that one
    anew,    // throws it away
  };
  // `facts` are what the result depends on, key by key: the source, the recipe, the text. Throws Error when there is nothing to resume, or
  // when its facts differ: the message names the first that does.
  PartialRun(std::filesystem::path out, nlohmann::ordered_json facts, Start start);

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] const std::filesystem::path& out() const { return out_; }
  // Layers that are finished, with what was recorded of them. -1: not even embedding and head are.
  [[nodiscard]] int layers_done() const { return layers_done_; }
  [[nodiscard]] const LayerResult& result() const { return result_; }

  // Notes that so many layers are on the disk.
  void save(int layers_done, const LayerResult& result);
  // Puts the finished folder in its place, and what was there out of the way.
  void commit();
  // The same with one file of the folder, which then goes.
  void commit_file(const std::string& name);

 private:
  void load();
  [[nodiscard]] bool is_begun() const;
  [[nodiscard]] std::filesystem::path state_file() const { return folder_ / "cachalot-quantize.json"; }

  std::filesystem::path out_, folder_;
  nlohmann::ordered_json facts_;
  int layers_done_ = -1;
  LayerResult result_;
};

}  // namespace cachalot
