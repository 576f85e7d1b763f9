"""`python -m tinyvllm` is the command `tinyvllm`."""

import sys

from tinyvllm.cli import main

sys.exit(main())
