"""The page at "/": chat, history, settings, dashboard, keyboard, phone, hostile text."""

import json
import os
import re

import pytest

from conftest import KEY, MODEL, URL

SCREENSHOTS = os.environ.get("CACHALOT_SCREENSHOTS", "")


def send(page, text):
    page.locator("#input").fill(text)
    page.locator("#input").press("Enter")


def answers(page):
    return page.locator(".message.assistant")


def finished(page, n=1):
    """Waits for the n-th answer's figures."""
    figures = answers(page).nth(n - 1).locator(".figures")
    figures.wait_for()
    return figures.inner_text()


def text_of(page, n=1):
    return answers(page).nth(n - 1).locator(".body").inner_text()


def settings(page, **values):
    page.locator("#settings-button").click()
    for name, value in values.items():
        field = page.locator(f"#settings [name={name}]")
        if field.evaluate("e => e.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    page.locator("#settings button[type=submit]").click()


def test_an_answer_streams(page):
    settings(page, max_tokens="200")
    lengths = []
    page.expose_function("sawLength", lambda n: lengths.append(n))
    page.evaluate("new MutationObserver(() => { const b = document.querySelector('.message.assistant .body'); if (b) sawLength(b.textContent.length); })"
                  ".observe(document.getElementById('messages'), {childList: true, subtree: true, characterData: true})")
    send(page, "Write a line of code.")
    figures = finished(page)
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ s · prompt \d+", figures), figures
    assert len(set(lengths)) > 3 and lengths[-1] > 0, "the text grew piece by piece"
    assert page.locator(".message.user .body").inner_text() == "Write a line of code."
    assert page.locator("#send").inner_text() == "Send"


def test_stop_ends_the_work(page):
    settings(page, max_tokens="1900")
    for stop in (lambda: page.keyboard.press("Escape"), lambda: page.locator("#send").click()):
        before = answers(page).count()
        send(page, "Go on and on.")
        page.locator(".message.assistant .caret").wait_for()
        assert page.locator("#send").inner_text() == "Stop"
        stop()
        assert finished(page, before + 1) in ("stopped", ) or "cut at the limit" in finished(page, before + 1)
    page.wait_for_function("async (key) => (await (await fetch('/load', {headers: {Authorization: 'Bearer ' + key}})).json()).server_load === 0", arg=KEY)


def test_regenerate_and_edit(page):
    send(page, "First question.")
    finished(page)
    first = text_of(page)
    answers(page).first.get_by_role("button", name="Regenerate").click()
    page.wait_for_function("() => document.querySelectorAll('.message').length === 2 && document.querySelector('.message.assistant .figures')")
    assert text_of(page) == first, "equal seeds, equal text"
    send(page, "Second question.")
    finished(page, 2)
    page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    area = page.locator("textarea.edit")
    assert area.input_value() == "First question."
    area.fill("Another question altogether.")
    page.locator(".message.user").first.get_by_role("button", name="Send").click()
    page.wait_for_function("() => document.querySelectorAll('.message').length === 2 && document.querySelector('.message.assistant .figures')")
    assert page.locator(".message.user .body").inner_text() == "Another question altogether."


def test_history_survives_a_reload_and_can_be_exported(page):
    send(page, "Remember this line.")
    finished(page)
    before = text_of(page)
    page.reload()
    page.locator("#history .open", has_text="Remember this line.").click()
    assert text_of(page) == before
    with page.expect_download() as download:
        page.locator("#export-all").click()
    with open(download.value.path(), encoding="utf-8") as file:
        conversations = json.load(file)
    assert conversations[0]["messages"][0] == {"role": "user", "content": "Remember this line."}
    assert conversations[0]["messages"][1]["role"] == "assistant"
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#delete-all").click()
    page.locator("#history .open").first.wait_for(state="detached")
    page.reload()
    assert page.locator("#history .open").count() == 0


def test_settings_reach_the_server(page):
    settings(page, max_tokens="5", temperature="0", priority="P2", system="Be brief.")
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "Hello.")
    body = request.value.post_data_json
    assert body["max_completion_tokens"] == 5 and body["temperature"] == 0 and body["priority"] == "P2"
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert re.match(r"[1-5] tokens", finished(page))
    page.reload()
    page.locator("#settings-button").click()
    assert page.locator("#settings [name=max_tokens]").input_value() == "5"
    page.locator("#settings-reset").click()
    assert page.locator("#settings [name=max_tokens]").input_value() == ""


def test_without_a_key(watched):
    one = watched()
    page = one.open(settings=None)
    page.locator("#model-name", has_text="An API key is needed").wait_for()
    settings(page, key=KEY)
    page.locator("#model-name", has_text=MODEL).wait_for()
    assert all("401" in fault for fault in one.faults), "the browser logs the refusal, and nothing else"
    one.faults.clear()


def test_errors_are_told(page, faults):
    settings(page, min_p="0.1")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=429, headers={"Retry-After": "7", "Content-Type": "application/json"}, body='{"error": {"message": "The queue is full <b>", "type": "rate_limit_error"}}'))
    send(page, "Hello.")
    error = page.locator(".message .error")
    error.wait_for()
    assert error.inner_text() == "The queue is full <b> Try again in 7 s."
    assert len(faults) == 1 and "429" in faults[0], "the browser's own line about the answer"
    faults.clear()


def test_the_dashboard_moves(page):
    page.locator("#tab-dashboard").click()
    written = page.locator(".card:last-child .value")
    written.wait_for()
    before = int(re.sub(r"\D", "", written.inner_text()))
    answer = page.request.post(URL + "/v1/completions", headers={"Authorization": "Bearer " + KEY}, data={"prompt": "x", "max_tokens": 30, "ignore_eos": True})
    assert answer.ok
    page.wait_for_function("(n) => Number(document.querySelector('.card:last-child .value').textContent.replace(/\\D/g, '')) >= n", arg=before + 30)
    assert page.locator(".card", has_text="Time to first token").locator("rect").count() >= 1
    rows = page.locator(".card table tbody tr")
    assert [rows.nth(i).locator("td").first.inner_text() for i in range(3)] == ["P0 interactive", "P1 batch", "P2 best effort"]
    page.set_viewport_size({"width": 780, "height": 800})
    assert page.evaluate("() => { const box = document.getElementById('dashboard'); return box.scrollWidth <= box.clientWidth; }"), "narrow windows scroll down, not sideways"


def test_by_keyboard_alone(page):
    page.keyboard.press("Alt+KeyI")
    page.keyboard.type("By keyboard")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("alone.")
    page.keyboard.press("Enter")
    finished(page)
    assert page.locator(".message.user .body").inner_text() == "By keyboard\nalone."
    assert page.locator("#input").evaluate("e => e === document.activeElement"), "the next message can be typed at once"
    page.keyboard.press("Alt+KeyR")
    page.wait_for_function("() => document.querySelector('.message.assistant .figures')")
    page.keyboard.press("Alt+KeyD")
    page.locator("#dashboard .card").first.wait_for()
    page.keyboard.press("Alt+KeyD")
    page.keyboard.press("Alt+KeyN")
    page.locator(".welcome").wait_for()
    seen = set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id"))
        assert page.evaluate("document.activeElement === document.body || getComputedStyle(document.activeElement).visibility === 'visible'")
    assert {"theme", "settings-button", "new-chat", "input", "send", "tab-chat", "tab-dashboard", "export-all"} <= seen
    page.locator("#settings-button").focus()
    page.keyboard.press("Enter")
    page.locator("#settings[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("#settings[open]").wait_for(state="detached")
    assert page.evaluate("document.activeElement.id") == "settings-button"


def no_sideways_scroll(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth && document.getElementById('messages').scrollWidth <= document.getElementById('messages').clientWidth")


def test_on_a_phone(watched):
    page = watched(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True).open()
    page.locator("#model-name", has_text=MODEL).wait_for()
    send(page, "A word that is quite long: " + "Donaudampfschiff" * 12)
    finished(page)
    assert no_sideways_scroll(page)
    assert page.locator("#send").bounding_box()["height"] >= 36
    page.locator("#menu").tap()
    page.locator("#new-chat").wait_for(state="visible")
    page.locator("#new-chat").tap()
    page.locator(".welcome").wait_for()
    page.locator("#tab-dashboard").tap()
    page.locator("#dashboard .card").first.wait_for()
    assert no_sideways_scroll(page)


HOSTILE = ('<img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3)) [b](data:text/html,<script>alert(4)</script>) '
           '`<b>` **<i onclick=alert(5)>x</i>** [c](https://example.org/"onmouseover="alert(6)) ![d](http://example.org/x.png)\n\n'
           '```html"><script>alert(7)</script>\n</code></pre><script>alert(8)</script>\n```\n\n| <td onload=alert(9)> | b |\n|---|---|\n| <svg/onload=alert(10)> | c |\n')


def test_hostile_text_stays_text(page):
    opened = []
    page.on("dialog", lambda dialog: (opened.append(dialog.message), dialog.dismiss()))
    chunks = [HOSTILE[i:i + 7] for i in range(0, len(HOSTILE), 7)]
    events = "".join("data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": c, "reasoning_content": c}}]}) + "\n\n" for c in chunks)
    events += "data: " + json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + "\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events))
    send(page, HOSTILE)
    page.locator(".message.assistant .tools").wait_for()
    page.locator("details.reasoning summary").click()
    page.reload()  # and from the store, in the list of conversations too
    page.locator("#history .open").first.click()
    page.locator(".message.assistant .tools").wait_for()
    assert opened == []
    for box in (".message.user .body", ".message.assistant .body", "#history"):
        assert page.locator(f"{box} :is(script, img, svg, iframe, i, [onclick], [onerror], [onload], [onmouseover])").count() == 0, box
    links = page.locator(".message a").evaluate_all("all => all.map((a) => [a.protocol, a.rel])")
    assert links and all(protocol in ("http:", "https:") and "noopener" in rel for protocol, rel in links)
    assert page.locator(".message.user .body").inner_text().startswith("<img src=x onerror=alert(1)>")


