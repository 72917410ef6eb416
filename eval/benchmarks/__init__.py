"""Benchmarks: methods against each other or against a rival, same budget, several seeds.

`visual-grpo benchmark NAME --seeds K` calls the function of a row as `function(seeds=K, out=folder)`; it returns a
result with `to_dict()` or a mapping. Nothing is imported until then.
"""

TABLE: dict[str, tuple[str, str]] = {
    "text_step_vs_trl": (
        "visual_grpo.eval.benchmarks.text_step_vs_trl:run",
        "One GRPO step of text_lm against TRL's GRPOTrainer: time by phase, memory, losses.",
    ),
}
