"""What this documentation adds to Sphinx: mathematics as MathML, figures of stored results, the command's own help, the
optimizers' real defaults, and the report next to the pages. Nothing needs a network.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
RUNS = Path(os.environ.get("MVNGRAD_DOCS_RUNS", ROOT / "docs" / "_build" / "runs"))
"""Results of `mvngrad reproduce`, which `make docs` runs first; without them their figures are a line of text."""
REPORT, DIAGNOSIS = "full-report.html", "example-diagnosis.html"
MONITOR_RECORD = RESULTS / "cifar100-start-monitor.jsonl"
"""ResNet-18 with MVN-Grad as the paper selects it, the first 24 steps on CIFAR-100."""
logger = logging.getLogger(__name__)


# Mathematics


def visit_math(self: Any, node: nodes.math) -> None:
    self.body.append(make_mathml(node, block=False))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math" tabindex="0">{make_mathml(node, block=True)}</div>\n')
    raise nodes.SkipNode


def make_mathml(node: nodes.Node, block: bool) -> str:
    text = node.astext()
    try:
        return str(tex2mathml(text, as_block=block))
    except MathError as error:
        logger.warning("mathematics that docutils cannot read: %s: %s", text, error, location=node)
        return f"<code>{escape(text)}</code>"


# Figures


@cache
def load_records() -> dict[str, Any]:
    from mvngrad_lab.report import load_records as load
    from mvngrad_lab.report.verdicts import find_latest

    return dict(find_latest(load(RUNS, RESULTS, warn=lambda text: logger.info(text))))


@cache
def draw_record(name: str) -> list[Any]:
    from mvngrad_lab.report.page import draw

    record = load_records().get(name)
    return [] if record is None else draw(record)


class RecordFigure(SphinxDirective):
    """`{record-figure} NAME` or `{record-figure} NAME START`: the figures of a stored result in the report's style, all
    or that whose title starts so. The content is for readers of the source, such as on GitHub, and is not used here.
    """

    required_arguments, optional_arguments, final_argument_whitespace, has_content = 1, 1, True, True

    def run(self) -> list[nodes.Node]:
        from mvngrad_lab.report.page import TEMPLATES

        name, _, start = " ".join(self.arguments).partition(" ")
        macro: Any = TEMPLATES.get_template("parts.html").module
        figures = [figure for figure in draw_record(name) if figure.title.startswith(start)]
        if not figures:
            if name in load_records():
                logger.warning("no figure of %s starts with %r", name, start, location=self.get_location())
            text = f"The figure of {name} is drawn from the result of `mvngrad reproduce {name}`, which is not here."
            return [nodes.paragraph("", "", *mark_code(text))]
        html = "".join(str(macro.figure(figure, "p")) for figure in figures)
        html = html.replace("<table", '<div class="scroll" tabindex="0"><table').replace("</table>", "</table></div>")
        return [nodes.raw("", html, format="html")]


# The command


@cache
def get_help(words: tuple[str, ...]) -> str:
    from mvngrad_lab.cli import main

    content, columns = io.BytesIO(), os.environ.get("COLUMNS")
    output = io.TextIOWrapper(content, encoding="utf-8")  # with an encoding, for which boxes are drawn
    os.environ["COLUMNS"] = "2000"  # one line for each option
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    output.flush()
    return re.sub(r"\x1b\[[0-9;]*m", "", content.getvalue().decode())


def parse_help(text: str) -> tuple[str, list[str], list[tuple[str, str]]]:
    """The description, the examples, and a pair for each argument: its form, and what it is."""
    before, _, boxes = text.partition("╭")
    description, _, examples = before.partition("\n\n")[2].partition("examples:")
    arguments: list[tuple[str, str]] = []
    for line in boxes.splitlines():
        if line.startswith("│"):
            content = line.strip("│").rstrip()[1:]
            if not content.strip() or content.strip() == "(required)" or content.startswith("-h, --help"):
                continue
            if content.startswith(" ") and not content.lstrip().startswith("•") and arguments:
                name, words = arguments[-1]
                arguments[-1] = (name, f"{words} {content.strip()}".strip())
            else:
                form, _, words = re.sub(r"\s{2,}", "\n", content.strip().lstrip("• ")).partition("\n")
                arguments.append((form, words.replace("\n", " ")))
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    return " ".join(description.split()), lines, arguments


def mark_code(text: str) -> list[nodes.Node]:
    """The text with what is between backticks as code."""
    return [nodes.literal("", part) if at % 2 else nodes.Text(part) for at, part in enumerate(text.split("`"))]


class CommandHelp(SphinxDirective):
    """`{command-help} sweep work`: what `mvngrad sweep work --help` says."""

    optional_arguments, final_argument_whitespace = 1, True

    def run(self) -> list[nodes.Node]:
        words = tuple(" ".join(self.arguments).split())
        description, examples, arguments = parse_help(get_help(words))
        if not description:
            logger.warning("no help for %s", " ".join(words), location=self.get_location())
        result: list[nodes.Node] = [nodes.paragraph("", "", *mark_code(description))]
        if examples:
            text = "\n".join(examples)
            result.append(nodes.literal_block(text, text, language="console"))
        rows = nodes.definition_list(classes=["options"])
        for form, meaning in arguments:
            name = nodes.term("", "", nodes.literal("", form))
            rows += nodes.definition_list_item(
                "", name, nodes.definition("", nodes.paragraph("", "", *mark_code(meaning)))
            )
        return [*result, rows] if arguments else result


# The optimizers' defaults


def show_real_defaults(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str] | None:
    """The signature of an optimizer with the values that it uses where an option is None or not given."""
    from mvngrad.optim.optimizer import RuleOptimizer

    if not (inspect.isclass(obj) and issubclass(obj, RuleOptimizer)):
        return None
    import torch

    defaults = obj([torch.nn.Parameter(torch.zeros(1))]).defaults
    parts, star = ["params"], False
    for parameter in list(inspect.signature(obj).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts, star = [*parts, "*"], True
        if parameter.name in defaults:
            parts.append(f"{parameter.name}={defaults[parameter.name]!r}")
    return f"({', '.join(parts)})", ""


# The report


def write_report(app: Any, error: Exception | None) -> None:
    from mvngrad.diagnostics import diagnose, read_records
    from mvngrad_lab import report, store
    from mvngrad_lab.report.page import render_diagnosis

    if error is not None or app.builder.name != "html":
        return
    report.build(RUNS, RESULTS, out=Path(app.outdir) / REPORT, docs="index.html", warn=lambda text: logger.info(text))
    records = read_records(MONITOR_RECORD)
    page = render_diagnosis(records, diagnose(records), source=MONITOR_RECORD.name)
    store.write_atomic(Path(app.outdir) / DIAGNOSIS, page)


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.add_directive("record-figure", RecordFigure)
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-signature", show_real_defaults)
    app.connect("build-finished", write_report)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
