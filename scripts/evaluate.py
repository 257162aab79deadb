"""Accuracy of a checkpoint or adapter on a data set; see --help."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.evaluate import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the results are written; vLLM's and Triton's own shutdown prints pages about leaks
