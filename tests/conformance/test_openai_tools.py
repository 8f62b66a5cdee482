"""OpenAI's own client: tools, wanted shapes, reasoning, tenants and classes, the Responses interface."""

import asyncio
import json
import re
from typing import Literal

import openai
import pydantic
import pytest

from conftest import LIMITED_KEY, THINKS, URL

HELLO = [{"role": "user", "content": "Where is it warmer, in Rome or in Oslo?"}]


def function(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "about a place", "strict": True, "parameters": schema}}


PLACE = {"type": "string", "enum": ["Rome", "Oslo"]}
TOOLS = [function("get_weather", place=PLACE, days={"type": "integer", "minimum": 1, "maximum": 9}), function("get_time", place=PLACE)]


def check_call(name, arguments):
    value = json.loads(arguments)
    assert value["place"] in ("Rome", "Oslo")
    assert set(value) == ({"place", "days"} if name == "get_weather" else {"place"})


class Report(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    place: Literal["Rome", "Oslo"]
    warm: bool
    days: Literal[1, 2, 3]


def chat(client, model, **more):
    return client.chat.completions.create(model=model, messages=HELLO, **{"max_tokens": 1500, "seed": 1, **more})


def no_thinking(**more):
    return {"chat_template_kwargs": {"thinking": False}, **more} if THINKS else more


def test_a_named_tool_is_called(client, model):
    choice = chat(client, model, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}}, extra_body=no_thinking()).choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert [c.function.name for c in choice.message.tool_calls] == ["get_weather"]
    check_call("get_weather", choice.message.tool_calls[0].function.arguments)
    history = HELLO + [choice.message, {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "25 degrees"}]
    answer = client.chat.completions.create(model=model, messages=history, tools=TOOLS, max_tokens=8)
    assert answer.usage.prompt_tokens > 0, "the answer's own message is taken back as history"


def test_calls_stream_as_they_are_whole(client, model):
    asked = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, extra_body=no_thinking())
    whole = chat(client, model, **asked).choices[0].message.tool_calls
    names, arguments, ids, reason = [], "", set(), None
    for chunk in chat(client, model, stream=True, **asked):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                assert call.index == 0
                ids |= {call.id} if call.id else set()
                names += [call.function.name] if call.function.name else []
                arguments += call.function.arguments or ""
            reason = choice.finish_reason or reason
    assert reason == "tool_calls" and len(ids) == 1
    assert names == [c.function.name for c in whole] and arguments == whole[0].function.arguments
    check_call(names[0], arguments)


def test_a_tool_that_is_not_there(client, model):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, model, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "no_such_tool"}})
    assert error.value.param == "tool_choice"


def test_strict_schema_through_the_parse_helper(client, model):
    answer = client.chat.completions.parse(model=model, messages=HELLO, max_tokens=1500, seed=1, response_format=Report, extra_body=no_thinking())
    assert isinstance(answer.choices[0].message.parsed, Report)


def test_strict_schema_streamed_through_the_helper(client, model):
    with client.chat.completions.stream(model=model, messages=HELLO, max_tokens=1500, seed=1, response_format=Report, extra_body=no_thinking()) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Report)


def test_json_object(client, model):
    choice = chat(client, model, response_format={"type": "json_object"}, temperature=1.0, max_tokens=60, extra_body=no_thinking()).choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("wish, pattern", [({"regex": "[A-F]{3}-[0-9]{2}"}, r"[A-F]{3}-[0-9]{2}"), ({"choice": ["warm", "cold"]}, "warm|cold"), ({"grammar": 'root ::= "a" [0-9]{4} "z"'}, r"a\d{4}z")])
def test_structured_outputs(client, model, wish, pattern):
    answer = chat(client, model, extra_body=no_thinking(structured_outputs=wish))
    assert re.fullmatch(pattern, answer.choices[0].message.content)


def test_shapes_that_cannot_be_honoured(client, model):
    for schema in ({"type": "object", "not": {}}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}):
        with pytest.raises(openai.BadRequestError) as error:
            chat(client, model, stream=True, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}})
        assert error.value.param == "response_format"


@pytest.mark.skipif(not THINKS, reason="the model's template has no switch for thinking")
def test_reasoning_is_apart_from_content(client, model):
    whole = chat(client, model, max_tokens=12, extra_body={"chat_template_kwargs": {"thinking": True}})
    message = whole.choices[0].message
    assert message.reasoning_content and message.reasoning == message.reasoning_content and not message.content
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    reasoning = ""
    for chunk in chat(client, model, max_tokens=12, stream=True, extra_body={"chat_template_kwargs": {"thinking": True}}):
        for choice in chunk.choices:
            assert not choice.delta.content
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    assert reasoning == message.reasoning_content
    hidden = chat(client, model, max_tokens=12, extra_body={"chat_template_kwargs": {"thinking": True}, "include_reasoning": False})
    assert not getattr(hidden.choices[0].message, "reasoning_content", None)
    history = HELLO + [{"role": "assistant", "content": "Rome.", "reasoning_content": "It lies further south."}] + HELLO
    assert client.chat.completions.create(model=model, messages=history, max_tokens=2).usage.prompt_tokens > 0


