"""Evaluation protocols, one file each, and their reports. A new one is a file and a row in the table below.

Nothing is imported until a protocol is used: the table holds paths and the line that `visual-grpo list evals` prints.
"""

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.eval, not as {__name__}")

TABLE: dict[str, tuple[str, str]] = {}
