"""Options of the command line, declared where a value is: `epochs: Annotated[int, COUNT, Option("Passes.")] = 10`.

Commands are made from these declarations, which know nothing of how a command line is read.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """The option that sets a field of a dataclass; type, range and default are those of the field.

    Attributes:
        help: What `--help` says of it.
        name: How it is written, such as ``"--from"``; empty for the name of the field, as in ``--batch-size``.
        metavar: The word for its value in the help; empty for the type.
        panel: The group that it is shown in; empty for that of its section.
        also: Other fields of the same dataclass that it sets to the same value.
    """

    help: str
    name: str = ""
    metavar: str = ""
    panel: str = ""
    also: tuple[str, ...] = ()
