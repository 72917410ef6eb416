"""`python -m visual_grpo.eval NAME ...` is `visual-grpo eval NAME ...`."""

import sys

from visual_grpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
