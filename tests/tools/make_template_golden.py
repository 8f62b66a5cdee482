#!/usr/bin/env python3
"""Writes testdata/templates/golden.json: conversations and what jinja2 renders of them, and testdata/templates/language.json: small
templates, one for each feature of the language, and their output. The C++ tests compare with both byte for byte.

jinja2 (3.1.6 or newer) is set up as transformers sets it up for apply_chat_template, with one filter more: from_json, which one of the
templates calls and engines for serving provide.

Usage: make_template_golden.py [testdata/templates]
"""
import datetime
import json
import pathlib
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2025, 7, 4, 9, 5, 3)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name, value):
        Namespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(name)


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.filters["from_json"] = json.loads
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    env.globals["dict"] = dict
    env.globals["namespace"] = Namespace
    return env


def render(env, source, variables):
    """{"output": text} or {"error": True}. The test asks for an Error where jinja2 raises anything."""
    try:
        output = env.from_string(source).render(**variables)
        output.encode("utf-8")  # a lone surrogate is no text
        return {"output": output}
    except Exception as error:  # any failure of the template or of Python beneath it
        return {"error": type(error).__name__ + ": " + str(error).split("\n")[0][:160]}


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather at a place, <now> & later: \"quoted\", 温度",
    "parameters": {"type": "object", "properties": {
        "place": {"type": "string", "description": "City"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 18446744073709551615, "default": 1.0},
        "detail": {"type": "boolean", "default": False, "nullable": None}}, "required": ["place"]}}}
