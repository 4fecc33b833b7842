"""Estimators with scikit-learn's interface: fit, predict, score, clone, pipelines and searches.

Every key of `regard train` is an argument of the constructor; a dot in it is written as two
underscores, as in model__block__heads=8. Keys are checked by `fit`.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from regard.api import load, train
from regard.errors import UsageError
from regard.files import make_folder

__all__ = [
    "Embedder",
    "ImageClassifier",
    "Refused",
    "SeriesClassifier",
    "SoundClassifier",
    "Tagger",
    "TextClassifier",
    "Translator",
]

_VALID_SHARE = 0.1  # of each class, to choose the best weights by
_MOST_VALID = 2000  # rows


class Refused(UsageError, ValueError):
    """An error of use that scikit-learn takes for one of values, too."""


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise Refused(str(error)) from None


class _Settings(BaseEstimator):
    """An estimator whose parameters are whatever settings it was given by name."""

    _own: ClassVar[tuple[str, ...]] = ()  # parameters that are no settings, which have a default

    def __init__(self, **settings: Any):
        self.settings = settings

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name."""
        return {**{name: getattr(self, name) for name in self._own}, **self.settings}

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name; they are checked when they are used."""
        for name, value in params.items():
            if name in self._own:
                setattr(self, name, value)
            else:
                self.settings = {**self.settings, name: value}
        return self

    def _keys(self) -> dict[str, Any]:
        """Settings that are given, by their keys on the command line."""
        given = {name.replace("__", "."): value for name, value in self.settings.items()}
        return {key: value for key, value in given.items() if value is not None}


class _Model(_Settings):
    """An estimator that trains a model in a folder.

    Args:
        out: folder of the run; None: a temporary one that lives as long as the estimator.
        settings: keys of `regard train` for the task.
    """

    task: ClassVar[str] = ""
    fixed: ClassVar[Mapping[str, Any]] = {}  # settings unless given
    _own = ("out",)

    def __init__(self, *, out: str | Path | None = None, **settings: Any):
        super().__init__(**settings)
        self.out = out

    def _train(self, write: Any) -> None:
        """Train on what `write` puts into a folder and returns as data."""
        for name in ("data", "valid", "test", "quiet", "task"):
            if name in self.settings:
                raise Refused(f"{name}= is not a parameter of an estimator; leave it out")
        home = tempfile.TemporaryDirectory(prefix="regard-")
        folder = Path(home.name) / "run" if self.out is None else Path(self.out)
        staged = Path(home.name) / "data"
        make_folder(staged)
        with _refusing():
            keys = {**self.fixed, **self._keys()}
            train(self.task, data=write(staged), out=folder, quiet=True, **keys)
            self._loaded = load(folder)
        self._home, self.folder_ = home, str(folder)

    @property
    def runner_(self) -> Any:
        """The trained model, as `regard.load` returns it."""
        check_is_fitted(self, "folder_")
        if self._loaded is None:
            self._loaded = load(self.folder_)
        return self._loaded

    def _answers(self, inputs: list[Any], **settings: Any) -> list[Any]:
        with _refusing():
            return self.runner_.run(inputs, **settings) if inputs else []

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "folder_")

    def __getstate__(self) -> dict[str, Any]:
        """State without tensors: the path of a run, or the files of a temporary one as bytes."""
        whole: Any = super().__getstate__()
        state = {k: v for k, v in whole.items() if k not in ("_home", "_loaded")}
        if self.out is None and hasattr(self, "folder_"):
            files = (path for path in Path(self.folder_).iterdir() if path.is_file())
            state["_files"] = {path.name: path.read_bytes() for path in files}
            del state["folder_"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("_files", None)
        super().__setstate__(state)
        self._loaded = None
        if files is not None:
            self._home = tempfile.TemporaryDirectory(prefix="regard-")
            for name, content in files.items():
                (Path(self._home.name) / Path(name).name).write_bytes(content)
            self.folder_ = self._home.name

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.non_deterministic = False
        return tags


def held_out(numbers: Any, seed: int = 1) -> np.ndarray:
    """True for the rows of each class (n,) that are held out: a tenth, and one of some class."""
    labels, out = np.asarray(numbers), np.zeros(len(numbers), dtype=bool)
    rng = np.random.default_rng(seed)
    share = min(_VALID_SHARE, _MOST_VALID / max(1, len(labels)))
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        out[rows[: int(share * len(rows))]] = True
    if not out.any():
        counts = np.bincount(labels)
        rows = np.flatnonzero(labels == counts.argmax())
        if len(rows) > 1:
            out[rng.choice(rows)] = True
    return out


class _Classifier(ClassifierMixin, _Model):
    """A classifier: one of several labels for an input."""

    def _inputs(self, X: Any, *, fitting: bool = False) -> list[Any]:
        """Inputs as `regard run` takes them."""
        raise NotImplementedError

    def _write(self, folder: Path, parts: Mapping[str, tuple[list[Any], list[str]]]) -> Any:
        """Data of a training, of inputs and labels by part."""
        raise NotImplementedError

    def fit(self, X: Any, y: Any) -> Self:
        """Train a model on inputs and their labels."""
        inputs = self._inputs(X, fitting=True)
        if y is None:
            raise Refused("requires y to be passed, but the target y is None")
        y = np.asarray(y)
        if y.ndim == 2 and y.shape[1] == 1:
            from sklearn.utils.validation import column_or_1d

            y = column_or_1d(y, warn=True)
        if len(y) != len(inputs):
            raise Refused(f"{len(inputs)} inputs but {len(y)} labels; expected one each")
        if len(inputs) < 2:
            raise Refused(f"n_samples={len(inputs)}: a classifier needs more than 1 sample")
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise Refused(f"the labels are of one class, {self.classes_[0]}; expected two")
        names = self._names()
        if len(set(names)) < len(names):
            raise Refused("two classes are spelled alike as text; rename one")
        out = held_out(numbers, int(self.settings.get("seed") or 1))
        chosen = {"train": ~out, "valid": out if out.any() else ~out}
        parts = {
            part: (
                [inputs[i] for i in np.flatnonzero(rows)],
                [names[n] for n in numbers[rows]],
            )
            for part, rows in chosen.items()
        }
        self._train(lambda folder: self._write(folder, parts))
        return self

    def _names(self) -> list[str]:
        return [str(each) for each in self.classes_.tolist()]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each of `classes_` (n, classes)."""
        check_is_fitted(self)
        inputs = self._inputs(X)
        answers = self._answers(inputs)
        place = {name: n for n, name in enumerate(self._names())}
        probs = np.zeros((len(inputs), len(self.classes_)))
        columns = [place[label] for label in self.runner_.labels]
        for row, answer in zip(probs, answers, strict=True):
            row[columns] = answer.probabilities
        return probs / np.maximum(probs.sum(1, keepdims=True), 1e-12)

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of each input."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(1)]


