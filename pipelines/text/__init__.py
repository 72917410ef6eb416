"""Methods for text models, one file each, and their recipes: a new one is a file and its rows below.

Nothing is imported until a name is used: the tables hold paths and the lines that `visual-grpo list` prints.
"""

METHOD_TABLE: dict[str, tuple[str, str]] = {
    "grpo": ("visual_grpo.pipelines.text.grpo:Grpo", "GRPO (2402.03300): the core's defaults, fills no hook"),
    "dapo": (
        "visual_grpo.pipelines.text.dapo:Dapo",
        "DAPO (2503.14476): clip-higher, dynamic sampling, token mean, overlong penalty",
    ),
    "dr_grpo": ("visual_grpo.pipelines.text.dr_grpo:DrGrpo", "Dr. GRPO (2503.20783): no std, constant length"),
    "rloo": ("visual_grpo.pipelines.text.rloo:Rloo", "RLOO (2402.14740): against the mean of the other answers"),
    "gspo": ("visual_grpo.pipelines.text.gspo:Gspo", "GSPO (2507.18071): one ratio a sequence"),
    "balanced_aggregation": (
        "visual_grpo.pipelines.text.balanced_aggregation:BalancedAggregation",
        "Balanced Aggregation (2605.04077): token means by the sign of the advantage",
    ),
    "lambda_grpo": (
        "visual_grpo.pipelines.text.lambda_grpo:LambdaGrpo",
        "lambda-GRPO (2509.21154): beginnings that answers share count once",
    ),
    "tmn_reweight": (
        "visual_grpo.pipelines.text.tmn_reweight:TmnReweight",
        "TMN-Reweight (2605.19577): one reward scale a task, a factor of difficulty",
    ),
    "seed_grpo": (
        "visual_grpo.pipelines.text.seed_grpo:SeedGrpo",
        "SEED-GRPO (2505.12346): smaller steps where a group's answers differ in meaning",
    ),
    "fg_expo": (
        "visual_grpo.pipelines.text.fg_expo:FgExpo",
        "FG-ExPO (2605.11403): KL by the batch's accuracy, questions by their pass rate",
    ),
    "redit": ("visual_grpo.pipelines.text.redit:Redit", "ReDit (2506.18631): noise on the rewards, for any units"),
    "real": ("visual_grpo.pipelines.text.real:Real", "REAL (2602.05630): rewards as class labels, bounded gradients"),
    "lens": ("visual_grpo.pipelines.text.lens:Lens", "LENS (2510.08696): learns from all-wrong groups by confidence"),
    "s_grpo": ("visual_grpo.pipelines.text.s_grpo:SGrpo", "S-GRPO (2508.05928): group weights for noisy labels"),
    "microcoder_grpo": (
        "visual_grpo.pipelines.text.microcoder_grpo:MicroCoderGrpo",
        "MicroCoder-GRPO (2603.07777): masks a share of cut answers, temperature by diversity",
    ),
    "grail": ("visual_grpo.pipelines.text.grail:Grail", "GRAIL (2606.04889): tokens weighted by the answer's gradient"),
    "degrpo": (
        "visual_grpo.pipelines.text.degrpo:DeGrpo",
        "DeGRPO (2505.13379): the token that chooses the mode apart",
    ),
    "sft": (
        "visual_grpo.pipelines.text.sft:Sft",
        "Supervised fine-tuning: the data set's answers, negative log-likelihood",
    ),
}