def test_policy_of_the_page(page, faults):
    response = page.request.get(URL + "/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    with_script = page.evaluate("() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); return window.ran; }")
    assert with_script is None
    page.wait_for_timeout(100)
    assert any(fault.startswith("policy: script-src") for fault in faults), "and so the tests would see it"
    faults.clear()


CONVERSATION = """Here is **what you asked for**, with `code` in the line and a [link](https://example.org).

## A list

1. The first thing, which is long enough to fill more than one line on a telephone and perhaps even on a desk.
2. The second
   - with a part
   - and another

```python
def dive(depth: int) -> float:
    # A line that is rather long, so that the block must scroll sideways instead of the page: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
    return depth * 1.025
```

| model | tokens/s | memory |
| --- | ---: | ---: |
| tiny-v3 | 1,234 | 12 MB |
| DeepSeek-V2-Lite | 21.5 | 10.1 GB |

> A quotation, to see how it stands.
"""


@pytest.mark.skipif(not SCREENSHOTS, reason="CACHALOT_SCREENSHOTS names no folder")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width, height", [(1280, 800), (820, 1180), (390, 844)])
def test_screenshots(watched, theme, width, height):
    page = watched(viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=1).open()
    page.locator("#model-name", has_text=MODEL).wait_for()
    name = f"{SCREENSHOTS}/{theme}-{width}"
    page.screenshot(path=f"{name}-welcome.png")
    send(page, "Write a line of code.")
    finished(page)
    page.screenshot(path=f"{name}-answer.png")
    events = [{"delta": {"reasoning_content": "The user wants to see all kinds of text.\n\nSo I write them."}}, {"delta": {"content": CONVERSATION}}, {"delta": {}, "finish_reason": "stop"}]
    body = "".join("data: " + json.dumps({"choices": [{"index": 0, **e}]}) + "\n\n" for e in events)
    body += "data: " + json.dumps({"choices": [], "usage": {"prompt_tokens": 210, "completion_tokens": 180, "prompt_tokens_details": {"cached_tokens": 160}}}) + "\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))
    send(page, "Show me all kinds of text, please.\nAnd be quick about it.")
    finished(page, 2)
    page.screenshot(path=f"{name}-markdown-end.png")
    page.locator("details.reasoning").last.locator("summary").click()
    page.locator(".message.user").nth(1).evaluate("e => e.scrollIntoView()")
    page.screenshot(path=f"{name}-markdown.png")
    page.locator(".message.user").nth(1).get_by_role("button", name="Edit").click()
    page.screenshot(path=f"{name}-edit.png")
    page.keyboard.press("Escape")
    if width < 760:
        page.locator("#menu").click()
        page.wait_for_timeout(300)
        page.screenshot(path=f"{name}-menu.png")
        page.keyboard.press("Escape")
    page.locator("#settings-button").click()
    page.screenshot(path=f"{name}-settings.png")
    page.keyboard.press("Escape")
    page.unroute("**/v1/chat/completions")
    page.locator("#tab-dashboard").click()
    page.locator("#dashboard .card").first.wait_for()
    for _ in range(3):
        page.request.post(URL + "/v1/completions", headers={"Authorization": "Bearer " + KEY}, data={"prompt": "x" * 300, "max_tokens": 150, "ignore_eos": True, "n": 2})
        page.wait_for_timeout(2200)
    page.screenshot(path=f"{name}-dashboard.png", full_page=False)
    page.locator("#dashboard").evaluate("e => e.scrollTo(0, e.scrollHeight)")
    page.screenshot(path=f"{name}-dashboard-end.png")
