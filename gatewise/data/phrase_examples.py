"""Dates, times, durations and amounts in two languages: translation data that needs no file.

Every phrase is written by Babel from the Common Locale Data Repository (CLDR) of Unicode.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterator
from typing import Literal

from gatewise.contract.errors import ArgumentError, CorpusError, MissingExtra, sentence
from gatewise.data.parallel import ParallelText

ISO = "iso"
"""A stand-in for the name of a language that writes only dates and times, in ISO 8601."""

_FIRST_DAY, _DAYS = datetime.datetime(1950, 1, 1), 36_524
_DATE_FORMATS = ("full", "long", "medium", "short")
_Period = Literal["minute", "hour", "day", "week", "month", "year"]
_PERIODS: dict[_Period, int] = {"minute": 60, "hour": 24, "day": 30, "week": 10, "month": 12, "year": 100}
_SECONDS = {"minute": 60, "hour": 3600, "day": 86_400, "week": 604_800, "month": 2_592_000, "year": 31_536_000}
_UNITS = (
    *("length-meter", "length-kilometer", "length-centimeter", "mass-kilogram", "mass-gram", "volume-liter"),
    *("temperature-celsius", "speed-kilometer-per-hour", "energy-kilowatt-hour", "digital-megabyte"),
)
_CURRENCIES = ("EUR", "USD", "CHF", "GBP", "JPY")
_DRAWS_PER_PAIR = 20

Writer = Callable[[str], str]
"""A function that writes one date or amount in the given language."""


def phrases(source: str = "de", target: str = "en", count: int = 20_000, seed: int = 0) -> ParallelText:
    """Return localised phrases and their translations, without duplicates.

    Args:
        source: The language of the phrases: a locale that Babel knows, such as ``"de"``, ``"en"`` or ``"pt_BR"``.
        target: The language of the translations; ``"iso"`` writes dates and times as ISO 8601 does, and nothing else.
        count: The number of pairs.
        seed: The seed of the random phrases.

    Returns:
        Pairs such as ``Dienstag, 5. März 2024`` and ``Tuesday, March 5, 2024``. Ambiguous phrases are left out, so that
        every phrase has one translation. The wording depends on Babel's version.

    Raises:
        ArgumentError: Babel has no such locale, or `count` is not positive.
        CorpusError: There are fewer than `count` different phrases.
        MissingExtra: Babel is not installed.
    """
    if count < 1:
        raise ArgumentError(sentence("count", "a positive integer", count))
    for name, language in (("source", source), ("target", target)):
        _check_language(name, language, iso_allowed=name == "target")
    drawn: dict[str, str | None] = {}
    unambiguous = 0
    things = _things(random.Random(seed), ISO in (source, target))
    for _ in range(count * _DRAWS_PER_PAIR):
        write = next(things)
        phrase, translation = (" ".join(write(language).split()) for language in (source, target))
        if phrase not in drawn:
            drawn[phrase] = translation
            unambiguous += 1
        elif drawn[phrase] not in (translation, None):
            drawn[phrase] = None
            unambiguous -= 1
        if unambiguous == count:
            break
    kept = [(phrase, translation) for phrase, translation in drawn.items() if translation is not None]
    if len(kept) < count:
        expectation = f"at most the number of different phrases, about {len(kept):,}"
        raise CorpusError(sentence("count", expectation, f"{count:,}"))
    name = f"dates and amounts, {source} to {target}"
    return ParallelText(name, tuple(pair[0] for pair in kept), tuple(pair[1] for pair in kept))


def _things(draw: random.Random, only_dates: bool) -> Iterator[Writer]:
    """Draw phrases to write, without end."""
    kinds = [_date, _date, _moment] if only_dates else [_date, _date, _moment, _distance, _measure, _price]
    while True:
        yield draw.choice(kinds)(draw)


def _date(draw: random.Random) -> Writer:
    day, form = _FIRST_DAY + datetime.timedelta(days=draw.randrange(_DAYS)), draw.choice(_DATE_FORMATS)
    if form == "short":  # writes two digits of the year: dates of a single century stay unambiguous
        day = day.replace(year=2000 + day.year % 100, day=min(day.day, 28))

    def write(language: str) -> str:
        if language == ISO:
            return day.date().isoformat()
        return _babel().dates.format_date(day, form, locale=language)

    return write


def _moment(draw: random.Random) -> Writer:
    moment = _FIRST_DAY + datetime.timedelta(days=draw.randrange(_DAYS), minutes=5 * draw.randrange(288))
    form = draw.choice(("full", "long", "medium"))

    def write(language: str) -> str:
        if language == ISO:
            return moment.isoformat(timespec="minutes")
        dates = _babel().dates
        day = dates.format_date(moment, form, locale=language)
        return f"{day}, {dates.format_time(moment, 'short', locale=language)}"

    return write


def _distance(draw: random.Random) -> Writer:
    period = draw.choice(list(_PERIODS))
    number = draw.randint(1, _PERIODS[period]) * draw.choice((1, -1))
    delta = datetime.timedelta(seconds=number * _SECONDS[period])
    return lambda language: _babel().dates.format_timedelta(
        delta, granularity=period, threshold=1e9, add_direction=True, locale=language
    )


def _measure(draw: random.Random) -> Writer:
    unit, number = draw.choice(_UNITS), _number(draw)
    return lambda language: _babel().units.format_unit(number, unit, locale=language)


def _price(draw: random.Random) -> Writer:
    currency, number = draw.choice(_CURRENCIES), draw.randint(1, 9999) / 100
    return lambda language: _babel().numbers.format_currency(number, currency, locale=language, format_type="name")


def _number(draw: random.Random) -> float:
    return draw.randint(1, 100) if draw.random() < 0.5 else draw.randint(1, 999) / 10


def _check_language(name: str, language: str, iso_allowed: bool) -> None:
    if language == ISO and iso_allowed:
        return
    core = _babel().core
    try:
        core.Locale.parse(language)
    except (ValueError, TypeError, core.UnknownLocaleError):
        advice = f"{ISO} stands for ISO 8601, and can be the target." if iso_allowed or language == ISO else ""
        raise ArgumentError(sentence(name, "a locale such as de, en or pt_BR", repr(language), advice)) from None


def _babel():  # noqa: ANN202 - the type is the optional module itself
    try:
        import babel
        import babel.core
        import babel.dates
        import babel.numbers
        import babel.units
    except ModuleNotFoundError:
        raise MissingExtra.for_package("Babel", "the phrases to learn from", "train") from None
    return babel
