"""The page in a real browser: no errors, nothing fetched, both themes, and no sideways scrolling on a phone."""

import json

import pytest

from fedweave.cli import main
from tests.report.conftest import COMPARED


@pytest.fixture(scope="module")
def page(tiny_run, tmp_path_factory):
    target = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(tiny_run(COMPARED)), "--output", str(target)]) == 0
    return target.as_uri()


def look(browser, page, scheme="light", width=1200):
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page)


def test_no_errors_and_no_network(browser, page):
    for log in ("browser", "performance"):
        browser.get_log(log)  # of pages before this one
    look(browser, page)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {
        m["params"]["request"]["url"].split("#")[0] for m in messages if m["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in asked if not url.startswith("data:")} <= {page}
    assert browser.execute_script("return document.querySelectorAll('figure svg').length") > 15


def test_every_picture_is_drawn_and_none_is_cut(browser, page):
    look(browser, page)
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('figure')].map(f => [f.id,"
        " f.querySelector('.scroll').scrollWidth - f.clientWidth,"
        " f.querySelector('svg').getBoundingClientRect().height])"
    )
    assert all(extra <= 0 and height > 80 for _, extra, height in boxes), boxes


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_never_scrolls_sideways(browser, page, width):
    look(browser, page, width=width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def brightness(colour: str) -> float:
    red, green, blue = (int(x) for x in colour[colour.index("(") + 1 :].rstrip(")").split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(browser, page, scheme):
    look(browser, page, scheme)
    back, ink, label = browser.execute_script(
        "const style = (e, p) => getComputedStyle(e)[p];"
        "return [style(document.body, 'backgroundColor'), style(document.body, 'color'),"
        " style(document.querySelector('figure svg text'), 'fill')]"
    )
    assert (brightness(back) > 0.5) == (scheme == "light")
    assert abs(brightness(ink) - brightness(back)) > 0.6
    assert abs(brightness(label) - brightness(back)) > 0.45, "figures must follow the theme"


def test_choosing_a_client_or_an_expert_fades_the_others(browser, page):
    look(browser, page)
    seen = """
        const form = document.querySelector('.chooser'), [client, expert] = arguments;
        form.client.value = client; form.expert.value = expert; form.dispatchEvent(new Event('change'));
        const opacity = (part) => part.classList.contains('elsewhere');
        return [...document.querySelectorAll('[data-client], [data-expert]')].map(
            (part) => [part.dataset.client ?? null, part.dataset.expert ?? null, opacity(part)]);"""
    assert browser.execute_script("return !document.querySelector('.chooser').hidden")
    everything = browser.execute_script(seen, "", "")
    assert len(everything) > 30 and not any(faded for *_, faded in everything)
    for client, expert, faded in browser.execute_script(seen, "client_1", "0"):
        assert faded == (client not in (None, "client_1") or expert not in (None, "0"))
    browser.execute_script("document.querySelector('.chooser button').click()")
    left = browser.execute_async_script("setTimeout(arguments[0], 50, 0)") or browser.execute_script(
        "return document.querySelectorAll('.elsewhere').length"
    )
    assert left == 0
