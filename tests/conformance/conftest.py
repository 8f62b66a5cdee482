"""The address of the server under test, and the official clients that talk to it."""

import os

import anthropic
import openai
import pytest

URL = os.environ["CACHALOT_URL"]
KEY = os.environ["CACHALOT_KEY"]
MODEL = os.environ["CACHALOT_MODEL"]


@pytest.fixture
def client():
    return openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture
def async_client():
    return openai.AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture
def claude():
    return anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture
def async_claude():
    return anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture
def model():
    return MODEL
