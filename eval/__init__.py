"""Evaluation protocols, one file each, and their reports. A new one is a file and a row in the table below.

Nothing is imported until a protocol is used: the table holds paths and the line that `visual-grpo list evals` prints.
"""

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.eval, not as {__name__}")

TABLE: dict[str, tuple[str, str]] = {
    "caption": ("visual_grpo.eval.caption:evaluate", "Captions: CaptionQA, DCScore or CapArena-Auto, with a judge."),
    "geneval": ("visual_grpo.eval.geneval:evaluate", "GenEval: objects, counts, colours and positions of the prompt."),
    "ocr": ("visual_grpo.eval.ocr:evaluate", "OCR accuracy: the prompt's quoted text is readable in the image."),
    "text": ("visual_grpo.eval.text:evaluate", "Text problems: pass@k, avg@k and maj@k of several samples."),
    "vqa": ("visual_grpo.eval.vqa:evaluate", "Answers about images: VQA accuracy, exact match, ANLS, choices, boxes."),
}
