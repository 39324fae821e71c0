"""`python -m tests.golden.write`: write all golden files again. README.md says when that is right."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.golden.formats import FORMATS

FOLDER = Path(__file__).parent


def main() -> None:
    for name in ("run", "state", "messages"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    for written in FORMATS:
        for name, content in written().items():
            path = FOLDER / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            print(f"{len(content):7,} bytes  {name}")


if __name__ == "__main__":
    main()
