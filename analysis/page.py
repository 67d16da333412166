"""One self-contained HTML page: its style, and the HTML of headings, figures and tables.

No script, no font, nothing loaded. Wide tables scroll in a box of their own, so that the page never does; figures stand
on white in either colour scheme; a print has no boxes and breaks between runs.
"""

import html
from collections.abc import Iterable

import pandas

from analysis.style import Drawing

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --quiet: #404040; --line: #d9d9d9; --ground: #ffffff;
  --link: #005a8c; --bad: #b34700; }
@media screen and (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --quiet: #b8b8b8; --line: #454545; --ground: #161616; --link: #7cc4f0; --bad: #f0a070; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground);
  margin: 0 auto; padding: 1rem; max-width: 56rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 0.5rem; overflow-wrap: anywhere;
  border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1rem; line-height: 1.3; margin: 2rem 0 0.5rem; }
p { margin: 0.5rem 0; max-width: 42rem; overflow-wrap: anywhere; }
a { color: var(--link); }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.25rem 1rem 0.25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { font-weight: 600; }
table.numbers td, table.numbers th { white-space: nowrap; }
table.numbers td:not(:first-child), table.numbers th:not(:first-child) { text-align: right; padding: 0.25rem 0.5rem; }
table.comparison { font-size: 0.85rem; }
table.comparison td:nth-child(2) { min-width: 9rem; overflow-wrap: anywhere; }
table.comparison .wide { min-width: 7rem; }
table.words td { overflow-wrap: anywhere; min-width: 7rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); column-gap: 2rem;
  align-items: start; }
figure { margin: 0.5rem 0 1rem; break-inside: avoid; }
figure svg { display: block; width: 100%; max-width: 34rem; height: auto; background: #ffffff; }
figcaption { font-size: 0.9rem; color: var(--quiet); max-width: 34rem; margin-top: 0.25rem; }
.failed { border-left: 4px solid var(--bad); padding-left: 0.75rem; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 0.5rem; font-size: 0.85rem;
  color: var(--quiet); }
@media screen and (prefers-color-scheme: dark) {
  figure svg { padding: 0.5rem; border-radius: 0.25rem; }
}
@media (max-width: 30rem) {
  body { padding: 0.75rem; }
  table { font-size: 0.8rem; }
  th, td { padding-right: 0.6rem; }
  table.numbers td:first-child { min-width: 5rem; white-space: normal; }
  table.numbers td:not(:first-child), table.numbers th:not(:first-child) { padding: 0.25rem 0.3rem; }
}
@page { margin: 15mm; }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  h2, h3 { break-after: avoid; }
  section.run { break-before: page; }
  section.run:only-of-type { break-before: auto; }
  .part, tr { break-inside: avoid; }
  .scroll { overflow-x: visible; }
  a { color: inherit; text-decoration: none; }
  figure svg { max-width: 12cm; }
  .pair { grid-template-columns: 1fr 1fr; break-inside: avoid; }
  table { font-size: 8pt; }
  th, td { padding-top: 0.1rem; padding-bottom: 0.1rem; }
  table.comparison { font-size: 6pt; }
  table.comparison td, table.comparison th { padding-right: 0.3rem; }
  table.comparison td:nth-child(2) { min-width: 5rem; }
  table.comparison .wide { min-width: 3.5rem; overflow-wrap: anywhere; }
}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(title: str, body: Iterable[str]) -> str:
    """The whole document."""
    return _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(body))


def figure(drawing: Drawing, *, level: int = 3) -> str:
    """A heading, the drawing with what it shows in words, and its caption."""
    named = f'<svg role="img" aria-label="{html.escape(drawing.alt)}" '
    return (
        f'<div class="part">{heading(drawing.title, level)}\n<figure>{drawing.svg.replace("<svg ", named, 1)}'
        f"<figcaption>{html.escape(drawing.caption)}</figcaption></figure></div>"
    )


def table(frame: pandas.DataFrame, kind: str, title: str, *, level: int = 3, escape: bool = True) -> str:
    """A heading and a table in a box that scrolls; nothing for an empty frame.

    `kind` is its class: numbers, words or comparison. `escape` False takes cells that are HTML already.
    """
    if frame.empty:
        return ""
    cells = frame.to_html(index=False, border=0, classes=kind, justify="left", escape=escape)
    cells = cells.replace("<th>", '<th scope="col">')
    whole = " part" if kind == "numbers" else ""
    label = html.escape(title)
    return (
        f'<div class="{kind}-table{whole}">{heading(title, level)}\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">{cells}</div></div>'
    )


def heading(title: str, level: int) -> str:
    return f"<h{level}>{html.escape(title)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{html.escape(text)}</p>' if kind else f"<p>{html.escape(text)}</p>"
