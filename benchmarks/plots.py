"""Figures as a picture: bars from zero, one scale for each figure, with the spread as a line. Plain SVG, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from xml.sax.saxutils import escape

__all__ = ["bars", "number"]

WIDTH, LABEL, BAR, ROW, GAP, TOP = 760, 130, 480, 22, 34, 16
STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#1f2328}.name{font-weight:600}.value{fill:#57606a}
.card{fill:#fff;stroke:#d0d7de}.ours{fill:#0969da}.other{fill:#afb8c1}.spread{stroke:#1f2328;stroke-width:1.5}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.value{fill:#9198a1}.card{fill:#161b22;stroke:#3d444d}
.ours{fill:#4493f8}.other{fill:#656c76}.spread{stroke:#e6edf3}}
"""

Samples = Mapping[str, Sequence[float]]


def bars(figures: Sequence[tuple[str, str, Samples]], ours: str) -> str:
    """Of each figure its name, its unit, and the samples of each contestant."""
    parts, y = [], TOP
    for name, unit, all_samples in figures:
        samples = {who: values for who, values in all_samples.items() if values}  # not everybody takes part in everything
        parts.append(f'<text class="name" x="16" y="{y + 14}">{escape(name)}, {escape(unit)}</text>')
        y += ROW
        most = max(max(values) for values in samples.values()) or 1.0
        for who, values in samples.items():
            parts.append(_row(who, values, most, y, "ours" if who == ours else "other"))
            y += ROW
        y += GAP - ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img">\n'
        f"<title>{escape('; '.join(name for name, _, _ in figures))}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{y - 1}" rx="6"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _row(who: str, values: Sequence[float], most: float, y: int, kind: str) -> str:
    middle, least, last = (value * BAR / most for value in (median(values), min(values), max(values)))
    x, line = LABEL, y + 8
    return (
        f'<text x="{x - 8}" y="{y + 12}" text-anchor="end">{escape(who)}</text>'
        f'<rect class="{kind}" x="{x}" y="{y + 1}" width="{max(middle, 1):.1f}" height="14" rx="2"/>'
        f'<path class="spread" d="M{x + least:.1f} {line}H{x + last:.1f}"/>'
        f'<text class="value" x="{x + max(middle, last) + 8:.1f}" y="{y + 12}">{number(median(values))}</text>'
    )