RECIPE_TABLE: dict[str, tuple[str, str]] = {
    "grpo_text_tiny": ("visual_grpo.pipelines.text.grpo:grpo_text_tiny", "GRPO on the tiny LM's arithmetic"),
    "grpo_deepseekmath_7b": (
        "visual_grpo.pipelines.text.grpo:grpo_deepseekmath_7b",
        "GRPO on DeepSeekMath 7B, the paper's settings",
    ),
    "grpo_smollm2_135m": (
        "visual_grpo.pipelines.text.grpo:grpo_smollm2_135m",
        "GRPO on SmolLM2-135M-Instruct: sums from reasoning-gym, on a laptop",
    ),
    "dapo_text_tiny": ("visual_grpo.pipelines.text.dapo:dapo_text_tiny", "DAPO on the tiny LM's arithmetic"),
    "dapo_qwen2_5_7b": ("visual_grpo.pipelines.text.dapo:dapo_qwen2_5_7b", "DAPO on Qwen2.5-7B, the paper's settings"),
    "dr_grpo_text_tiny": (
        "visual_grpo.pipelines.text.dr_grpo:dr_grpo_text_tiny",
        "Dr. GRPO on the tiny LM's arithmetic",
    ),
    "dr_grpo_qwen2_5_math_7b": (
        "visual_grpo.pipelines.text.dr_grpo:dr_grpo_qwen2_5_math_7b",
        "Dr. GRPO on Qwen2.5-Math-7B",
    ),
    "rloo_text_tiny": (
        "visual_grpo.pipelines.text.rloo:rloo_text_tiny",
        "RLOO on the tiny LM's arithmetic: the mean of the other answers",
    ),
    "rloo_qwen2_5_7b": (
        "visual_grpo.pipelines.text.rloo:rloo_qwen2_5_7b",
        "RLOO on Qwen2.5-7B-Instruct and GSM8K, four answers a prompt",
    ),
    "gspo_text_tiny": ("visual_grpo.pipelines.text.gspo:gspo_text_tiny", "GSPO on the tiny LM's arithmetic"),
    "gspo_qwen3_8b": ("visual_grpo.pipelines.text.gspo:gspo_qwen3_8b", "GSPO on Qwen3-8B"),
    "balanced_aggregation_text_tiny": (
        "visual_grpo.pipelines.text.balanced_aggregation:balanced_aggregation_text_tiny",
        "BA on the tiny LM's arithmetic",
    ),
    "balanced_aggregation_qwen2_5_math_7b": (
        "visual_grpo.pipelines.text.balanced_aggregation:balanced_aggregation_qwen2_5_math_7b",
        "BA under DAPO on Qwen2.5-Math-7B, DAPO-17k",
    ),
    "lambda_grpo_text_tiny": (
        "visual_grpo.pipelines.text.lambda_grpo:lambda_grpo_text_tiny",
        "lambda-GRPO on the tiny LM's arithmetic",
    ),
    "lambda_grpo_qwen2_5_3b": (
        "visual_grpo.pipelines.text.lambda_grpo:lambda_grpo_qwen2_5_3b",
        "lambda-GRPO on Qwen2.5-3B-Instruct, the reference script's settings",
    ),
    "tmn_reweight_text_tiny": (
        "visual_grpo.pipelines.text.tmn_reweight:tmn_reweight_text_tiny",
        "TMN-Reweight on the tiny LM's arithmetic, sums paid a tenth",
    ),
    "tmn_reweight_qwen3_4b": (
        "visual_grpo.pipelines.text.tmn_reweight:tmn_reweight_qwen3_4b",
        "TMN-Reweight on Qwen3-4B, the launch script's settings",
    ),
    "seed_grpo_text_tiny": (
        "visual_grpo.pipelines.text.seed_grpo:seed_grpo_text_tiny",
        "SEED-GRPO on the tiny LM's arithmetic",
    ),
    "seed_grpo_qwen2_5_math_7b": (
        "visual_grpo.pipelines.text.seed_grpo:seed_grpo_qwen2_5_math_7b",
        "SEED-GRPO on Qwen2.5-Math-7B, the paper's settings",
    ),
    "fg_expo_text_tiny": (
        "visual_grpo.pipelines.text.fg_expo:fg_expo_text_tiny",
        "FG-ExPO on the tiny LM's arithmetic",
    ),
    "fg_expo_r1_distill_qwen_1_5b": (
        "visual_grpo.pipelines.text.fg_expo:fg_expo_r1_distill_qwen_1_5b",
        "FG-ExPO on R1-Distill-Qwen-1.5B, the paper's settings",
    ),
    "redit_text_tiny": (
        "visual_grpo.pipelines.text.redit:redit_text_tiny",
        "ReDit on the tiny LM's arithmetic",
    ),
    "redit_qwen2_5_7b": (
        "visual_grpo.pipelines.text.redit:redit_qwen2_5_7b",
        "ReDit on Qwen2.5-7B-Instruct, GSM8K",
    ),
    "real_text_tiny": ("visual_grpo.pipelines.text.real:real_text_tiny", "REAL on the tiny LM's arithmetic"),
    "real_r1_distill_qwen_1_5b": (
        "visual_grpo.pipelines.text.real:real_r1_distill_qwen_1_5b",
        "REAL on R1-Distill-Qwen-1.5B",
    ),
    "lens_text_tiny": ("visual_grpo.pipelines.text.lens:lens_text_tiny", "LENS on the tiny LM's arithmetic"),
    "lens_qwen2_5_3b": ("visual_grpo.pipelines.text.lens:lens_qwen2_5_3b", "LENS on Qwen2.5-3B"),
    "s_grpo_text_tiny": ("visual_grpo.pipelines.text.s_grpo:s_grpo_text_tiny", "S-GRPO on the tiny LM's arithmetic"),
    "s_grpo_llama3_2_3b": ("visual_grpo.pipelines.text.s_grpo:s_grpo_llama3_2_3b", "S-GRPO on Llama-3.2-3B"),
    "microcoder_grpo_text_tiny": (
        "visual_grpo.pipelines.text.microcoder_grpo:microcoder_grpo_text_tiny",
        "MicroCoder-GRPO on the tiny LM's arithmetic",
    ),
    "microcoder_grpo_qwen3_4b": (
        "visual_grpo.pipelines.text.microcoder_grpo:microcoder_grpo_qwen3_4b",
        "MicroCoder-GRPO on Qwen3-4B-Instruct-2507",
    ),
    "grail_text_tiny": ("visual_grpo.pipelines.text.grail:grail_text_tiny", "GRAIL on the tiny LM's arithmetic"),
    "grail_qwen3_4b": ("visual_grpo.pipelines.text.grail:grail_qwen3_4b", "GRAIL on Qwen3-4B"),
    "degrpo_text_tiny": ("visual_grpo.pipelines.text.degrpo:degrpo_text_tiny", "DeGRPO on the tiny LM's arithmetic"),
    "degrpo_thinkless_1_5b": (
        "visual_grpo.pipelines.text.degrpo:degrpo_thinkless_1_5b",
        "DeGRPO on Thinkless-1.5B-Warmup",
    ),
    "sft_text_tiny": (
        "visual_grpo.pipelines.text.sft:sft_text_tiny",
        "Fine-tuning of the tiny LM on brief and long answers",
    ),
    "sft_thinkless_1_5b": (
        "visual_grpo.pipelines.text.sft:sft_thinkless_1_5b",
        "Warm-up of Thinkless on R1-Distill-Qwen-1.5B, pairs of brief and long answers",
    ),
    "thinkless_tiny": (
        "visual_grpo.pipelines.text.thinkless:thinkless_tiny",
        "Thinkless on the tiny LM in two stages: two modes are taught, then when to take which",
    ),
    "thinkless_1_5b": (
        "visual_grpo.pipelines.text.thinkless:thinkless_1_5b",
        "Thinkless from R1-Distill-Qwen-1.5B in two stages",
    ),
}
