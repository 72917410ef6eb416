"""Methods, one file each, in folders by family; and their recipes. A new method is a file and its rows below.

Nothing is imported until a name is used: the tables hold paths and the lines that `visual-grpo list` prints.
"""

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.pipelines, not as {__name__}")

METHOD_TABLE: dict[str, tuple[str, str]] = {}

# A recipe is a function that returns a RunConfig.
RECIPE_TABLE: dict[str, tuple[str, str]] = {}
