"""Draw docs/pictures/leak.png: which outputs move when one later token of V is changed, in two recipes.

Run from the root of the checkout: python docs/pictures/leak.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.leakage.demo import demo  # noqa: E402

RECIPES = ("cudnn-mxfp8", "flamia-mxfp8")


def main() -> None:
    """Run the demonstration and write its picture."""
    (ROOT / "docs" / "pictures" / "leak.png").write_bytes(demo(RECIPES).to_png())


if __name__ == "__main__":
    main()
