"""The page in a real browser: light and dark, on a phone, and without a single request to anywhere."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib import image

from lockstep.benchmark.bundle import write_bundle
from lockstep.cli.report import main
from tests.unit.bundle_fixtures import make_bundle
from tests.unit.page_fixtures import make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")

OWN_REQUEST = "not an origin"  # the initiator of what the browser asks for by itself, of news about itself
LONG = "a_name_that_is_very_long_and_has_no_place_in_which_a_browser_could_break_it"


def browse(page: Path, *flags: str) -> str:
    """Open a page and return what the browser printed."""
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={page.resolve().parent / 'profile'}",
        *flags,
        page.resolve().as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout


def requests_in(net_log: Path) -> list[str]:
    """Return the URLs that a page has asked for."""
    content = json.loads(net_log.read_text())
    started = content["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    parameters = [event.get("params", {}) for event in content["events"] if event["type"] == started]
    return [each["url"] for each in parameters if each.get("initiator", OWN_REQUEST) != OWN_REQUEST]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page of everything that there is: a run, and bundles of all kinds with long names and many ranks."""
    big = make_bundle(num_envs=[64] * 64, num_nodes=8, device="cuda", run__task=LONG)
    bundles = {
        "big": big,
        LONG: make_bundle(num_envs=[64] * 4, run__task=LONG, run__command=("lockstep", LONG * 4)),
        "start": make_bundle("startup"),
        "training": make_bundle("training"),
    }
    paths = [tmp_path / f"{name}.json" for name in bundles]
    for path, bundle in zip(paths, bundles.values(), strict=True):
        write_bundle(bundle, path)
    run = make_run(tmp_path / "logs" / LONG, host=LONG, platform=LONG * 3)
    assert main([str(run), *map(str, paths), "--output", str(tmp_path / "page.html")]) == 0
    return tmp_path / "page.html"


def test_light_and_dark_without_a_request(page: Path) -> None:
    light, requests = look_at(page, dark=False)
    assert requests == []
    dark, requests = look_at(page, dark=True)
    assert requests == []
    assert light[2, 2].min() > 0.9, "the ground is light"
    assert dark[2, 2].max() < 0.15, "the ground is dark"
    assert light.min() < 0.2, "on it there is dark text"
    assert dark.max() > 0.85, "on it there is light text"
    # Bars have colours of their own in each.
    assert has_color(light, "#2f6fd6") and not has_color(light, "#6d9ff2")
    assert has_color(dark, "#6d9ff2") and not has_color(dark, "#2f6fd6")


def look_at(page: Path, dark: bool) -> tuple[npt.NDArray[np.float32], list[str]]:
    """Return what the page looks like, red, green and blue from 0 to 1, and the URLs that it asked for."""
    picture, net_log = page.with_name("page.png"), page.with_name("net.json")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    browse(page, scheme, f"--screenshot={picture}", f"--log-net-log={net_log}", "--window-size=1000,6000")
    pixels: npt.NDArray[np.float32] = image.imread(picture)[..., :3]
    return pixels, requests_in(net_log)


def has_color(pixels: npt.NDArray[np.float32], color: str) -> bool:
    wanted = [int(color[k : k + 2], 16) for k in (1, 3, 5)]
    return int((np.round(pixels * 255) == wanted).all(axis=-1).sum()) > 500


def test_a_request_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<!doctype html><img src="http://picture.invalid/x.png">')
    browse(tmp_path / "page.html", f"--log-net-log={tmp_path / 'net.json'}", "--dump-dom")
    assert requests_in(tmp_path / "net.json") == ["http://picture.invalid/x.png"]


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Path) -> None:
    wide = page.with_name("wide.html")
    wide.write_text('<!doctype html><meta name=viewport content="width=device-width"><p style="width:500px">wide')
    # The window of a browser without a screen can't be as narrow as a phone, but a frame can.
    frames = "".join(
        f'<iframe src="{each.name}" style="width:360px;height:800px;border:0"></iframe>' for each in (page, wide)
    )
    measure = "[frames[0], frames[1]].map(each => each.document.documentElement.scrollWidth).join()"
    phone = page.with_name("phone.html")
    phone.write_text(f"<!doctype html>{frames}<p><script>onload = () => document.title = {measure}</script>")
    dom = browse(phone, "--allow-file-access-from-files", "--dump-dom", "--window-size=900,900")
    found = re.search("<title>([0-9,]+)</title>", dom)
    assert found is not None
    # Of the second one it is more, so that the first one's is no accident.
    page_width, wide_width = map(int, found[1].split(","))
    assert page_width == 360
    assert wide_width > 360
