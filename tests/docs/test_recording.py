"""The moving picture of the demo: each line at its time, nothing that GitHub or PyPI would not show, and today's demo in it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from tools.recording import Line, Scene, drawing, scenes_of

from rallypoint.demo import scenes

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "demo.svg"
SVG = "{http://www.w3.org/2000/svg}"
TOLD = """\
1. A worker is killed
   0.00 s  $ rallyrun train.py
   0.50 s    now: kill -9 of rank 2

2. A <worker> hangs & goes on
   0.00 s  $ rallyrun --hang-timeout 2 train.py
   2.50 s  rank 1 hangs: """ + "word " * 40 + """

next: rallyrun --help
"""  # fmt: skip


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_what_the_demo_says_is_read_with_its_times() -> None:
    first, second = scenes_of(TOLD)
    assert first == Scene("A worker is killed", [Line(0.0, "$ rallyrun train.py"), Line(0.5, "  now: kill -9 of rank 2")])
    assert second.title == "A <worker> hangs & goes on"
    assert [line.at_s for line in second.lines] == [0.0, 2.5]


def test_every_line_comes_at_its_time_and_no_word_is_lost() -> None:
    one, two = scenes_of(TOLD)
    picture = drawing([one, two])
    shown = texts(picture)
    assert {"1. A worker is killed", "2. A <worker> hangs & goes on", "now: kill -9 of rank 2", "0.50 s"} <= set(shown)
    assert sum(text.split().count("word") for text in shown) == 40
    [length_s] = {float(found) for found in re.findall(r"animation-duration:([\d.]+)s", picture)}
    begins = {name: float(at) * length_s / 100 for name, at in re.findall(r"@keyframes (\S+?)\{0%\{.*?\}([\d.]+)%", picture)}
    assert abs(begins["l0-1"] - 0.5) < 0.01
    assert abs(begins["l1-1"] - begins["l1-0"] - 2.5) < 0.01
    assert begins["s0"] == 0.0
    assert begins["s1"] == begins["l1-0"] > 0.5


def test_the_picture_of_the_repository_is_small_and_shows_the_demo() -> None:
    picture = PICTURE.read_text()
    assert len(picture) < 150_000
    elements = {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(picture).iter()}
    assert elements == {"svg", "title", "style", "rect", "g", "text"}, "no script, nothing that is loaded"
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert "@import" not in picture
    shown = texts(picture)
    assert [text.partition(". ")[2] for text in shown if re.match(r"\d\. ", text)] == list(scenes.TITLES)
    assert sum("go on from step" in text for text in shown) == len(scenes.TITLES)
    assert sum(text == f"done: all {scenes.STEPS} steps, exit code 0" for text in shown) == len(scenes.TITLES)
    assert " ".join(shown).count("(host, ranks 2-3)") >= 1, "the machine's own name is not told"
