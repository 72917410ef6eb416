"""Methods, one file each, in folders by family; and their recipes. A new method is a file and its rows below.

Nothing is imported until a name is used: the tables hold paths and the lines that `visual-grpo list` prints.
"""

if __name__.partition(".")[0] != "visual_grpo":
    raise ImportError(f"import this package as visual_grpo.pipelines, not as {__name__}")

METHOD_TABLE: dict[str, tuple[str, str]] = {
    "grpo": ("visual_grpo.pipelines.text.grpo:Grpo", "GRPO (2402.03300): the core's defaults, fills no hook"),
    "dapo": (
        "visual_grpo.pipelines.text.dapo:Dapo",
        "DAPO (2503.14476): clip-higher, dynamic sampling, token mean, overlong penalty",
    ),
    "dr_grpo": ("visual_grpo.pipelines.text.dr_grpo:DrGrpo", "Dr. GRPO (2503.20783): no std, constant length"),
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
    "flow_grpo": (
        "visual_grpo.pipelines.flow.flow_grpo:FlowGrpo",
        "Flow-GRPO and -Fast (2505.05470): each noisy step is a unit",
    ),
    "v_grpo": ("visual_grpo.pipelines.flow.v_grpo:VGrpo", "V-GRPO (2604.23380): ELBO surrogate on the finished sample"),
    "mixgrpo": (
        "visual_grpo.pipelines.flow.mixgrpo:MixGrpo",
        "MixGRPO and -Flash (2507.21802): a moving window of noisy, trained steps, ODE elsewhere",
    ),
    "dancegrpo": (
        "visual_grpo.pipelines.flow.dancegrpo:DanceGrpo",
        "DanceGRPO (2505.07818): constant noise, shared initial noise, a random subset of steps",
    ),
    "best_of_n": (
        "visual_grpo.pipelines.flow.best_of_n:BestOfN",
        "Best-of-N of DanceGRPO, in any stack: train the best and the worst samples of a prompt",
    ),
    "gdpo": (
        "visual_grpo.pipelines.flow.gdpo:Gdpo",
        "GDPO (2601.05242), in any stack: each reward normalised by itself (combine.how=gdpo)",
    ),
    "diffusion_nft": (
        "visual_grpo.pipelines.flow.diffusion_nft:DiffusionNft",
        "DiffusionNFT (2509.16117): no log-prob, good and bad mixtures of velocities, a slow sampler",
    ),
    "vipo": (
        "visual_grpo.pipelines.flow.vipo:Vipo",
        "ViPO (2511.18719): a map of the picture spreads the advantage; behind flow_grpo",
    ),
    "mv_grpo": (
        "visual_grpo.pipelines.flow.mv_grpo:MvGrpo",
        "MV-GRPO (2603.12648): the same samples under further captions; behind flow_grpo",
    ),
    "flow_opd": (
        "visual_grpo.pipelines.flow.flow_opd:FlowOpd",
        "Flow-OPD (2605.08063): distils one expert a task on the student's own noisy steps; behind flow_grpo",
    ),
    "flow_sft": (
        "visual_grpo.pipelines.flow.flow_sft:FlowSft",
        "Flow-matching loss on samples of teachers or pictures of the data set",
    ),
    "task_cycle": (
        "visual_grpo.pipelines.flow.task_cycle:TaskCycle",
        "Cycle over the tasks of data.sources, in any stack: one task a step",
    ),
}

