"""The documentation as a site: built without a warning, every page looked at in a real browser; its examples run."""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from browser import Browser, Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WIDTHS = (390, 1440)
PROBLEMS = """
(() => {
    const article = document.querySelector("article"), width = document.documentElement.clientWidth, found = [];
    if (document.documentElement.scrollWidth > width) found.push("the page is wider than the window");
    if (!article) return found;
    const scrolls = (element) => /auto|scroll/.test(getComputedStyle(element).overflowX);
    for (const pre of article.querySelectorAll("pre"))
        if (pre.scrollWidth > pre.clientWidth + 1) found.push("clipped code: " + pre.textContent.slice(0, 40));
    for (const element of article.querySelectorAll("p, li, td, th, dt, dd, h1, h2, h3, pre, math, svg, figcaption")) {
        let above = element;
        while (above !== article && !scrolls(above)) above = above.parentElement;
        const right = element.getBoundingClientRect().right;
        if (above === article && right > width + 1) found.push("clipped: " + element.textContent.slice(0, 40));
    }
    const blocks = article.querySelectorAll("div.highlight pre").length;
    const buttons = article.querySelectorAll("button.copybtn").length;
    if (blocks !== buttons) found.push(`${blocks} blocks of code and ${buttons} buttons to copy`);
    for (const link of document.querySelectorAll("a[href^='#']")) {
        const target = decodeURIComponent(link.getAttribute("href").slice(1));
        if (target && !document.getElementById(target)) found.push("no target " + target);
    }
    return found;
})()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Sphinx needs Python 3.11")
def test_the_site_builds_without_a_warning_and_every_page_is_whole_in_a_browser(tmp_path):
    if os.environ.get("CI") != "true" and not (find_spec("furo") and find_spec("sphinx_copybutton")):
        pytest.skip("the documentation is built by packages that are not here: pip install '.[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-d", tmp_path / "trees", DOCS, site]
    environment = os.environ | {"MVNGRAD_DOCS_RUNS": str(tmp_path / "no-runs")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = sorted(site.rglob("*.html"))
    problems = []
    with Browser(tmp_path / "browser") as browser:
        page = Page(browser, pages[0])
        for path in pages:
            page.load(path)
            where = path.relative_to(site)
            for width in WIDTHS:
                page.resize(width)
                problems += [f"{where} at {width}: {problem}" for problem in page.evaluate(PROBLEMS)]
            problems += [f"{where}: {str(complaint)[:200]}" for complaint in page.complaints]
            others = [url for url in page.requests if not url.startswith((site.as_uri(), "data:"))]
            problems += [f"{where}: asks {url}" for url in others]
        page.close()
        assert not problems, "\n".join(problems)
        settings = [Page(browser, site / "how-to" / "settings.html", theme=theme) for theme in ("light", "dark")]
        inks = [page.evaluate("getComputedStyle(document.body).getPropertyValue('--ink')") for page in settings]
        assert inks[0] != inks[1], "figures have the colours of the theme"
        assert settings[0].evaluate("document.fonts.check('16px \"STIX Two Math\"', 'x')")
        assert settings[0].evaluate("document.querySelector('math').getBoundingClientRect().height") > 0
    names = {str(path.relative_to(site)) for path in pages}
    assert {
        "full-report.html",
        "example-diagnosis.html",
        "commands.html",
        "changelog.html",
        "api/optimizers.html",
    } <= names
    api, commands = (
        re.sub(r"<[^>]*>", "", (site / name).read_text()) for name in ("api/optimizers.html", "commands.html")
    )
    assert "eps_s=1e-16" in api, "the default that is used, where Python has None"
    assert "--storage URL" in commands


@pytest.mark.parametrize("name", ["spike", "decay", "digits", "regime", "resume"])
def test_an_example_prints_what_its_page_shows(name, capsys):
    """Up to the numbers, which differ between machines; the digits with one seed."""
    module = runpy.run_path(str(DOCS / "examples" / f"{name}.py"))
    module["main"](**({"seeds": 1} if name == "digits" else {}))
    shown = (DOCS / "examples" / f"{name}.out").read_text()
    printed, shown = (re.findall(r"[A-Za-z_]{2,}", text) for text in (capsys.readouterr().out, shown))
    assert printed == shown
