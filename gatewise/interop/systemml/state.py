"""The state that the forward pass hands to the backward pass, in memory and on disk."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gatewise.contract.errors import CheckpointError, MissingExtra
from gatewise.contract.saved import Saved
from gatewise.files import irregular, write_bytes
from gatewise.functional.serialization import rebuild, take_apart
from gatewise.interop.systemml.arguments import Sizes

_HEADER, _KIND = "gatewise", "state of systemml.lstm"
_FINGERPRINT = "fingerprint."


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class State:
    """The opaque third result of `lstm`.

    It holds the converted input and weights, the output, and the tensors that the kernel keeps for its backward pass.

    Attributes:
        saved: The state of the explicit forward pass.
        sizes: The sizes of the problem.
        home: The device of the arguments.
        fingerprints: The numbers by which the arguments are told apart from others; see `arguments.fingerprints`.
    """

    saved: Saved
    sizes: Sizes
    home: torch.device
    fingerprints: Mapping[str, Tensor]

    @property
    def kernel(self) -> str:
        """The name of the kernel that made the state."""
        return self.saved.kernel

    @property
    def device(self) -> torch.device:
        """The device that made the state."""
        return self.saved.inputs.x.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all its tensors."""
        return self.saved.problem.dtype

    @property
    def projected(self) -> bool:
        """Whether the products with a sparse X or W used its stored entries."""
        return self.saved.problem.projected

    def __repr__(self) -> str:
        """Return one line: kernel, device, sizes and dtype."""
        return f"State({self.kernel} on {self.device}: {self.sizes}, {str(self.dtype).removeprefix('torch.')})"

    def save(self, path: str | os.PathLike) -> None:
        """Write the state to a safetensors file, atomically.

        PyTorch's native loop (the kernel `aten` in float64) keeps an autograd graph, which cannot be saved: a backward
        pass from the restored state repeats its forward pass, with a warning.

        Args:
            path: The file to write; its old content is replaced at the end.

        Raises:
            CheckpointError: The file cannot be written; its old content is unchanged.
            MissingExtra: safetensors is not installed.
        """
        tensors, facts = take_apart(self.saved)
        tensors |= {f"{_FINGERPRINT}{name}": tensor for name, tensor in self.fingerprints.items()}
        header = {"kind": _KIND, "facts": facts | {"sizes": self.sizes._asdict(), "home": self.home.type}}
        save = _safetensors().torch.save
        content = save({name: tensor.cpu() for name, tensor in tensors.items()}, {_HEADER: json.dumps(header)})
        write_bytes(Path(path), content)

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> State:
        """Read a state that `save` wrote; no code in the file is executed.

        The tensors that a kernel keeps can be read by the same kernel in the same versions on the same kind of device.
        Otherwise the backward pass repeats the forward pass, with a warning.

        Args:
            path: The file to read.
            device: The device of the state. To avoid a repeated forward pass, give the device that made it.

        Raises:
            CheckpointError: The file is missing, truncated, or not a state.
            MissingExtra: safetensors is not installed.
        """
        library = _safetensors()
        path = Path(path)
        if reason := irregular(path):
            raise CheckpointError(reason)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. Check the path.") from error
        try:
            tensors = library.torch.load(content)
        except KeyError as error:  # of the table of dtypes that PyTorch has
            raise CheckpointError(
                f"{path} holds tensors of the dtype {error}, which cannot be read. Take another copy."
            ) from error
        except library.SafetensorError as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({error}). Take another copy."
            ) from error
        device = torch.device(device)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
        try:
            header = json.loads(metadata[_HEADER])
            if header["kind"] != _KIND:
                raise CheckpointError(f"{path} holds a {header['kind']}, not a {_KIND}. Give the right file.")
            facts = header["facts"]
            fingerprints = {
                name.removeprefix(_FINGERPRINT): tensor
                for name, tensor in tensors.items()
                if name.startswith(_FINGERPRINT)
            }
            if not fingerprints:
                raise KeyError(_FINGERPRINT)
            saved = rebuild({name: tensor.to(device) for name, tensor in tensors.items()}, facts)
            home = saved.inputs.x.device if facts["home"] == device.type else torch.device(facts["home"])
            return cls(saved, Sizes(**facts["sizes"]), home, fingerprints)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            message = f"{path} is a safetensors file, but holds no {_KIND}. Give the right file."
            raise CheckpointError(message) from error


def _safetensors():  # noqa: ANN202 - the type is the optional module itself
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise MissingExtra.for_package("safetensors", "saving and restoring a state", "train") from None
    return safetensors
