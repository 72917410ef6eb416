"""Built-in rewards, one file each. A new one is a file here and a row in the table below.

Nothing is imported until a reward is used: the table holds paths and the line that `visual-grpo list rewards` prints.
"""

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.rewards, not as {__name__}")

TABLE: dict[str, tuple[str, str]] = {}
