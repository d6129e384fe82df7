"""A self-contained HTML report: tables, sentences, pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from nanocp.simulator.reports.pictures import LOOKS

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
h1 { overflow-wrap: anywhere }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto }
td, th { padding: .2em .8em; border-bottom: 1px solid #8886; text-align: right }
td:first-child, th:first-child { text-align: left }
img { max-width: 100%; background: #fff }
"""


@dataclass(slots=True)
class HtmlPage:
    """A page, from top to bottom."""

    title: str
    parts: list[str] = field(default_factory=list)

    def sentence(self, text: str) -> None:
        """Add a paragraph."""
        self.parts.append(f"<p>{escape(text)}</p>")

    def table(self, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        self.parts.append(f"<h2>{escape(heading)}</h2><table><tr>{head}</tr>{body}</table>")

    def pictures(self, figures: Mapping[str, Callable[..., Figure]], *data: Any) -> None:
        """Draw and add pictures, by their headings."""
        for heading, draw in figures.items():
            png = io.BytesIO()
            with matplotlib.rc_context(LOOKS):
                draw(*data).savefig(png, format="png", dpi=100)
            image = base64.b64encode(png.getvalue()).decode()
            self.parts.append(
                f'<h2>{escape(heading)}</h2><img alt="{escape(heading)}" '
                f'src="data:image/png;base64,{image}">'
            )

    def write(self, path: Path) -> None:
        """Write the page. Raises OSError."""
        body = "\n".join(self.parts)
        path.write_text(
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>'
            f"{escape(self.title)}</title><style>{_STYLE}</style></head><body>\n"
            f"<h1>{escape(self.title)}</h1>\n{body}\n</body></html>\n",
            encoding="utf-8",
        )
