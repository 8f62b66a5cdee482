"""A browser on the page of a running server. What the page logs as an error, or its policy forbids, fails the test."""

import os

import pytest
from playwright.sync_api import sync_playwright

URL = os.environ["CACHALOT_URL"]
KEY = os.environ["CACHALOT_KEY"]
MODEL = os.environ["CACHALOT_MODEL"]

SETTINGS = '{"key": "%s", "seed": "1", "max_tokens": "40"}' % KEY


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["CACHALOT_BROWSER"], args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Watched:
    """Pages of one browser context, and all that went wrong in them."""

    def __init__(self, browser, **options):
        self.faults, self.hosts = [], set()
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(30000)
        # The policy of the page does not bind these scripts; what it forbids to others is told here.
        self.context.expose_function("toldOfViolation", lambda text: self.faults.append("policy: " + text))
        self.context.add_init_script("document.addEventListener('securitypolicyviolation', (e) => toldOfViolation(e.violatedDirective + ' ' + e.blockedURI))")

    def open(self, path="/", settings=SETTINGS):
        if settings:
            self.context.add_init_script(f"localStorage.getItem('cachalot.settings') ?? localStorage.setItem('cachalot.settings', {settings!r})")
        page = self.context.new_page()
        page.on("console", lambda message: self.faults.append("console: " + message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.goto(URL + path)
        return page


@pytest.fixture
def watched(browser):
    made = []

    def make(**options):
        made.append(Watched(browser, **options))
        return made[-1]

    yield make
    for one in made:
        one.context.close()
        assert one.faults == []
        assert one.hosts <= {URL.split("/")[2]}, "nothing is loaded from elsewhere"


@pytest.fixture
def one(watched):
    return watched()


@pytest.fixture
def faults(one):
    """For tests that bring some about: they look at them, and clear the list."""
    return one.faults


@pytest.fixture
def page(one):
    page = one.open()
    page.locator("#model-name", has_text=MODEL).wait_for()
    return page