def _listed(X: Any, what: str) -> list[Any]:
    """Inputs of a list, array or column."""
    if hasattr(X, "columns"):  # a frame of one column, as a ColumnTransformer gives it
        if len(X.columns) != 1:
            raise Refused(f"a table of {len(X.columns)} columns; expected one of {what}")
        X = X.iloc[:, 0]
    if isinstance(X, str | bytes) or not hasattr(X, "__len__"):
        raise Refused(f"a {type(X).__name__}; expected a list or column of {what}")
    found = list(X.ravel() if isinstance(X, np.ndarray) and X.dtype.kind in "OU" else X)
    if not found:
        raise Refused(f"0 sample(s) while a minimum of 1 is required: expected {what}")
    return found


def _texts(X: Any) -> list[str]:
    found = _listed(X, "texts")
    for number, text in enumerate(found, 1):
        if not isinstance(text, str):
            raise Refused(f"input {number} is a {type(text).__name__}; expected a text")
    return [str(text) for text in found]


class TextClassifier(_Classifier):
    """A classifier of texts: X is a list or column of texts, y their labels.

    Args:
        out: folder of the run; None: a temporary one that lives as long as the estimator.
        settings: keys of `regard train classify`.
    """

    task, fixed = "classify", {"labels": "fine"}

    def _inputs(self, X: Any, *, fitting: bool = False) -> list[Any]:
        return _texts(X)

    def _write(self, folder: Path, parts: Mapping[str, tuple[list[Any], list[str]]]) -> Any:
        return {
            part: [{"text": x, "label": y} for x, y in zip(*both, strict=True)]
            for part, both in parts.items()
        }

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        return tags


