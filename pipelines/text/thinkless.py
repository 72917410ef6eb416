"""Thinkless: "Thinkless: LLM Learns When to Think", arXiv 2505.13379, as a pipeline of its two stages.

1. `sft` on pairs of a brief and a long answer, each behind its control token, so that the model can answer in both ways and
   chooses either about equally often.
2. `degrpo` from that model: when to answer in which.

Departures: see the two methods. The second stage of the tiny pipeline weighs the control token by about one over the mean
length of its short answers, as the paper's 0.001 does for answers of a thousand tokens, and takes an answer that begins with
`<short>` for brief only up to 8 tokens: without that the model moves its workings there.
"""

from __future__ import annotations

from visual_grpo.config_stages import PipelineConfig

TINY_LENGTH = 40
"""Room for the longest working and its control tokens."""


def thinkless_tiny() -> PipelineConfig:
    """Both stages on the tiny LM's arithmetic: the brief answer for easy sums, the working for hard ones."""
    return PipelineConfig(
        name="thinkless_tiny",
        summary="Thinkless on the tiny LM's arithmetic: two modes are taught, then when to take which",
        stages={
            "warm_up": {"recipe": "sft_text_tiny"},
            "degrpo": {
                "recipe": "degrpo_text_tiny",
                "model": {"path": "stage://warm_up"},
                "method": [{"degrpo": {"control_weight": 0.1, "mode_rewards": {"short_max": 8}}}],
                "data": {"source": "testbed/arithmetic_modes"},
                "rewards": {"exact_match": {"params": {"extraction": "hashes"}}},
                "sampling": {"max_new_tokens": TINY_LENGTH},
            },
        },
    )


def thinkless_1_5b() -> PipelineConfig:
    """Both stages from DeepSeek-R1-Distill-Qwen-1.5B; the second with the reference's settings, from the first one's model."""
    return PipelineConfig(
        name="thinkless_1_5b",
        summary="Thinkless from R1-Distill-Qwen-1.5B: warm-up on pairs of answers, then DeGRPO",
        stages={
            "warm_up": {"recipe": "sft_thinkless_1_5b"},
            "degrpo": {"recipe": "degrpo_thinkless_1_5b", "model": {"path": "stage://warm_up"}},
        },
    )
