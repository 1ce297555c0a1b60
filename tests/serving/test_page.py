"""The page at /, in a real browser."""

import httpx
import pytest

from tests.helpers import PROMPTS
from tests.serving.conftest import running


def wait(browser, condition, seconds: float = 120):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, poll_frequency=0.05).until(lambda _: condition())


def find(browser, name: str):
    return browser.find_element("id", name)


def ask(browser, prompt: str, fresh: bool = True) -> str:
    """Type, send, wait for the closing line; the answer. ``fresh``: in a new chat."""
    if fresh and find(browser, "fresh").is_enabled():
        find(browser, "fresh").click()
    find(browser, "prompt").clear()
    find(browser, "prompt").send_keys(prompt)
    find(browser, "send").click()
    wait(browser, lambda: " tokens · " in find(browser, "status").text)
    return find(browser, "answer").text


def test_a_prompt_its_answer_its_expert_and_the_bars(browser, server, twin):
    browser.get(server.url)
    wait(browser, lambda: find(browser, "model").find_elements("tag name", "option"))
    assert f"{twin.mixture.layout.experts} experts" in find(browser, "about").text
    assert not find(browser, "key").is_displayed()
    find(browser, "tokens").clear()
    find(browser, "tokens").send_keys("12")
    for prompt in PROMPTS:
        expected = twin.generate([prompt], max_new_tokens=12)[0]
        shown = ask(browser, prompt)
        assert shown.split() == expected.text.split()  # a browser folds blanks at the edges
        assert find(browser, "status").text.startswith(f"expert {expected.expert} ")
        bars = browser.find_elements("css selector", "#weights .bar")
        widths = [float(b.get_attribute("style").split("width:")[1].split("%")[0]) for b in bars]
        assert widths == pytest.approx([100 * w for w in expected.weights], abs=0.1)
        won = browser.find_elements("css selector", "#weights .won")[0].text
        assert won == f"expert {expected.expert}"


def test_a_chat_of_several_turns_under_a_system_prompt(browser, server, twin):
    browser.get(server.url)
    wait(browser, lambda: find(browser, "model").find_elements("tag name", "option"))
    find(browser, "tokens").clear()
    find(browser, "tokens").send_keys("5")
    find(browser, "leading").find_element("tag name", "summary").click()
    find(browser, "system").send_keys("Fix it.")
    messages = [{"role": "system", "content": "Fix it."}]
    for turn, prompt in enumerate(PROMPTS[:2]):
        messages.append({"role": "user", "content": prompt})
        expected = twin.generate([tuple(messages)], max_new_tokens=5)[0]
        assert ask(browser, prompt, fresh=False).split() == expected.text.split()
        assert len(browser.find_elements("css selector", "#turns .asked")) == turn
        messages.append({"role": "assistant", "content": expected.text})
    assert find(browser, "prompt").get_attribute("value") == ""
    find(browser, "fresh").click()
    assert not browser.find_elements("css selector", "#turns .asked") and find(browser, "answer").text == ""
    messages = [{"role": "system", "content": "Fix it."}, {"role": "user", "content": PROMPTS[1]}]
    assert ask(browser, PROMPTS[1]).split() == twin.generate([tuple(messages)], max_new_tokens=5)[0].text.split()


def test_the_page_says_what_the_experts_are(browser, model):
    experts = [
        {"name": "", "share": 0.75, "words": ["fix", "grammar"], "typical": ["Fix the grammar: <b>she go</b>"]},
        *({"name": "Sums", "share": 0.25, "words": ["多少"]} for _ in range(model.mixture.layout.experts - 1)),
    ]
    with running(model, told={"schema": 1, "source": "", "round": 1, "experts": experts}) as server:
        browser.get(server.url)
        wait(browser, lambda: find(browser, "model").find_elements("tag name", "option"))
        options = [o.text for o in find(browser, "model").find_elements("tag name", "option")]
        assert options[1] == "expert 0 (fix, grammar)" and options[2] == "expert 1, Sums (多少)"
        find(browser, "experts").find_element("tag name", "summary").click()
        assert "expert 0 · 75 % of the prompts" in find(browser, "cards").text
        browser.find_element("css selector", "#cards .try").click()
        assert find(browser, "prompt").get_attribute("value") == "Fix the grammar: <b>she go</b>"
        find(browser, "model").send_keys("expert 1")
        ask(browser, PROMPTS[0])
        assert find(browser, "status").text.startswith("expert 1, Sums · ")


@pytest.mark.parametrize("width", [320, 1200])
def test_nothing_scrolls_sideways(browser, server, width):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get(server.url)
        wait(browser, lambda: find(browser, "model").find_elements("tag name", "option"))
        ask(browser, "W" * 60)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_forced_expert_and_an_error(browser, server):
    browser.get(server.url)
    wait(browser, lambda: find(browser, "model").find_elements("tag name", "option"))
    find(browser, "model").send_keys("expert 1")
    ask(browser, PROMPTS[0])
    assert find(browser, "status").text.startswith("expert 1 ")
    assert "forced" in find(browser, "weights").text
    find(browser, "prompt").send_keys("word " * 500)
    find(browser, "send").click()
    wait(browser, lambda: "longer than 464 tokens" in find(browser, "answer").text)
    assert find(browser, "send").is_enabled()


def test_a_key_is_asked_for_when_the_server_has_one(browser, model):
    with running(model, key="secret") as server:
        browser.get(server.url)
        wait(browser, lambda: find(browser, "key").is_displayed())
        find(browser, "key").send_keys("secret")
        find(browser, "prompt").send_keys(PROMPTS[0])
        find(browser, "send").click()
        wait(browser, lambda: " tokens · " in find(browser, "status").text)


def test_the_page_asks_nobody_else_and_has_both_colours(browser, server):
    import json

    browser.get_log("performance")
    browser.get(server.url)
    wait(browser, lambda: find(browser, "model").find_elements("tag name", "option"))
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert urls and all(url.startswith((server.url, "data:")) for url in urls)
    colours = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        colours.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [e for e in severe if "401" not in e["message"] and "400" not in e["message"]]


def test_the_page_is_self_contained(server):
    text = httpx.get(server.url).text
    assert "http://" not in text and "https://" not in text and "src=" not in text
