"""`python -m visual_grpo.cli ...` is `visual-grpo ...`."""

import sys

from visual_grpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
