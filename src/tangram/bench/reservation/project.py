"""The project that the agents work on: a small Python package, its tests, and the bugs that can be planted in it.

Owns the text of every file, and the shell commands that create the project and plant a bug. Independent of sandboxes.
Everything is real: the tests pass without a bug, and fail with one.
"""

from __future__ import annotations

import re
import shlex

import msgspec

PYTHON = "/usr/bin/python3"
"""The interpreter of the machine, which every sandbox sees."""

NEEDS = {
    PYTHON: "python3",
    "/usr/bin/grep": "grep",
    "/usr/bin/sed": "sed",
    "/usr/bin/find": "findutils",
    "/usr/bin/xargs": "findutils",
    "/usr/bin/diff": "diffutils",
}
"""Programs that the agents call in addition to coreutils, and their Debian packages."""

SUITE = f"ls tests/test_*.py | xargs -P {{cpus}} -n 2 {PYTHON} -m unittest 2>&1"
"""All tests, two files per process, as many processes at a time as there are cores."""

ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Python detects a stale byte code file by the second of its source, and an agent edits faster than that."""


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """One data set item: what the siblings of a group repair."""

    name: str
    module: str
    right: str
    planted: str
    misguided: str
    """A repair that some agents try: it satisfies only a part of the tests."""

    @property
    def path(self) -> str:
        return f"almanac/{self.module}.py"

    @property
    def tests(self) -> str:
        """The test file that detects the bug."""
        return f"tests/test_{self.module}.py"

    @property
    def plant(self) -> str:
        """The command that plants the bug."""
        return substitute(self.path, self.right, self.planted)


def substitute(path: str, before: str, after: str) -> str:
    """Return a sed command for one line of a file that keeps the indentation."""
    pattern = re.sub(r"([\\/.*\[\]^$])", r"\\\1", before)
    written = re.sub(r"([\\/&])", r"\\\1", after)
    script = rf"s/^\( *\){pattern}$/\1{written}/"
    return f"sed -i {shlex.quote(script)} {path}"


def passed(output: str) -> tuple[int, int]:
    """Return the number of passed tests and of all tests, from the output of the suite's processes in any order.

    A line is contiguous, but may follow dots that another process has printed.
    """
    ran = sum(int(count) for count in re.findall(r"Ran (\d+) tests? in ", output))
    failed = sum(int(count) for count in re.findall(r"(?:failures|errors)=(\d+)", output))
    return ran - failed, ran


BUGS = (
    Bug(
        name="leap-years",
        module="dates",
        right="return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
        planted="return year % 4 == 0",
        misguided="return year % 4 == 0 and year % 100 != 0",
    ),
    Bug(
        name="wrapped-lines",
        module="text",
        right="if line and len(line) + 1 + len(word) > width:",
        planted="if line and len(line) + len(word) > width:",
        misguided="if line and len(line) + 2 + len(word) > width:",
    ),
    Bug(
        name="even-median",
        module="stats",
        right="return (ordered[middle - 1] + ordered[middle]) / 2",
        planted="return (ordered[middle] + ordered[middle + 1]) / 2",
        misguided="return ordered[middle - 1]",
    ),
    Bug(
        name="lost-cents",
        module="money",
        right="extra = cents - share * people",
        planted="extra = 0",
        misguided="extra = 1",
    ),
    Bug(
        name="longer-ways",
        module="graph",
        right="if there < best.get(other, INFINITY):",
        planted="if other not in best:",
        misguided="if there <= best.get(other, 0):",
    ),
    Bug(
        name="roman-nines",
        module="roman",
        right='VALUES = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40}',
        planted='VALUES = {"M": 1000, "D": 500, "CD": 400, "C": 100, "L": 50, "XL": 40}',
        misguided='VALUES = {"M": 1000, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40}',
    ),
)

FILES = {
    "README.md": """\
# almanac

Dates, text, statistics, money, graphs and numerals, each in a module of its own, with tests in tests/.

Run one file of tests with `python3 -m unittest tests/test_dates.py`.
""",
    "almanac/__init__.py": '"""Small functions that many programs need."""\n',
    "almanac/dates.py": '''\
"""Days and years of the Gregorian calendar."""

LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year):
    """Every fourth year, but not every hundredth, but every four hundredth."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year, month):
    return 29 if month == 2 and is_leap(year) else LENGTHS[month - 1]


def days_in_year(year):
    return sum(days_in_month(year, month) for month in range(1, 13))


def ordinal(year, month, day):
    """Days since the first of January of the year 1, which is day 1."""
    before = year - 1
    days = before * 365 + sum(is_leap(each) for each in range(4, year, 4))
    return days + sum(days_in_month(year, each) for each in range(1, month)) + day
''',
    "almanac/text.py": '''\
"""Lines and words."""


def words_of(text):
    return [word for word in text.split() if word]


def wrap(text, width):
    """Wrap into lines of at most `width` characters; a longer word has its own line."""
    lines, line = [], ""
    for word in words_of(text):
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    return [*lines, line] if line else lines


def counted(text):
    """How often each word occurs."""
    counts = {}
    for word in words_of(text.lower()):
        counts[word] = counts.get(word, 0) + 1
    return counts
