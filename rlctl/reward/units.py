"""Units of measurement: which are equal, and the factor between two of one kind.

Words that are no unit of measurement ("apples") are not compared, because the question names them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from rlctl.lazy import lazy_pattern

#: Kind of measure → its units: names, separated by "|", and the size of the unit in the first unit.
_KINDS = {
    "length": (
        "m|meter 1, mm|millimeter 1/1000, cm|centimeter 1/100, dm|decimeter 1/10, km|kilometer 1000"
        ", in|inch 0.0254, ft|foot|feet 0.3048, yd|yard 0.9144, mi|mile 1609.344"
    ),
    "volume": (
        "l|liter 1, ml|milliliter|cc 1/1000, cl|centiliter 1/100, dl|deciliter 1/10, gal|gallon 3.785411784"
        ", qt|quart 0.946352946, pt|pint 0.473176473, cup 0.2365882365"
    ),
    "mass": "g|gram 1, mg|milligram 1/1000, kg|kilogram|kilo 1000, oz|ounce 28.349523125, lb|pound 453.59237",
    "time": "s|second|sec 1, ms|millisecond 1/1000, min|minute 60, h|hour|hr 3600, day 86400, week 604800",
    "calendar": "month 1, year|yr 12, decade 120, century|centuries 1200",
    "money": "dollar|usd|buck 1, cent 1/100",
    "euro": "euro|eur 1",
    "pounds": "sterling|gbp|quid 1, pence|penny 1/100",
    "yen": "yen|jpy 1",
    "rupee": "rupee|inr 1",
    "peso": "peso 1",
    "yuan": "yuan|rmb|cny 1",
    "ruble": "ruble|rouble|rub 1",
    "celsius": "celsius 1",
    "fahrenheit": "fahrenheit 1",
    "kelvin": "kelvin 1",
    "force": "newton 1, kilonewton 1000",
    "energy": "joule 1, kilojoule 1000",
    "heat": "calorie|cal 1, kcal|kilocalorie 1000",
    "power": "watt 1, kilowatt 1000, megawatt 1000000",
    "voltage": "volt 1, kilovolt 1000",
    "pressure": "pascal 1, kilopascal 1000, megapascal 1000000",
    "frequency": "hertz 1, kilohertz 1000, megahertz 1000000, gigahertz 1000000000",
    "amount": "mole|mol 1",
    "work": "kwh|kilowatt-hour 1",
    "angle": "degree 1",
    "radian": "radian|rad 1",
    "memory": "byte 1, kb|kilobyte 1000, mb|megabyte 1000000, gb|gigabyte 1000000000",
}
_MONEY = {"money", "euro", "pounds", "yen", "rupee", "peso", "yuan", "ruble"}
#: Units that are two: per hour.
_SPEEDS = {"mph": ("mile", "hour"), "kph": ("km", "hour"), "kmh": ("km", "hour"), "mps": ("m", "s")}
#: Symbols that capital letters tell from others.
_SYMBOLS = {
    "N": "newton",
    "kN": "kilonewton",
    "J": "joule",
    "kJ": "kilojoule",
    "W": "watt",
    "kW": "kilowatt",
    "MW": "megawatt",
    "V": "volt",
    "kV": "kilovolt",
    "Pa": "pascal",
    "kPa": "kilopascal",
    "MPa": "megapascal",
    "Hz": "hertz",
    "kHz": "kilohertz",
    "MHz": "megahertz",
    "GHz": "gigahertz",
    "K": "kelvin",
}
#: Kinds of which one name may mean the other: degrees, and pounds.
_AMBIGUOUS = [{"angle", "celsius"}, {"angle", "fahrenheit"}, {"mass", "pounds"}]
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3, "": 1}


@dataclass(frozen=True, slots=True)
class Measure:
    """A unit of measurement with its power: cm²."""

    kind: str
    size: Fraction
    power: int = 1
    name: str = field(default="", compare=False)  # as written, with its power


#: Numerator and denominator of a unit; None for a word that is no unit of measurement, and if there is none.
Units = tuple[Measure | None, Measure | None]
NO_UNITS: Units = (None, None)


def _measures() -> dict[str, Measure]:
    measures = {}
    for kind, units in _KINDS.items():
        for unit in units.split(", "):
            names, size = unit.split(" ")
            measures.update(dict.fromkeys(names.split("|"), Measure(kind, Fraction(size))))
    return measures


_MEASURES = _measures()
_TEXT = lazy_pattern(
    r"[\s~]*(?:(?P<before>square|cubic|sq|cu)\b\.?\s*)?(?P<over>[A-Za-z]+)\.?(?:\s*\^\s*\{?(?P<power>\d)\}?|\s+(?P<after>squared|cubed)\b)?"
    r"(?:\s*(?:/|\b(?:per|an?)\b)\s*(?P<under>[A-Za-z]+)(?:\s*\^\s*\{?(?P<under_power>\d)\}?)?"
    r"|[\s*·]*(?P<inverse>[A-Za-z]+)\s*\^\s*\{?-(?P<inverse_power>\d)\}?)?"
)


def units_of(text: str) -> Units:
    """The units at the start of a text: of " km/h", " square meters", " dollars per day"."""
    match = _TEXT.match(text)
    if match is None:
        return NO_UNITS
    over, under = (
        _SYMBOLS.get(name, name.lower()) for name in (match["over"], match["under"] or match["inverse"] or "")
    )
    over, under = _SPEEDS.get(over, (over, under))
    power = int(match["power"] or 0) or _POWERS[(match["before"] or match["after"] or "").lower()]
    return _measure(over, power), _measure(under, int(match["under_power"] or match["inverse_power"] or 1))


def _measure(word: str, power: int) -> Measure | None:
    word = word.replace("tre", "ter")
    names = (word, word.removesuffix("s"), word.removesuffix("es"))
    measure = next((_MEASURES[name] for name in names if name in _MEASURES), None)
    if measure is None:
        return None
    name = word if power == 1 else f"{word}^{power}"
    if measure.kind == "volume" and power == 1:  # 1 l is 1000 cm³
        return Measure("length", measure.size / 1000, 3, name)
    return Measure(measure.kind, measure.size**power, power, name)


def units_text(units: Units) -> str:
    """Units as `units_of` reads them, after a space: " km/h"; nothing for words that are no units."""
    over, under = units
    if over is None:
        return ""
    return f" {over.name}/{under.name}" if under else f" {over.name}"


def factor(units: Units, others: Units) -> Fraction | None:
    """By what to multiply a number with `units` for the same quantity in `others`; None: of different kinds.

    A unit is compared only if both numbers have one. A length, mass or time is not a rate: 5 m is not 5 m/s.
    """
    result = Fraction(1)
    for measure, other, sign in zip(units, others, (1, -1), strict=True):
        if measure is None or other is None or {measure.kind, other.kind} in _AMBIGUOUS:
            continue
        if (measure.kind, measure.power) != (other.kind, other.power):
            return None
        result *= (measure.size / other.size) ** sign
    is_rate = [under is not None for _, under in (units, others)]
    is_money = units[0] is not None and units[0].kind in _MONEY
    if units[0] and others[0] and is_rate[0] != is_rate[1] and not is_money:
        return None
    return result
