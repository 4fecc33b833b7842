"""Help pages and named settings: what is shown is what a run gets, and a typo costs nothing."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import regard
from regard.attention.positions import POSITIONS
from regard.cli import main
from regard.errors import UsageError
from regard.files import read_json
from regard.help import HEADINGS, train_rows, with_short
from regard.recipes import RECIPES
from regard.settings import Setting, describe
from regard.tasks import TASKS, task
from regard.tasks.frame.settings import flat
from regard.verbs import TABLE, VERBS

TRAINED = [name for name in TASKS if task(name).objective]
# texts that name no entry of a table
FREE = {
    *("data", "valid", "test", "out", "outputs", "plot", "probes", "init", "teacher", "foreign"),
    *("filters", "lm", "texts", "caption", "forced", "prefix", "system", "stop", "names", "links"),
    *("columns", "column", "pattern", "separator", "from", "to", "language", "background"),
    *(
        "device",
        "lora_on",
        "layers",
        "heads",
        "at",
        "cause",
        "against",
        "word",
        "steer",
        "judge",
        "model",
    ),
    *("width", "task", "weights_at", "size"),
}


def shown(default: object) -> str:
    """A value as a page shows it."""
    if isinstance(default, list | tuple):
        return ",".join(map(shown, default))
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def settings_of_a_run(name: str, **given: str) -> dict[str, str]:
    """Defaults of a training by all keys, long and short."""
    kind = task(name)
    settings = flat(kind.resolve({"data": "DATA", **given}))
    for key, longs in kind.short.items():
        each = (longs,) if isinstance(longs, str) else longs
        if settings.keys() >= {*each}:
            settings[key] = [*dict.fromkeys(shown(settings[long]) for long in each)]
    expected = {key: shown(value) for key, value in settings.items()}
    return expected | {"data": "none", "out": f"runs/{name}"}


@pytest.mark.parametrize("name", TRAINED)
def test_the_page_of_a_task_shows_the_defaults_of_a_run_and_what_each_key_is(name, capsys):
    for given in ({}, {"size": "base"}):
        expected = settings_of_a_run(name, **given)
        rows = VERBS["train"].rows(name, values=given)
        assert {row.key: row.default for row in rows if row.default != expected[row.key]} == {}
        assert all(row.help and "('" not in row.help for row in rows)
        keys = [row.key for row in rows]
        assert len(keys) == len(set(keys))
        long = {key for key in flat(task(name).resolve({"data": "DATA", **given}))}
        short = {k: {v} if isinstance(v, str) else {*v} for k, v in task(name).short.items()}
        assert long <= {*keys, *(one for key in keys for one in short.get(key, ()))}
    assert main(["train", name, "--help"]) == 0
    page = capsys.readouterr().out
    headings = [line.rstrip(":") for line in page.splitlines() if line[:1].isalpha()]
    assert headings[3:4] == ["Data"] and "Length of training" in headings
    assert page.split("\nData:\n")[1].lstrip().startswith("data ")
    for row in VERBS["train"].rows(name, values={}):
        assert f"\n  {row.key} " in page


def test_a_run_gets_what_the_page_shows(tmp_path: Path):
    """Beside what follows from the data: vocabularies, and positions for the longest texts."""
    table = tmp_path / "pairs.tsv"
    table.write_text("".join(f"a b c {n}\tc b a {n}\n" for n in range(400)))
    out = tmp_path / "run"
    given = {"steps": 1, "valid": "0.1", "pieces": 320, "batch_tokens": 256}
    regard.train("translate", data=str(table), out=str(out), quiet=True, **given)
    used = {key: shown(value) for key, value in read_json(out / "recipe.json")["settings"].items()}
    rows = {row.key: row for row in VERBS["train"].rows("translate", values={})}
    short = {long: key for key, long in task("translate").short.items() if isinstance(long, str)}
    follow = {*given, "data", "out", "model.source_vocab", "model.target_vocab", "warmup"}
    follow |= {"model.max_length", "valid_every", "batches"}
    told = {key: rows[short.get(key, key)].default for key in used if key not in follow}
    assert len(told) > 60
    assert told == {key: used[key] for key in told}


def test_the_page_of_a_recipe_shows_its_own_settings():
    for name in ("trec", "multi30k_en_de", "fashion"):
        expected = regard.recipes.recipe(name).SETTINGS  # type: ignore[attr-defined]
        rows = {row.key: row.default for row in VERBS["train"].rows(name, values={})}
        for key in expected.keys() & rows.keys():
            assert rows[key] in (shown(expected[key]), f"{expected[key]}.0"), (name, key)


def test_keys_of_other_families_are_not_listed():
    keys = {row.key for row in VERBS["train"].rows("translate", values={})}
    assert "norm" in keys and not keys & {"cell", "kernel", "readout", "direction"}
    keys = {row.key for row in VERBS["train"].rows("translate", values={"like": "rnnsearch"})}
    assert "cell" in keys and "norm" not in keys
    swin = {row.key for row in VERBS["train"].rows("images", values={"family": "swin"})}
    assert "model.merge" in swin and "model.stem" not in swin


def test_a_verb_without_a_model_lists_what_every_model_has(capsys):
    for verb in ("run", "eval", "look"):
        keys = {row.key for row in VERBS[verb].rows(values={})}
        assert not keys & {"script", "beam", "from", "tokenise"}, verb
        assert main([verb, "--help"]) == 0
        assert f"regard {verb} MODEL --help lists" in capsys.readouterr().out
    assert {row.key for row in VERBS["export"].rows(values={})} >= {"out", "format", "dtype"}
    assert "out" in {row.key for row in VERBS["import"].rows(values={})}


def test_the_page_of_a_model_shows_its_own_defaults():
    model = regard.load("en-zh")
    for verb, settings in (("run", model.check({})), ("eval", model.eval_settings({}))):
        expected = {key: shown(value) for key, value in flat(settings).items()}
        rows = {row.key: row.default for row in VERBS[verb].rows("en-zh", values={})}
        assert {key: rows[key] for key in expected} == expected


def test_groups_are_known_and_in_order():
    rows = [row for name in TRAINED for row in VERBS["train"].rows(name, values={})]
    rows += [row for verb in ("run", "eval", "look") for row in VERBS[verb].rows(values={})]
    nested = {"sound", "augment", "decoder", "pretrainer"}
    assert {row.group for row in rows} <= {*HEADINGS, *nested}


def test_a_key_for_several_others_stands_before_them():
    rows = [Setting(f"model.{x}", "number", "1", x, "model", ()) for x in "abc"]
    made = with_short(rows, {"bc": ("model.b", "model.c"), "x": ("model.x",), "d": "model.d"})
    assert [row.key for row in made] == ["model.a", "bc", "model.b", "model.c"]
    assert made[1].help == "sets model.b and model.c" and made[1].default == "1"


# Names


def named(rows: list[Setting]) -> list[Setting]:
    """Settings that name an entry of a table."""
    return [row for row in rows if row.names()]


@pytest.mark.parametrize("name", TRAINED)
def test_a_typo_in_a_name_is_refused_before_data_are_read_and_leaves_nothing(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = named(VERBS["train"].rows(name, values={}))
    assert len(rows) > 8
    with pytest.raises(UsageError, match="nowhere"):
        regard.train(name, data="nowhere", out="run", quiet=True)
    for row in rows:
        typo = f"{row.names()[0] or row.names()[1]}q"
        with pytest.raises(
            UsageError, match=f"unknown .*'{typo}'; choose from .*{row.names()[-1]}"
        ):
            regard.train(name, data="nowhere", out="run", quiet=True, **{row.key: typo})
    assert not [*tmp_path.iterdir()]


def all_settings() -> dict[str, list[Setting]]:
    """Rows of every verb, of all tasks where it is for one."""
    found = {}
    for verb in TABLE:
        names = TASKS if verb.name in ("run", "eval", "look") else [None]
        for name in TRAINED if verb.name == "train" else names:
            part = verb.name.capitalize()
            rows = describe(getattr(task(name), part)) if name else verb.rows(values={})
            found[f"{verb.name} {name or ''}"] = list(rows)
    return found


@pytest.mark.parametrize("verb", ["run", "eval", "look"])
def test_a_typo_in_a_name_is_refused_by_what_uses_a_model(verb, tmp_path):
    for name in TASKS:
        kind = getattr(task(name), verb.capitalize())
        for row in named(list(describe(kind))):
            typo = f"{next(filter(None, row.names()))}q"
            with pytest.raises(UsageError, match=f"unknown {row.key} '{typo}'; choose from"):
                regard.settings.fill(kind, {row.key: typo})


def test_every_text_that_is_no_name_is_known_to_be_none():
    """A new setting of type text has choices, or stands in the list above."""
    found = {
        row.key
        for rows in all_settings().values()
        for row in rows
        if "text" in row.type and not row.names()
    }
    assert found <= FREE | {"family", "like"}


def test_a_position_of_ones_own_is_accepted(monkeypatch):
    monkeypatch.setitem(POSITIONS, "mine", POSITIONS["rotary"])
    settings = task("language").resolve({"data": "DATA", "position": "mine"})
    assert settings.model.position == "mine"
    rows = {row.key: row for row in VERBS["train"].rows("language", values={})}
    assert "mine" in rows["position"].names()
    assert is_dataclass(settings) and "model" in {one.name for one in fields(settings)}


def test_recipes_have_pages(capsys):
    for name in RECIPES:
        assert main(["train", name, "--help"]) == 0
        assert "Length of training:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "family, key", [("swin", "image"), ("conformer", "mels"), ("bert", "pieces")]
)
def test_a_family_says_what_is_classified_where_no_data_are_given(family, key):
    keys = {row.key for row in train_rows("classify", {"family": family})}
    assert key in keys
    with pytest.raises(UsageError, match="unknown family"):
        train_rows("classify", {"family": family + "x"})
