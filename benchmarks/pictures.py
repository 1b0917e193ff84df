"""Draw the pictures of docs/simulator.md again: the page of ``view`` at 256 ranks, block sizes, and the comparison.

    python benchmarks/pictures.py [view | block-size | compare ...]     needs chromium for the page

The others come with what they show: placement from the quickstart, planning time from ``benchmarks/planner.py
--curve``, convergence from ``benchmarks/convergence.py``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import image

from megatron_fcp import cli

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "img"
CASE = ["--workload", "longtail", "--cp-size", "256", "--hardware", "h100-ib"]
SECTIONS = {"view-holds": ("header", 1), "view-rounds": ("", 2), "view-timeline": ("", 3)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def view(scratch: Path) -> None:
    """One picture of each section of the page, without the white below it."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser found (looked for {', '.join(BROWSERS)}); Debian: apt-get install chromium")
    cli.main(["view", *CASE, "--output", str(scratch / "plan.html")])
    html = (scratch / "plan.html").read_text(encoding="utf-8")
    for name, (head, section) in SECTIONS.items():
        style = f"section:not(:nth-of-type({section})) {{ display: none }}"
        style += "" if head else " header { display: none } h2 { margin-top: 4px }"
        part, shot = scratch / f"{name}.html", scratch / f"{name}.png"
        part.write_text(html.replace("</style>", f"{style}</style>"), encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={scratch / 'profile'}", "--virtual-time-budget=8000", "--window-size=1300,1600"]
        subprocess.run([*command, f"--screenshot={shot}", part.as_uri()], check=True, capture_output=True, timeout=120)
        pixels = image.imread(shot)
        used = (pixels[..., :3] < 1).any(axis=(1, 2)).nonzero()[0]
        image.imsave(FOLDER / f"{name}.png", pixels[: used[-1] + 12, :, :3], pil_kwargs={"optimize": True})


def block_size(scratch: Path) -> None:
    """Efficiency and traffic against block size."""
    out = ["--output", str(scratch / "fcp.yaml"), "--picture", str(FOLDER / "block-size.png")]
    cli.main(["tune", *CASE, "--layout", "resident", *out])


def compare(scratch: Path) -> None:
    """Efficiency over ranks: minutes."""
    workloads = ["longtail", "weaktail", "bimodal", "uniform-512k"]
    cli.main(["compare", "--workloads", *workloads, "--picture", str(FOLDER / "compare.png")])


PICTURES = {"view": view, "block-size": block_size, "compare": compare}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help=f"of {', '.join(PICTURES)} (default: all)")
    chosen = parser.parse_args().pictures or list(PICTURES)
    if unknown := set(chosen) - set(PICTURES):
        parser.error(f"there is no picture {sorted(unknown)[0]}; choose from {', '.join(PICTURES)}")
    for picture in chosen:
        with tempfile.TemporaryDirectory() as folder:
            PICTURES[picture](Path(folder))
