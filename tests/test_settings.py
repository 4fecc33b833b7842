"""Settings: what a word means, what a value becomes, and how a wrong one is refused."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import UsageError
from regard.settings import describe, fill, parse, setting


@dataclass(frozen=True)
class Block:
    width: int = setting(256, "numbers per token", min=1)
    norm: Literal["layer", "rms"] = "layer"


@dataclass(frozen=True)
class Model:
    block: Block = Block(width=64)
    depth: int = 3


@dataclass(frozen=True)
class Run:
    data: Path
    source: str | None = setting(None, "language in", key="from")
    steps: int = setting(10, min=1, max=100)
    dropout: float = setting(0.1, min=0, below=1)
    lr: float | None = setting(None, above=0)
    scores: bool = False
    layers: tuple[int, ...] = ()
    betas: tuple[float, float] = (0.9, 0.98)
    names: tuple[str, ...] | None = None
    threads: int | Literal["auto"] = "auto"
    penalty: Literal["gnmt", "average", "none"] | None = "gnmt"
    model: Model = Model()
    teacher: Model | None = None


@pytest.mark.parametrize(
    ("words", "plain", "values"),
    [
        (["translate", "steps=10"], ["translate"], {"steps": "10"}),
        (["--steps", "10", "--lr=1e-3"], [], {"steps": "10", "lr": "1e-3"}),
        (["--length-penalty", "gnmt"], [], {"length_penalty": "gnmt"}),
        (["--lr", "-1"], [], {"lr": "-1"}),
        (["model.block.norm=rms"], [], {"model.block.norm": "rms"}),
        (["out=my folder/a=b"], [], {"out": "my folder/a=b"}),
        (["out="], [], {"out": ""}),
        (["Einstein wrote E=mc2", "2+2=4"], ["Einstein wrote E=mc2", "2+2=4"], {}),
        (["--", "E=mc2", "--help", "--"], ["E=mc2", "--help", "--"], {}),
        (["-", "-5", "--- a rule", "- a list"], ["-", "-5", "--- a rule", "- a list"], {}),
        (["prefix=first\nsecond"], [], {"prefix": "first\nsecond"}),
        ([""], [""], {}),
    ],
)
def test_a_word_is_text_or_a_setting(words, plain, values):
    assert parse(words) == (plain, values)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=1", "a=2"], "a is given twice: '1' and '2'; keep one"),
        (["--a-b", "1", "a_b=2"], "a_b is given twice"),
        (["--steps"], "--steps has no value; write steps=VALUE"),
        (["--steps", "--lr"], "--steps has no value"),
        (["-x"], "unknown option '-x'"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words, message):
    with pytest.raises(UsageError, match="^" + message.replace("?", r"\?")):
        parse(words)


@given(st.lists(st.text()))
def test_all_after_two_dashes_is_text(words):
    assert parse(["--", *words]) == (words, {})


def test_strings_and_python_values_give_the_same():
    by_words = {
        "data": "x", "from": "en", "steps": "7", "dropout": "0", "lr": "1e-3", "scores": "yes",
        "layers": "0, 2", "betas": "0.8,0.9", "names": "a,b", "threads": "2", "penalty": "none",
        "model.block.norm": "rms", "model.depth": "1", "teacher.depth": "2",
    }  # fmt: skip
    by_values = {
        "data": Path("x"), "source": "en", "steps": 7, "dropout": 0, "lr": 1e-3, "scores": True,
        "layers": [0, 2], "betas": (0.8, 0.9), "names": ["a", "b"], "threads": 2,
        "penalty": "none", "model": {"block": {"norm": "rms"}, "depth": 1},
        "teacher": Model(depth=2),
    }  # fmt: skip
    filled = fill(Run, by_words)
    assert filled == fill(Run, by_values)
    assert filled == Run(
        Path("x"), "en", 7, 0.0, 1e-3, True, (0, 2), (0.8, 0.9), ("a", "b"), 2, "none",
        Model(Block(64, "rms"), 1), Model(depth=2),
    )  # fmt: skip


def test_none_is_none_only_where_it_may_be():
    filled = fill(
        Run, {"data": "x", "from": "none", "lr": "None", "names": None, "teacher": "none"}
    )
    assert (filled.source, filled.lr, filled.names, filled.teacher) == (None, None, None, None)
    assert fill(Run, {"data": "none"}).data == Path("none")


def test_what_is_not_given_stays_as_in_the_outer_default():
    assert fill(Run, {"data": "x", "model.block.norm": "rms"}).model.block == Block(64, "rms")
    base = Run(Path("x"), steps=3, model=Model(Block(8), 9))
    assert fill(Run, {"model.depth": 1}, base=base) == Run(
        Path("x"), steps=3, model=Model(Block(8), 1)
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dropuot", "0.1", "unknown key 'dropuot'; did you mean 'dropout'?"),
        (
            "model.block.nrm",
            "rms",
            "unknown key 'model.block.nrm'; did you mean 'model.block.norm'?",
        ),
        ("norm", "rms", "unknown key 'norm'; did you mean 'model.block.norm'?"),
        ("steps.a", "1", "unknown key 'steps.a'"),
        (".", "1", "unknown key '.'"),
        ("zzz", "1", "unknown key 'zzz'; --help lists the keys"),
        ("steps", "ten", "steps='ten' is not a whole number"),
        ("steps", "1.5", "steps='1.5' is not a whole number"),
        ("steps", 1.5, "steps=1.5 is not a whole number"),
        ("steps", True, "steps=True is not a whole number"),
        ("steps", None, "steps=None is not a whole number"),
        ("steps", "", "steps='' is not a whole number"),
        ("steps", "9" * 5000, "is not a whole number"),
        ("steps", 2**64, "is not a whole number of at most 63 bits"),
        ("steps", "0", "steps=0 is too small; it must be at least 1"),
        ("steps", "101", "steps=101 is too large; it must be at most 100"),
        ("dropout", "1", "dropout=1.0 is too large; it must be less than 1"),
        ("dropout", "nan", "dropout='nan' is not a finite number"),
        ("dropout", "1e999", "is not a finite number"),
        ("dropout", 10**400, "is not a number"),
        ("lr", "0", "lr=0.0 is too small; it must be more than 0"),
        ("lr", "fast", "lr='fast' is not a number, nor none"),
        ("scores", "maybe", "scores='maybe' is not true or false"),
        (
            "penalty",
            "gmnt",
            "penalty='gmnt' is not one of gnmt, average, none; did you mean 'gnmt'?",
        ),
        ("threads", "all", "threads='all' is not a whole number or one of auto"),
        ("layers", "0,x", "layers='0,x' is not a list of whole numbers by commas"),
        ("betas", "0.9", "betas='0.9' is not a list of 2 numbers by commas"),
        ("data", "", "data='' is not a path"),
        ("data", "a\0b", "is not a path"),
        ("source", 3, "from=3 is not text"),
        ("model", "big", "model='big' has parts of its own; set one of model.block.width,"),
        ("model.block", 3, "model.block=3 has parts of its own"),
        ("model.block.width", "0", "model.block.width=0 is too small"),
        ("teacher", "big", "teacher='big' has parts of its own"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(key, value, message):
    with pytest.raises(UsageError) as caught:
        fill(Run, {"data": "x"} | {key: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_few_keys_are_all_named():
    with pytest.raises(UsageError, match="^unknown key 'a'; keys are width, norm$"):
        fill(Block, {"a": "1"})
    with pytest.raises(UsageError, match="did you mean 'width'\\? Keys: width, norm$"):
        fill(Block, {"widht": "1"})


def test_what_is_needed_is_asked_for():
    with pytest.raises(UsageError, match=r"^regard train: data is missing; add data=\.\.\.$"):
        fill(Run, {}, where="regard train")


def test_one_value_by_two_names_is_refused():
    with pytest.raises(UsageError, match="given twice"):
        fill(Run, {"data": "x", "from": "en", "source": "de"})


SHORT = {"norm": "model.block.norm", "depth": ("model.depth", "teacher.depth")}


def test_short_keys_stand_for_longer_ones():
    filled = fill(Run, {"data": "x", "norm": "rms", "depth": "5"}, short=SHORT)
    assert filled.model == Model(Block(64, "rms"), 5)
    assert filled.teacher == Model(depth=5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nrom": "rms"}, "unknown key 'nrom'; did you mean 'norm'?"),
        ({"norm": "rsm"}, "norm='rsm' is not one of layer, rms; did you mean 'rms'?"),
        ({"depth": "x"}, "depth='x' is not a whole number"),
        ({"depth": 1, "model.depth": 2}, "model.depth is given twice, also as depth; keep one"),
    ],
)
def test_a_mistake_names_the_key_that_was_written(values, message):
    with pytest.raises(UsageError) as caught:
        fill(Run, {"data": "x"} | values, short=SHORT)
    assert str(caught.value) == message


def test_help_has_a_row_for_every_key():
    rows = {row.key: row for row in describe(Run)}
    assert rows["from"][:4] == ("from", "text|none", "none", "language in")
    assert rows["data"].default == ""
    assert rows["betas"][:4] == ("betas", "number,...", "0.9,0.98", "")
    assert rows["threads"].type == "whole number|auto"
    assert rows["model.block.width"].help == "numbers per token"
    assert rows["model.block.width"].default == "64"
    assert {"model.block.norm", "model.depth", "teacher.block.width"} <= rows.keys()


@dataclass(frozen=True)
class ShortRun(Run):
    steps: int = 3
    source: str | None = "en"


def test_another_default_in_a_subclass_keeps_help_bounds_and_key():
    run = fill(ShortRun, {"data": "x", "from": "de"})
    assert (run.steps, run.source) == (3, "de")
    with pytest.raises(UsageError, match=r"steps=101 is too large; it must be at most 100"):
        fill(ShortRun, {"data": "x", "steps": 101})
    rows = {row.key: row for row in describe(ShortRun)}
    assert rows["from"].help == "language in" and rows["from"].default == "en"
    assert rows["steps"].default == "3"


NORMS = {"layer": 1, "rms": 2}


@dataclass(frozen=True)
class Part:
    norm: str = setting("layer", "norm", choices=NORMS)


@dataclass(frozen=True)
class Named:
    GROUP = "optimiser"

    data: str | None = setting(None, "data", group="data")
    schedule: str = setting("cosine", "schedule", choices=lambda: ("cosine", "constant"))
    augment: str = setting("flip", "changes", choices=("none", "flip", "crop"), joined_by="+")
    heads: tuple[str, ...] = setting((), "heads", choices=("mean", "max"))
    model: Part = field(default_factory=Part)


@dataclass(frozen=True)
class OtherNamed(Named):
    schedule: str = "constant"
    data: str | None = setting(None, "photos")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"schedule": "cosin"},
            "unknown schedule 'cosin'; choose from constant, cosine. Did you m",
        ),
        ({"augment": "flip+crpo"}, "unknown augment 'crpo'; choose from crop, flip, none. Did you"),
        (
            {"heads": "max,mena"},
            "unknown heads 'mena'; choose from max, mean. Did you mean 'mean'?",
        ),
        ({"norm": "rsm"}, "unknown norm 'rsm'; choose from layer, rms. Did you mean 'rms'?"),
        ({"model": {"norm": "x"}}, "unknown norm 'x'; choose from layer, rms."),
    ],
)
def test_a_name_that_is_not_among_the_choices_is_refused(values, message):
    with pytest.raises(UsageError, match="^" + re.escape(message)):
        fill(OtherNamed, values, short={"norm": "model.norm"})


def test_names_that_were_added_to_a_table_are_known():
    mine = dict(NORMS)
    NORMS["mine"] = 3
    try:
        assert fill(Named, {"model.norm": "mine", "augment": "flip + crop"}).model.norm == "mine"
        assert {row.key: row.names() for row in describe(Named)}["model.norm"] == list(NORMS)
    finally:
        NORMS.clear()
        NORMS.update(mine)


def test_groups_are_those_of_the_field_or_of_its_class():
    expected = {"data": "data", "schedule": "optimiser", "augment": "optimiser"}
    expected |= {"heads": "optimiser", "model.norm": "model"}
    for kind in (Named, OtherNamed):
        assert {row.key: row.group for row in describe(kind)} == expected
