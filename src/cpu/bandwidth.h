// How fast this machine's memory can be read, measured: the yardstick for decoding, which reads every weight once per token.
#pragma once

#include <cstddef>

#include "base/thread_pool.h"

namespace cachalot::cpu {

// Bytes per second: the best of several passes of all workers over `bytes` in huge pages, which should be far more than the caches hold.
double read_bandwidth(ThreadPool& pool, size_t bytes = size_t{512} << 20);

}  // namespace cachalot::cpu
