"""Built-in rewards, one file each. A new one is a file here and a row in the table below.

Nothing is imported until a reward is used: the table holds paths and the line that `visual-grpo list rewards` prints; a reward of
downloaded weights adds their size, their licence and the typical range of its values.
"""

from collections.abc import Mapping

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.rewards, not as {__name__}")

TABLE: dict[str, tuple[str, str] | tuple[str, str, Mapping[str, str]]] = {
    "aesthetic": (
        "visual_grpo.rewards.aesthetic:Aesthetic",
        "Aesthetic rating of the image alone, by LAION's predictor v2.",
        {"range": "4.5 to 6.5", "size": "1.7 GB", "licence": "MIT (CLIP), Apache-2.0 (head)"},
    ),
    "anls": ("visual_grpo.rewards.anls:Anls", "Edit similarity with the nearest gold answer, for document VQA [0, 1]."),
    "brightness": ("visual_grpo.rewards.brightness:Brightness", "Mean pixel value, for tests and tutorials [0, 1]."),
    "caption_correctness": (
        "visual_grpo.rewards.caption_judge:CaptionCorrectness",
        "Share of a caption's claims that a VLM finds true and visible [0, 1].",
    ),
    "caption_coverage": (
        "visual_grpo.rewards.caption_judge:CaptionCoverage",
        "Share of the reference caption's content that the caption states [0, 1].",
    ),
    "caption_language": (
        "visual_grpo.rewards.caption_judge:CaptionLanguage",
        "Clarity, fluency and coherence of a caption of fitting length [0, 1].",
    ),
    "cider": ("visual_grpo.rewards.cider:Cider", "CIDEr-D of a caption against its references [0, 10]."),
    "clip_score": (
        "visual_grpo.rewards.clip_score:ClipScore",
        "Fit of image and prompt by CLIP: diffusion_nft (cosine), paper or torchmetrics.",
        {
            "range": "0.22 to 0.33 (paper 0.4 to 0.9, torchmetrics 20 to 35)",
            "size": "1.7 GB (paper 0.6 GB)",
            "licence": "MIT",
        },
    ),
    "code": (
        "visual_grpo.rewards.code:Code",
        "Share of tests that the completion's Python program passes, run in a sandbox [0, 1].",
    ),
    "cosine_length": (
        "visual_grpo.rewards.cosine_length:CosineLength",
        "Correctness, worth more when right and short or wrong and long [-1, 1].",
    ),
    "deqa": ("visual_grpo.rewards.deqa:DeQA", "Image quality as the mean of excellent .. bad, DeQA-Score [0.2, 1]."),
    "dino_similarity": (
        "visual_grpo.rewards.dino_similarity:DinoSimilarity",
        "Likeness to a reference image by DINOv2.",
        {"range": "-1 to 1", "size": "0.35 GB", "licence": "Apache-2.0"},
    ),
    "exact_match": ("visual_grpo.rewards.exact_match:ExactMatch", "Extracted answer equals the gold answer (0 or 1)."),
    "format": (
        "visual_grpo.rewards.format:Format",
        "Think, think + answer, boxed, JSON, box, tags or a pattern of your own (0 or 1).",
    ),
    "geneval": (
        "visual_grpo.rewards.geneval:GenEval",
        "Objects, counts, colours and positions of the prompt (up to 1).",
        {"range": "0 to 1", "size": "none (testbed), 2 GB (mask2former)", "licence": "MIT (both weights)"},
    ),
    "hps_v2": (
        "visual_grpo.rewards.hps_v2:HpsV2",
        "Human preference for the image given its prompt, by HPS v2.0 or v2.1.",
        {"range": "0.20 to 0.38", "size": "2 to 4 GB", "licence": "Apache-2.0"},
    ),
    "hps_v3": ("visual_grpo.rewards.hps_v3:HpsV3", "Human preference by HPSv3, a head on Qwen2-VL (about -5 to 15)."),
    "image_reward": (
        "visual_grpo.rewards.image_reward:ImageReward",
        "Human preference for the image given its prompt, by ImageReward v1.0.",
        {"range": "-2.3 to 2.0", "size": "1.8 GB", "licence": "Apache-2.0"},
    ),
    "iou": ("visual_grpo.rewards.iou:Iou", "Overlap of the answered boxes with the gold boxes [0, 1]."),
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
        "Minus the JPEG size in kB / 500 (below 0).",
    ),
    "jpeg_incompressibility": ("visual_grpo.rewards.jpeg:JpegIncompressibility", "JPEG size in kB (above 0)."),
    "length": ("visual_grpo.rewards.length:Length", "Closeness to a target length, or staying under a ceiling [0, 1]."),
    "llm_judge": ("visual_grpo.rewards.llm_judge:LlmJudge", "A language model's mark for the answer [0, 1]."),
    "math_verify": (
        "visual_grpo.rewards.math_verify:MathVerify",
        "Mathematical equality with the gold answer (0 or 1).",
    ),
    "multiple_choice": (
        "visual_grpo.rewards.multiple_choice:MultipleChoice",
        "The chosen option is the gold one (0 or 1).",
    ),
    "nsfw": (
        "visual_grpo.rewards.nsfw:Nsfw",
        "Safety gate: 1 if a classifier calls the image safe, else 0.",
        {"range": "0 or 1", "size": "0.34 GB", "licence": "Apache-2.0"},
    ),
    "ocr": (
        "visual_grpo.rewards.ocr:Ocr",
        "The prompt's quoted text is readable in the image [0, 1].",
        {"range": "0 to 1", "size": "15 MB, in the package rapidocr", "licence": "Apache-2.0"},
    ),
    "overlong": ("visual_grpo.rewards.length:Overlong", "DAPO's soft punishment of overlong answers [-1, 0]."),
    "pickscore": (
        "visual_grpo.rewards.pickscore:PickScore",
        "Human preference for the image given its prompt, by PickScore v1 (0.7 to 0.92).",
        {"range": "0.7 to 0.92", "size": "3.9 GB", "licence": "MIT"},
    ),
    "reasoning_gym": (
        "visual_grpo.rewards.reasoning_gym:ReasoningGym",
        "Score of the puzzle's own data set in reasoning-gym [0, 1].",
    ),
    "remote": (
        "visual_grpo.rewards.remote:Remote",
        "A reward on a server (visual-grpo serve-rewards); also given by its URL or by `url:`.",
    ),
    "repetition": ("visual_grpo.rewards.repetition:Repetition", "Penalty on repeated n-grams [-1, 0]."),
    "rubric": (
        "visual_grpo.rewards.rubric:Rubric",
        "Share of a rubric's weighted criteria that a judge finds met [0, 1].",
    ),
    "unified_reward": (
        "visual_grpo.rewards.unified_reward:UnifiedReward",
        "Alignment and quality of an image by UnifiedReward [0.2, 1].",
    ),
    "vlm_judge": ("visual_grpo.rewards.vlm_judge:VlmJudge", "A vision-language model's mark for the image [0, 1]."),
    "vqa_accuracy": ("visual_grpo.rewards.vqa_accuracy:VqaAccuracy", "Soft agreement with several annotators [0, 1]."),
    "vqa_score": (
        "visual_grpo.rewards.vqa_score:VqaScore",
        "Probability that the image shows the prompt, by a VLM [0, 1].",
    ),
}