def test_salts_keep_prefixes_apart(client, model):
    messages = [{"role": "user", "content": "a long beginning that fills several pages of the cache " * 8}]

    def cached(salt):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=1, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("tenant-a"), cached("tenant-b")] == [0, 0]
    assert cached("tenant-a") > 0


def test_classes(client, model):
    for priority in ("P0", "P1", "P2", 0, 5):
        assert chat(client, model, max_tokens=2, extra_body={"priority": priority}).choices
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, model, extra_body={"priority": "P9"})
    assert error.value.param == "priority"


def test_several_answers_streamed(client, model):
    texts = {}
    for chunk in chat(client, model, n=3, temperature=1.0, max_tokens=8, stream=True, extra_body=no_thinking()):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    whole = chat(client, model, n=3, temperature=1.0, max_tokens=8, extra_body=no_thinking())
    assert texts == {c.index: c.message.content for c in whole.choices}


def test_logprobs_streamed(client, model):
    tokens = []
    for chunk in chat(client, model, logprobs=True, top_logprobs=2, max_tokens=8, stream=True):
        for choice in chunk.choices:
            tokens += choice.logprobs.content if choice.logprobs else []
    whole = chat(client, model, logprobs=True, top_logprobs=2, max_tokens=8).choices[0].logprobs.content
    assert [t.token for t in tokens] == [t.token for t in whole]
    assert all(bytes(t.bytes).decode("utf-8", "replace") == t.token for t in tokens if "\ufffd" not in t.token)


def test_many_streams_at_once(async_client, model):
    async def one(i):
        text = ""
        async for chunk in await chat(async_client, model, seed=i % 2, temperature=1.0, max_tokens=8, stream=True, extra_body=no_thinking()):
            text += "".join(c.delta.content or "" for c in chunk.choices)
        return text

    async def all_of_them():
        return await asyncio.gather(*(one(i) for i in range(8)))

    texts = asyncio.run(all_of_them())
    assert len(set(texts[0::2])) == 1 and len(set(texts[1::2])) == 1, "an answer does not depend on its neighbours' seeds"


def test_a_key_that_asks_too_much(client, model):
    limited = client.with_options(api_key=LIMITED_KEY)
    assert chat(limited, model, max_tokens=1).choices
    with pytest.raises(openai.RateLimitError) as error:
        chat(limited, model, n=2, max_tokens=1)
    assert int(error.value.response.headers["retry-after"]) >= 1
    assert error.value.response.headers["x-request-id"] == error.value.request_id


def test_timeouts_and_no_server(client, async_client, model):
    async def ask():
        await chat(async_client.with_options(timeout=0.05), model, max_tokens=1500, extra_body={"ignore_eos": True})

    with pytest.raises(openai.APITimeoutError):
        asyncio.run(ask())
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0).models.list()
    assert client.models.list().data, URL


def test_responses_call_tools(client, model):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = dict(model=model, input=HELLO, tools=tools, tool_choice="required", parallel_tool_calls=False, max_output_tokens=1500, extra_body=no_thinking(seed=1))
    answer = client.responses.create(**asked)
    call = next(item for item in answer.output if item.type == "function_call")
    check_call(call.name, call.arguments)
    arguments = ""
    for event in client.responses.create(stream=True, **asked):
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
        elif event.type == "response.completed":
            assert [item.type for item in event.response.output] == ["function_call"]
    assert arguments == call.arguments
    history = HELLO + [call.model_dump(exclude_none=True), {"type": "function_call_output", "call_id": call.call_id, "output": "25 degrees"}]
    assert client.responses.create(model=model, input=history, tools=tools, max_output_tokens=8).usage.input_tokens > answer.usage.input_tokens


def test_responses_keep_a_schema(client, model):
    answer = client.responses.parse(model=model, input=HELLO, instructions="Be brief.", max_output_tokens=1500, text_format=Report, extra_body=no_thinking())
    assert isinstance(answer.output_parsed, Report)
    with client.responses.stream(model=model, input=HELLO, max_output_tokens=1500, text_format=Report, extra_body=no_thinking()) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Report)


def test_responses_without_a_store(client, model):
    for more in ({"previous_response_id": "resp_1"}, {"background": True}):
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(model=model, input="hi", **more)
        assert error.value.param == next(iter(more))


def test_responses_async(async_client, model):
    async def ask():
        return await async_client.responses.create(model=model, input="hi", max_output_tokens=4)

    assert asyncio.run(ask()).usage.output_tokens <= 4
