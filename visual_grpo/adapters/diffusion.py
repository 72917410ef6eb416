"""Flow-matching generators: one denoising loop and one replay for every family.

A family (SD3, FLUX, ...) gives a velocity for latents at a noise level, text conditions, and a decoder; see `DiffusionAdapter`.
Time runs from sigma = 1 (noise) to 0 (image). Step mathematics is float32 or wider whatever the network's dtype.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from visual_grpo.adapters.conditions import Condition, NetworkInputs, TextCache
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.noise import row_noise
from visual_grpo.adapters.protocol import PolicyAdapter, SamplingConfig
from visual_grpo.errors import UserError
from visual_grpo.objectives import elbo_pair_loss
from visual_grpo.schedules import flow_match_sigmas, linear_shift_sigmas, shortened_tail
from visual_grpo.transitions import (
    Transition,
    cps_step,
    dance_sde_step,
    ddim_step,
    flow_sde_step,
    interpolate,
    multistep_step,
    ode_step,
    transition_log_prob,
    x0_from_velocity,
)
from visual_grpo.types import LogProb, PromptBatch, RolloutBatch


class DiffusionAdapter(PolicyAdapter):
    """Base of the diffusion families; a family fills the abstract methods and nothing else of the loop.

    Rollouts: `data` holds `final` [N, *latent] and, of the `U` stochastic steps, `latents` and `next_latents` [N, U, *latent];
    `unit_tags["step_index"]` is [N, U]; `shared` holds `sigmas` [steps + 1] and the `sampling` that replays follow.
    Noise pairs (V-GRPO) are replayed from `final`, `pair_sigma` [N, M] and `pair_noise` [N, M, *latent].
    """

    kind = "diffusion"
    library = "diffusers"
    unit_kinds = frozenset({"transition", "noise_pair"})
    Sampling = DiffusionSampling
    channel_dim: ClassVar[int] = 1
    """Dimension of the channels in [N, *latent]; -1 for packed latents."""
    wide_input: ClassVar[bool] = False
    """Whether `predict_velocity` gets the latents in `step_dtype` and rounds them itself."""
    sampling: DiffusionSampling
    """Used for rollouts that hold no `shared["sampling"]` (data-set rows)."""

    def __init__(self, sampling: SamplingConfig) -> None:
        """Keep `sampling` as the default; families add their networks."""
        self.sampling = self._checked(sampling)
        self._texts = TextCache()

    # ---- what a family gives -------------------------------------------------------------------------------------------

    @abstractmethod
    def latent_shape(self, sampling: DiffusionSampling) -> tuple[int, ...]:
        """Shape `*latent` of one row; UserError for a size the model cannot draw."""

    @abstractmethod
    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Velocity `noise - x0` [n, *latent] of latents [n, *latent] at levels sigma [n]; no guidance here."""

    @abstractmethod
    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """Condition tensors [P, ...] of `P` distinct texts, from frozen encoders."""

    @abstractmethod
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Images [n, 3, H, W] in [0, 1], unclamped, of latents [n, *latent]."""

    def encode_images(self, images: Tensor) -> Tensor:
        """Latents [n, *latent] of pictures [n, 3, H, W] in [0, 1], the inverse of `decode_latents`.

        Raises:
            UserError: the family has no encoder.
        """
        raise UserError(
            f"{type(self).__name__} cannot encode pictures; take teachers' samples in place of a data set's"
        )

    def noise_levels(self, sampling: DiffusionSampling) -> Tensor:
        """Levels [steps + 1] from 1 to 0; a family sets its default shift, or another schedule."""
        return flow_match_sigmas(sampling.steps, sampling.shift or 1.0, dtype=self.step_dtype)

    def first_latents(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """Latents at the first level `sigma` [] from standard normal `noise` [n, *latent]."""
        return noise

    def clean_latents(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """Finished latents from those at the last level `sigma` [], which is 0 but for some schedules."""
        return latents

    def guided(self, free: Tensor, bound: Tensor, scale: float) -> Tensor:
        """Velocity [n, *latent] from both branches' [n, *latent]; scale 1 = the conditional one (and is not asked for)."""
        return free + scale * (bound - free)

    @property
    def level_range(self) -> tuple[float, float]:
        """Lowest and highest noise level that the network was trained on."""
        return 0.0, 1.0

    # ---- shared -------------------------------------------------------------------------------------------------------

    def check_prompts(
        self, prompts: Sequence[str], metadata: Sequence[dict[str, Any]], sampling: SamplingConfig
    ) -> None:
        """Refuse records with a system message, which text encoders have no place for."""
        for text, record in zip(prompts, metadata, strict=True):
            if record.get("system") is not None:
                raise UserError(
                    f"prompt {text[:60]!r} has a system message, and {type(self).__name__} takes plain prompts: leave it "
                    "out of the data (a column of this name that is no message must be called something else)"
                )

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.trainable_module.parameters()).device

    @property
    def network_dtype(self) -> torch.dtype:
        """What the network's first layer takes."""
        return next(self.trainable_module.parameters()).dtype

    @property
    def step_dtype(self) -> torch.dtype:
        """Of latents and step mathematics: float32, or float64 with a float64 network."""
        return torch.promote_types(self.network_dtype, torch.float32)

    @torch.no_grad()
    def encode(self, texts: Sequence[str], sampling: DiffusionSampling, *, guided: bool = False) -> Condition:
        """Encode [N] texts, each distinct one once (see `TextCache`); with guidance the negative prompt as well."""
        everything = [*texts, sampling.negative_prompt] if guided else texts
        with torch.autocast(self.device.type, enabled=False):  # encoders keep the dtype they were loaded in
            condition = self._texts.encode(
                everything,
                lambda distinct: self.encode_texts(distinct, sampling),
                key=sampling.max_sequence_length,
                limit=sampling.text_cache,
                device=self.device,
                dtype=self.network_dtype,
            )
        return replace(condition, guided=guided)

    def forget_texts(self) -> None:
        """Drop the kept encodings: the text encoders' weights have changed."""
        self._texts = TextCache()

    def stochastic_steps(self, sampling: DiffusionSampling, units: Tensor | None = None) -> list[int]:
        """Step indices that are noisy, stored and trainable: `units`, or all but the last step.

        Raises:
            UserError: `units` is not ascending, leaves the schedule, or asks for steps that have no noise.
        """
        if units is None:
            return [] if sampling.deterministic else list(range(sampling.steps - 1))
        steps = [int(unit) for unit in units]
        if steps and sampling.deterministic:
            raise UserError(
                f"solver {sampling.solver!r} has no stochastic steps, but {steps} are to be trained: set sampling.solver"
            )
        end = sampling.steps - (sampling.solver in ("cps", "ddim"))  # their last step has no noise
        if steps != sorted(set(steps)) or (steps and not 0 <= steps[0] <= steps[-1] < end):
            raise UserError(
                f"trained steps {steps} must be distinct, ascending and within 0..{end - 1} "
                f"(solver {sampling.solver!r}, sampling.steps {sampling.steps})"
            )
        return steps

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        sigma_next: Tensor,
        *,
        sampling: DiffusionSampling,
        sigma_max: Tensor,
    ) -> Transition:
        """The stochastic step of `sampling.solver` from `sigma` [n] to `sigma_next` [n]; `sigma_max` is `sigmas[1]`."""
        scale = sampling.noise_scale
        if sampling.solver == "dance_sde":
            return dance_sde_step(latents, velocity, sigma, sigma_next, noise_scale=scale)
        if sampling.solver == "cps":
            return cps_step(latents, velocity, sigma, sigma_next, noise_scale=scale)
        if sampling.solver == "ddim":
            return ddim_step(latents, velocity, sigma, sigma_next, eta=scale)
        if sampling.solver == "flow_sde":
            return flow_sde_step(latents, velocity, sigma, sigma_next, noise_scale=scale, sigma_max=sigma_max)
        raise UserError(
            f"solver {sampling.solver!r} has no stochastic transition: set sampling.solver to flow_sde, dance_sde, cps or ddim"
        )

    @torch.no_grad()
    def sample(
        self, prompts: PromptBatch, *, seed: int, sampling: SamplingConfig, units: Tensor | None = None
    ) -> RolloutBatch:
        """Denoise all rows; see `PolicyAdapter.sample` and the class docstring for what is stored."""
        options = self._checked(sampling)
        steps = self.stochastic_steps(options, units)
        chunks = torch.arange(len(prompts)).split(options.forward_batch or max(len(prompts), 1))
        return RolloutBatch.concat([self._denoise(prompts.select(rows), seed, options, steps) for rows in chunks])

    def _denoise(self, prompts: PromptBatch, seed: int, options: DiffusionSampling, steps: list[int]) -> RolloutBatch:
        """Denoise rows that go through the network together; `steps` are stochastic and stored."""
        count, shape = len(prompts), self.latent_shape(options)
        run: dict[str, Any] = {"dtype": self.step_dtype, "device": self.device}
        sigmas = self._schedule(options).to(self.device)
        inputs = self.encode(prompts.context("behaviour"), options, guided=options.guidance != 1).inputs(
            torch.arange(count, device=self.device)
        )
        ids, stream = (prompts.group_ids, "initial/group") if options.same_noise else (prompts.row_ids, "initial")
        latents = self.first_latents(row_noise(seed, ids, shape, stream).to(**run), sigmas[0])
        noise = row_noise(seed, prompts.row_ids, (len(steps), *shape), "steps").to(**run)
        stored = torch.empty(2, count, len(steps), *shape, **run)
        values = []
        before: tuple[Tensor, Tensor] | None = None  # of solver dpm: the last clean prediction and its level
        end = options.steps if options.tail_ratio is None or not steps else steps[-1] + 1
        for step in range(end):
            sigma, sigma_next = sigmas[step].expand(count), sigmas[step + 1].expand(count)
            velocity = self._velocity(latents, sigma, inputs, options)
            if options.solver == "dpm":
                clean = x0_from_velocity(latents, velocity, sigma)
                latents = multistep_step(latents, clean, sigma, sigma_next, before=before)
                before = clean, sigmas[step]
                continue
            if step not in steps:
                latents = ode_step(latents, velocity, sigma, sigma_next).mean
                continue
            slot = steps.index(step)
            move = self.transition(latents, velocity, sigma, sigma_next, sampling=options, sigma_max=sigmas[1])
            stored[0, :, slot] = latents
            latents = move.sample(noise[:, slot])
            stored[1, :, slot] = latents
            values.append(transition_log_prob(move, latents, options.reduction, channel_dim=self.channel_dim))
        if end < options.steps:
            latents = self._tail(latents, end, inputs, options)
        data: dict[str, Any] = {"final": self.clean_latents(latents, sigmas[-1])}
        if steps:
            data |= {"latents": stored[0], "next_latents": stored[1]}
        return RolloutBatch(
            prompts=prompts,
            unit_kind="transition",
            unit_mask=torch.ones(count, len(steps), dtype=torch.bool, device=self.device),
            old_log_prob=torch.stack(values, dim=1) if values else None,
            data=data,
            shared={"sigmas": sigmas, "sampling": options},
            unit_tags={"step_index": torch.tensor(steps, dtype=torch.int64, device=self.device).expand(count, -1)},
        )

    def log_prob(self, rollouts: RolloutBatch, units: Tensor, *, entropy: bool = False) -> LogProb:
        """Replay `units` of all rows; see `PolicyAdapter.log_prob`.

        Transitions: `value` [n, u, *map], `mean` and `prediction` (the velocity) [n, u, *latent], `std` and
        `kl_std` [n, u].
        Noise pairs: `value` [n, u] is minus the pair's denoising loss, `prediction` [n, u, *latent] the predicted x0.
        Both: `velocity` [n, u, *latent].
        """
        if entropy:
            raise UserError("a diffusion policy has no token entropy; its transitions have a fixed spread")
        options = rollouts.shared.get("sampling", self.sampling)
        if rollouts.unit_kind == "transition":
            return self._replay_transitions(rollouts, units.to(self.device), options)
        if rollouts.unit_kind == "noise_pair":
            return self._replay_pairs(rollouts, units.to(self.device), options)
        raise UserError(
            f"a diffusion policy replays transitions or noise pairs, not units of kind {rollouts.unit_kind!r}"
        )

    @torch.no_grad()
    def decode(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Fill `images` [N, 3, H, W], float32 in [0, 1], in CPU memory."""
        final: Tensor = rollouts.data["final"]
        options = rollouts.shared.get("sampling", self.sampling)
        with torch.autocast(final.device.type, enabled=False):  # half precision would band the pictures
            parts = [self.decode_latents(part) for part in final.split(options.decode_batch)]
        return replace(rollouts, images=torch.cat([part.clamp(0, 1).float().cpu() for part in parts]))

    # ---- inner --------------------------------------------------------------------------------------------------------

    @classmethod
    def _checked(cls, sampling: SamplingConfig) -> DiffusionSampling:
        if not isinstance(sampling, cls.Sampling) or not isinstance(sampling, DiffusionSampling):
            raise UserError(f"{cls.__name__} needs {cls.Sampling.__name__} options, got {type(sampling).__name__}")
        return sampling

    def _schedule(self, options: DiffusionSampling) -> Tensor:
        """Levels [steps + 1] by `options.schedule`."""
        if options.schedule == "scheduler" or options.shift is None:
            return self.noise_levels(options)
        return linear_shift_sigmas(options.steps, options.shift, dtype=self.step_dtype)

    def _tail(self, latents: Tensor, done: int, inputs: NetworkInputs, options: DiffusionSampling) -> Tensor:
        """Final latents, from those after `done` steps, over the shortened rest of the schedule."""
        assert options.tail_ratio is not None
        assert options.shift is not None
        levels = shortened_tail(options.steps, done, options.tail_ratio, options.shift, dtype=self.step_dtype)
        before = None
        for sigma, sigma_next in pairwise(levels.to(self.device)):
            level = sigma.expand(len(latents))
            clean = x0_from_velocity(latents, self._velocity(latents, level, inputs, options), level)
            latents = multistep_step(latents, clean, level, sigma_next, before=before)
            before = clean, sigma
        return latents

    def _velocity(self, latents: Tensor, sigma: Tensor, inputs: NetworkInputs, options: DiffusionSampling) -> Tensor:
        """Velocity [n, *latent] of latents [n, *latent] at sigma [n], with guidance where `inputs` has both branches."""
        x = latents if self.wide_input else latents.to(self.network_dtype)
        if inputs.doubled:
            both = self.predict_velocity(torch.cat([x, x]), torch.cat([sigma, sigma]), inputs.tensors).to(latents.dtype)
            free, bound = both.chunk(2)
            return self.guided(free, bound, options.guidance)
        bound = self.predict_velocity(x, sigma, inputs.tensors).to(latents.dtype)
        if inputs.free is None:
            return bound
        with torch.no_grad():
            free = self.predict_velocity(x, sigma, inputs.free).to(latents.dtype)
        return self.guided(free, bound, options.guidance)

    def _replay_velocity(
        self, latents: Tensor, sigma: Tensor, texts: list[str], repeats: int, options: DiffusionSampling
    ) -> Tensor:
        """Velocity of latents [n * repeats, *latent], row-major, in network batches of `forward_batch`."""
        guided = options.guidance != 1 and options.logprob_mode == "guided"
        apart = options.guidance_gradient == "cond" and torch.is_grad_enabled()
        condition = self.encode(texts, options, guided=guided)
        parts = []
        for start in range(0, len(latents), options.forward_batch or len(latents)):
            part = slice(start, start + (options.forward_batch or len(latents)))
            rows = torch.arange(len(latents), device=latents.device)[part] // repeats
            parts.append(self._velocity(latents[part], sigma[part], condition.inputs(rows, apart=apart), options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _replay_transitions(self, rollouts: RolloutBatch, units: Tensor, options: DiffusionSampling) -> LogProb:
        size = (len(rollouts), len(units))
        latents = rollouts.data["latents"].to(self.device)[:, units].flatten(0, 1)
        following = rollouts.data["next_latents"].to(self.device)[:, units].flatten(0, 1)
        sigmas = rollouts.shared["sigmas"].to(self.device)
        step = rollouts.unit_tags["step_index"].to(self.device)[:, units].flatten()
        sigma, sigma_next = sigmas[step], sigmas[step + 1]
        texts = rollouts.prompts.context("training")
        velocity = self._replay_velocity(latents, sigma, texts, len(units), options)
        move = self.transition(latents, velocity, sigma, sigma_next, sampling=options, sigma_max=sigmas[1])
        value = transition_log_prob(move, following, options.reduction, channel_dim=self.channel_dim)
        kl_std = move.std / move.kl_factor.sqrt()
        mean, std, kl_std, velocity = (item.unflatten(0, size) for item in (move.mean, move.std, kl_std, velocity))
        return LogProb(
            value=value.unflatten(0, size), mean=mean, std=std, kl_std=kl_std, prediction=velocity, velocity=velocity
        )

    def _replay_pairs(self, rollouts: RolloutBatch, units: Tensor, options: DiffusionSampling) -> LogProb:
        size = (len(rollouts), len(units))
        final = rollouts.data["final"].to(self.device)
        noise = rollouts.data["pair_noise"].to(self.device)[:, units].flatten(0, 1)
        sigma = rollouts.data["pair_sigma"].to(self.device)[:, units].flatten().to(final.dtype)
        noised = interpolate(final.repeat_interleave(len(units), dim=0), noise, sigma)
        velocity = self._replay_velocity(noised, sigma, rollouts.prompts.context("training"), len(units), options)
        prediction = x0_from_velocity(noised, velocity, sigma).unflatten(0, size)
        loss = elbo_pair_loss(prediction, final, self_normalize=options.self_normalize, floor=1e-5)
        return LogProb(value=-loss, prediction=prediction, velocity=velocity.unflatten(0, size))
