"""The states of all random number generators that training uses."""

from __future__ import annotations

import torch


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of the generators that dropout and initialisation use, as uint8 tensors on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore the states from `random_states`; states of devices that are not in use are ignored."""
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
