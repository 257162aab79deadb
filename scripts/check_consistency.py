"""Check that trainer and engine are the same model; see --help."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.check import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the report is written; vLLM's and Triton's own shutdown prints pages about leaks
