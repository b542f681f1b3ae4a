"""A headless browser with a report page in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest

from apfl.data.federation import Dataset
from apfl.experiments.record import Record
from apfl.experiments.run import Protocol, federate, run
from apfl.methods import load_method
from apfl.report.page import page
from tests.report.records import a_study

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,1000",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'apfl[dev]'")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        started = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
        try:
            yield started
        finally:
            started.quit()


@pytest.fixture(scope="module")
def real_records() -> list[Record]:
    """Real runs on the digits, one seed."""
    from apfl.data import load_dataset

    dataset: Dataset = load_dataset("digits")
    protocol = Protocol(n_clients=8, alpha=0.3)
    federation = federate(dataset, protocol, 0)
    settings = {"apfl": {"d_primary": 128, "d_refinement": 128}, "local_ridge": {}, "fedavg": {"n_rounds": 5}}
    return [run(name, load_method(name, **own), federation, dataset, protocol, 0)[0] for name, own in settings.items()]


@pytest.fixture(scope="module")
def address(real_records, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page([*a_study(), *real_records]), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(browser, address):
    """The page, freshly loaded on a wide screen, with the logs emptied before."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(address)
    return browser
