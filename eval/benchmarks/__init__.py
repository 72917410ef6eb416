"""Benchmarks: methods against each other or against a rival, same budget, several seeds.

`visual-grpo benchmark NAME --seeds K` calls the function of a row as `function(seeds=K, out=folder)`; it returns a
result with `to_dict()` or a mapping. Nothing is imported until then.
"""

TABLE: dict[str, tuple[str, str]] = {}
