"""Model families, one file each. A new one is a file here and a row in the table below.

Nothing is imported until a family is used: the table holds paths and the line that `visual-grpo list models` prints.
"""

TABLE: dict[str, tuple[str, str]] = {
    "toy": (
        "visual_grpo.adapters.toy:ToyAdapter",
        "words of digits from a table: for tests, and to start a new family from",
    ),
    "sd3": ("visual_grpo.adapters.sd3:SD3Adapter", "any StableDiffusion3Pipeline: tiny, SD3-M, SD3.5-M, SD3.5-L"),
    "text_lm": (
        "visual_grpo.adapters.text_lm:TextLMAdapter",
        "any AutoModelForCausalLM, with a chat template or plain text",
    ),
    "flux": ("visual_grpo.adapters.flux:FluxAdapter", "any FluxPipeline: FLUX.1-dev, -schnell"),
    "sdxl": ("visual_grpo.adapters.sdxl:SDXLAdapter", "any StableDiffusionXLPipeline base model"),
    "sana": ("visual_grpo.adapters.sana:SanaAdapter", "any SanaPipeline: SANA 0.6B, 1.6B, SANA-1.5"),
    "lumina2": ("visual_grpo.adapters.lumina2:Lumina2Adapter", "any Lumina2Pipeline: Lumina-Image 2.0"),
    "qwen_image": ("visual_grpo.adapters.qwen_image:QwenImageAdapter", "any QwenImagePipeline: Qwen-Image"),
    "z_image": ("visual_grpo.adapters.z_image:ZImageAdapter", "any ZImagePipeline: Z-Image, Z-Image-Turbo"),
    "sd15": ("visual_grpo.adapters.sd15:SD15Adapter", "any StableDiffusionPipeline: SD 1.x, 2.x"),
}
