"""The address of the server under test, and the official clients that talk to it."""

import os

import anthropic
import openai
import pytest

URL = os.environ["CACHALOT_URL"]
KEY = os.environ["CACHALOT_KEY"]
LIMITED_KEY = os.environ["CACHALOT_LIMITED_KEY"]  # one request at a time
MODEL = os.environ["CACHALOT_MODEL"]
THINKS = os.environ["CACHALOT_THINKS"] == "1"  # the chat template has a switch for thinking


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
