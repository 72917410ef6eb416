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
}

# A recipe is a function that returns a RunConfig.
RECIPE_TABLE: dict[str, tuple[str, str]] = {
    "quickstart": (
        "visual_grpo.pipelines.flow.v_grpo:quickstart",
        "V-GRPO teaches a tiny SD3 to follow its prompts, minutes on a laptop",
    ),
    "v_grpo_tiny": ("visual_grpo.pipelines.flow.v_grpo:v_grpo_tiny", "the same for about an hour"),
    "v_grpo_sd35_medium": (
        "visual_grpo.pipelines.flow.v_grpo:v_grpo_sd35_medium",
        "V-GRPO on SD3.5-medium, stage 1 of the paper",
    ),
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
    "grpo_text_tiny": ("visual_grpo.pipelines.text.grpo:grpo_text_tiny", "GRPO on the tiny LM's arithmetic"),
    "grpo_deepseekmath_7b": (
        "visual_grpo.pipelines.text.grpo:grpo_deepseekmath_7b",
        "GRPO on DeepSeekMath 7B, the paper's settings",
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
}
