"""Command-line options, declared with the field that they set: `epochs: Annotated[int, COUNT, Option("Passes.")] = 10`.

The commands are generated from these declarations, which do not depend on the parser of the command line.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A command-line option that sets a field of a dataclass; type, range and default are those of the field.

    Attributes:
        help: The text that `--help` shows.
        name: The name of the option, such as ``"--from"``; empty for the name of the field, as in ``--batch-size``.
        metavar: The placeholder for the value in the help; empty for the type.
        panel: The group of options in the help; empty for the group of the option's section.
        also: Other fields of the same dataclass that the option sets to the same value.
    """

    help: str
    name: str = ""
    metavar: str = ""
    panel: str = ""
    also: tuple[str, ...] = ()