# A recipe is a function that returns a RunConfig, or a PipelineConfig of several stages.
RECIPE_TABLE: dict[str, tuple[str, str]] = {
    "quickstart": (
        "visual_grpo.pipelines.flow.v_grpo:quickstart",
        "V-GRPO teaches a tiny SD3 to follow its prompts, in minutes on a laptop",
    ),
    "v_grpo_sd15_tiny": (
        "visual_grpo.pipelines.flow.v_grpo:v_grpo_sd15_tiny",
        "V-GRPO teaches a tiny SD1.5 to follow its prompts",
    ),
    "flow_grpo_sd15_tiny": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_sd15_tiny",
        "Flow-GRPO on a tiny SD1.5, DDIM transitions",
    ),
    "v_grpo_tiny": (
        "visual_grpo.pipelines.flow.v_grpo:v_grpo_tiny",
        "V-GRPO on the testbed's scenes with twice the batch, a quarter of an hour",
    ),
    "v_grpo_sd35_medium": (
        "visual_grpo.pipelines.flow.v_grpo:v_grpo_sd35_medium",
        "V-GRPO on SD3.5-medium, stage 1 of the paper",
    ),
    "v_grpo_flux1_dev": ("visual_grpo.pipelines.flow.v_grpo:v_grpo_flux1_dev", "V-GRPO on FLUX.1-dev"),
    "flow_grpo_tiny": ("visual_grpo.pipelines.flow.flow_grpo:flow_grpo_tiny", "Flow-GRPO on the testbed's scenes"),
    "flow_grpo_fast_tiny": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_fast_tiny",
        "Flow-GRPO-Fast on the testbed's scenes",
    ),
    "flow_grpo_sd35_medium_geneval": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_sd35_medium_geneval",
        "Flow-GRPO on SD3.5-medium, GenEval",
    ),
    "flow_grpo_sd35_medium_ocr": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_sd35_medium_ocr",
        "Flow-GRPO on SD3.5-medium, OCR",
    ),
    "flow_grpo_sd35_medium_pickscore": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_sd35_medium_pickscore",
        "Flow-GRPO on SD3.5-medium, PickScore",
    ),
    "flow_grpo_fast_sd35_medium_geneval": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_fast_sd35_medium_geneval",
        "Flow-GRPO-Fast on SD3.5-medium, no guidance",
    ),
    "flow_grpo_sd35_large_geneval": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_sd35_large_geneval",
        "Flow-GRPO on SD3.5-large, GenEval",
    ),
    "flow_grpo_flux1_dev_pickscore": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_flux1_dev_pickscore",
        "Flow-GRPO on FLUX.1-dev, PickScore",
    ),
    "flow_grpo_fast_flux1_dev_pickscore": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_fast_flux1_dev_pickscore",
        "Flow-GRPO-Fast on FLUX.1-dev, PickScore",
    ),
    "flow_grpo_sdxl_base_pickscore": (
        "visual_grpo.pipelines.flow.flow_grpo:flow_grpo_sdxl_base_pickscore",
        "Flow-GRPO on SDXL-base, DDIM transitions, PickScore",
    ),
    "mixgrpo_tiny": ("visual_grpo.pipelines.flow.mixgrpo:mixgrpo_tiny", "MixGRPO on the testbed's scenes"),
    "mixgrpo_flash_tiny": (
        "visual_grpo.pipelines.flow.mixgrpo:mixgrpo_flash_tiny",
        "MixGRPO-Flash on the testbed's scenes",
    ),
    "mixgrpo_sd35_medium": (
        "visual_grpo.pipelines.flow.mixgrpo:mixgrpo_sd35_medium",
        "MixGRPO on SD3.5-medium, settings of its FLUX runs",
    ),
    "mixgrpo_flux1_dev": ("visual_grpo.pipelines.flow.mixgrpo:mixgrpo_flux1_dev", "MixGRPO on FLUX.1-dev"),
    "mixgrpo_flash_flux1_dev": (
        "visual_grpo.pipelines.flow.mixgrpo:mixgrpo_flash_flux1_dev",
        "MixGRPO-Flash on FLUX.1-dev",
    ),
    "dancegrpo_tiny": ("visual_grpo.pipelines.flow.dancegrpo:dancegrpo_tiny", "DanceGRPO on the testbed's scenes"),
    "dancegrpo_best_of_n_tiny": (
        "visual_grpo.pipelines.flow.dancegrpo:dancegrpo_best_of_n_tiny",
        "DanceGRPO on the testbed's scenes, best and worst samples",
    ),
    "dancegrpo_sd35_medium": (
        "visual_grpo.pipelines.flow.dancegrpo:dancegrpo_sd35_medium",
        "DanceGRPO on SD3.5-medium, settings of its FLUX runs",
    ),
    "dancegrpo_best_of_n_sd35_medium": (
        "visual_grpo.pipelines.flow.dancegrpo:dancegrpo_best_of_n_sd35_medium",
        "DanceGRPO on SD3.5-medium, best and worst samples",
    ),
    "dancegrpo_flux1_dev": ("visual_grpo.pipelines.flow.dancegrpo:dancegrpo_flux1_dev", "DanceGRPO on FLUX.1-dev"),
    "dancegrpo_lora_flux1_dev": (
        "visual_grpo.pipelines.flow.dancegrpo:dancegrpo_lora_flux1_dev",
        "DanceGRPO on FLUX.1-dev, LoRA",
    ),
    "dancegrpo_sd15": (
        "visual_grpo.pipelines.flow.dancegrpo:dancegrpo_sd15",
        "DanceGRPO on Stable Diffusion 1.5, DDIM transitions",
    ),
    "flow_grpo_gdpo_tiny": (
        "visual_grpo.pipelines.flow.gdpo:flow_grpo_gdpo_tiny",
        "Flow-GRPO with GDPO on the testbed's scenes",
    ),
    "flow_grpo_gdpo_sd35_medium": (
        "visual_grpo.pipelines.flow.gdpo:flow_grpo_gdpo_sd35_medium",
        "Flow-GRPO with GDPO on SD3.5-medium",
    ),
    "diffusion_nft_tiny": (
        "visual_grpo.pipelines.flow.diffusion_nft:diffusion_nft_tiny",
        "DiffusionNFT on the testbed's scenes",
    ),
    "diffusion_nft_sd35_medium_geneval": (
        "visual_grpo.pipelines.flow.diffusion_nft:diffusion_nft_sd35_medium_geneval",
        "DiffusionNFT on SD3.5-medium, GenEval",
    ),
    "diffusion_nft_sd35_medium_pickscore": (
        "visual_grpo.pipelines.flow.diffusion_nft:diffusion_nft_sd35_medium_pickscore",
        "DiffusionNFT on SD3.5-medium, PickScore",
    ),
    "diffusion_nft_sd35_medium_ocr": (
        "visual_grpo.pipelines.flow.diffusion_nft:diffusion_nft_sd35_medium_ocr",
        "DiffusionNFT on SD3.5-medium, OCR",
    ),
    "diffusion_nft_sd35_medium_multi": (
        "visual_grpo.pipelines.flow.diffusion_nft:diffusion_nft_sd35_medium_multi",
        "DiffusionNFT on SD3.5-medium, three preference rewards",
    ),
    "diffusion_nft_flux1_dev": (
        "visual_grpo.pipelines.flow.diffusion_nft:diffusion_nft_flux1_dev",
        "DiffusionNFT on FLUX.1-dev",
    ),
    "vipo_tiny": (
        "visual_grpo.pipelines.flow.vipo:vipo_tiny",
        "Flow-GRPO with ViPO's maps on the testbed's scenes",
    ),
    "vipo_sd35_medium": (
        "visual_grpo.pipelines.flow.vipo:vipo_sd35_medium",
        "Flow-GRPO with ViPO's DINOv2 maps on SD3.5-medium",
    ),
    "vipo_flux1_dev": (
        "visual_grpo.pipelines.flow.vipo:vipo_flux1_dev",
        "DanceGRPO with ViPO's DINOv2 maps on FLUX.1-dev",
    ),
    "mv_grpo_tiny": (
        "visual_grpo.pipelines.flow.mv_grpo:mv_grpo_tiny",
        "Flow-GRPO with MV-GRPO's captions on the testbed's scenes",
    ),
    "mv_grpo_sd35_medium": (
        "visual_grpo.pipelines.flow.mv_grpo:mv_grpo_sd35_medium",
        "Flow-GRPO with MV-GRPO's captions on SD3.5-medium",
    ),
    "mv_grpo_flux1_dev": (
        "visual_grpo.pipelines.flow.mv_grpo:mv_grpo_flux1_dev",
        "DanceGRPO with MV-GRPO's captions on FLUX.1-dev",
    ),
    "flow_grpo_hacked_tiny": (
        "visual_grpo.pipelines.flow.hacking:flow_grpo_hacked_tiny",
        "Flow-GRPO without KL exploits a learned reward on the testbed's scenes",
    ),
    "flow_grpo_guarded_tiny": (
        "visual_grpo.pipelines.flow.hacking:flow_grpo_guarded_tiny",
        "Flow-GRPO on a learned reward with the anti-hacking kit, on the testbed's scenes",
    ),
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
    "flow_opd_tiny": (
        "visual_grpo.pipelines.flow.flow_opd_recipes:flow_opd_tiny",
        "Pipeline: experts of scenes and words, their mean, one student distilled from both",
    ),
    "flow_opd_no_cold_start_tiny": (
        "visual_grpo.pipelines.flow.flow_opd_recipes:flow_opd_no_cold_start_tiny",
        "flow_opd_tiny with a student that starts from the base model",
    ),
    "flow_opd_no_mar_tiny": (
        "visual_grpo.pipelines.flow.flow_opd_recipes:flow_opd_no_mar_tiny",
        "flow_opd_tiny without the pull to the anchor",
    ),
    "flow_opd_sft_tiny": (
        "visual_grpo.pipelines.flow.flow_opd_recipes:flow_opd_sft_tiny",
        "flow_opd_tiny with a supervised cold start",
    ),
    "grpo_mix_tiny": (
        "visual_grpo.pipelines.flow.flow_opd_recipes:grpo_mix_tiny",
        "V-GRPO on the testbed's scenes and words at once, what Flow-OPD is compared with",
    ),
    "flow_opd_sd35_medium": (
        "visual_grpo.pipelines.flow.flow_opd_recipes:flow_opd_sd35_medium",
        "Pipeline: Flow-OPD on SD3.5-medium, GenEval and OCR",
    ),
    "flow_opd_sft_sd35_medium": (
        "visual_grpo.pipelines.flow.flow_opd_recipes:flow_opd_sft_sd35_medium",
        "flow_opd_sd35_medium with a supervised cold start",
    ),
}