class _FileClassifier(_Classifier):
    """A classifier of files, or of arrays that are written as files to be trained on."""

    column: ClassVar[str] = "path"
    what: ClassVar[str] = ""

    def _inputs(self, X: Any, *, fitting: bool = False) -> list[Any]:
        return _listed(X, self.what)

    def _file(self, given: Any, path: Path) -> str:
        """Write an array as a file, and return its path."""
        raise NotImplementedError

    def _write(self, folder: Path, parts: Mapping[str, tuple[list[Any], list[str]]]) -> Any:
        def row(given: Any, label: str, name: str) -> dict[str, str]:
            known = isinstance(given, str | Path)
            path = str(Path(given).absolute()) if known else self._file(given, folder / name)
            return {self.column: path, "label": label}

        return {
            part: [row(x, y, f"{part}-{n}") for n, (x, y) in enumerate(zip(*both, strict=True))]
            for part, both in parts.items()
        }


class ImageClassifier(_FileClassifier):
    """A classifier of images: X holds arrays (h, w) or (h, w, 3) of bytes, PIL images or paths.

    Args:
        out: folder of the run; None: a temporary one that lives as long as the estimator.
        settings: keys of `regard train images`.
    """

    task, what = "images", "images"

    def _file(self, given: Any, path: Path) -> str:
        from regard.data.image_format import open_image

        open_image(given, "an input").save(path.with_suffix(".png"))
        return str(path.with_suffix(".png"))


class SoundClassifier(_FileClassifier):
    """A classifier of sounds: X holds arrays (n,) of samples, or paths.

    Args:
        out: folder of the run; None: a temporary one that lives as long as the estimator.
        settings: keys of `regard train sounds`; `rate` is also that of arrays.
    """

    task, what = "sounds", "sounds"

    def _file(self, given: Any, path: Path) -> str:
        import soundfile

        samples, rate = np.asarray(given, np.float32), int(self.settings.get("rate") or 16_000)
        if samples.ndim != 1 or not samples.size:
            raise Refused(f"an array {samples.shape}; expected samples (n,) of a sound")
        soundfile.write(path.with_suffix(".wav"), samples, rate, subtype="FLOAT")
        return str(path.with_suffix(".wav"))


class SeriesClassifier(_Classifier):
    """A classifier of series: X is (n, steps) or (n, steps, channels), or a list of such rows.

    Args:
        out: folder of the run; None: a temporary one that lives as long as the estimator.
        settings: keys of `regard train series`.
    """

    task = "series"

    def _inputs(self, X: Any, *, fitting: bool = False) -> list[Any]:
        ragged = isinstance(X, list | tuple) and len({np.shape(x) for x in X}) > 1
        if not ragged:
            given: Any = X  # of which scikit-learn's annotation knows only its default
            rules: dict[str, Any] = {"allow_nd": True, "ensure_all_finite": "allow-nan"}
            X = validate_data(self, given, reset=fitting, dtype=np.float32, **rules)
        arrays = [np.asarray(x, np.float32) for x in X]
        return [x[:, None] if x.ndim == 1 else x for x in arrays]

    def _write(self, folder: Path, parts: Mapping[str, tuple[list[Any], list[str]]]) -> Any:
        for part, (series, labels) in parts.items():
            lengths = np.array([len(x) for x in series])
            table = np.zeros((len(series), lengths.max(), series[0].shape[1]), np.float32)
            for place, x in zip(table, series, strict=True):
                place[: len(x)] = x
            np.savez(folder / f"{part}.npz", x=table, y=np.array(labels), lengths=lengths)
        return str(folder)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        return tags


