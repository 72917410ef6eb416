"""Inference engines that sample in place of the trained network: vLLM, on a server of its own or in the same process.

`engine` is what every engine offers, `connect` finds it and gives it its first weights, `agreement` measures how far engine and
network lie apart. docs/rollouts.md says how to run one.
"""
