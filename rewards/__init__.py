"""Built-in rewards, one file each. A new one is a file here and a row in the table below.

Nothing is imported until a reward is used: the table holds paths and the line that `visual-grpo list rewards` prints.
"""

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.rewards, not as {__name__}")

TABLE: dict[str, tuple[str, str]] = {
    "brightness": ("visual_grpo.rewards.brightness:Brightness", "Mean pixel value, for tests and tutorials [0, 1]."),
    "code": (
        "visual_grpo.rewards.code:Code",
        "Share of tests that the completion's Python program passes, run in a sandbox [0, 1].",
    ),
    "exact_match": ("visual_grpo.rewards.exact_match:ExactMatch", "Extracted answer equals the gold answer (0 or 1)."),
    "format": ("visual_grpo.rewards.format:Format", "Think, think + answer, or a pattern of your own (0 or 1)."),
    "geneval": (
        "visual_grpo.rewards.geneval:GenEval",
        "Objects, counts, colours and positions of the prompt (up to 1).",
    ),
    "jpeg_compressibility": (
        "visual_grpo.rewards.jpeg:JpegCompressibility",
        "Minus the JPEG size in kB / 500 (below 0).",
    ),
    "jpeg_incompressibility": ("visual_grpo.rewards.jpeg:JpegIncompressibility", "JPEG size in kB (above 0)."),
    "length": ("visual_grpo.rewards.length:Length", "Closeness to a target length, or staying under a ceiling [0, 1]."),
    "math_verify": (
        "visual_grpo.rewards.math_verify:MathVerify",
        "Mathematical equality with the gold answer (0 or 1).",
    ),
    "ocr": ("visual_grpo.rewards.ocr:Ocr", "The prompt's quoted text is readable in the image [0, 1]."),
    "overlong": ("visual_grpo.rewards.length:Overlong", "DAPO's soft punishment of overlong answers [-1, 0]."),
    "pickscore": (
        "visual_grpo.rewards.pickscore:PickScore",
        "Human preference for the image given its prompt, by PickScore v1 (0.7 to 0.92).",
    ),
    "remote": (
        "visual_grpo.rewards.remote:Remote",
        "A reward on a server (visual-grpo serve-rewards); also given by its URL or by `url:`.",
    ),
}