class Tagger(_Model):
    """A tagger: X is a list of lists of words, y a list of lists of their tags.

    Args:
        out: folder of the run; None: a temporary one that lives as long as the estimator.
        settings: keys of `regard train tag`.
    """

    task = "tag"

    def fit(self, X: Any, y: Any) -> Self:
        """Train a tagger on words and their tags."""
        words, tags = _listed(X, "lists of words"), _listed(y, "lists of tags")
        if len(words) != len(tags):
            raise Refused(f"{len(words)} texts but {len(tags)} lists of tags; expected one each")
        for number, (some, own) in enumerate(zip(words, tags, strict=True), 1):
            if isinstance(some, str) or len(some) != len(own):
                raise Refused(f"text {number}: expected a list of words with as many tags")
        rows = [(list(map(str, a)), list(map(str, b))) for a, b in zip(words, tags, strict=True)]
        self.classes_ = np.unique([tag for _, own in rows for tag in own])
        self._train(lambda folder: rows)
        return self

    def predict(self, X: Any) -> list[list[str]]:
        """Tags of the words of each text."""
        check_is_fitted(self)
        words = [list(map(str, some)) for some in _listed(X, "lists of words")]
        return [list(answer.tags) for answer in self._answers(words)]

    def score(self, X: Any, y: Any) -> float:
        """Share of words with the right tag."""
        flat = [tag for own in self.predict(X) for tag in own]
        return float(accuracy_score([str(tag) for own in y for tag in own], flat))


class Translator(_Model):
    """A translator: X is a list of texts, y a list of their translations.

    Args:
        out: folder of the run; None: a temporary one that lives as long as the estimator.
        settings: keys of `regard train translate`.
    """

    task = "translate"

    def fit(self, X: Any, y: Any) -> Self:
        """Train a translator on pairs of texts."""
        sources, targets = _texts(X), _texts(y)
        if len(sources) != len(targets):
            raise Refused(f"{len(sources)} texts but {len(targets)} translations; give one each")
        rows = list(zip(sources, targets, strict=True))
        self._train(lambda folder: rows)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Translations of texts."""
        check_is_fitted(self)
        return np.array([answer.text for answer in self._answers(_texts(X))], dtype=object)

    def score(self, X: Any, y: Any) -> float:
        """ChrF of the translations, from 0 to 1."""
        from sacrebleu import CHRF

        return CHRF().corpus_score(self.predict(X).tolist(), [_texts(y)]).score / 100

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        return tags


class Embedder(TransformerMixin, _Settings):
    """A transformer of texts, or of what else a model embeds, into vectors; nothing is learnt.

    Args:
        model: starter or folder of a model that embeds.
        settings: keys of `regard run` with that model, such as pooling.
    """

    _own = ("model",)

    def __init__(self, model: str | Path = "embed", **settings: Any):
        super().__init__(**settings)
        self.model = model

    @property
    def runner_(self) -> Any:
        """The model, loaded once."""
        if self.__dict__.get("_loaded", (None, None))[0] != str(self.model):
            with _refusing():
                try:
                    loaded = load(self.model, task="embed")
                except UsageError:  # it embeds images, or nothing at all
                    loaded = load(self.model)
            self._loaded = str(self.model), loaded
        return self._loaded[1]

    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the settings."""
        with _refusing():
            self.runner_.check(self._keys())
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Vectors (n, w) of inputs."""
        with _refusing():
            answers = self.runner_.run(_listed(X, "inputs"), **self._keys())
        if not hasattr(answers[0], "vector"):
            raise Refused(f"{self.model} gives no vectors; expected a model for embed")
        return np.stack([answer.vector for answer in answers])

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the numbers of a vector."""
        width = len(self.transform(["a"])[0])
        return np.array([f"embedder{n}" for n in range(width)], dtype=object)

    def __getstate__(self) -> dict[str, Any]:
        whole: Any = super().__getstate__()
        return {k: v for k, v in whole.items() if k != "_loaded"}

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.string = False, True
        tags.requires_fit = False
        return tags
