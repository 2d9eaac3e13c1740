"""The state of every random number generator that training draws from."""

from __future__ import annotations

import torch


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the generator states that dropout and initialisation use, uint8 tensors on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on from `random_states`; a state of a device that is not used now is left out."""
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
