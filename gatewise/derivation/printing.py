"""Convert operations of a cell's step and SymPy expressions to source text in Python or C++."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gatewise.derivation.trace import Operand, Operation, is_number

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def fused_product(operation: Operation, made_by: Mapping[str, Operation], reads: Mapping[str, int]) -> str:
    """Return the name of the product that a sum or difference includes, as `torch.addcmul`; empty for none.

    Args:
        operation: The operation.
        made_by: The operations by the names of their results.
        reads: The number of times that each value is read, as an operand or as a result of the step.
    """
    if operation.function not in ("add", "sub") or is_number(operation.operands[0]):
        return ""
    product = made_by.get(str(operation.operands[1]))
    if product is None or product.function != "mul" or any(map(is_number, product.operands)):
        return ""
    return product.name if reads[product.name] == 1 else ""


class Language(NamedTuple):
    """The syntax of a programming language for the operations of a step.

    Attributes:
        assignment: A format string for an assignment, with fields for the name and the value.
        number: A function that returns the literal of a number.
        function: A function that returns the name of a function in the language, given PyTorch's name.
    """

    assignment: str
    number: Callable[[float], str]
    function: Callable[[str], str]

    def name(self, value: Operand, sums: Collection[str]) -> str:
        """Return the name or the literal of a value. Names of sums get a prefix, so that they are no keywords."""
        if is_number(value):
            return self.number(float(value))
        return f"sum_{value}" if value in sums else str(value)

    def lines(self, operations: Iterable[Operation], sums: Collection[str]) -> list[str]:
        """Return one assignment for each operation."""
        return [
            self.assignment.format(
                operation.name, self.expression(operation, [self.name(operand, sums) for operand in operation.operands])
            )
            for operation in operations
        ]

    def expression(self, operation: Operation, operands: Sequence[str]) -> str:
        """Return the expression of an operation on operands that are given as text."""
        if operation.function in _SYMBOLS:
            return f" {_SYMBOLS[operation.function]} ".join(operands)
        if operation.function == "neg":
            return f"-{operands[0]}"
        return f"{self.function(operation.function)}({', '.join(operands)})"


def printer(name: Callable[[str], str], number: Callable[[float], str] | None = None) -> Any:
    """Return a SymPy printer that writes powers as products.

    Args:
        name: A function that returns the text of a symbol.
        number: A function that returns the literal of a number; None for Python's literals.
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
