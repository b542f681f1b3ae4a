"""The page in a real browser: what is there, sorting, colours, width, and that it asks nothing of anyone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser


def one(browser, selector: str):
    return browser.find_element("css selector", selector)


def texts(browser, selector: str) -> list[str]:
    return [each.text for each in browser.find_elements("css selector", selector)]


def column(browser, table: str, at: int) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(row => row.children[arguments[1]].dataset.v)"
    return browser.execute_script(script, f"#{table} tbody tr", at)


def test_content_is_present(opened):
    assert texts(opened, "h2") == ["Summary", "Tables", "Federations", "Settings and versions"]
    assert texts(opened, "main h3")[:3] == ["Accuracy", "apfl minus the others", "Everything measured"]
    assert "of 3 federations" in one(opened, ".lead").text
    federations = opened.find_elements("css selector", "#federations ~ details")
    assert len(federations) == 3
    expected = [
        "Accuracy against rounds", "Accuracy against computing time", "Accuracy against bytes sent",
        "Cost against accuracy: time", "Cost against accuracy: bytes", "Accuracy of every client",
        "Who has which classes", "What each client gained over the primary stream",
        "What each client gained over going alone (local_ridge)", "What apfl chose from", "How apfl chose gamma",
    ]  # fmt: skip
    for each in federations:
        opened.execute_script("arguments[0].open = true", each)
        assert [heading.text for heading in each.find_elements("css selector", "figure h3")] == expected
        assert all(svg.size["height"] > 100 for svg in each.find_elements("css selector", "figure svg"))
    assert len(opened.find_elements("css selector", "#federation-0-clients tbody tr")) == 8


def test_sorting_by_mouse(opened):
    head = one(opened, "#results thead th:nth-child(2)")
    button = head.find_element("css selector", "button")
    for order in ("descending", "ascending"):
        button.click()
        assert head.get_attribute("aria-sort") == order
        values = [float(v) for v in column(opened, "results", 1) if v]
        assert values == sorted(values, reverse=order == "descending")
        assert len(values) > 2
    assert "Sorted by" in one(opened, "#heard").get_attribute("textContent")


def test_sorting_by_keyboard(opened):
    from selenium.webdriver.common.keys import Keys

    one(opened, "#everything thead th:nth-child(4) button").send_keys(Keys.ENTER)
    values = [float(v) for v in column(opened, "everything", 3)]
    assert values == sorted(values, reverse=True)
    opened.switch_to.active_element.send_keys(Keys.SPACE)
    assert [float(v) for v in column(opened, "everything", 3)] == sorted(values)
    opened.switch_to.active_element.send_keys(Keys.SHIFT, Keys.TAB)  # to the heading on the left
    opened.switch_to.active_element.send_keys(Keys.ENTER)
    assert one(opened, "#everything thead th:nth-child(3)").get_attribute("aria-sort") == "descending"
    assert one(opened, "#everything thead th:nth-child(4)").get_attribute("aria-sort") == "none"


def test_missing_values_stay_at_the_end(opened):
    button = one(opened, "#differences thead th:nth-child(2) button")
    for _ in range(2):
        button.click()
        present = [bool(v) for v in column(opened, "differences", 1)]
        assert present == sorted(present, reverse=True)


def test_methods_sort_as_words(opened):
    one(opened, "#results thead th:first-child button").click()
    names = texts(opened, "#results tbody th")
    assert names == sorted(names)


def test_every_control_is_reached_by_tab_and_shows_it(opened):
    from selenium.webdriver.common.keys import Keys

    reached = []
    for _ in range(12):
        one(opened, "body").send_keys(Keys.TAB) if not reached else opened.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(opened.switch_to.active_element)
    assert reached[0].get_attribute("class") == "skip"
    assert reached[1].get_attribute("id") == "theme"
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert opened.execute_script(outline) != "none"


def background(browser) -> str:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


def contrast(browser) -> float:
    """WCAG contrast of the text of drawings and of the page against what is behind it: the least of them."""
    script = """
      const light = (c) => { const v = c.match(/[0-9.]+/g).slice(0, 3).map(Number).map(x => x / 255)
        .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
      const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const card = light(getComputedStyle(document.querySelector("figure")).backgroundColor);
      const paper = light(getComputedStyle(document.body).backgroundColor);
      const drawn = [...document.querySelectorAll("details[open] figure svg text")].map(t => ratio(light(getComputedStyle(t).fill), card));
      const soft = [...document.querySelectorAll("figcaption")].map(t => ratio(light(getComputedStyle(t).color), card));
      const plain = [...document.querySelectorAll("p, li a, td")].map(t => ratio(light(getComputedStyle(t).color), paper));
      return Math.min(...drawn, ...soft, ...plain);"""  # noqa: E501
    return browser.execute_script(script)


def test_light_and_dark_follow_the_system_and_the_button(opened):
    assert background(opened) == "rgb(255, 255, 255)"
    assert contrast(opened) >= 4.5
    one(opened, "#theme").click()
    assert background(opened) == "rgb(21, 21, 26)"
    assert contrast(opened) >= 4.5
    assert one(opened, "#theme").text == "Light colours"
    one(opened, "#theme").click()
    assert background(opened) == "rgb(255, 255, 255)"
    from selenium.webdriver.support.wait import WebDriverWait

    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    opened.refresh()
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    assert background(opened) == "rgb(21, 21, 26)"
    WebDriverWait(opened, 10).until(lambda browser: one(browser, "#theme").text == "Light colours")
    one(opened, "#theme").click()
    assert background(opened) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_phone_shows_it_without_sideways_scrolling(opened, width):
    screen = {"width": width, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    opened.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    heights = "[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height)"
    smallest = opened.execute_script(f"return Math.min(...{heights})")
    assert smallest >= 8  # px, the height of a line of the smallest label


def test_links_open_their_federation(opened):
    last = opened.find_elements("css selector", "#federations ~ details")[-1]
    link = one(opened, f"a[href='#{last.get_attribute('id')}']")
    assert last.get_attribute("open") is None
    for _ in range(2):  # the second time the address does not change
        link.click()
        assert last.get_attribute("open") is not None
        opened.execute_script("arguments[0].open = false", last)


def test_an_address_with_a_federation_opens_it(opened):
    from selenium.webdriver.support.wait import WebDriverWait

    last = opened.find_elements("css selector", "#federations ~ details")[-1]
    opened.execute_script("location.hash = arguments[0]", last.get_attribute("id"))
    WebDriverWait(opened, 10).until(lambda _: last.get_attribute("open") is not None)  # the event comes when it comes
    opened.refresh()
    WebDriverWait(opened, 10).until(lambda page: one(page, "#federations ~ details:last-of-type").get_attribute("open"))


def test_nothing_is_said_on_the_console_and_no_request_leaves_the_page(opened):
    one(opened, "#results thead th:nth-child(2) button").click()
    one(opened, "#theme").click()
    assert opened.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", "about:"))] == [opened.current_url.split("#")[0]]


def test_the_policy_stops_a_request_and_a_foreign_script(opened):
    """The test above cannot pass by looking the wrong way: what the page must not do is tried and refused."""
    opened.execute_script("const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i)")
    opened.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.foreign = 1'; document.body.append(s)"
    )
    assert opened.execute_script("return window.foreign") is None
    said = [entry["message"] for entry in opened.get_log("browser")]
    assert any("img-src" in message for message in said)
    assert any("script-src" in message for message in said)


def test_screen_readers_find_names(opened):
    nameless = len(
        opened.find_elements("css selector", "svg:not([role=img]), svg:not([aria-label]), svg[aria-label='']")
    )
    assert nameless == 0
    assert one(opened, "html").get_attribute("lang") == "en"
    heads = opened.find_elements("css selector", "table th:not([scope])")
    assert heads == []
    tree = opened.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {node.get("role", {}).get("value") for node in tree}
    assert {"main", "navigation", "banner", "table", "columnheader", "rowheader", "status"} <= roles
    buttons = [node for node in tree if node.get("role", {}).get("value") == "button"]
    assert buttons
    assert all(node["name"]["value"] for node in buttons)


def test_the_pages_size_is_reasonable(address):
    assert Path(address.removeprefix("file://")).stat().st_size < 5e6
