"""The time at which a timer runs: an expression of systemd's OnCalendar, checked before a render.

Owns the forms that every computer can check. systemd knows more: where it is installed, it decides
about the others.
"""

from __future__ import annotations

import re
import subprocess
from calendar import monthrange
from collections.abc import Sequence
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

ALLOWED = 'a time of systemd, like "hourly" or "*-*-* 04:00"'
_WORDS = frozenset(
    {
        *("minutely", "hourly", "daily", "weekly", "monthly", "quarterly", "semiannually"),
        *("yearly", "annually"),
    }
)
_DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
_WEEKDAYS = {name: number for number, day in enumerate(_DAYS) for name in (day, day[:3])}
# No line break, and no specifier of systemd: the text becomes a line of a unit.
_CHARACTERS = re.compile(r"[A-Za-z0-9*,.:/~+_ -]+")
_NUMBER = r"\d+(?:\.\d{1,6})?"
_PART = re.compile(rf"({_NUMBER})(?:\.\.({_NUMBER}))?(?:/({_NUMBER}))?")
_DATE = re.compile(r"(?:([^-~]+)-)?([^-~]+)([-~])([^-~]+)")
_LAST_YEAR = 2199
_LIMIT_S = 10.0


class _WrongTime(ValueError):
    """The message says which part is wrong."""


def schedule_fault(text: str) -> str:
    """Return the error in the time of a timer and the allowed form; "" if it is right."""
    if not _CHARACTERS.fullmatch(text):
        return ALLOWED
    try:
        check_schedule(text, now=datetime.now(UTC))
    except _WrongTime as error:
        return "" if _systemd_accepts(text) else f"{ALLOWED}; {error}"
    return ""


def check_schedule(text: str, *, now: datetime) -> None:
    """Raise ValueError, which names the part, unless a text is a time that comes after `now`.

    Forms: [WEEKDAYS] [[YEAR-]MONTH-DAY] [HOUR:MINUTE[:SECOND]] [ZONE], or a word like `daily`.
    """
    words = text.lower().split()
    if text.split() and _is_zone(text.split()[-1]):
        words.pop()
    if len(words) == 1 and words[0] in _WORDS:
        return
    if not words:
        raise _WrongTime("it has no time")
    if words[0][0].isalpha():
        _weekdays(words.pop(0))
    if words and ":" not in words[0]:
        _date(words.pop(0), now)
    if words:
        _time(words.pop(0))
    if words:
        raise _WrongTime(f"{words[0]!r} follows the time")


def _is_zone(word: str) -> bool:
    if not word[0].isalpha() or "/" not in word:
        return word == "UTC"
    try:
        ZoneInfo(word)
    except (KeyError, ValueError, OSError):
        return False
    return True


def _weekdays(word: str) -> None:
    for part in word.split(","):
        days = part.split("..")
        for day in days:
            if day not in _WEEKDAYS:
                raise _WrongTime(f"{day!r} is neither a weekday nor a word like daily")
        if len(days) > 2 or _WEEKDAYS[days[0]] > _WEEKDAYS[days[-1]]:
            raise _WrongTime(f"the weekdays {part!r} are not FIRST..LAST, from Mon to Sun")


def _date(word: str, now: datetime) -> None:
    found = _DATE.fullmatch(word)
    if not found:
        raise _WrongTime(f"{word!r} is neither a date like *-*-01 nor a time like 04:00")
    year, month, mark, day = found.groups()
    years = _numbers("year", year or "*", 1970, _LAST_YEAR)
    months = _numbers("month", month, 1, 12)
    days = _numbers("day", day, 1, 31)
    # The 29th of February is in a leap year.
    longest = max(monthrange(2024, one)[1] for one in months)
    if min(days) > longest:
        raise _WrongTime(f"no such month has {min(days)} days")
    if mark == "~" and "/" in day:
        raise _WrongTime(f"the day {day!r} from the end of a month has a step")
    if (max(years), max(months), max(days)) < (now.year, now.month, now.day):
        raise _WrongTime(f"the date {word!r} is over")


def _time(word: str) -> None:
    parts = word.split(":")
    if len(parts) not in (2, 3):
        raise _WrongTime(f"{word!r} is not a time like 04:00 or 04:00:00")
    for name, part, last in zip(("hour", "minute", "second"), parts, (23, 59, 59), strict=False):
        _numbers(name, part, 0, last)


def _numbers(name: str, text: str, first: int, last: int) -> Sequence[int]:
    """Return the numbers that a part of an expression names; of seconds, the whole ones."""
    if text == "*":
        return range(first, last + 1)
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if not match or ("." in part.replace("..", "") and name != "second"):
            raise _WrongTime(f"the {name} {part!r} is not *, a number, A..B or A/STEP")
        start = float(match[1])
        end = float(match[2] or last)
        step = float(match[3] or 1)
        if not first <= start <= end <= last or (match[2] and start == end):
            raise _WrongTime(f"the {name} {part!r} is not within {first}..{last}")
        if not step or (match[3] and start + step > end):
            raise _WrongTime(f"the {name} {part!r} has a step that never matches")
        if match[2] or match[3]:
            found |= {*range(int(start), int(end) + 1, max(1, int(step)))}
        else:
            found.add(int(start))
    return sorted(found)


def _systemd_accepts(text: str) -> bool:
    """Whether systemd is here, reads a time, and knows when it comes next."""
    command = ["systemd-analyze", "calendar", "--", text]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return not ended.returncode and "Next elapse: never" not in ended.stdout