''',
    "almanac/stats.py": '''\
"""Numbers that describe numbers."""


def mean(values):
    return sum(values) / len(values)


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def spread(values):
    """The standard deviation of a sample."""
    centre = mean(values)
    return (sum((value - centre) ** 2 for value in values) / (len(values) - 1)) ** 0.5
''',
    "almanac/money.py": '''\
"""Amounts in cents, none of which may get lost."""


def split(cents, people):
    """As even as it goes: the first ones get a cent more."""
    share = cents // people
    extra = cents - share * people
    return [share + 1] * extra + [share] * (people - extra)


def shown(cents):
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"


def total(amounts):
    return sum(amounts)
''',
    "almanac/graph.py": '''\
"""Ways through graphs, which are neighbours with weights by node."""

import heapq

INFINITY = float("inf")


def distances(graph, start):
    """The length of the shortest way to every node that can be reached."""
    best = {start: 0}
    heap = [(0, start)]
    while heap:
        here, node = heapq.heappop(heap)
        if here > best[node]:
            continue
        for other, weight in graph.get(node, {}).items():
            there = here + weight
            if there < best.get(other, INFINITY):
                best[other] = there
                heapq.heappush(heap, (there, other))
    return best


def reachable(graph, start):
    return sorted(distances(graph, start))
''',
    "almanac/roman.py": '''\
"""Roman numerals."""

VALUES = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40}
ONES = {"X": 10, "IX": 9, "V": 5, "IV": 4, "I": 1}


def numeral(number):
    parts = []
    for sign, value in (VALUES | ONES).items():
        count, number = divmod(number, value)
        parts.append(sign * count)
    return "".join(parts)


def number(numeral):
    total, last = 0, 0
    for sign in reversed(numeral):
        value = (VALUES | ONES)[sign]
        total += value if value >= last else -value
        last = max(last, value)
    return total
