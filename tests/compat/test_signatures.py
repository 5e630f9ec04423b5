"""Every public name has torch's signature, defaults, members and bases, or stands in the table of differences.

The snapshot of torch's surface is made by make_surface.py, so that the comparison needs no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.compat.make_surface import SURFACE, surface_of
from tests.compat.surface_comparing import differences

import rallypoint
from rallypoint.compat.differences import DIFFERENCES

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
PARTS = {"lacking", "kind", "signature", "value", "bases", "members", "abstract", "fields"}
KNOWN = {(one.module, one.name, one.aspect) for one in DIFFERENCES if ": " not in one.aspect}


def snapshot() -> dict[str, Any]:
    return dict(json.loads(SURFACE.read_text()))


def run_python(*arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), str(Path(rallypoint.__file__).parents[1])])
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S).stdout


def test_names_have_torchs_signatures() -> None:
    ours = json.loads(run_python("-S", "-m", "tests.compat.our_surface"))
    found: dict[tuple[str, str, str], str] = {}
    for module, names in snapshot()["modules"].items():
        for name, facts in names.items():
            if facts["kind"] != "alias":  # whose original is compared where it lives
                for aspect, torchs, mine in differences(facts, ours[module][name]):
                    if aspect not in PARTS and (module, name, "methods") in KNOWN:
                        aspect = "methods"  # noqa: PLW2901  # of a class none of whose own are there
                    found[module, name, aspect] = f"torch: {torchs}; ours: {mine}"
    assert {key: text for key, text in found.items() if key not in KNOWN} == {}
    assert KNOWN - found.keys() == set(), "these differ no more"


@pytest.mark.torch
def test_the_snapshot_is_torchs(tmp_path: Path) -> None:
    written = tmp_path / "surface-0.0.json"
    run_python("-c", f"from tests.compat import make_surface as m; m.SURFACE = m.Path({str(written)!r}); m.main()")
    now = json.loads(next(tmp_path.glob("surface-*.json")).read_text())
    kept = surface_of(now["torch"])
    if not kept.exists():
        pytest.skip(f"there is no snapshot of torch {now['torch']}, which is installed")
    assert now == json.loads(kept.read_text())
