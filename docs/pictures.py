"""Make the pictures of the pages in docs/img: `make pictures`, from the stored runs in results/ and, if there, runs/.

SVG files of the report's first figure and of the dial, for light and dark pages, and screenshots of the report and of
a diagnosis, for which a Chromium must be installed.
"""

from __future__ import annotations

import base64
import io
import re
import sys
import tempfile
from pathlib import Path

from PIL import Image

from mvngrad.diagnostics import diagnose, read_records
from mvngrad_lab import report, store
from mvngrad_lab.report import load_records, page
from mvngrad_lab.report.figures.style import DARK, LIGHT
from mvngrad_lab.report.findings import draw_lead
from mvngrad_lab.report.verdicts import find_latest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "img"
MONITORED = "cifar100-start-monitor.jsonl"
"""The Monitor's record of MVN-Grad at the start of a CIFAR-100 training, in results."""
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Noto Sans',Arial,sans-serif"


def make_figure(svg: str, colors: dict[str, str]) -> str:
    """A figure of the report as a file of its own, in these colours."""
    plain = re.sub(r"var\(--([a-z]+),[^)]*\)", lambda match: colors[match[1]], svg)
    return plain.replace("<svg ", f'<svg width="480" font-family="{FONT}" ', 1) + "\n"


def take_screenshot(html: Path, target: Path) -> None:
    """The first screen at 1280 pixels, in few colours."""
    sys.path.insert(0, str(ROOT / "lab" / "tests"))
    from browser import Browser, Page

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(folder) as browser:
        shown = Page(browser, html, width=1280)
        clip = {"x": 0, "y": 0, "width": 1280, "height": 800, "scale": 1}
        data = shown.call("Page.captureScreenshot", clip=clip)["data"]
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    image.quantize(128, method=Image.Quantize.MAXCOVERAGE).save(target, optimize=True)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    folders = [folder for folder in (ROOT / "runs", ROOT / "results") if folder.is_dir()]
    records = find_latest(load_records(*folders, warn=store.print_warning))
    lead, (dial, *_) = draw_lead(records), page.draw(records["floor-dial"])
    assert lead is not None
    panels = dict(zip(("floor", "dial-images", "dial-language"), (*lead.panels, *dial.panels), strict=True))
    for theme, colors in (("light", LIGHT | {"paper": "#ffffff"}), ("dark", DARK | {"paper": "#0d1117"})):  # GitHub's
        for name, panel in panels.items():
            (FOLDER / f"{name}-{theme}.svg").write_text(make_figure(panel.svg, colors), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        take_screenshot(report.build(*folders, out=Path(folder) / "report.html"), FOLDER / "report.png")
        monitored = read_records(ROOT / "results" / MONITORED)
        diagnosis = Path(folder) / "diagnosis.html"
        diagnosis.write_text(page.render_diagnosis(monitored, diagnose(monitored), source="monitor.jsonl"), "utf-8")
        take_screenshot(diagnosis, FOLDER / "diagnosis.png")
    for path in sorted(FOLDER.iterdir()):
        print(path.relative_to(ROOT), f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
