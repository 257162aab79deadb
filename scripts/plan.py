"""Memory and sync of a recipe; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.plan_cli import main

if __name__ == "__main__":
    sys.exit(main())
