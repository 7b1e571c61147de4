"""Small pieces of a self-contained HTML page: nothing here asks another host for anything, and all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# Wide enough for the metrics table, one column on a phone; colours for light and dark, which the pictures use too.
STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6472; --paper: #ffffff; --card: #f5f7fa; --rule: #d5dae2;
  --first: #2563b0; --second: #c2571a; --good: #1b7f4b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e9f0; --soft: #9aa4b2; --paper: #14171c; --card: #1d2128; --rule: #363c47;
  --first: #6aa5f0; --second: #f0955c; --good: #5fcf95; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 48rem; } .soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.cards div { background: var(--card); border-radius: .5rem; padding: .75rem 1rem; }
.cards b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) { .scroll { font-size: .85rem; } th, td { padding-right: .6rem; } }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); gap: 1.5rem; }
.columns h3 { font-size: 1rem; margin: .5rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
figure { margin: 0; min-width: 0; } figcaption { color: var(--soft); font-size: .9rem; }
svg { display: block; width: 100%; height: auto; } svg text { font-family: system-ui, sans-serif !important; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 600; vertical-align: bottom; } .number { text-align: right; } td.number { white-space: nowrap; }
th.number { max-width: 9rem; } td:last-child, th:last-child { padding-right: 0; }
.columns td:last-child { overflow-wrap: anywhere; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document. `body` is markup; `title` is text."""
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Should a text ever escape its escaping, it still runs nothing and fetches nothing.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>"
    )
    content = "\n".join(body)
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{content}\n</body>\n</html>\n'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int | None = None) -> str:
    """A table of texts; columns from `numbers_from` on are set as numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        marks = [' class="number"' if numbers_from is not None and i >= numbers_from else "" for i in range(len(row))]
        return "".join(f"<{tag}{mark}>{escape(str(cell))}</{tag}>" for cell, mark in zip(row, marks, strict=True))

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>\n" if header else ""
    return f'<div class="scroll"><table>\n{head}<tbody>\n{body}\n</tbody>\n</table></div>'


def cards(values: Iterable[tuple[str, str]]) -> str:
    """Figures in large type, each (figure, what it is)."""
    return f'<div class="cards">{"".join(f"<div><b>{escape(v)}</b> {escape(name)}</div>" for v, name in values)}</div>'


def charts(pictures: Iterable[tuple[str, str]]) -> str:
    """Pictures side by side where there is room, each (SVG markup, caption)."""
    inner = "\n".join(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in pictures)
    return f'<div class="charts">\n{inner}\n</div>'


def columns(blocks: Iterable[tuple[str, str]]) -> str:
    """Blocks side by side where there is room, each (heading, markup)."""
    return f'<div class="columns">{"".join(f"<div><h3>{escape(name)}</h3>{markup}</div>" for name, markup in blocks)}</div>'


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of text, of one of the kinds soft, good, bad."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """A section's heading."""
    return f"<h2>{escape(text)}</h2>"
