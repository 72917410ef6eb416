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
