"""Write facts.json: what the installed torch answers in every case.

python -m tests.compat.conformance.record
"""

from __future__ import annotations

import json
from importlib.metadata import version

from tests.compat.conformance.running import FACTS, PYTHON, run_sides


def main() -> None:
    facts = run_sides("torch")["torch"]
    lines = ",\n".join(f"  {json.dumps(case)}: {json.dumps(facts[case])}" for case in sorted(facts))
    versions = f' "torch": {json.dumps(version("torch").partition("+")[0])},\n "python": {json.dumps(PYTHON)}'
    FACTS.write_text(f'{{\n{versions},\n "cases": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    main()
