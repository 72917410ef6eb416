"""Model families, one file each. A new one is a file here and a row in the table below.

Nothing is imported until a family is used: the table holds paths and the line that `visual-grpo list models` prints.
"""

TABLE: dict[str, tuple[str, str]] = {}
