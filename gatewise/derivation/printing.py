"""Expressions as text that Python and C++ read alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
