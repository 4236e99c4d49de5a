"""A page as blocks, and the two texts that are made from it: Markdown and one HTML file.

SPDX-License-Identifier: Apache-2.0
"""

import re
import textwrap
from dataclasses import dataclass, field
from html import escape

STYLE = """
:root {
  --paper: #ffffff; --raised: #f6f7f8; --ink: #1b1f24; --soft: #5a636e; --line: #dfe3e7;
  --grid: #eceff1; --accent: #0a62a3;
  --blue: #0072b2; --green: #00835f; --orange: #c27a00; --purple: #b0478f; --grey: #8a929b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #13161a; --raised: #1b1f25; --ink: #e7eaee; --soft: #9ba5b0; --line: #2d343c;
    --grid: #22282f; --accent: #6cb4ee;
    --blue: #56a9e8; --green: #3cc79d; --orange: #efb140; --purple: #e389c3; --grey: #7d8791;
  }
}
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); color-scheme: light dark; }
body { margin: 0 auto; max-width: 1000px; padding: 0 20px 64px;
       font: 16px/1.55 Inter, system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
h1 { font-size: 30px; line-height: 1.2; } h2 { font-size: 23px; margin-top: 52px; }
h3 { font-size: 18px; margin-top: 34px; } p, li { max-width: 46em; }
a { color: var(--accent); }
.table { overflow-x: auto; margin: 18px 0; }
table { border-collapse: collapse; font-size: 14.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: left; border-bottom: 1px solid var(--line);
         vertical-align: top; }
td { white-space: nowrap; } td:first-child, td:last-child { white-space: normal; }
th { color: var(--soft); font-weight: 560; } tr.aside td { color: var(--soft); }
pre { background: var(--raised); padding: 10px 14px; overflow-x: auto; font-size: 13.5px; }
code { font-size: 0.92em; } figure { margin: 26px 0; }
figure svg { max-width: 100%; height: auto; } figcaption, .machine { color: var(--soft);
  font-size: 14px; max-width: 52em; }
"""
# Colours of the figures, which are drawn for paper, as variables of the page.
THEME = {
    "#ffffff": "paper",
    "#1b1f24": "ink",
    "#5a636e": "soft",
    "#dfe3e7": "line",
    "#eceff1": "grid",
    "#0072b2": "blue",
    "#00835f": "green",
    "#c27a00": "orange",
    "#b0478f": "purple",
    "#8a929b": "grey",
}


@dataclass
class Heading:
    level: int
    text: str


@dataclass
class Text:
    text: str
    small: bool = False


@dataclass
class Points:
    lines: list


@dataclass
class Code:
    text: str


@dataclass
class Table:
    head: list
    rows: list
    asides: set = field(default_factory=set)  # numbers of rows that are no measurement of ours


@dataclass
class Picture:
    name: str  # of the file beside the Markdown
    svg: str
    caption: str
    alt: str = ""


def anchor(text):
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def filled(text, indent=""):
    """Lines of a paragraph; code stays in one of them."""
    whole = re.sub(r"`[^`]+`", lambda m: m.group().replace(" ", "\0"), " ".join(text.split()))
    lines = textwrap.fill(
        whole, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")


def markdown_block(block):
    match block:
        case Heading():
            return "#" * block.level + " " + block.text
        case Text():
            return filled(block.text)
        case Points():
            return "\n".join(filled("- " + line, "  ") for line in block.lines)
        case Code():
            return "\n".join("    " + line for line in block.text.splitlines())
        case Table():
            lines = [block.head, ["---"] * len(block.head), *block.rows]
            return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        case Picture():
            alt = block.alt or block.name.replace("_", " ")
            return f"![{alt}](pictures/{block.name}.svg)\n\n{filled(block.caption)}"
    raise TypeError(block)


def markdown(blocks):
    return "\n\n".join(markdown_block(block) for block in blocks) + "\n"


def inline(text):
    """The little of Markdown that texts use: code, bold and links."""
    text = escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)


def themed(svg):
    for colour, name in THEME.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def html_block(block):
    match block:
        case Heading():
            level = block.level
            return f'<h{level} id="{anchor(block.text)}">{inline(block.text)}</h{level}>'
        case Text():
            kind = ' class="machine"' if block.small else ""
            return f"<p{kind}>{inline(' '.join(block.text.split()))}</p>"
        case Points():
            items = "\n".join(f"<li>{inline(' '.join(line.split()))}</li>" for line in block.lines)
            return f"<ul>\n{items}\n</ul>"
        case Code():
            return f"<pre>{escape(block.text)}</pre>"
        case Table():
            head = "".join(f"<th>{inline(cell)}</th>" for cell in block.head)
            lines = [
                f"<tr{' class=aside' if i in block.asides else ''}>"
                + "".join(f"<td>{inline(cell)}</td>" for cell in row)
                + "</tr>"
                for i, row in enumerate(block.rows)
            ]
            body = "\n".join(lines)
            return f'<div class="table"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
        case Picture():
            caption = inline(" ".join(block.caption.split()))
            svg = themed(block.svg).replace(
                'role="img"', f'role="img" aria-label="{escape(block.alt)}"'
            )
            return f"<figure>\n{svg}<figcaption>{caption}</figcaption>\n</figure>"
    raise TypeError(block)


def html(title, blocks):
    body = "\n".join(html_block(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )
