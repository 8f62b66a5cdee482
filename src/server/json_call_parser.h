// Tool calls written as a JSON object with a name and arguments: Qwen's between tags, Llama's alone.
#pragma once

#include <memory>

#include "server/tool_parser.h"

namespace cachalot::server {

// tagged: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere in the text. Not tagged: the text is one or more such objects
// ("parameters" for "arguments"), perhaps behind <|python_tag|>, or it is no call at all.
std::unique_ptr<ToolParser> make_json_call_parser(bool tagged);

}  // namespace cachalot::server
