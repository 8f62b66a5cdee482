"""Anthropic's own client against /v1/messages."""

import asyncio
import json

import anthropic
import pytest

HELLO = [{"role": "user", "content": "Write a line of code."}]


def test_message(claude, model):
    answer = claude.messages.create(model=model, max_tokens=16, messages=HELLO, system="Be brief.")
    assert answer.type == "message" and answer.role == "assistant"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens <= 16


def test_stream(claude, model):
    with claude.messages.stream(model=model, max_tokens=16, messages=HELLO, temperature=0) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = claude.messages.create(model=model, max_tokens=16, messages=HELLO, temperature=0)
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


def test_async(async_claude, model):
    async def ask():
        return await async_claude.messages.create(model=model, max_tokens=8, messages=HELLO)

    assert asyncio.run(ask()).usage.output_tokens <= 8


def test_count_tokens(claude, model):
    short = claude.messages.count_tokens(model=model, messages=HELLO).input_tokens
    longer = claude.messages.count_tokens(model=model, messages=HELLO, system="Be brief. " * 20).input_tokens
    assert 0 < short < longer


def test_tools_are_accepted(claude, model):
    tools = [{"name": "get_weather", "description": "Weather", "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}}}]
    history = HELLO + [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"place": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]},
    ]
    assert claude.messages.create(model=model, max_tokens=8, messages=history, tools=tools).usage.input_tokens > 0


WEATHER = {
    "name": "get_weather",
    "description": "Weather",
    "input_schema": {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"], "additionalProperties": False},
}


def test_a_tool_is_called(claude, model):
    asked = dict(model=model, max_tokens=1500, messages=HELLO, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}, temperature=0)
    answer = claude.messages.create(**asked)
    call = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use" and call.input["place"] in ("Rome", "Oslo")
    with claude.messages.stream(**asked) as stream:
        parts = [event.delta.partial_json for event in stream if event.type == "content_block_delta" and event.delta.type == "input_json_delta"]
        final = stream.get_final_message()
    assert json.loads("".join(parts)) == call.input
    assert [block.name for block in final.content if block.type == "tool_use"] == ["get_weather"]
    history = HELLO + [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}]
    assert claude.messages.create(model=model, max_tokens=4, messages=history, tools=[WEATHER]).usage.output_tokens <= 4


def test_stop_sequences(claude, model):
    whole = claude.messages.create(model=model, max_tokens=16, messages=HELLO, temperature=0)
    text = "".join(block.text for block in whole.content if block.type == "text")
    if len(text) < 4:
        pytest.skip("the model said too little")
    answer = claude.messages.create(model=model, max_tokens=16, messages=HELLO, temperature=0, stop_sequences=[text[2:4]])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == text[2:4]


def test_raw_events_are_in_order(claude, model):
    events = [event.type for event in claude.messages.create(model=model, max_tokens=4, messages=HELLO, stream=True)]
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") >= 1


def test_system_as_blocks(claude, model):
    answer = claude.messages.create(model=model, max_tokens=4, messages=HELLO, system=[{"type": "text", "text": "Be brief."}], metadata={"user_id": "u"})
    assert answer.usage.input_tokens > 0


def test_async_stream(async_claude, model):
    async def ask():
        async with async_claude.messages.stream(model=model, max_tokens=8, messages=HELLO) as stream:
            async for _ in stream.text_stream:
                pass
            return await stream.get_final_message()

    assert asyncio.run(ask()).usage.output_tokens <= 8


def test_timeouts(claude, model):
    with pytest.raises(anthropic.APITimeoutError):
        claude.with_options(timeout=0.001).messages.create(model=model, max_tokens=1500, messages=HELLO)
    assert claude.messages.create(model=model, max_tokens=1, messages=HELLO).content is not None


def test_errors(claude, model):
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.messages.create(model=model, max_tokens=0, messages=HELLO)
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model=model, max_tokens=4, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="no-such-model", max_tokens=4, messages=HELLO)
