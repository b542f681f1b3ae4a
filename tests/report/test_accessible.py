"""The report page for everyone: axe-core finds nothing, on a desk, on a phone, in the dark and on paper."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
AXE = "4.14.0"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 3, "mobile": True}


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    """axe-core's one file: that of APFL_AXE, or npm's."""
    if given := os.environ.get("APFL_AXE"):
        return Path(given).read_text(encoding="utf-8")
    if shutil.which("npm") is None:
        pytest.skip("needs axe-core: install npm, or set APFL_AXE to the path of axe.min.js")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run(["npm", "pack", f"axe-core@{AXE}"], cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"needs axe-core, which npm could not get: {done.stderr.strip()[-200:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()


def violations(browser, axe: str) -> list[str]:
    """What axe-core finds wrong with the page as it is shown now: the rule, and where."""
    browser.execute_script(axe)
    script = """
        const done = arguments[arguments.length - 1];
        axe.run(document, {runOnly: arguments[0]}).then(done,
            error => done({violations: [{id: String(error), nodes: []}]}));
    """
    browser.set_script_timeout(120)
    found = browser.execute_async_script(script, RULES)["violations"]
    return [f"{each['id']}: {[node['html'][:150] for node in each['nodes'][:3]]}" for each in found]


def open_all(browser) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(each => { each.open = true })")


def test_on_a_desk(opened, axe):
    open_all(opened)
    assert violations(opened, axe) == []


def test_on_a_phone(opened, axe):
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    open_all(opened)
    assert violations(opened, axe) == []
    wide = opened.execute_script("return document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert not wide, "the page itself does not scroll sideways; its tables do"
    heights = "return [...document.querySelectorAll('button, summary')].map(each => each.offsetHeight)"
    assert min(height for height in opened.execute_script(heights) if height) >= 24, (
        "what is tapped is at least 24 pixels high (WCAG 2.2)"
    )


def test_in_the_dark(opened, axe):
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    open_all(opened)
    assert violations(opened, axe) == []


def test_on_paper(opened, axe):
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert violations(opened, axe) == []
    assert opened.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    opened.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert opened.execute_script("return document.querySelectorAll('details:not([open])').length") == 0
    opened.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert opened.execute_script("return document.querySelectorAll('details:not([open])').length") > 0
    assert not opened.find_element("css selector", "nav").is_displayed()


def test_a_printed_page_has_every_federation(opened):
    printed = base64.b64decode(opened.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") + printed.count(b"/Type/Page") > 3


def test_the_look_for_violations_sees_them(opened, axe):
    opened.execute_script("document.querySelector('#theme').textContent = ''")
    opened.execute_script("document.querySelector('.lead').style.color = '#ddd'")
    found = " ".join(violations(opened, axe))
    assert "button-name" in found
    assert "color-contrast" in found
