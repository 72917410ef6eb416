"""Evaluation protocols, one file each, and their reports. A new one is a file and a row in the table below.

Nothing is imported until a protocol is used: the table holds paths and the line that `visual-grpo list evals` prints.
"""

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.eval, not as {__name__}")

TABLE: dict[str, tuple[str, str]] = {
    "caption": ("visual_grpo.eval.caption:evaluate", "Captions: CaptionQA, DCScore or CapArena-Auto, with a judge."),
    "compbench": (
        "visual_grpo.eval.compbench:evaluate",
        "T2I-CompBench: attributes by a judge, 2D spatial relations and numeracy by a detector.",
    ),
    "diversity": (
        "visual_grpo.eval.diversity:evaluate",
        "Mean pairwise 1 - cosine of image features within each prompt's images.",
    ),
    "dpg": ("visual_grpo.eval.dpg:evaluate", "DPG-Bench: yes/no questions about dense prompts, with dependencies."),
    "fid": ("visual_grpo.eval.fid:evaluate", "Frechet distance of image features to a reference set."),
    "geneval": ("visual_grpo.eval.geneval:evaluate", "GenEval: objects, counts, colours and positions of the prompt."),
    "geneval2": (
        "visual_grpo.eval.geneval2:evaluate",
        "GenEval2: soft answers of a judge about compositional prompts.",
    ),
    "ocr": ("visual_grpo.eval.ocr:evaluate", "OCR accuracy: the prompt's quoted text is readable in the image."),
    "preference": (
        "visual_grpo.eval.preference:evaluate",
        "Any rewards over a prompt file, on the scales of the DrawBench table.",
    ),
    "text": ("visual_grpo.eval.text:evaluate", "Text problems: pass@k, avg@k and maj@k of several samples."),
    "vqa": ("visual_grpo.eval.vqa:evaluate", "Answers about images: VQA accuracy, exact match, ANLS, choices, boxes."),
}
