// The two ways a configuration is stored, each read into a Config. Internal to model/.
#pragma once

#include "model/config.h"

namespace cachalot {

Config read_json_config(const Checkpoint& checkpoint);  // config.json and generation_config.json
Config read_gguf_config(const Checkpoint& checkpoint);  // GGUF metadata

// YaRN's attention magnitude m(factor, mscale) = 0.1 * mscale * ln(factor) + 1, or 1 without scaling.
double yarn_magnitude(double factor, double mscale);

}  // namespace cachalot
