"""Built-in rewards, one file each. A new one is a file here and a row in the table below.

Nothing is imported until a reward is used: the table holds paths and what `visual-grpo list rewards` prints: a line, the range of
the values (of models: typical), and size and licence of the weights. Those of judges are the default model's.
"""

from collections.abc import Mapping

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.rewards, not as {__name__}")

Facts = Mapping[str, str]


def _free(range_: str) -> Facts:
    """Facts of a reward that loads no model."""
    return {"range": range_, "size": "no weights"}


_QWEN: Facts = {"size": "16 GB", "licence": "Apache-2.0"}
"""Qwen3-8B and Qwen2.5-VL-7B-Instruct, the default judges."""

TABLE: dict[str, tuple[str, str, Facts]] = {
    "aesthetic": (
        "visual_grpo.rewards.aesthetic:Aesthetic",
        "Aesthetic rating of the image alone, by LAION's predictor v2.",
        {"range": "4.5 to 6.5", "size": "1.7 GB", "licence": "MIT (CLIP), Apache-2.0 (head)"},
    ),
    "anls": (
        "visual_grpo.rewards.anls:Anls",
        "Edit similarity with the nearest gold answer, for document VQA.",
        _free("0 to 1"),
    ),
    "brightness": (
        "visual_grpo.rewards.brightness:Brightness",
        "Mean pixel value, for tests and tutorials.",
        _free("0 to 1"),
    ),
    "caption_correctness": (
        "visual_grpo.rewards.caption_judge:CaptionCorrectness",
        "Share of a caption's claims that a VLM finds true and visible.",
        {"range": "0 to 1", **_QWEN},
    ),
    "caption_coverage": (
        "visual_grpo.rewards.caption_judge:CaptionCoverage",
        "Share of the reference caption's content that the caption states.",
        {"range": "0 to 1", **_QWEN},
    ),
    "caption_language": (
        "visual_grpo.rewards.caption_judge:CaptionLanguage",
        "Clarity, fluency and coherence of a caption of fitting length.",
        {"range": "0 to 1", **_QWEN},
    ),
    "cider": (
        "visual_grpo.rewards.cider:Cider",
        "CIDEr-D of a caption against its references.",
        _free("0 to 10"),
    ),
    "clip_score": (
        "visual_grpo.rewards.clip_score:ClipScore",
        "Fit of image and text by CLIP: diffusion_nft (cosine), paper, refclip or torchmetrics.",
        {
            "range": "0.22 to 0.33 (paper 0.4 to 0.9, refclip 0.5 to 0.9, torchmetrics 20 to 35)",
            "size": "1.7 GB (paper and refclip 0.6 GB)",
            "licence": "MIT",
        },
    ),
    "code": (
        "visual_grpo.rewards.code:Code",
        "Share of tests that the completion's Python program passes, run in a sandbox.",
        _free("0 to 1"),
    ),
    "cosine_length": (
        "visual_grpo.rewards.cosine_length:CosineLength",
        "Correctness, worth more when right and short or wrong and long.",
        _free("-1 to 1"),
    ),
    "deqa": (
        "visual_grpo.rewards.deqa:DeQA",
        "Image quality as the mean of excellent .. bad, DeQA-Score.",
        {"range": "0.2 to 1", **_QWEN},
    ),
    "dino_similarity": (
        "visual_grpo.rewards.dino_similarity:DinoSimilarity",
        "Likeness to a reference image by DINOv2.",
        {"range": "-1 to 1", "size": "0.35 GB", "licence": "Apache-2.0"},
    ),
    "exact_match": (
        "visual_grpo.rewards.exact_match:ExactMatch",
        "Extracted answer equals the gold answer.",
        _free("0 or 1"),
    ),
    "format": (
        "visual_grpo.rewards.format:Format",
        "Think, think + answer, boxed, JSON, box, tags or a pattern of your own.",
        _free("0 or 1 (tag_count 0 to 1)"),
    ),
    "geneval": (
        "visual_grpo.rewards.geneval:GenEval",
        "Objects, counts, colours and positions of the prompt.",
        {"range": "up to 1", "size": "none (testbed), 2 GB (mask2former)", "licence": "MIT (both weights)"},
    ),
    "hps_v2": (
        "visual_grpo.rewards.hps_v2:HpsV2",
        "Human preference for the image given its prompt, by HPS v2.0 or v2.1.",
        {"range": "0.20 to 0.38", "size": "2 to 4 GB", "licence": "Apache-2.0"},
    ),
    "hps_v3": (
        "visual_grpo.rewards.hps_v3:HpsV3",
        "Human preference by HPSv3, a head on Qwen2-VL.",
        {"range": "about -5 to 15", "size": "17 GB", "licence": "MIT (base Apache-2.0)"},
    ),
    "image_reward": (
        "visual_grpo.rewards.image_reward:ImageReward",
        "Human preference for the image given its prompt, by ImageReward v1.0.",
        {"range": "-2.3 to 2.0", "size": "1.8 GB", "licence": "Apache-2.0"},
    ),
    "iou": (
        "visual_grpo.rewards.iou:Iou",
        "Overlap of the answered boxes with the gold boxes.",
        _free("0 to 1 (giou -1 to 1)"),
    ),
    "iqa": (
        "visual_grpo.rewards.iqa:Iqa",
        "Image quality by MUSIQ, MANIQA, CLIP-IQA, NIQE or BRISQUE, higher is better.",
        {
            "range": "musiq 0 to 100, maniqa and clipiqa 0 to 1, niqe -100 to 0, brisque -150 to 0",
            "size": "up to 0.9 GB",
            "licence": "PolyForm Noncommercial and S-Lab (pyiqa)",
        },
    ),
    "jpeg_compressibility": (
        "visual_grpo.rewards.jpeg:JpegCompressibility",
        "Minus the JPEG size in kB / 500.",
        _free("below 0"),
    ),
    "jpeg_incompressibility": (
        "visual_grpo.rewards.jpeg:JpegIncompressibility",
        "JPEG size in kB.",
        _free("above 0"),
    ),
    "label_noise": (
        "visual_grpo.rewards.label_noise:LabelNoise",
        "A text reward of 0 or 1 whose verdicts are flipped with a known probability.",
        _free("0 or 1"),
    ),
    "length": (
        "visual_grpo.rewards.length:Length",
        "Closeness to a target length, or staying under a ceiling.",
        _free("0 to 1"),
    ),
    "llm_judge": (
        "visual_grpo.rewards.llm_judge:LlmJudge",
        "A language model's mark for the answer.",
        {"range": "0 to 1", **_QWEN},
    ),
    "math_verify": (
        "visual_grpo.rewards.math_verify:MathVerify",
        "Mathematical equality with the gold answer.",
        _free("0 or 1"),
    ),
    "multiple_choice": (
        "visual_grpo.rewards.multiple_choice:MultipleChoice",
        "The chosen option is the gold one.",
        _free("0 or 1"),
    ),
    "nsfw": (
        "visual_grpo.rewards.nsfw:Nsfw",
        "Safety gate: 1 if a classifier calls the image safe, else 0.",
        {"range": "0 or 1", "size": "0.34 GB", "licence": "Apache-2.0"},
    ),
    "ocr": (
        "visual_grpo.rewards.ocr:Ocr",
        "The prompt's quoted text is readable in the image.",
        {"range": "0 to 1", "size": "15 MB, in the package rapidocr", "licence": "Apache-2.0"},
    ),
    "overlong": (
        "visual_grpo.rewards.length:Overlong",
        "DAPO's soft punishment of overlong answers.",
        _free("-1 to 0"),
    ),
    "pickscore": (
        "visual_grpo.rewards.pickscore:PickScore",
        "Human preference for the image given its prompt, by PickScore v1.",
        {"range": "0.7 to 0.92", "size": "3.9 GB", "licence": "MIT"},
    ),
    "reasoning_gym": (
        "visual_grpo.rewards.reasoning_gym:ReasoningGym",
        "Score of the puzzle's own data set in reasoning-gym.",
        _free("0 to 1"),
    ),
    "remote": (
        "visual_grpo.rewards.remote:Remote",
        "A reward on a server (visual-grpo serve-rewards); also given by its URL or by `url:`.",
        _free("the served reward's"),
    ),
    "repetition": (
        "visual_grpo.rewards.repetition:Repetition",
        "Penalty on repeated n-grams.",
        _free("-1 to 0"),
    ),
    "rubric": (
        "visual_grpo.rewards.rubric:Rubric",
        "Share of a rubric's weighted criteria that a judge finds met.",
        {"range": "0 to 1", **_QWEN},
    ),
    "two_tower": (
        "visual_grpo.rewards.two_tower:TwoTowerReward",
        "Fit of image and prompt by the testbed's learned judge of coloured shapes, which can be exploited.",
        {"range": "-1 to 1", "size": "0.7 MB, in the package", "licence": "Apache-2.0"},
    ),
    "unified_reward": (
        "visual_grpo.rewards.unified_reward:UnifiedReward",
        "Alignment and quality of an image by UnifiedReward.",
        {"range": "0.2 to 1", "size": "16 GB", "licence": "MIT"},
    ),
    "vlm_judge": (
        "visual_grpo.rewards.vlm_judge:VlmJudge",
        "A vision-language model's mark for the image.",
        {"range": "0.2 to 1", **_QWEN},
    ),
    "vqa_accuracy": (
        "visual_grpo.rewards.vqa_accuracy:VqaAccuracy",
        "Soft agreement with several annotators.",
        _free("0 to 1"),
    ),
    "vqa_score": (
        "visual_grpo.rewards.vqa_score:VqaScore",
        "Probability that the image shows the prompt, by a VLM.",
        {"range": "0 to 1", **_QWEN},
    ),
    "word_likeness": (
        "visual_grpo.rewards.word_likeness:WordLikeness",
        "Partial credit for the testbed's words: correlation with the word as it is drawn.",
        _free("0 to 1"),
    ),
}
