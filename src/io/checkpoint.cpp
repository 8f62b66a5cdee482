// Checkpoint::open: which container a path holds. And what both containers share.
#include "io/checkpoint.h"

#include <algorithm>
#include <array>
#include <fstream>

#include "base/error.h"
#include "io/checkpoint_impl.h"
#include "io/packed_checkpoint.h"

namespace cachalot {
namespace fs = std::filesystem;
namespace {

constexpr std::array<std::string_view, 6> kPickleEndings = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"};

bool is_pickle(const fs::path& path) {
  return std::find(kPickleEndings.begin(), kPickleEndings.end(), path.extension().string()) != kPickleEndings.end();
}

[[noreturn]] void refuse_pickle(const fs::path& path) {
  fail("{}: a pickle file, which may run code when it is read; expected .safetensors or .gguf", path.string());
}

bool starts_as_gguf(const fs::path& path) {
  std::array<char, 4> magic{};
  std::ifstream in(path, std::ios::binary);
  return in.read(magic.data(), magic.size()) && std::string_view(magic.data(), magic.size()) == "GGUF";
}

// "model-00002-of-00003.gguf" -> "model"; other names as they are.
std::string stem_of_split(const std::string& file) {
  constexpr std::string_view kForm = "-00000-of-00000.gguf";
  if (file.size() <= kForm.size()) return file;
  const std::string_view ending = std::string_view(file).substr(file.size() - kForm.size());
  for (size_t i = 0; i < kForm.size(); ++i) {
    const bool digit = ending[i] >= '0' && ending[i] <= '9';
    if (kForm[i] == '0' ? !digit : ending[i] != kForm[i]) return file;
  }
  return file.substr(0, file.size() - kForm.size());
}

std::string names_of(const std::vector<fs::path>& files) {
  std::string out;
  for (size_t i = 0; i < std::min<size_t>(files.size(), 4); ++i) out += (i == 0 ? "" : ", ") + files[i].filename().string();
  return files.size() > 4 ? out + ", ..." : out;
}

std::unique_ptr<Checkpoint> open_pack(const fs::path& directory, const std::string& name, PackedModels packed) {
  if (packed == PackedModels::refuse) fail("{}: a packed model, which can only be run; expected the model that it was packed from", name);
  return open_packed_checkpoint(directory, name);
}

std::unique_ptr<Checkpoint> open_directory(const fs::path& directory, PackedModels packed) {
  const std::string name = directory.string();
  std::error_code error;
  if (fs::exists(directory / "adapter_config.json", error) && !fs::exists(directory / "config.json", error))
    fail("{}: found an adapter (adapter_config.json), expected a model; merge it into its base model first", name);
  if (fs::exists(directory / kPackName, error)) return open_pack(directory, name, packed);
  if (fs::exists(directory / kPackGguf, error)) fail("{}: an unfinished packed model: {} is missing", name, kPackName);
  if (const fs::path index = directory / "model.safetensors.index.json"; fs::exists(index, error))
    return open_safetensors_checkpoint({directory, index, true, name});
  if (const fs::path single = directory / "model.safetensors"; fs::exists(single, error))
    return open_safetensors_checkpoint({directory, single, false, name});

  std::vector<fs::path> safetensors, gguf, pickles;
  auto entries = fs::directory_iterator(directory, error);
  if (error) fail("{}: cannot list the directory: {}", name, error.message());
  for (const auto& entry : entries) {
    const fs::path& path = entry.path();
    if (path.extension() == ".safetensors") safetensors.push_back(path);
    if (path.extension() == ".gguf") gguf.push_back(path);
    if (is_pickle(path)) pickles.push_back(path);
  }
  for (auto* files : {&safetensors, &gguf, &pickles}) std::sort(files->begin(), files->end());
  if (safetensors.size() == 1) return open_safetensors_checkpoint({directory, safetensors[0], false, name});
  if (safetensors.size() > 1)
    fail("{}: {} safetensors files ({}) and no model.safetensors.index.json that says which tensor is where", name, safetensors.size(),
         names_of(safetensors));
  if (!gguf.empty()) {
    const std::string stem = stem_of_split(gguf[0].filename().string());
    for (const fs::path& file : gguf) {
      if (stem_of_split(file.filename().string()) != stem)
        fail("{}: several GGUF models ({}), expected one; name the file", name, names_of(gguf));
    }
    return open_gguf_checkpoint(gguf[0], name);
  }
  if (!pickles.empty()) refuse_pickle(pickles[0]);
  fail("{}: no *.safetensors and no *.gguf in this directory", name);
}

// "organisation/model", or an address.
bool looks_like_hub_name(const std::string& name) {
  const size_t slash = name.find('/');
  return name.find("://") != std::string::npos || (slash != std::string::npos && slash > 0 && name[0] != '.' && name[0] != '~' &&
                                                   slash + 1 < name.size() && name.find('/', slash + 1) == std::string::npos);
}

}  // namespace

std::unique_ptr<Checkpoint> Checkpoint::open(const fs::path& path, PackedModels packed) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status))
    fail("{}: no such file or directory{}", path.string(),
         looks_like_hub_name(path.string()) ? "; models are not fetched from a hub: expected a path on this machine" : "");
  if (fs::is_directory(status)) return open_directory(path, packed);
  if (!fs::is_regular_file(status)) fail("{}: not a regular file", path.string());
  if (path.extension() == ".cachalot") {
    if (path.filename() != kPackName) fail("{}: expected a file of the name {}, or its directory", path.string(), kPackName);
    return open_pack(path.parent_path().empty() ? fs::path(".") : path.parent_path(), path.string(), packed);
  }
  if (path.extension() == ".safetensors") return open_safetensors_checkpoint({path.parent_path(), path, false, path.string()});
  if (path.filename().string().ends_with(".safetensors.index.json"))
    return open_safetensors_checkpoint({path.parent_path(), path, true, path.string()});
  if (path.extension() == ".gguf" || starts_as_gguf(path)) return open_gguf_checkpoint(path, path.string());
  if (is_pickle(path)) refuse_pickle(path);
  fail("{}: not a model: expected a .gguf or .safetensors file, or a directory with either", path.string());
}

void check_shape(const TensorInfo& tensor, const std::vector<int64_t>& expected) {
  if (tensor.shape != expected)
    fail("{}: tensor \"{}\": shape: found [{}], expected [{}]", tensor.file, printable(tensor.name), fmt::join(tensor.shape, ", "),
         fmt::join(expected, ", "));
}

void check_readable(const TensorInfo& tensor) {
  if (!tensor.has_format)
    fail("{}: tensor \"{}\": type: found {}, expected F32, F16, BF16, or F8_E4M3 with scales", tensor.file, printable(tensor.name),
         tensor.dtype);
}

void forget_in(const MappedFile& mapping, const LinearSource& source) {
  for (const WeightBytes& w : source.matrices)
    for (const auto part : {w.data, w.scales, w.zeros}) mapping.forget(part);
}

std::vector<float> read_vector(const TensorInfo& tensor, int n) {
  check_readable(tensor);
  check_shape(tensor, {n});
  if (tensor.format == Format::fp8_block)
    fail("{}: tensor \"{}\": type: found {}, expected F32, F16 or BF16 for a vector", tensor.file, printable(tensor.name), tensor.dtype);
  std::vector<float> out(static_cast<size_t>(n));
  dequant_row(tensor.format, tensor.data.data(), n, out.data());
  return out;
}

}  // namespace cachalot
