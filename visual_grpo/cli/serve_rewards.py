"""`visual-grpo serve-rewards`: rewards in a process or on a machine of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

TOKEN = "VISUAL_GRPO_REWARD_TOKEN"


def command(
    names: Annotated[str, typer.Argument(metavar="NAME[,NAME...]", help="Names, or package.module:Name.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME.key=value ...", help="As under `rewards:`, e.g. code.params.seconds=2."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    device: Annotated[str, typer.Option("--device", help="For rewards that are models.")] = "cpu",
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", exists=True, dir_okay=False, help=f"File of the token (default: ${TOKEN})."),
    ] = None,
    body_mb: Annotated[int, typer.Option("--max-body-mb", min=1, help="Largest request.")] = 64,
    batch_rows: Annotated[int, typer.Option("--batch", min=1, help="Most rows of requests that are joined.")] = 64,
) -> None:
    """Serve rewards over HTTP; a run names them by `rewards: {NAME: {url: http://HOST:PORT}}`.

    Clients must send the token of --token-file or $VISUAL_GRPO_REWARD_TOKEN, if there is one.
    """
    from visual_grpo.cli.reward_settings import reward_settings
    from visual_grpo.errors import UserError
    from visual_grpo.registry import REWARDS

    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        REWARDS.target(name)  # an unknown name is refused before torch is imported
    rewards = reward_settings(chosen, settings or [])
    from visual_grpo.data import read_text

    token = read_text(token_file, "the token").strip() if token_file is not None else os.environ.get(TOKEN)
    if token is not None and not token:
        raise UserError("the token is empty; write one into the file or the variable, or take it away.")
    if token is None and host not in ("127.0.0.1", "localhost", "::1"):
        print(f"Warning: anybody who reaches {host} can use this server; set {TOKEN}.", file=sys.stderr)

    from visual_grpo.reward_server import RewardService, ServerLimits, serve

    limits = ServerLimits(body_mb=body_mb, batch_rows=batch_rows)
    service = RewardService(rewards, device=device, limits=limits)
    serve(
        service,
        host=host,
        port=port,
        token=token,
        announce=lambda url: print(f"serving {', '.join(chosen)} on {url}", flush=True),
    )
