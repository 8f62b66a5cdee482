// No object of a lower level holds instructions of a higher one, and the objects of isa/ define nothing that the linker could merge with
// another object's copy: otherwise a CPU without AVX-512 could meet AVX-512 code in an innocent inline function.
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <memory>
#include <string>

namespace cachalot::cpu {
namespace {

// Output lines of a command, grouped by the archive member that they belong to.
std::map<std::string, std::string> by_member(const std::string& command, const std::string& member_end) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::map<std::string, std::string> found;
  if (pipe == nullptr) return found;
  std::string member;
  char line[4096];
  while (fgets(line, sizeof line, pipe.get()) != nullptr) {
    const std::string text(line);
    const size_t end = text.find(member_end);
    if (end != std::string::npos && text.find(".o:") != std::string::npos) {
      member = text.substr(0, text.find(".cpp"));
    } else {
      found[member] += text;
    }
  }
  return found;
}

TEST(Isolation, LowerObjectsHoldNoHigherInstructions) {
  const auto code = by_member(std::string(CACHALOT_OBJDUMP) + " -d --no-show-raw-insn " CACHALOT_CPU_ARCHIVE, "file format");
  ASSERT_TRUE(code.contains("avx512")) << "no disassembly";
  EXPECT_NE(code.at("avx512").find("%zmm"), std::string::npos);
  EXPECT_NE(code.at("avx2").find("%ymm"), std::string::npos);
  EXPECT_NE(code.at("amx").find("%tmm"), std::string::npos);
  for (const auto& [member, text] : code) {
    if (member.starts_with("amx")) continue;
    EXPECT_EQ(text.find("%tmm"), std::string::npos) << member;
    EXPECT_EQ(text.find("tilecfg"), std::string::npos) << member;
    EXPECT_EQ(text.find("tilerelease"), std::string::npos) << member;
    if (member.starts_with("avx512")) continue;
    EXPECT_EQ(text.find("%zmm"), std::string::npos) << member;
    EXPECT_EQ(text.find("{%k"), std::string::npos) << member;  // mask registers: AVX-512 on short vectors
    if (!member.starts_with("avx2")) {
      EXPECT_EQ(text.find("%ymm"), std::string::npos) << member;
    }
  }
}

TEST(Isolation, IsaObjectsDefineNoMergeableSymbols) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers add mergeable symbols of their own";
#endif
  const auto symbols = by_member(std::string(CACHALOT_NM) + " -C " CACHALOT_CPU_ARCHIVE, ".cpp.o:");
  for (const char* member :
       {"scalar", "avx2", "avx2_wide", "avx512", "avx512_floats", "avx512vnni", "avx512bf16", "amx", "amx_attention"}) {
    ASSERT_TRUE(symbols.contains(member)) << member;
    for (const char* kind : {" W ", " V ", " u ", " w "}) EXPECT_EQ(symbols.at(member).find(kind), std::string::npos) << member << kind;
  }
}

}  // namespace
}  // namespace cachalot::cpu
