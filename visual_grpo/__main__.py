"""`python -m visual_grpo ...` is `visual-grpo ...` (for `accelerate launch -m visual_grpo train ...`)."""

import sys

from visual_grpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
