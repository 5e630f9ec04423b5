"""What is in the wheel, as CycloneDX tells it to scanners: ``python -m tools.release.sbom`` writes the file that goes into it.

The wheel has nothing in it but rallypoint, and needs nothing. What an extra adds is named with its bound, as optional: which
version there is, the environment knows. No time and no random number is in the file, so it is the same wherever it is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rallypoint

__all__ = ["FILE", "document", "extras_of", "main", "text"]

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("rallypoint.cdx.json")
FOR_DEVELOPMENT = {"test", "lint", "docs"}
_EXTRA = re.compile(r"^(\w+) = (\[.*\])$", re.MULTILINE)
_REQUIREMENT = re.compile(r"^([\w-]+)(.*)$")


def main() -> None:
    FILE.write_text(text())


def text() -> str:
    made = document(rallypoint.__version__, extras_of((ROOT / "pyproject.toml").read_text()))
    return json.dumps(made, indent=2) + "\n"


def extras_of(project: str) -> dict[str, list[str]]:
    """What users may install beside it, by the name of the extra."""
    table = project.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    return {name: json.loads(packages) for name, packages in _EXTRA.findall(table) if name not in FOR_DEVELOPMENT}


def document(version: str, extras: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    ours = f"pkg:pypi/rallypoint@{version}"
    optional = [_component(extra, requirement) for extra, packages in extras.items() for requirement in packages]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": ours,
                "name": "rallypoint",
                "version": version,
                "description": "An elastic launcher for distributed Python programs",
                "licenses": [{"license": {"id": "BSD-3-Clause"}}],
                "purl": ours,
            }
        },
        "components": optional,
        "dependencies": [{"ref": ours, "dependsOn": []}, *({"ref": one["bom-ref"]} for one in optional)],
        "compositions": [{"aggregate": "complete", "assemblies": [ours], "dependencies": [ours]}],
    }


def _component(extra: str, requirement: str) -> dict[str, Any]:
    found = _REQUIREMENT.match(requirement)
    assert found, requirement
    name, bound = found.groups()
    properties = {"rallypoint:extra": extra, "rallypoint:requires": f"{name}{bound}"}
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}#{extra}",
        "name": name,
        "scope": "optional",
        "purl": f"pkg:pypi/{name}",
        "properties": [{"name": key, "value": value} for key, value in properties.items()],
    }


if __name__ == "__main__":
    main()
