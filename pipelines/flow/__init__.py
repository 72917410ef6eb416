"""Methods for flow-matching and diffusion models, one file each, and their recipes: a new one is a file and its rows below.

Nothing is imported until a name is used: the tables hold paths and the lines that `visual-grpo list` prints.
"""

METHOD_TABLE: dict[str, tuple[str, str]] = {
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
