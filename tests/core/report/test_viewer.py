"""`e2ip view`: what the page holds, what it refuses, and the page in a browser."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from e2ip_plugins.report import viewer


@pytest.fixture
def predictions(write, make_frames):
    """Predictions for six frames of nine atoms, with leverages; one atom of the first frame has no reference."""
    frames, rng = make_frames(count=6), np.random.default_rng(1)
    for atoms in frames:
        atoms.positions *= 2.0
        atoms.arrays["MACE_e2ip_log_sigma0"] += 0.5 * rng.normal(size=(9, 6))
        atoms.arrays["MACE_e2ip_leverage"] = rng.chisquare(3, 9)
    frames[0].arrays["REF_forces"][4] = np.nan
    return write("predictions.xyz", frames)


@pytest.fixture
def page(predictions, succeed):
    """Function that runs `e2ip view` with some options and gives the data of its page."""
    pytest.importorskip("chemiscope", reason="e2ip view needs chemiscope")

    def data(*options):
        succeed("view", predictions, *options)
        text = predictions.with_suffix(".html").read_text(encoding="utf-8")
        return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])

    return data


def matrix(shape, scale):
    """Covariance (3, 3) whose ellipsoid of one standard deviation is the shape."""
    axes = Rotation.from_quat(shape["orientation"]).as_matrix()
    return axes @ np.diag(np.square(shape["semiaxes"]) / scale**2) @ axes.T


@pytest.mark.parametrize("seed", range(4))
def test_ellipsoid_is_the_covariance(seed):
    """Also of a rotated and of a reflected one."""
    rng = np.random.default_rng(seed)
    root, q = 0.1 * rng.normal(size=(3, 3)), np.linalg.qr(rng.normal(size=(3, 3)))[0]
    covariance = root @ root.T
    for turn in (np.eye(3), q, -q):
        turned = turn @ covariance @ turn.T
        assert matrix(viewer.ellipsoid(turned, 3.0), 3.0) == pytest.approx(turned, abs=1e-4)


def test_large_ellipsoids_keep_their_form():
    shape = viewer.ellipsoid(np.diag([1.0, 4.0, 16.0]), 10.0)
    assert sorted(shape["semiaxes"]) == pytest.approx([0.5, 1.0, 2.0])


def test_page_holds_what_was_predicted(page, predictions):
    from e2ip_plugins.predictions.prediction_files import read_predictions

    data, p = page("--scale", "2"), read_predictions(predictions)
    values, covariance = viewer.atom_values(p)
    assert len(data["structures"]) == 6 and len(data["environments"]) == 54
    for name in ("force deviation", "epistemic deviation", "leverage"):
        assert data["properties"][name]["values"] == pytest.approx(values[name], abs=1e-6)
    shapes = data["shapes"]["covariance"]["parameters"]["atom"]
    assert matrix(shapes[7], 2.0) == pytest.approx(covariance[7], abs=1e-4)
    error = data["properties"]["force error"]["values"]
    assert error[4] == "NaN" and error.count("NaN") == 1
    expected = np.sqrt(np.square(p.reference_forces - p.forces)[5].mean())
    assert error[5] == pytest.approx(expected, abs=1e-6)
    assert data["shapes"]["error"]["parameters"]["atom"][4]["vector"] == [0.0, 0.0, 0.0]


def test_page_loads_nothing(page, predictions):
    page()
    text = predictions.with_suffix(".html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|img|link|iframe)[^>]*\s(src|href)=", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    "frames, expected", [("2", [2]), ("-1", [5]), ("::2", [0, 2, 4]), (":2", [0, 1]), ("::-2", [1, 3, 5])]
)
def test_frames(page, frames, expected):
    data = page("--frames", frames)
    assert data["properties"]["frame of the file"]["values"] == expected
    assert data["meta"]["description"].startswith(f"{len(expected)} of 6 frames, {9 * len(expected)} atoms; ")


def test_page_of_a_long_file_has_frames_from_all_of_it(page, predictions, monkeypatch):
    monkeypatch.setattr(viewer, "DEFAULT_FRAMES", 3)
    assert page()["properties"]["frame of the file"]["values"] == [0, 2, 5]


def test_without_references_the_scatter_has_the_leverage(change, page, predictions):
    change(predictions, lambda atoms: atoms.arrays.pop("REF_forces"))
    data = page("--colour", "leverage")
    assert data["settings"]["map"]["y"]["property"] == "leverage" and list(data["shapes"]) == ["covariance"]


def test_calibration_widens_the_ellipsoids(page, write, make_frames, succeed):
    plain = page()
    succeed("calibrate", write("valid.xyz", make_frames(seed=1, inflate=2.0)), "--method", "scale")
    factor = json.loads(Path("calibration.json").read_text())["factor"]["C"]["value"]
    calibrated = page("--calibration", "calibration.json", "--overwrite")
    ratio = np.divide(*(data["properties"]["force deviation"]["values"] for data in (calibrated, plain)))
    assert ratio == pytest.approx(np.sqrt(factor), rel=1e-4) and factor > 2.0


def test_refusals(refuse, change, predictions, monkeypatch):
    pytest.importorskip("chemiscope", reason="e2ip view needs chemiscope")
    assert "--frames 9: none of the 6 frames" in refuse("view", predictions, "--frames", "9")
    assert "--frames one: give the number of a frame or a slice" in refuse("view", predictions, "--frames", "one")
    monkeypatch.setattr(viewer, "MOST_ATOMS", 20)
    assert "6 frames have 54 atoms, and a page holds 20; choose fewer frames, such as --frames ::3" in refuse(
        "view", predictions
    )
    change(predictions, lambda atoms: atoms.arrays.pop("REF_forces"))
    line = refuse("view", predictions, "--colour", "error", "--frames", "0")
    assert "--colour error: predictions.xyz has no reference forces" in line.replace(f"{predictions.parent}/", "")


def test_refuses_a_deterministic_model(refuse, write, make_frames):
    pytest.importorskip("chemiscope", reason="e2ip view needs chemiscope")
    assert "has no uncertainties to show" in refuse("view", write("plain.xyz", make_frames(uncertain=False, count=2)))


def test_says_how_to_install_chemiscope(refuse, predictions, monkeypatch):
    monkeypatch.setitem(sys.modules, "chemiscope", None)
    assert refuse("view", predictions).endswith("install it into this environment: pip install 'e2ip-plugins[view]'")
    assert not predictions.with_suffix(".html").exists()


@pytest.fixture(scope="module")
def browser():
    """A Chromium without a window."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="pages are opened with selenium")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(programs):
        pytest.skip("pages are opened in chromium, with chromedriver; one of them is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--enable-unsafe-swiftshader", "--window-size=900,600"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=programs[1]))
    yield driver
    driver.quit()


