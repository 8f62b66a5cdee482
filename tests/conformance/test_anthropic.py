"""Anthropic's own client against /v1/messages."""

import asyncio

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


def test_errors(claude, model):
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.messages.create(model=model, max_tokens=0, messages=HELLO)
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model=model, max_tokens=4, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="no-such-model", max_tokens=4, messages=HELLO)
