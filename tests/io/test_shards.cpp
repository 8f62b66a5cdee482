// Sharded safetensors and model directories: the index, its oddities, and everything in a directory that is refused by name.
#include <gmock/gmock.h>

#include "byte_builder.h"
#include "io/checkpoint.h"
#include "io/shard_index.h"

namespace cachalot {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A shard whose tensors are f32 vectors of 2.
std::string shard(const std::vector<std::string>& names) {
  std::string header = "{", data;
  for (size_t i = 0; i < names.size(); ++i) {
    header += fmt::format(R"({}"{}":{{"dtype":"F32","shape":[2],"data_offsets":[{},{}]}})", i == 0 ? "" : ",", names[i], 8 * i, 8 * i + 8);
    data += packed(static_cast<float>(i)) + packed(1.5f);
  }
  return safetensors_image(header + "}", data);
}

class Shards : public ::testing::Test {
 protected:
  Shards() {
    put("m-1.safetensors", shard({"model.norm.weight", "model.layers.0.input_layernorm.weight"}));
    put("m-2.safetensors", shard({"lm_head.weight"}));
    put_index(
        R"({"model.norm.weight":"m-1.safetensors","model.layers.0.input_layernorm.weight":"m-1.safetensors","lm_head.weight":"m-2.safetensors"})");
  }
  void put(const std::string& name, std::string_view content) const { static_cast<void>(dir_.write(name, content)); }
  void put_index(const std::string& weight_map) const {
    put("model.safetensors.index.json", R"({"metadata":{"total_size":24},"weight_map":)" + weight_map + "}");
  }
  [[nodiscard]] std::string refusal() const {
    return error_of([&] { static_cast<void>(Checkpoint::open(dir_.path())); });
  }
  TempDir dir_;
};

TEST_F(Shards, OpensAllPartsThroughTheIndex) {
  for (const auto& path : {dir_.path(), dir_.path() / "model.safetensors.index.json"}) {
    const auto checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint->tensors().size(), 3U);
    EXPECT_TRUE(checkpoint->has("output.weight"));  // only in the second part
    EXPECT_FALSE(checkpoint->has("token_embd.weight"));
    EXPECT_THAT(checkpoint->vector("blk.0.attn_norm.weight", 2), ElementsAre(1.0f, 1.5f));
    EXPECT_THAT(checkpoint->unmapped(), IsEmpty());
    EXPECT_EQ(checkpoint->config_json(), "");
  }
}

TEST_F(Shards, AllowsOddMetadata) {
  const std::string map = R"("weight_map":{"lm_head.weight":"m-2.safetensors"})";
  for (const char* head : {"", "\"metadata\":null,", "\"metadata\":{},", "\"metadata\":{\"a\":[1,{\"b\":null}]},\"more\":true,"}) {
    put("model.safetensors.index.json", std::string("{") + head + map + "}\n");
    EXPECT_EQ(Checkpoint::open(dir_.path())->tensors().size(), 1U) << head;
  }
}

TEST_F(Shards, NamesAMissingShard) {
  std::filesystem::remove(dir_.path() / "m-2.safetensors");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("index.json"), HasSubstr("m-2.safetensors is missing")));
}

TEST_F(Shards, NamesTensorsThatNoShardHas) {
  put_index(R"({"a":"m-1.safetensors","lm_head.weight":"m-1.safetensors","model.norm.weight":"m-1.safetensors","b":"m-2.safetensors"})");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("3 tensors are not where the index says"), HasSubstr("\"a\" in m-1"),
                               HasSubstr("\"lm_head.weight\" in m-1"), HasSubstr("\"b\" in m-2")));
}

TEST_F(Shards, NamesATensorInTwoShards) {
  put("m-2.safetensors", shard({"lm_head.weight", "model.norm.weight"}));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("\"model.norm.weight\" is in"), HasSubstr("m-1.safetensors"), HasSubstr("m-2.safetensors")));
}

TEST_F(Shards, NamesABadShard) {
  put("m-2.safetensors", shard({"lm_head.weight"}) + "x");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("m-2.safetensors"), HasSubstr("1 bytes after the last tensor")));
}

struct BadIndex {
  const char* name;
  std::string text;
  std::string fragment;
};
class BadShardIndex : public ::testing::TestWithParam<BadIndex> {};

TEST_P(BadShardIndex, IsRefused) {
  const TempDir dir;
  static_cast<void>(dir.write("m-1.safetensors", shard({"w"})));
  static_cast<void>(dir.write("model.safetensors.index.json", GetParam().text));
  expect_refused("model.safetensors.index.json", {GetParam().fragment}, [&] { static_cast<void>(Checkpoint::open(dir.path())); });
}

