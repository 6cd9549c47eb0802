"""The report: its figures' numbers against the store's, its specs against Vega-Lite's schema, its page in a browser."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command import geosweep
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait
from study_store import ALL_EVALUATORS, make_study_store

from orchestrator.beside import Beside
from orchestrator.query import Store
from orchestrator.report.effects import counterexamples, matched_sets
from orchestrator.report.page import VEGA_LITE, Report, find_figure, image, make_report, page_of
from orchestrator.report.vega import kept_script, vega_script
from orchestrator.store.layout import create_or_open
from orchestrator.study import Study, read_study
from trainers.errors import InputError

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDTHS = {"desktop": 1280, "phone": 390}
# CI keeps what lies here: .ci/run names the folder.
ARTEFACTS = Path(os.environ.get("GEOSWEEP_ARTEFACTS", Path(__file__).parent.parent / ".cache" / "screenshots"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "store"
    make_study_store(folder, checkpoints=3, evaluators=ALL_EVALUATORS, diverged=(7,))
    return folder


@pytest.fixture(scope="module")
def report(root: Path) -> Report:
    with Store(root) as store:
        return make_report(store, root, "study")


@pytest.fixture(scope="module")
def page(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_of(report, vega_script(VEGA_LITE)), encoding="utf-8")
    return path


def test_the_script_of_the_page_is_made_once_and_where_it_cannot_be_kept_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEOSWEEP_CACHE", str(tmp_path / "cache"))
    assert kept_script(VEGA_LITE) is None
    script = vega_script(VEGA_LITE)
    assert "window.vegaEmbed" in script
    assert kept_script(VEGA_LITE) == script
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text("kept", encoding="utf-8")
    assert vega_script(VEGA_LITE) == "kept"
    monkeypatch.setenv("GEOSWEEP_CACHE", "/proc/nowhere")
    with Beside("orchestrator.report.vega") as making:
        making.ask(VEGA_LITE)
        assert making.answer() == script
    assert kept_script(VEGA_LITE) is None
    assert vega_script(VEGA_LITE) == script


def test_a_process_beside_the_report_that_dies_is_an_error_and_one_that_is_not_asked_ends() -> None:
    with Beside("orchestrator.report.nothing") as nobody:
        nobody.ask("anything")
        with pytest.raises(RuntimeError, match=r"report.nothing ended with 1 and no answer"):
            nobody.answer()
    with Beside("orchestrator.report.vega") as waiting:
        process = waiting._process
    assert process.returncode == -9


# --- figures --------------------------------------------------------------------------------------------------------


def test_every_figure_is_drawn_has_a_caption_with_its_n_and_a_valid_spec(report: Report) -> None:
    for figure in report.figures:
        assert not figure.missing, (figure.key, figure.missing)
        assert re.search(r"n = \d+", figure.caption), figure.key
        assert figure.rows, figure.key
        for panel in figure.panels:
            panel.to_dict(validate=True)
    assert len({figure.key for figure in report.figures}) == len(report.figures)


def test_the_sql_of_every_figure_is_answered_and_holds_the_trials_of_the_figure(root: Path, report: Report) -> None:
    with Store(root) as store:
        for figure in report.figures:
            answer = store.sql(figure.sql).pandas()
            trials = {row["trial"] for row in figure.rows if row.get("trial")}
            assert trials <= set(answer["trial"]), figure.key


def test_rank_and_loss_shows_the_stored_numbers(root: Path, report: Report) -> None:
    (figure,) = [figure for figure in report.figures if figure.key == "rank-and-loss"]
    with Store(root) as store:
        stored = store.sql(figure.sql).pandas().set_index("trial").sort_index()
    shown = pd.DataFrame(figure.rows).set_index("trial").sort_index()
    for name in ("effective_rank", "effective_rank_share", "loss_docs", "token_budget"):
        pd.testing.assert_series_equal(shown[name], stored[name])


def test_the_page_holds_the_lint_of_the_stored_sweep_file(report: Report) -> None:
    (content,) = [
        part.content for section in report.sections for part in section.tables if part.title == "Lint of the design"
    ]
    assert any("attention" in what and "family" in what for _, what, _ in content.rows)


def test_the_curves_over_tokens_show_every_checkpoint_after_the_start(root: Path, report: Report) -> None:
    (figure,) = [figure for figure in report.figures if figure.key == "saturation"]
    with Store(root) as store:
        count = store.sql("select count(*) as n from results where tokens > 0 and effective_rank is not null").rows()
    assert len(figure.rows) == count[0]["n"]


def _study(cells: pd.DataFrame, axes: tuple[str, ...]) -> Study:
    cells = cells.assign(scale="4M", trial=[f"t{place}" for place in range(len(cells))])
    return Study(sweep="s", revision="r", question="", cells=cells, axes=axes, measures={})


def test_only_cells_that_differ_in_the_axis_alone_are_compared() -> None:
    # Batch 8 and 16 meet at decay 0.1 only; the cell with decay 0.5 has no partner.
    cells = pd.DataFrame(
        {"batch_size": [8, 16, 16], "weight_decay": [0.1, 0.1, 0.5], "effective_rank": [10.0, 14.0, 99.0]}
    )
    sets = matched_sets(_study(cells, ("batch_size", "weight_decay")), "batch_size", "effective_rank")
    assert sets["change"].tolist() == [-2.0, 2.0]


def test_seeds_are_averaged_within_a_level() -> None:
    cells = pd.DataFrame({"batch_size": [8, 8, 16], "seed": [0, 1, 0], "effective_rank": [10.0, 12.0, 15.0]})
    sets = matched_sets(_study(cells, ("batch_size", "seed")), "batch_size", "effective_rank")
    assert sets["value"].tolist() == [11.0, 15.0]


def test_counter_examples_are_high_rank_with_poor_loss_and_low_rank_with_good_loss(root: Path) -> None:
    with Store(root) as store:
        study = read_study(store, root, "study")
    found = counterexamples(study)
    named = found[found["example"].notna()]
    assert len(named) > 0
    for cell in named.to_dict("records"):
        peers = found[(found["scale"] == cell["scale"]) & (found["token_budget"] == cell["token_budget"])]
        above = cell["example"] == "high rank, poor loss"
        for metric in ("effective_rank", "loss_docs"):
            middle = peers[metric].median()
            assert cell[metric] >= middle if above else cell[metric] <= middle


# --- stores with little in them -------------------------------------------------------------------------------------


def test_a_store_without_the_later_evaluations_says_so_in_the_page(tmp_path: Path) -> None:
    make_study_store(tmp_path / "s", scales=("4M", "14M"), batches=(32,), checkpoints=2)
    done = geosweep("report", "study", "--store", tmp_path / "s", "-o", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "r.html").read_text()
    for section in ("fine-tuning", "forgetting", "quantisation"):
        assert re.search(rf'id="{section}">\s*<h3>[^<]*</h3>\s*<p class="missing">not evaluated in this store', page)
    assert "geometry of H</td><td>not evaluated in this store" in page


@pytest.mark.parametrize(("finished", "diverged"), [(0, ()), (1, ()), (3, ()), (3, (0, 1, 2))])
def test_a_sweep_with_little_or_nothing_finished_gets_a_page_that_says_what_is_missing(
    tmp_path: Path, finished: int, diverged: tuple[int, ...]
) -> None:
    root = tmp_path / "s"
    make_study_store(root, scales=("4M",), batches=(32,), checkpoints=2, finished=finished, diverged=diverged)
    with Store(root) as store:
        report = make_report(store, root, "study")
    text = page_of(report, script="")
    missing = [figure for figure in report.figures if figure.missing]
    assert missing
    assert all(figure.missing in text.replace("&#39;", "'") for figure in missing)
    assert all(f"{count} {state}" in text for state, count in report.found.counts.states.items())
    if diverged:
        assert "the loss is nan" in text


def test_an_empty_store_and_a_folder_that_is_none_are_named(tmp_path: Path) -> None:
    create_or_open(tmp_path / "empty")
    for store, words in (("empty", "has no sweep 'study'"), ("none", "no store at")):
        done = geosweep("report", "study", "--store", tmp_path / store, "-o", tmp_path / "r.html")
        assert (done.returncode, words in done.stderr, "Traceback" in done.stderr) == (2, True, False)
        assert not (tmp_path / "r.html").exists()


IMAGES = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<svg"}


@pytest.mark.parametrize("form", IMAGES)
def test_a_single_figure_becomes_an_image(report: Report, form: Any) -> None:
    for key in ("rank-and-loss", "saturation", "associations-raw"):
        data = image(find_figure(report, key), form)
        assert data.startswith(IMAGES[form])
        assert len(data) > 5000


def test_a_single_figure_is_written_by_the_command(root: Path, tmp_path: Path) -> None:
    command = ("report", "study", "--figure", "rank-and-loss", "--format", "png", "--store", root)
    done = geosweep(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank-and-loss.png").read_bytes().startswith(IMAGES["png"])


def test_an_unknown_figure_gets_the_nearest_key(report: Report) -> None:
    with pytest.raises(InputError, match="no figure 'rank-loss'; nearest is 'rank-and-loss'"):
        find_figure(report, "rank-loss")


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Headless Chromium; skipped where there is none (Debian: chromium, chromium-driver)."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium with chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    quiet = "--disable-background-networking --disable-component-update --disable-sync --disable-quic --no-first-run"
    place = f"--user-data-dir={tmp_path_factory.mktemp('browser')} --window-size=1280,900"
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", *quiet.split(), *place.split()):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER)) as driver:
        yield driver


@pytest.mark.parametrize("device", WIDTHS)
def test_the_page_draws_every_figure_asks_nothing_of_the_network_and_shows_tooltips(
    device: str, browser: webdriver.Chrome, report: Report, page: Path
) -> None:
    screen = {"width": WIDTHS[device], "height": 844, "deviceScaleFactor": 1, "mobile": device == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(page.as_uri())
    WebDriverWait(browser, 50).until(lambda driver: driver.execute_script("return window.drawn"))
    assert browser.execute_script("return window.drawn") is True
    assert browser.get_log("browser") == []
    assert requests(browser) == {page.as_uri()}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= WIDTHS[device]
    for figure in report.figures:
        for place in range(len(figure.panels)):
            marks = browser.execute_script(
                "const svg = document.querySelector('#' + arguments[0] + ' svg');"
                "return svg ? svg.querySelectorAll('.mark-symbol path, .mark-rect path, .mark-line path').length : -1",
                f"{figure.key}-{place}",
            )
            assert marks > 1, (figure.key, place)
    assert hovered_trial(browser, "rank-and-loss-0") in set(report.study.cells["trial"])
    save_screenshot(browser, f"report-{device}.png", WIDTHS[device])
    if device == "desktop":
        save_print(browser, "report.pdf")


def requests(browser: webdriver.Chrome) -> set[str]:
    """What the page's own document asked for (the browser's start page asks for parts of itself)."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    asked = {params["request"]["url"] for params in sent if params["documentURL"].startswith("file:")}
    return {url for url in asked if not url.startswith("data:")}


def hovered_trial(browser: webdriver.Chrome, panel: str) -> str:
    """The trial that the tooltip of a mark names."""
    mark = browser.find_element(By.CSS_SELECTOR, f"#{panel} .mark-symbol.role-mark path")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", mark)
    ActionChains(browser).move_to_element(mark).perform()
    tooltip = WebDriverWait(browser, 10).until(
        lambda driver: driver.find_element(By.CSS_SELECTOR, "#vg-tooltip-element.visible")
    )
    return str(tooltip.find_element(By.CSS_SELECTOR, "td.value").text)


def save_print(browser: webdriver.Chrome, name: str) -> None:
    """The page as it is printed on A4."""
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True})
    data = base64.b64decode(printed["data"])
    assert data.startswith(b"%PDF")
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    (ARTEFACTS / name).write_bytes(data)


def save_screenshot(browser: webdriver.Chrome, name: str, width: int) -> None:
    height = browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    (ARTEFACTS / name).write_bytes(base64.b64decode(taken["data"]))
