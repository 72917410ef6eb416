"""Methods and their recipes in folders by family, each with tables of its own; here they are one."""

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.pipelines, not as {__name__}")

from visual_grpo.pipelines import flow, text

METHOD_TABLE: dict[str, tuple[str, str]] = {**text.METHOD_TABLE, **flow.METHOD_TABLE}
RECIPE_TABLE: dict[str, tuple[str, str]] = {**text.RECIPE_TABLE, **flow.RECIPE_TABLE}
