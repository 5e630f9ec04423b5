"""The moving picture of the demo: ``python -m tools.recording FILE`` runs ``rallypoint demo`` and draws what it said, and when.

An SVG that moves by CSS alone, because GitHub and PyPI show pictures without scripts and without fonts of ours. It brings its own
background, so it looks the same on a light page and on a dark one. Within a scene every line comes at its own time; between two
there is a pause. Whoever has asked for less motion, and whatever cannot move, shows the first scene as a whole.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

__all__ = ["Line", "Scene", "drawing", "main", "scenes_of"]

PAUSE_S = 4.5  # to read a scene before the next one begins
COLUMNS = 64  # of a line's text; what is longer is wrapped
FONT, LEADING, MARGIN = 14, 20, 22
TEXT_AT = MARGIN + 74
WIDTH = TEXT_AT + int(COLUMNS * FONT * 0.61) + MARGIN
TOP = 58
HIDDEN, VISIBLE, INHERIT = (f"visibility:{word}" for word in ("hidden", "visible", "inherit"))
_TITLE = re.compile(r"^\d\. (.+)$")
_LINE = re.compile(r"^ +(\d+\.\d\d) s  (.*)$")
_COLOURS = (  # the first that fits
    ("command", re.compile(r"(node \w: )?\$ ")),
    ("hurt", re.compile(r" *now: ")),
    ("good", re.compile(r" *(done: |\d+ workers go on )")),
    ("bad", re.compile(r".*\b(failed|hangs|was lost)\b")),
    ("said", re.compile(r"")),
)
STYLE = f"""
text{{font:{FONT}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#c9d1d9}}
.at{{fill:#8b949e;text-anchor:end}}.title{{font-weight:bold;fill:#fff}}.command{{fill:#79c0ff}}
.hurt{{fill:#ffa657;font-weight:bold}}.good{{fill:#56d364}}.bad{{fill:#ff9a94}}
.scene{{visibility:hidden}}.scene:first-of-type{{visibility:visible}}
@media(prefers-reduced-motion:no-preference){{
.scene,.line,.bar{{animation:1s step-end infinite}}.bar{{animation-timing-function:linear;transform-origin:8px}}
"""
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"
     aria-labelledby="what">
<title id="what">A recording of rallypoint demo: {told}. Each time the job goes on.</title>
<style>{style}{rules}}}</style>
<rect x="1" y="1" width="{inner_width}" height="{inner_height}" rx="8" fill="#161b22" stroke="#57606a"/>
<rect class="bar" x="8" y="{bar_at}" width="{bar_width}" height="2" fill="#388bfd"/>
{scenes}
</svg>
"""


class Line(NamedTuple):
    at_s: float
    text: str


class Scene(NamedTuple):
    title: str
    lines: list[Line]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.recording", description="Record the demo as a picture that moves.")
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    done = subprocess.run([sys.executable, "-m", "rallypoint", "demo"], stdout=subprocess.PIPE, text=True, check=True)
    picture = drawing(scenes_of(done.stdout.replace(os.uname().nodename, "host")))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(picture)
    print(f"{file}: {len(picture) / 1024:.0f} KB")


def scenes_of(output: str) -> list[Scene]:
    """What the demo printed, but for its last words."""
    scenes: list[Scene] = []
    for text in output.splitlines():
        if title := _TITLE.match(text):
            scenes.append(Scene(title[1], []))
        elif line := _LINE.match(text):
            scenes[-1].lines.append(Line(float(line[1]), line[2]))
    return scenes


def drawing(scenes: Sequence[Scene]) -> str:
    lengths = [scene.lines[-1].at_s + PAUSE_S for scene in scenes]
    height = TOP + max(_rows(scene) for scene in scenes) * LEADING + MARGIN
    rules, groups, begins_s, total_s = [], [], 0.0, sum(lengths)
    for number, (scene, length_s) in enumerate(zip(scenes, lengths, strict=True)):
        begin, end = _percent(begins_s / total_s), _percent((begins_s + length_s) / total_s)
        rules.append(_rule(f"s{number}", total_s, f"0%{{{HIDDEN}}}{begin}{{{VISIBLE}}}{end}{{{HIDDEN}}}"))
        shown = list(_lines(number, scene, begins_s, total_s))
        rules += [rule for rule, _ in shown]
        groups.append("\n".join([f'<g class="scene s{number}">', _title(number, scene), *(text for _, text in shown), "</g>"]))
        begins_s += length_s
    rules.append(_rule("bar", total_s, "from{transform:scaleX(0)}to{transform:scaleX(1)}"))
    return SVG.format(
        width=WIDTH, height=height, inner_width=WIDTH - 2, inner_height=height - 2, bar_at=height - 5, bar_width=WIDTH - 16,
        told=escape("; ".join(scene.title.lower() for scene in scenes)),
        style=STYLE, rules="".join(rules), scenes="\n".join(groups),
    )  # fmt: skip


def _rule(name: str, total_s: float, frames: str) -> str:
    return f".{name}{{animation-name:{name};animation-duration:{total_s:.2f}s}}@keyframes {name}{{{frames}}}\n"


def _percent(part: float) -> str:
    return f"{part * 100:.3f}%"


def _rows(scene: Scene) -> int:
    return sum(len(_wrapped(line.text)) for line in scene.lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def _title(number: int, scene: Scene) -> str:
    return f'<text class="title" x="{MARGIN}" y="{MARGIN + FONT}">{number + 1}. {escape(scene.title)}</text>'


def _lines(number: int, scene: Scene, begins_s: float, total_s: float) -> Iterator[tuple[str, str]]:
    """When each line comes, and what it shows."""
    row = 0
    for index, line in enumerate(scene.lines):
        name = f"l{number}-{index}"
        frames = f"0%{{{HIDDEN}}}{_percent((begins_s + line.at_s) / total_s)}{{{INHERIT}}}to{{{INHERIT}}}"
        colour = next(colour for colour, pattern in _COLOURS if pattern.match(line.text))
        parts = [f'<text class="at" x="{TEXT_AT - 14}" y="{_y(row)}">{line.at_s:.2f} s</text>']
        for text in _wrapped(line.text.strip()):
            column = len(text) - len(text.lstrip())
            x = TEXT_AT + round(column * FONT * 0.6)
            parts.append(f'<text class="{colour}" x="{x}" y="{_y(row)}">{escape(text.strip())}</text>')
            row += 1
        yield _rule(name, total_s, frames), f'<g class="line {name}">' + "".join(parts) + "</g>"


def _y(row: int) -> int:
    return TOP + FONT + row * LEADING


if __name__ == "__main__":
    main()