SEARCH = {"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}
BOTH = [WEATHER, SEARCH]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def tool(text, **more):
    return {"role": "tool", "content": text, **more}


def call(name, arguments, number=0):
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def conversations():
    """name -> variables beside bos_token, eos_token and add_generation_prompt=True."""
    paris, berlin = {"place": "Paris", "days": 2, "detail": True}, {"place": "東京 \"x\"", "unit": None, "nested": {"a": [1, 2.5, 1e-7, 1e22]}}
    asked = [system("Be brief."), user("Weather?")]
    one = asked + [assistant(None, tool_calls=[call("get_weather", paris)]), tool("18 °C", tool_call_id="call_0", name="get_weather")]
    two = asked + [assistant(None, tool_calls=[call("get_weather", paris), call("get_weather", berlin, 1)]), tool("18"), tool("21")]
    as_text = asked + [assistant(None, tool_calls=[call("get_weather", json.dumps(paris)), call("search", "{}", 1)]), tool("18"), tool("[]")]
    chats = {
        "one user message": [user("Hello!")],
        "system and user": [system("You are helpful."), user("Hi")],
        "three turns": [user("1"), assistant("one"), user("2"), assistant("two"), user("3")],
        "three turns with system": [system("Count."), user("1"), assistant("one"), user("2"), assistant("two"), user("3")],
        "two system messages": [system("First."), system("Second."), user("Hi")],
        "late system message": [user("Hi"), system("Now rhyme."), user("Go on")],
        "tool call, content null": one[:3],
        "tool result": one,
        "tool result and answer": one + [assistant("It is 18 °C.")],
        "tool result, answer, question": one + [assistant("It is 18 °C."), user("And now?")],
        "two tool calls": two,
        "two tool calls and answer": two + [assistant("18 and 21"), user("Thanks")],
        "tool arguments as text": as_text,
        "tool call, content empty": asked + [assistant("", tool_calls=[call("search", {})]), tool("none found")],
        "tool call with content": asked + [assistant("Let me look.", tool_calls=[call("search", {"q": "<b> & 'x'"})]), tool("1"), assistant("Found.")],
        "tool call without content key": asked + [{"role": "assistant", "tool_calls": [call("search", {})]}, tool("x")],
        "tool calls over two rounds": one + [assistant(None, tool_calls=[call("search", {"n": -3}, 2)]), tool("more"), assistant("Done.")],
        "tool calls empty list": [user("a"), assistant("b", tool_calls=[]), user("c")],
        "tool calls null": [user("a"), assistant("b", tool_calls=None), user("c")],
        "tool content as object": asked + [assistant(None, tool_calls=[call("search", {})]), tool({"hits": ["a", 1, None]})],
        "reasoning content": [user("2+2?"), assistant("4", reasoning_content="Add them."), user("3+3?")],
        "reasoning content last": [user("2+2?"), assistant("4", reasoning_content="\nAdd them.\n")],
        "reasoning inside content": [user("2+2?"), assistant("<think>\nAdd.\n</think>\n\n4"), user("3+3?"), assistant("<think>Again</think>6")],
        "reasoning in a tool loop": asked + [assistant("", reasoning_content="Need a tool.", tool_calls=[call("search", {"q": "x"})]), tool("y"),
                                             assistant("z", reasoning_content="Now I know.")],
        "assistant last": [user("Write code"), assistant("```python\n")],
        "assistant prefix flag": [user("Write code"), assistant("Sure", prefix=True)],
        "Chinese, Japanese, Korean": [system("你是一个助手。"), user("你好，世界！"), assistant("こんにちは"), user("안녕하세요 ｜User｜")],
        "emoji": [user("👩‍👩‍👧‍👦 🇫🇷 e\u0301 \U0001f600"), assistant("😀"), user("\u200d\ufe0f")],
        "unusual white space": [system("  lead\n\n"), user("\t a \r\n b\u00a0\u3000 \n"), assistant("\n\n  x  \n"), user(" \u2028 ")],
        "empty content": [system(""), user(""), assistant(""), user("")],
        "content null": [user(None)],
        "content as parts": [user([{"type": "text", "text": "Look"}, {"type": "image"}]), assistant("ok"), user("more")],
        "markup in content": [user("<|im_start|>system {{ x }} {% if %} <think> </think> & \" ' \\n"), assistant("<tool_response>"), user("x")],
        "unknown role": [user("a"), {"role": "critic", "content": "b"}, user("c")],
        "developer role": [{"role": "developer", "content": "Be exact."}, user("a")],
        "role missing": [{"content": "a"}],
        "content missing": [{"role": "user"}],
        "no messages": [],
        "unknown fields": [{"role": "user", "content": "a", "name": "Ann", "refusal": None, "x": {"y": [1]}}],
        "names of methods as fields": [{"role": "user", "content": "a", "items": 1, "keys": [2], "update": "u"}],
        "tool response as user": [user("q"), assistant("a"), user("<tool_response>x</tool_response>")],
    }
    cases = {name: {"messages": chat} for name, chat in chats.items()}
    for name in ("tool call, content null", "tool result", "two tool calls and answer", "tool arguments as text", "one user message", "system and user",
                 "reasoning in a tool loop", "three turns with system", "no messages", "empty content", "tool calls over two rounds"):
        cases[name + ", tools given"] = {"messages": chats[name], "tools": BOTH}
    for name in ("assistant last", "three turns", "assistant prefix flag", "two tool calls", "reasoning content last"):
        cases[name + ", no prompt"] = {"messages": chats[name], "add_generation_prompt": False}
        cases[name + ", thinking"] = {"messages": chats[name], "thinking": True, "enable_thinking": True}
    cases["thinking off"] = {"messages": chats["system and user"], "enable_thinking": False}
    cases["thinking on"] = {"messages": chats["system and user"], "enable_thinking": True}
    cases["thinking, reasoning in a tool loop"] = {"messages": chats["reasoning in a tool loop"], "thinking": True}
    cases["tools in the system message"] = {"messages": chats["tool result"], "tools": BOTH, "tools_in_user_message": False}
    cases["builtin tools"] = {"messages": one, "builtin_tools": ["get_weather", "code_interpreter"], "date_string": "1 Jan 2026"}
    cases["tools empty list"] = {"messages": chats["one user message"], "tools": []}
    return cases


TOKENS = {"deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), "llama-cpp-deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
          "meta-llama": ("<|begin_of_text|>", "<|eot_id|>"), "Qwen": (None, "<|im_end|>"), "HuggingFaceTB": ("<|im_start|>", "<|im_end|>")}


def make_golden(env, folder):
    cases = conversations()
    result = {"conversations": cases, "templates": {}}
    for path in sorted(folder.glob("*.jinja")):
        bos, eos = next(value for key, value in TOKENS.items() if path.name.startswith(key))
        outcomes = {}
        for name, case in cases.items():
            variables = {"tools": None, "documents": None, "add_generation_prompt": True, **case}
            variables.update({k: v for k, v in (("bos_token", bos), ("eos_token", eos)) if v is not None})
            outcomes[name] = render(env, path.read_text(encoding="utf-8"), variables)
        rendered = sum("output" in outcome for outcome in outcomes.values())
        print(f"{path.name}: {rendered} rendered, {len(outcomes) - rendered} refused")
        result["templates"][path.name] = {"bos_token": bos, "eos_token": eos, "outcomes": outcomes}
    return result


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2] / "testdata/templates")
    env = environment()
    golden = make_golden(env, folder)
    (folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=True, indent=0) + "\n", encoding="utf-8")
    language = [case for line in (folder / "language.jsonl").read_text(encoding="utf-8").split("\n") if line.strip()
                for case in [json.loads(line)]]
    for case in language:
        for key in ("output", "error"):
            case.pop(key, None)
        case.update(render(env, case["template"], {"messages": [], **case.get("variables", {})}))
    (folder / "language.jsonl").write_text("".join(json.dumps(case, ensure_ascii=False) + "\n" for case in language), encoding="utf-8")
    print(f"language.jsonl: {len(language)} cases")


if __name__ == "__main__":
    main()
