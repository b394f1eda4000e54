"""What submodels will probably score: a line through those that were judged.

A few hundred examples tell two submodels of one size apart only by chance, but all that were judged tell together what each
width is worth. So guesses choose which candidates are judged next, and who is looked at more closely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raffm.errors import RunError
from raffm.libraries import library
from raffm.models.space import Space
from raffm.search.front import Candidate, Sizes

NEEDS = RunError("a search needs scikit-learn: pip install 'raffm[search]'.")

TRUST = 0.5
"""How much a candidate's own score counts where it was judged on few examples; the rest is what is guessed of it."""


class Guess:
    """A Bayesian ridge regression of scores on the widths that candidates keep."""

    def __init__(self, space: Space, judged: Sequence[Candidate]) -> None:
        self._space = space
        self._line = library("sklearn.linear_model", NEEDS).BayesianRidge()
        self._line.fit(self._features([each.sizes for each in judged]), [each.score for each in judged])

    def scores(self, candidates: Sequence[Sizes]) -> list[float]:
        """What each will probably score."""
        found: list[float] = self._line.predict(self._features(candidates)).tolist() if candidates else []
        return found

    def revised(self, judged: Sequence[Candidate]) -> list[Candidate]:
        """Candidates with scores that chance says less in."""
        guessed = self.scores([each.sizes for each in judged])
        return [
            replace(each, score=TRUST * each.score + (1 - TRUST) * guess) for each, guess in zip(judged, guessed, strict=True)
        ]

    def _features(self, candidates: Sequence[Sizes]) -> NDArray[np.float64]:
        """The share that every group keeps, and its root: the first indices of a group are worth the most."""
        shares = np.array([[sizes[group] / most[0] for group, most in self._space.sizes.items()] for sizes in candidates])
        return np.concatenate([shares, np.sqrt(shares)], 1)