''',
    "tests/__init__.py": "",
    "tests/test_dates.py": """\
import calendar
import unittest

from almanac import dates


class Dates(unittest.TestCase):
    def test_every_fourth_year_is_longer(self):
        self.assertEqual([dates.days_in_year(year) for year in (2023, 2024)], [365, 366])

    def test_a_century_is_no_leap_year(self):
        self.assertFalse(dates.is_leap(1900))

    def test_four_centuries_are_one(self):
        self.assertTrue(dates.is_leap(2000))

    def test_years_agree_with_the_standard_library(self):
        for year in range(1, 3000):
            self.assertEqual(dates.days_in_year(year), 366 if calendar.isleap(year) else 365)
""",
    "tests/test_dates_ordinal.py": """\
import datetime
import unittest

from almanac import dates


class Ordinal(unittest.TestCase):
    def test_the_first_day_is_one(self):
        self.assertEqual(dates.ordinal(1, 1, 1), 1)

    def test_a_day_of_this_century(self):
        self.assertEqual(dates.ordinal(2024, 2, 29), datetime.date(2024, 2, 29).toordinal())

    def test_many_days(self):
        for year in range(1, 2400, 12):
            self.assertEqual(dates.ordinal(year, 12, 31), datetime.date(year, 12, 31).toordinal())
""",
    "tests/test_text.py": """\
import textwrap
import unittest

from almanac import text

WORDS = " ".join("abcdefghij"[: 1 + k * 7 % 9] for k in range(900))


class Wrap(unittest.TestCase):
    def test_a_line_that_fits_stays_whole(self):
        self.assertEqual(text.wrap("one two", 7), ["one two"])

    def test_a_line_that_is_too_long_by_one_is_broken(self):
        self.assertEqual(text.wrap("one two", 6), ["one", "two"])

    def test_no_line_is_too_long(self):
        for width in range(10, 80, 2):
            self.assertLessEqual(max(map(len, text.wrap(WORDS, width))), width)

    def test_lines_are_those_of_the_standard_library(self):
        self.assertEqual(text.wrap(WORDS, 40), textwrap.wrap(WORDS, 40))
""",
    "tests/test_text_words.py": """\
import unittest

from almanac import text


class Words(unittest.TestCase):
    def test_words_are_counted_whatever_their_case(self):
        self.assertEqual(text.counted("a B b"), {"a": 1, "b": 2})

    def test_nothing_has_no_words(self):
        self.assertEqual(text.words_of("  "), [])

    def test_counts_add_up(self):
        words = " ".join(str(k % 97) for k in range(60000))
        self.assertEqual(sum(text.counted(words).values()), 60000)
""",
    "tests/test_stats.py": """\
import random
import statistics
import unittest

from almanac import stats


class Median(unittest.TestCase):
    def test_of_an_odd_number_of_values(self):
        self.assertEqual(stats.median([3, 1, 2]), 2)

    def test_of_two_values(self):
        self.assertEqual(stats.median([1, 3, 5, 100]), 4)

    def test_of_equal_values(self):
        self.assertEqual(stats.median([7, 7, 7, 7]), 7)

    def test_agrees_with_the_standard_library(self):
        draw = random.Random(1)
        for count in range(3, 240):
            values = [draw.random() for _ in range(count)]
            self.assertEqual(stats.median(values), statistics.median(values))
""",
    "tests/test_stats_spread.py": """\
import random
import unittest

from almanac import stats


class Spread(unittest.TestCase):
    def test_equal_values_have_none(self):
        self.assertEqual(stats.spread([2, 2, 2]), 0)

    def test_mean_of_two(self):
        self.assertEqual(stats.mean([1, 2]), 1.5)

    def test_a_large_sample_of_a_known_distribution(self):
        draw = random.Random(2)
        values = [draw.random() for _ in range(150000)]
        self.assertAlmostEqual(stats.spread(values), (1 / 12) ** 0.5, places=2)
""",
    "tests/test_money.py": """\
import unittest

from almanac import money


class Split(unittest.TestCase):
    def test_an_even_split(self):
        self.assertEqual(money.split(90, 3), [30, 30, 30])

    def test_one_cent_over(self):
        self.assertEqual(money.split(100, 3), [34, 33, 33])

    def test_two_cents_over(self):
        self.assertEqual(money.split(101, 3), [34, 34, 33])

    def test_no_cent_is_lost(self):
        for cents in range(0, 9000, 7):
            for people in range(1, 24):
                self.assertEqual(money.total(money.split(cents, people)), cents)
""",
    "tests/test_money_shown.py": """\
import unittest
from decimal import Decimal

from almanac import money


class Shown(unittest.TestCase):
    def test_cents_have_two_digits(self):
        self.assertEqual(money.shown(105), "1.05")

    def test_a_debt(self):
        self.assertEqual(money.shown(-105), "-1.05")

    def test_all_amounts_can_be_read_back(self):
        for cents in range(-15000, 15000):
            self.assertEqual(Decimal(money.shown(cents)) * 100, cents)
""",
    "tests/test_graph.py": """\
import unittest

from almanac import graph

SQUARE = {"a": {"b": 1, "c": 5}, "b": {"d": 1}, "d": {"c": 1}, "c": {"e": 1}}


class Distances(unittest.TestCase):
    def test_one_way(self):
        self.assertEqual(graph.distances({"a": {"b": 2}}, "a"), {"a": 0, "b": 2})

    def test_the_detour_is_shorter(self):
        self.assertEqual(graph.distances(SQUARE, "a")["c"], 3)

    def test_what_lies_behind_the_detour(self):
        self.assertEqual(graph.distances(SQUARE, "a")["e"], 4)

    def test_a_grid_on_which_detours_pay(self):
        size = 90
        grid = {
            (x, y): {(x + 1, y): 1 + 50 * (y % 9 == 0 and x % 2), (x, y + 1): 1}
            for x in range(size)
            for y in range(size)
        }
        found = graph.distances(grid, (0, 0))
        self.assertEqual(found[size - 1, size - 1], 2 * (size - 1))
""",
    "tests/test_graph_reach.py": """\
import unittest

from almanac import graph


class Reachable(unittest.TestCase):
    def test_nothing_but_the_start(self):
        self.assertEqual(graph.reachable({}, "a"), ["a"])

    def test_not_against_the_arrow(self):
        self.assertEqual(graph.reachable({"a": {"b": 1}}, "b"), ["b"])

    def test_a_long_chain(self):
        chain = {k: {k + 1: 1} for k in range(20000)}
        self.assertEqual(len(graph.reachable(chain, 0)), 20001)
""",
    "tests/test_roman.py": """\
import unittest

from almanac import roman


class Numerals(unittest.TestCase):
    def test_small_ones(self):
        self.assertEqual([roman.numeral(n) for n in (1, 4, 9, 14)], ["I", "IV", "IX", "XIV"])

    def test_nineties(self):
        self.assertEqual(roman.numeral(98), "XCVIII")

    def test_nine_hundreds(self):
        self.assertEqual(roman.numeral(1994), "MCMXCIV")

    def test_none_has_four_signs_in_a_row(self):
        for n in range(1, 4000):
            written = roman.numeral(n)
            self.assertFalse(any(sign * 4 in written for sign in "IXC"), written)
""",
    "tests/test_roman_numbers.py": """\
import unittest

from almanac import roman


class Numbers(unittest.TestCase):
    def test_adding(self):
        self.assertEqual(roman.number("XVI"), 16)

    def test_subtracting(self):
        self.assertEqual(roman.number("XIV"), 14)

    def test_there_and_back(self):
        for n in range(1, 2000):
            self.assertEqual(roman.number(roman.numeral(n)), n)
""",
}


def setup() -> tuple[str, ...]:
    """Return the commands that create the project in an empty workspace. The last one runs all its tests, which must
    pass."""
    write = [f"mkdir -p {' '.join(sorted({path.rpartition('/')[0] for path in FILES} - {''}))}"]
    write += [f"cat > {path} <<'END'\n{text}END" for path, text in FILES.items()]
    keep = "mkdir -p .before && cp -r almanac .before/"
    return ("\n".join(["set -e", *write, keep]), SUITE.replace("{cpus}", "2"))
