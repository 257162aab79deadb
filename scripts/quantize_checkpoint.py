"""Convert a bf16 checkpoint to NVFP4 experts and MXFP8 projections; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from quant.cli import main

if __name__ == "__main__":
    sys.exit(main())
