// View: addresses and shapes of columns, rows and heads.
#include "tensor/view.h"

#include <gtest/gtest.h>

#include <vector>

namespace cachalot {
namespace {

TEST(View, WindowsPointWhereTheyShould) {
  std::vector<float> data(6 * 8);
  const View whole = View::matrix(data.data(), DType::f32, 6, 8);
  EXPECT_EQ(whole.n_cols(), 8);
  EXPECT_EQ(whole.row_bytes(), 32u);
  const View part = whole.rows(2, 3).cols(4, 2);
  EXPECT_EQ(part.n_rows(), 3);
  EXPECT_EQ(part.n_cols(), 2);
  EXPECT_EQ(part.row<float>(0), data.data() + 2 * 8 + 4);
  EXPECT_EQ(part.row<float>(2), data.data() + 4 * 8 + 4);
  const View heads = part.heads(2, 1);
  EXPECT_EQ(heads.n_dims, 3);
  EXPECT_EQ(heads.n_cols(), 2);
  EXPECT_EQ(heads.row_stride(), 8);
  EXPECT_EQ(heads.row<float>(1), data.data() + 3 * 8 + 4);
}

TEST(View, ElementSizesCount) {
  std::vector<uint16_t> data(4 * 4);
  const View whole = View::matrix(data.data(), DType::bf16, 4, 4);
  EXPECT_EQ(whole.cols(3, 1).data, data.data() + 3);
  EXPECT_EQ(whole.rows(3, 1).data, data.data() + 12);
  EXPECT_EQ(size_of(DType::u8), 1u);
  EXPECT_EQ(size_of(DType::i32), 4u);
  EXPECT_STREQ(name_of(DType::bf16), "bf16");
  EXPECT_FALSE(View{});
  EXPECT_TRUE(whole);
}

TEST(ViewDeathTest, WindowsStayInside) {
  std::vector<float> data(4 * 4);
  const View whole = View::matrix(data.data(), DType::f32, 4, 4);
  EXPECT_DEATH((void)whole.cols(2, 3), "columns 2\\+3 of 4");
  EXPECT_DEATH((void)whole.rows(-1, 2), "rows -1\\+2 of 4");
  EXPECT_DEATH((void)whole.heads(3, 2), "3 heads of 2 in 4 columns");
}

}  // namespace
}  // namespace cachalot
