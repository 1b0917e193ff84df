"""The page of ``megatron-fcp view`` in a real headless browser: it draws, steps, zooms, tells what the mouse is on.

The browser runs the page with a script at its end that acts like a user and leaves what it saw in the document.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from megatron_fcp.plan import Plan
from megatron_fcp.simulate import draw_lengths, load_hardware
from megatron_fcp.simulate.case import Case
from megatron_fcp.simulate.peers.fcp import fcp_plan
from megatron_fcp.simulate.view import page, page_data

pytestmark = pytest.mark.plan

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

USER = """
const seen = {}, $$ = (id) => document.getElementById(id);
function hover(id, x, y) {
  const box = $$(id).getBoundingClientRect();
  $$(id).dispatchEvent(new MouseEvent("mousemove", { clientX: box.left + x, clientY: box.top + y, bubbles: true }));
  return $$("tip").style.display === "block" ? $$("tip").textContent : "";
}
function inked(id) {
  const c = $$(id), pixels = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3]) colours.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
  return colours.size;
}
seen.title = $$("title").textContent;
seen.colours = ["holds", "matrix", "gantt", "detail"].map(inked);
seen.block = hover("holds", LEFT + 2, 18 + ROW * 0.5);
const m = 0;
$$("round").value = M.round[m]; $$("round").dispatchEvent(new Event("input"));
seen.round = $$("roundtext").textContent;
seen.message = hover("matrix", LEFT + (M.dst[m] + 0.5) * MATRIX, SIDE + (M.src[m] + 0.5) * MATRIX);
$$("next").click();
seen.next = $$("roundtext").textContent;
seen.kernel = hover("gantt", LEFT + 1, GTOP + 0.5 * HEIGHT / N);
const whole = view.t1 - view.t0, box = $$("gantt").getBoundingClientRect();
$$("gantt").dispatchEvent(new WheelEvent("wheel", { deltaY: -1, clientX: box.left + 600, clientY: box.top + 100 }));
seen.zoomed = view.t1 - view.t0 < whole;
$$("gantt").dispatchEvent(new MouseEvent("dblclick"));
seen.reset = view.t1 - view.t0 === whole;
const y = box.top + GTOP + 2.5 * HEIGHT / N;
$$("gantt").dispatchEvent(new MouseEvent("click", { clientX: box.left + 600, clientY: y }));
seen.picked = $$("detailtitle").textContent;
$$("passes").children[1].click();
seen.backward = D.passes[pass].name;
seen.scroll = document.documentElement.scrollWidth <= window.innerWidth;
const report = document.createElement("pre");
report.id = "seen"; report.textContent = JSON.stringify(seen); document.body.append(report);
"""


@pytest.fixture(scope="module")
def browser() -> str:
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no browser found (looked for {', '.join(BROWSERS)}); Debian: apt-get install chromium")


def planned(cp_size: int, tokens: int) -> tuple[Case, Plan]:
    lengths = draw_lengths("longtail", num_tokens=cp_size * tokens, seed=1)
    case = Case(lengths, cp_size, tokens, load_hardware("h100-ib"))
    return case, fcp_plan(case)


def use(browser: str, html: str, folder: Path) -> dict[str, object]:
    path = folder / "page.html"
    path.write_text(html.replace("</body>", f"<script>{USER}</script></body>"), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, "--window-size=1300,1000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body, done.stdout[:500]
    assert "data-error" not in body.group(), body.group()
    assert 'data-ready="1"' in body.group()
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen, "the script did not come to its end"
    return json.loads(unescape(seen.group(1)))


@pytest.mark.parametrize(("cp_size", "tokens"), [(16, 8192), (256, 4096)])
def test_the_page_in_a_browser(browser: str, tmp_path: Path, cp_size: int, tokens: int) -> None:
    case, plan = planned(cp_size, tokens)
    seen = use(browser, page(plan, case), tmp_path)
    assert seen["title"] == f"FCP plan: {cp_size} ranks, {tokens:,} tokens each, h100-ib"
    assert min(seen["colours"]) >= 5  # type: ignore[call-overload]
    first = int(plan.placement.blocks_of(0)[0])
    assert str(seen["block"]).startswith(f"block {first} on rank 0 (stream tokens {first * plan.table.block_size:,} to")
    assert "document " in str(seen["block"])
    m = plan.schedule.messages
    src, dst, blocks = int(m.src[0]), int(m.dst[0]), m.block[m.ptr[0] : m.ptr[1]]
    assert str(seen["message"]).startswith(f"rank {src} \u2192 rank {dst}: ")
    assert f"this round: blocks {blocks[0]}" in str(seen["message"])
    bound = page_data(plan, case)["rounds_lower_bound"]
    assert str(seen["round"]).startswith(f"round 1 of {plan.schedule.num_rounds} (lower bound {bound})")
    assert str(seen["next"]).startswith("round 2 of")
    assert str(seen["kernel"]).startswith("rank 0, local attention")
    assert seen["zoomed"]
    assert seen["reset"]
    assert str(seen["picked"]).startswith("Rank 2: ")
    assert seen["backward"] == "backward"
    assert seen["scroll"], "the page is wider than a 1300 pixel window"


def test_the_page_needs_nothing_else() -> None:
    case, plan = planned(4, 4096)
    html = page(plan, case)
    assert not re.search(r'(src|href)\s*=\s*["\']', html)
    assert "http" not in html
    assert "/*DATA*/" not in html


def test_data_is_complete() -> None:
    case, plan = planned(8, 4096)
    data = page_data(plan, case)
    assert sum(data["fragment_length"]) == case.lengths.sum()
    for p in data["passes"]:
        assert max(p["end"]) == pytest.approx(p["makespan"], abs=0.11)
        assert np.isfinite(p["start"]).all()


def test_a_plan_without_messages(browser: str, tmp_path: Path) -> None:
    case = Case(np.full(8, 2048), 4, 4096, load_hardware("flat5920"))
    plan = fcp_plan(case)
    assert plan.schedule.num_rounds == 0
    path = tmp_path / "page.html"
    path.write_text(page(plan, case), encoding="utf-8")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'p'}", "--dump-dom",
         path.as_uri()], capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body
    assert "data-error" not in body.group()
    assert "nothing moves" in done.stdout
