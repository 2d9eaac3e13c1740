"""Operations and expressions of a cell's step as text, in Python and in C++."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from gatewise.derivation.trace import Operand, Operation, is_number

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


class Language(NamedTuple):
    """How a language writes what a step is made of.

    Attributes:
        assignment: A line that gives a name a value, with places for both.
        number: Returns a number as the language writes it.
        function: Returns the name of a function, given that of PyTorch's.
    """

    assignment: str
    number: Callable[[float], str]
    function: Callable[[str], str]

    def name(self, value: Operand, sums: Collection[str]) -> str:
        """Return a value by its name, or a number; names of sums are told from words of the language."""
        if is_number(value):
            return self.number(float(value))
        return f"sum_{value}" if value in sums else str(value)

    def lines(self, operations: Iterable[Operation], sums: Collection[str]) -> list[str]:
        """Return a line for each operation."""
        return [self.assignment.format(operation.name, self._expression(operation, sums)) for operation in operations]

    def _expression(self, operation: Operation, sums: Collection[str]) -> str:
        operands = [self.name(operand, sums) for operand in operation.operands]
        if operation.function in _SYMBOLS:
            return f" {_SYMBOLS[operation.function]} ".join(operands)
        if operation.function == "neg":
            return f"-{operands[0]}"
        return f"{self.function(operation.function)}({', '.join(operands)})"


def printer(name: Callable[[str], str], number: Callable[[float], str] | None = None) -> Any:
    """Return a printer of SymPy's that writes powers as products.

    Args:
        name: Returns a value as the language writes it.
        number: Returns a number as the language writes it; None writes numbers as Python does.
    """
    from sympy.printing.str import StrPrinter

    class Printer(StrPrinter):
        def _print_Symbol(self, expr: Any) -> str:  # noqa: N802
            return name(str(expr))

        def _print_Float(self, expr: Any) -> str:  # noqa: N802
            return repr(float(expr)) if number is None else number(float(expr))

        def _print_Integer(self, expr: Any) -> str:  # noqa: N802
            return str(int(expr)) if number is None else number(float(expr))

        def _print_Rational(self, expr: Any) -> str:  # noqa: N802
            return repr(float(expr)) if number is None else number(float(expr))

        def _print_Pow(self, expr: Any, rational: bool = False) -> str:  # noqa: N802
            base, exponent = expr.as_base_exp()
            if not exponent.is_Integer:
                raise NotImplementedError(f"the power {expr}")
            text = self.parenthesize(base, 100)
            product = "*".join([text] * abs(int(exponent)))
            one = "1" if number is None else number(1.0)
            return f"({product})" if exponent > 0 else f"({one}/({product}))"

    return Printer()
