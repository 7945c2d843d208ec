"""How long a prefill takes on this machine, learnt from the engine's own steps, and what sharing saved by it.

P(T, pairs) = a + b·T + c·pairs: a fixed cost per step, the matrix products (linear in the tokens T) and attention
(linear in query-key pairs). a, b, c >= 0 by least squares over the steps that held prefill rows only. Pure Python:
three unknowns need no linear algebra library.
"""

from __future__ import annotations

from collections import deque
from itertools import combinations

MIN_SAMPLES = 20
WINDOW = 1000
TOKEN_UNIT = 1e-3
PAIR_UNIT = 1e-6
"""Features in thousands of tokens and millions of pairs keep the normal equations well conditioned."""

Vector = list[float]
Matrix = list[Vector]


def solve(matrix: Matrix, right: Vector) -> Vector | None:
    """Solution of a small linear system by elimination with partial pivoting; None if it is singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [x - factor * y for x, y in zip(rows[row], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


class PrefillModel:
    """Running non-negative least squares of seconds over (1, tokens, pairs)."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._gram: Matrix = [[0.0] * 3 for _ in range(3)]
        self._moment: Vector = [0.0] * 3
        self._fitted: tuple[float, float, float] | None = None

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """Add one step that ran `tokens` prefill tokens with `pairs` query-key pairs in `seconds`; mutates."""
        features = (1.0, tokens * TOKEN_UNIT, pairs * PAIR_UNIT)
        for i, x in enumerate(features):
            self._moment[i] += x * seconds
            for j, y in enumerate(features):
                self._gram[i][j] += x * y
        self.num_samples += 1
        self._fitted = None

    def coefficients(self) -> tuple[float, float, float] | None:
        """(a, b, c) in seconds per step, thousand tokens and million pairs; None before `MIN_SAMPLES` steps.

        The non-negative optimum is the best of the unconstrained optima over all subsets of the features whose
        coefficients come out non-negative; with three features there are seven.
        """
        if self.num_samples < MIN_SAMPLES:
            return None
        if self._fitted is None:
            candidates = [
                fit
                for size in (1, 2, 3)
                for subset in combinations(range(3), size)
                if (fit := self._fit(subset)) is not None
            ]
            self._fitted = min(candidates, key=self._loss) if candidates else None
        return self._fitted

    def _fit(self, subset: tuple[int, ...]) -> tuple[float, float, float] | None:
        solution = solve([[self._gram[i][j] for j in subset] for i in subset], [self._moment[i] for i in subset])
        if solution is None or min(solution) < 0:
            return None
        full = [0.0] * 3
        for i, value in zip(subset, solution, strict=True):
            full[i] = value
        return (full[0], full[1], full[2])

    def _loss(self, fit: tuple[float, float, float]) -> float:
        """Sum of squared residuals, less the constant sum of squared seconds."""
        quadratic = sum(fit[i] * self._gram[i][j] * fit[j] for i in range(3) for j in range(3))
        return quadratic - 2 * sum(x * y for x, y in zip(fit, self._moment, strict=True))

    def predict(self, steps: float, tokens: float, pairs: float) -> float | None:
        """Seconds of `steps` prefills with these totals; None before the model is known."""
        fit = self.coefficients()
        if fit is None:
            return None
        return fit[0] * steps + fit[1] * tokens * TOKEN_UNIT + fit[2] * pairs * PAIR_UNIT


class TtftAcceleration:
    """Ratio of sums over the last `WINDOW` requests: P(the whole prompt) over P(what was computed, in its context).

    Both sides come from the same fitted model, so waiting in the queue and the load of the machine are in neither.
    """

    def __init__(self, model: PrefillModel):
        self._model = model
        self._requests: deque[tuple[int, int, int, int]] = deque(maxlen=WINDOW)

    def observe(self, prompt_tokens: int, computed_tokens: int, computed_pairs: int) -> None:
        """Add one request; mutates."""
        whole_pairs = prompt_tokens * (prompt_tokens + 1) // 2
        self._requests.append((prompt_tokens, whole_pairs, computed_tokens, computed_pairs))

    def factor(self) -> float | None:
        """The ratio; None before the model is known or any request was seen."""
        count = len(self._requests)
        if not count:
            return None
        whole_tokens, whole_pairs, tokens, pairs = (sum(column) for column in zip(*self._requests, strict=True))
        whole = self._model.predict(count, whole_tokens, whole_pairs)
        computed = self._model.predict(count, tokens, pairs)
        if whole is None or computed is None or computed <= 0:
            return None
        return whole / computed