#: Where a point of the scatter plot is in the window, and which atom is selected.
POINT = """
const plot = document.querySelector("#map > div").shadowRoot.querySelector(".js-plotly-plot");
const [trace, axes] = [plot.data[0], plot._fullLayout];
const box = plot.getBoundingClientRect();
const at = (axis, value) => axis.c2p(axis.d2c(value));
return [box.left + axes._size.l + at(axes.xaxis, trace.x[arguments[0]]),
        box.top + axes._size.t + at(axes.yaxis, trace.y[arguments[0]])];
"""
SHAPES = """
const plot = document.querySelector("#map > div").shadowRoot.querySelector(".js-plotly-plot");
return plot._fullLayout.shapes.filter((line) => line.visible).map((line) => [line.x0, line.y0, line.x1, line.y1]);
"""
SELECTED = """
const info = document.querySelector("#info > div").shadowRoot;
return [...info.querySelectorAll("input.chsp-info-number")].map((input) => Number(input.value));
"""


def test_page_in_a_browser(browser, page, predictions):
    """The page opens without an error, draws atoms in many colours, and a click on a point selects its atom."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    data = page("--frames", ":4")
    browser.get(predictions.with_suffix(".html").as_uri())
    # Software rendering on a busy machine takes its time.
    wait = WebDriverWait(browser, 120)
    wait.until(lambda b: b.execute_script("return document.body.dataset.state || problem.textContent"))
    assert browser.execute_script("return document.getElementById('problem').textContent") == ""

    # The line error = deviation, until another property is chosen.
    (line,) = browser.execute_script(SHAPES)
    deviations = data["properties"]["force deviation"]["values"]
    assert line == pytest.approx([min(deviations)] * 2 + [max(deviations)] * 2)
    browser.execute_script("visualizer.map._options.y.property.value = 'leverage'")
    assert browser.execute_script(SHAPES) == []
    browser.execute_script("visualizer.map._options.y.property.value = 'force error'")

    image = matplotlib.image.imread(io.BytesIO(browser.find_element("id", "structure").screenshot_as_png))[..., :3]
    colourful = image[np.ptp(image, axis=-1) > 0.2]
    assert len(colourful) > 2000 and len(np.unique(colourful.round(1), axis=0)) > 10

    # The point farthest from the others is under no other one.
    log = np.log([data["properties"][name]["values"][9:] for name in ("force deviation", "force error")]).T
    distances = np.linalg.norm(log[:, None] - log[None], axis=-1) + 100.0 * np.eye(len(log))
    index = 9 + int(distances.min(1).argmax())
    x, y = browser.execute_script(POINT, index)
    assert browser.execute_script(SELECTED) == [0, 0]
    actions = ActionChains(browser)
    actions.w3c_actions.pointer_action.move_to_location(round(x), round(y)).pause(0.5).click()
    actions.perform()
    wait.until(lambda b: b.execute_script(SELECTED) == list(divmod(index, 9)))
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe
