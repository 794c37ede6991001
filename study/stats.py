"""Statistics of paired runs: exact Student's t, Holm's correction, intervals, verdicts."""
import math
import statistics
from typing import NamedTuple


def t_inside(t, df):
    """P(|T| < t) for Student's t with a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(df))
    cos, sin = math.cos(theta), math.sin(theta)
    first = 1 if df % 2 else 0
    term, total = cos if df % 2 else 1.0, 0.0
    for k in range(2, df + 1, 2):  # cos (1 + 2/3 cos^2 + ...) for odd df, 1 + 1/2 cos^2 + ... for even
        total += term
        term *= (k / (k + 1) if first else (k - 1) / k) * cos * cos
    return 2 / math.pi * (theta + sin * total) if df % 2 else sin * total


def t_quantile(inside, df):
    """t with P(|T| < t) = inside: half the width of an interval in standard errors."""
    low, high = 0.0, 1.0
    while t_inside(high, df) < inside:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_inside(middle, df) < inside else (low, middle)
    return high


class Paired(NamedTuple):
    """Differences of a mode to the base over pairs of one seed; `spread` is their standard deviation."""
    mean: float
    spread: float
    n: int
    won: int

    @property
    def error(self):
        return self.spread / math.sqrt(self.n)

    @property
    def p(self):
        """Two-sided, of no difference; nan for a single pair."""
        if self.n < 2:
            return math.nan
        return 1 - t_inside(self.mean / self.error, self.n - 1) if self.error else float(self.mean == 0)

    def interval(self, inside=0.95):
        width = t_quantile(inside, self.n - 1) * self.error if self.n > 1 else math.inf
        return self.mean - width, self.mean + width


def paired(mine, base):
    """{seed: loss} of a mode and of the base -> Paired over the seeds they share, or None."""
    d = [mine[seed] - base[seed] for seed in sorted(mine.keys() & base.keys())]
    if not d:
        return None
    return Paired(statistics.mean(d), statistics.stdev(d) if len(d) > 1 else math.nan, len(d), sum(x < 0 for x in d))


def holm(p):
    """{name: p} -> {name: p corrected for looking at all of them} (Holm 1979); nan stays nan and does not count."""
    tested = sorted((value, name) for name, value in p.items() if not math.isnan(value))
    out, worst = dict(p), 0.0
    for i, (value, name) in enumerate(tested):
        worst = out[name] = min(1.0, max(worst, value * (len(tested) - i)))
    return out
