"""Benchmarks: methods against each other or against a rival, same budget, several seeds.

`visual-grpo benchmark NAME --seeds K [option=value ...]` calls the function of a row as `function(seeds=K, out=folder,
option=value)`; it returns a result with `to_dict()` or a mapping. Nothing is imported until then.
"""

TABLE: dict[str, tuple[str, str]] = {
    "geneval_folder": (
        "visual_grpo.eval.benchmarks.geneval_folder:run",
        "GenEval of 2,212 drawn images with the testbed's detector: seconds from files to summary.",
    ),
    "ocr_batch": (
        "visual_grpo.eval.benchmarks.ocr_batch:run",
        "OCR of test cards: batches against one call an image, images a second and equal texts.",
    ),
    "step_memory": (
        "visual_grpo.eval.benchmarks.step_memory:run",
        "What autograd holds in a step of Flow-GRPO and of V-GRPO with 5, 10, 20 and 40 denoising steps.",
    ),
    "text_step_vs_trl": (
        "visual_grpo.eval.benchmarks.text_step_vs_trl:run",
        "One GRPO step of text_lm against TRL's GRPOTrainer: time by phase, memory, losses.",
    ),
    "text_step_profile": (
        "visual_grpo.eval.benchmarks.text_step_profile:run",
        "Which operations a GRPO step of text_lm spends its time in, by phase.",
    ),
    "flow_methods": (
        "visual_grpo.eval.benchmarks.flow_methods:run",
        "Flow methods on the testbed under the same wall time: held-out score, steps, network calls, time to a score.",
    ),
    "logprob_memory": (
        "visual_grpo.eval.benchmarks.logprob_memory:run",
        "Memory of a text model's log-prob pass for 256 to 4,096 tokens and a vocabulary of 151,936.",
    ),
    "text_methods": (
        "visual_grpo.eval.benchmarks.text_methods:run",
        "Text methods against vanilla GRPO on the tiny LM, each where its paper says it helps: held-out score with intervals.",
    ),
}
