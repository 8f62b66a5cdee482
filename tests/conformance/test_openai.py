"""OpenAI's own client: chat, completions, responses, models; whole, streamed, asynchronous; errors as its exception classes."""

import asyncio
import json

import httpx
import openai
import pytest

from conftest import KEY, URL

HELLO = [{"role": "user", "content": "Write a line of code."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather at a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


def chat(client, model, **more):
    return client.chat.completions.create(model=model, messages=HELLO, max_tokens=16, seed=1, **more)


def test_models(client, model):
    assert model in [m.id for m in client.models.list()]
    assert client.models.retrieve(model).id == model


def test_chat(client, model):
    answer = chat(client, model)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == model
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 1 <= answer.usage.completion_tokens <= 16


def test_chat_stream_equals_whole(client, model):
    whole = chat(client, model)
    text, usage, reason = "", None, None
    for chunk in chat(client, model, stream=True, stream_options={"include_usage": True}):
        if chunk.usage:
            assert chunk.choices == []
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert text == whole.choices[0].message.content
    assert reason == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_chat_async(async_client, model):
    async def both():
        first, second = await asyncio.gather(chat(async_client, model), chat(async_client, model))
        stream = await chat(async_client, model, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        return first, second, text

    first, second, text = asyncio.run(both())
    assert first.choices[0].message.content == second.choices[0].message.content == text


def test_same_seed_same_text(client, model):
    texts = {chat(client, model, temperature=1.0).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


def test_several_answers(client, model):
    answer = chat(client, model, n=3, temperature=1.0)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) > 1, "each answer has a seed of its own"


def test_stop(client, model):
    whole = chat(client, model).choices[0].message.content
    if len(whole) < 4:
        pytest.skip("the model said too little")
    stop = whole[2:4]
    answer = chat(client, model, stop=[stop])
    assert stop not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs(client, model):
    answer = chat(client, model, logprobs=True, top_logprobs=3, temperature=0)
    content = answer.choices[0].logprobs.content
    assert content
    for token in content:
        assert token.logprob <= 1e-6 and len(token.top_logprobs) == 3
        assert abs(token.logprob - token.top_logprobs[0].logprob) < 1e-4, "greedy takes the likeliest"


def test_logit_bias(client, model):
    plain = chat(client, model, temperature=0, logprobs=True).choices[0].logprobs.content[0]
    answer = httpx.post(URL + "/tokenize", headers={"Authorization": "Bearer " + KEY}, json={"prompt": plain.token, "add_special_tokens": False})
    ids = answer.json()["tokens"]
    other = chat(client, model, temperature=0, logprobs=True, logit_bias={str(i): -100 for i in ids})
    assert other.choices[0].logprobs.content[0].token != plain.token


def test_tools_are_accepted(client, model):
    answer = chat(client, model, tools=TOOLS, tool_choice="auto")
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    history = HELLO + [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"place\": \"Rome\"}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model=model, messages=history, tools=TOOLS, max_tokens=8)
    assert answer.usage.prompt_tokens > 0


def test_completions(client, model):
    answer = client.completions.create(model=model, prompt="def f(", max_tokens=8, seed=1)
    assert answer.object == "text_completion" and answer.usage.completion_tokens <= 8
    text = "".join(c.choices[0].text for c in client.completions.create(model=model, prompt="def f(", max_tokens=8, seed=1, stream=True))
    assert text == answer.choices[0].text


def test_completions_echo_scores(client, model):
    answer = client.completions.create(model=model, prompt="def f(x):", max_tokens=0, echo=True, logprobs=1)
    scores = answer.choices[0].logprobs
    assert answer.choices[0].text == "def f(x):"
    assert scores.token_logprobs[0] is None
    assert all(x <= 1e-6 for x in scores.token_logprobs[1:])
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset)


def test_responses(client, model):
    answer = client.responses.create(model=model, input="Write a line of code.", max_output_tokens=16)
    assert answer.status in ("completed", "incomplete")
    assert isinstance(answer.output_text, str)
    types, text = [], ""
    for event in client.responses.create(model=model, input="Write a line of code.", max_output_tokens=16, stream=True):
        types.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert types[0] == "response.created" and types[-1] in ("response.completed", "response.incomplete")


def test_errors(client, model):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, model, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        chat(client, "no-such-model")
    with pytest.raises(openai.AuthenticationError):
        chat(client.with_options(api_key="wrong"), model)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 100000}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=model, input="x")


def test_timeouts(client, model):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(model=model, messages=HELLO, max_tokens=1500, extra_body={"ignore_eos": True})
    assert chat(client, model).choices, "the server goes on"


def test_a_stream_left_early(client, model):
    stream = client.chat.completions.create(model=model, messages=HELLO, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    for i, _ in enumerate(stream):
        if i == 3:
            break
    stream.close()
    assert chat(client, model).choices


def test_raw_stream_ends_with_done(client, model):
    with client.chat.completions.with_streaming_response.create(model=model, messages=HELLO, max_tokens=4, stream=True) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        json.loads(line[len("data: "):])
