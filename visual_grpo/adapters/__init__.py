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
}
