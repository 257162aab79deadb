"""Accuracy of a checkpoint or adapter on a data set; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.evaluate import main
from rl.processes import end_process

if __name__ == "__main__":
    end_process(main())