std::string map_to(const std::string& file) { return R"({"weight_map":{"w":")" + file + R"("}})"; }

INSTANTIATE_TEST_SUITE_P(
    Text, BadShardIndex,
    ::testing::Values(BadIndex{"empty", "", "the JSON text ends"}, BadIndex{"array", "[]", "expected '{'"},
                      BadIndex{"cut", R"({"weight_map":{"w":"m-1.safetensors")", "the JSON text ends"},
                      BadIndex{"not_utf8", "{\"\xff\":1}", "not valid UTF-8"},
                      BadIndex{"trailing", map_to("m-1.safetensors") + "]", "expected the end of the text"},
                      BadIndex{"no_map", R"({"metadata":{}})", "\"weight_map\" is missing"},
                      BadIndex{"map_is_array", R"({"weight_map":[]})", "expected '{'"},
                      BadIndex{"map_is_null", R"({"weight_map":null})", "expected '{'"},
                      BadIndex{"map_empty", R"({"weight_map":{}})", "found no tensor"},
                      BadIndex{"map_twice", R"({"weight_map":{"w":"m-1.safetensors"},"weight_map":{"w":"m-1.safetensors"}})",
                               "\"weight_map\" appears twice"},
                      BadIndex{"metadata_twice", R"({"metadata":1,"metadata":2})", "\"metadata\" appears twice"},
                      BadIndex{"tensor_twice", R"({"weight_map":{"w":"m-1.safetensors","w":"m-1.safetensors"}})",
                               "the tensor \"w\" appears twice"},
                      BadIndex{"file_is_number", R"({"weight_map":{"w":1}})", "expected a file name (a string)"},
                      BadIndex{"file_is_object", R"({"weight_map":{"w":{}}})", "expected a file name (a string)"},
                      BadIndex{"parent_folder", map_to("../m-1.safetensors"), "\"../m-1.safetensors\", expected a plain name"},
                      BadIndex{"absolute", map_to("/etc/m-1.safetensors"), "expected a plain name"},
                      BadIndex{"subfolder", map_to("a/m-1.safetensors"), "expected a plain name"},
                      BadIndex{"backslash", map_to("..\\\\m-1.safetensors"), "expected a plain name"},
                      BadIndex{"drive", map_to("C:m-1.safetensors"), "expected a plain name"},
                      BadIndex{"hidden", map_to("..safetensors"), "expected a plain name"},
                      BadIndex{"nul", map_to("m-1\\u0000.safetensors"), "expected a plain name"},
                      BadIndex{"no_name", map_to(""), "expected a plain name"},
                      BadIndex{"pickle", map_to("pytorch_model.bin"), "\"pytorch_model.bin\", expected a plain name"},
                      BadIndex{"long_name", map_to(std::string(300, 'a') + ".safetensors"), "expected a plain name"},
                      BadIndex{"name_escaped", R"({"weight_map":{"\u0077":"m-1.safetensors"}})", "expected plain characters"},
                      BadIndex{"absent_shard", map_to("m-9.safetensors"), "m-9.safetensors is missing"},
                      BadIndex{"absent_tensor", R"({"weight_map":{"v":"m-1.safetensors"}})", "\"v\" in m-1"},
                      BadIndex{"deep_metadata", "{\"metadata\":" + std::string(100'000, '['), "no deeper nesting"},
                      BadIndex{"bad_number", R"({"metadata":01,"weight_map":{}})", "leading zero"},
                      BadIndex{"bad_word", R"({"metadata":nul,"weight_map":{}})", "expected a value"}),
    [](const auto& param) { return param.param.name; });

class Directory : public ::testing::Test {
 protected:
  [[nodiscard]] std::string refusal(const std::string& name = "") const {
    return error_of([&] { static_cast<void>(Checkpoint::open(name.empty() ? dir_.path() : dir_.path() / name)); });
  }
  void put(const std::string& name, std::string_view content) const { static_cast<void>(dir_.write(name, content)); }
  TempDir dir_;
};

TEST_F(Directory, PrefersTheUsualNames) {
  put("golden.safetensors", shard({"x"}));
  EXPECT_EQ(Checkpoint::open(dir_.path())->tensors()[0].name, "x");  // the only one
  put("model.safetensors", shard({"lm_head.weight"}));
  EXPECT_EQ(Checkpoint::open(dir_.path())->tensors()[0].name, "lm_head.weight");
  put("model.gguf", sound_gguf().build());
  EXPECT_EQ(Checkpoint::open(dir_.path())->container(), Checkpoint::Container::safetensors);
  EXPECT_EQ(Checkpoint::open(dir_.path() / "golden.safetensors")->unmapped(), std::vector<std::string>{"x"});
  EXPECT_EQ(Checkpoint::open(dir_.path() / "model.gguf")->container(), Checkpoint::Container::gguf);
  put("blob-without-ending", sound_gguf().build());
  EXPECT_EQ(Checkpoint::open(dir_.path() / "blob-without-ending")->container(), Checkpoint::Container::gguf);
}

TEST_F(Directory, RefusesByName) {
  EXPECT_THAT(refusal("absent"), AllOf(HasSubstr("absent"), HasSubstr("no such file")));
  EXPECT_THAT(refusal(), HasSubstr("no *.safetensors and no *.gguf"));
  put("notes.txt", "hello");
  EXPECT_THAT(refusal("notes.txt"), AllOf(HasSubstr("notes.txt"), HasSubstr("not a model")));
  put("pytorch_model.bin", "\x80\x02");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("pytorch_model.bin"), HasSubstr("pickle")));
  for (const char* name : {"pytorch_model.bin", "a.pt", "a.pth", "a.ckpt", "a.pkl"}) {
    put(name, "PK");
    EXPECT_THAT(refusal(name), AllOf(HasSubstr(name), HasSubstr("pickle")));
  }
  put("model-00001-of-00002.safetensors", shard({"x"}));
  put("model-00002-of-00002.safetensors", shard({"y"}));
  EXPECT_THAT(refusal(), AllOf(HasSubstr("2 safetensors files"), HasSubstr("no model.safetensors.index.json")));
}

TEST_F(Directory, RefusesOtherQuantizationByName) {
  put("model.safetensors", shard({"lm_head.weight"}));
  const auto config = [&](const std::string& quantization) {
    put("config.json", "{\"model_type\":\"llama\",\"quantization_config\":" + quantization + "}");
    return refusal();
  };
  for (const char* method : {"bitsandbytes", "hqq", "modelopt"}) {
    EXPECT_THAT(config(fmt::format(R"({{"quant_method":"{}"}})", method)),
                AllOf(HasSubstr("config.json: quantization_config: quant_method"), HasSubstr(method), HasSubstr("\"fp8\"")));
  }
  EXPECT_THAT(config("{}"), HasSubstr("\"quant_method\" is missing"));
  EXPECT_THAT(config("[]"), HasSubstr("found an array, expected an object"));
  EXPECT_THAT(config(R"({"quant_method":8})"), HasSubstr("found an integer, expected a string"));
  EXPECT_THAT(config(R"({"quant_method":"fp8","weight_block_size":[64,128]})"), HasSubstr("found [64, 128], expected [128, 128]"));
  EXPECT_THAT(config(R"({"quant_method":"fp8","weight_block_size":[128]})"), HasSubstr("found [128], expected [128, 128]"));
  EXPECT_THAT(config(R"({"quant_method":"fp8","fmt":"e5m2","weight_block_size":[128,128]})"),
              HasSubstr("found \"e5m2\", expected \"e4m3\""));
  put("config.json", "{");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("config.json"), HasSubstr("not valid JSON")));
  put("config.json", R"({"quantization_config":null})");
  EXPECT_EQ(Checkpoint::open(dir_.path())->config_json(), R"({"quantization_config":null})");
}

TEST_F(Directory, ReadsCompanionsWithALimit) {
  put("model.safetensors", shard({"lm_head.weight"}));
  const auto checkpoint = Checkpoint::open(dir_.path());
  EXPECT_EQ(checkpoint->tokenizer_json(), "");
  put("tokenizer.json", "{\"a\":1}");
  put("tokenizer_config.json", "{\"b\":1}");
  put("generation_config.json", "{\"c\":1}");
  put("chat_template.jinja", "{{ x }}");
  EXPECT_EQ(checkpoint->tokenizer_json(), "{\"a\":1}");
  EXPECT_EQ(checkpoint->tokenizer_config_json(), "{\"b\":1}");
  EXPECT_EQ(checkpoint->generation_config_json(), "{\"c\":1}");
  EXPECT_EQ(checkpoint->chat_template_file(), "{{ x }}");
  put("generation_config.json", std::string((1 << 20) + 1, ' '));
  EXPECT_THAT(error_of([&] { static_cast<void>(checkpoint->generation_config_json()); }),
              AllOf(HasSubstr("generation_config.json"), HasSubstr("expected at most 1048576")));
}

}  // namespace
}  // namespace cachalot
