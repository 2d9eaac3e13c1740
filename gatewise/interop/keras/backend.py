"""Import of Keras with the torch backend."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from gatewise.contract.errors import ArgumentError, MissingExtra, sentence

_ADVICE = "Put KERAS_BACKEND=torch into the environment before the first import of keras."


def keras_on_torch() -> ModuleType:
    """Import Keras with the torch backend and return it.

    Keras chooses its backend when it is first imported. If Keras is not imported yet and KERAS_BACKEND is not set,
    this function sets it to torch.

    Raises:
        ArgumentError: Keras has another backend.
        MissingExtra: Keras is not installed.
    """
    wanted = os.environ.get("KERAS_BACKEND", "torch")
    if "keras" not in sys.modules:
        if wanted != "torch":
            raise ArgumentError(sentence("KERAS_BACKEND", "torch for gatewise.interop.keras", repr(wanted), _ADVICE))
        os.environ["KERAS_BACKEND"] = wanted
    try:
        import keras
    except ModuleNotFoundError:
        raise MissingExtra.for_package("keras", "the Keras layer", "keras") from None
    found = keras.backend.backend()
    if found != "torch":
        raise ArgumentError(sentence("the backend of Keras", "torch for gatewise.interop.keras", repr(found), _ADVICE))
    return keras
