"""`explain` and the JSON Schema: one declaration, every key described."""

from pathlib import Path

import pytest

from tunewell.config.explain import explain, explain_all, json_schema
from tunewell.config.keys import all_keys, format_key, parse_key
from tunewell.config.load import load_config
from tunewell.config.schema import ALIASES, Config
from tunewell.core.errors import UserError


def test_a_key_is_explained_with_type_default_doc_and_names():
    """The page must say all that the declaration knows."""
    found = explain("packing.context_length")
    assert found.key == "packing.context_length"
    assert found.type == "a whole number (at least 2 and at most 16,777,216), or `auto`"
    assert found.default == "auto" and "longest document" in found.doc
    assert "cutoff_len" in found.aliases


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("max_seq_length", "packing.context_length"),
        ("context_length", "packing.context_length"),
        ("lr", "train.learning_rate"),
        ("train.lr", "train.learning_rate"),
        ("data.sources[0].share", "data.sources.share"),
        ("sources[].share", "data.sources.share"),
        ("data.clean", "data.clean"),
        ("model_name", "model"),
    ],
)
def test_a_key_is_found_by_the_names_people_use(asked, key):
    """Nobody types the whole path from memory."""
    assert explain(asked).key == key


def test_a_list_of_choices_says_so():
    """Its type must not read like that of `data.sources`, which is a list too."""
    found = explain("template.learn_roles")
    assert found.type == "a list of `system`, `user`, `assistant` or `tool`"
    assert found.allowed == ("system", "user", "assistant", "tool") and found.default == ["assistant"]


def test_a_group_lists_its_keys():
    """`explain packing` is how a person looks around."""
    keys = [name.removeprefix("packing.") for name, _ in explain("packing").keys]
    assert keys == ["context_length", "long_documents", "shard_tokens"]


def test_an_unknown_key_names_the_nearest():
    """A dead end must show the way."""
    with pytest.raises(UserError, match="no key") as caught:
        explain("packing.contxt_length")
    assert caught.value.fix == "did you mean `packing.context_length`?"
    with pytest.raises(UserError, match="several keys end in `learn_from`"):
        explain("learn_from")


def test_it_says_what_the_value_is_now_and_where_it_was_set(tmp_path, monkeypatch):
    """The value in force is the question behind most questions."""
    monkeypatch.chdir(tmp_path)
    Path("tunewell.yaml").write_text("seed: 4\ndata:\n  sources:\n  - a.jsonl\n  - {path: b.jsonl, limit: 9}\n")
    loaded = load_config(None, ["max_length=512"])
    found = {key: explain(key, loaded) for key in ("packing.context_length", "seed", "train.epochs")}
    assert {key: (explanation.value, explanation.origin) for key, explanation in found.items()} == {
        "packing.context_length": (512, "--set max_length=512"),
        "seed": (4, "tunewell.yaml line 1"),
        "train.epochs": ("auto", "default"),
    }
    assert explain("data.sources.limit", loaded).value == [None, 9]
    assert explain("data.sources[1].limit", loaded).value == 9
    assert explain("data.sources[7].limit", loaded).value is None


def test_every_key_can_be_set_and_explained():
    """A key that `--set` cannot name or `explain` cannot find is half a key."""
    for name, _ in explain_all():
        assert explain(name).key == name
        assert format_key(parse_key(name)) == name
    assert set(ALIASES.values()) <= set(all_keys())
    assert not set(ALIASES) & set(all_keys())


def test_the_schema_for_editors_describes_every_key_and_closes_every_group():
    """An editor shows the description on hover and marks unknown keys."""
    seen = set()

    def walk(node: dict, prefix: str) -> None:
        for name, inner in node.get("properties", {}).items():
            assert inner["description"].strip(), prefix + name
            seen.add(prefix + name)
            for part in [inner, *inner.get("anyOf", [])]:
                if "properties" in part:
                    assert part["additionalProperties"] is False
                    walk(part, f"{prefix}{name}.")

    schema = json_schema()
    walk(schema, "")
    assert set(all_keys()) <= seen and set(ALIASES) <= seen and "packing.max_length" in seen
    assert "$ref" not in str(schema) and "$defs" not in str(schema)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert schema["properties"]["packing"]["properties"]["context_length"]["default"] == "auto"
    kinds = [part.get("type") for part in schema["properties"]["data"]["properties"]["sources"]["anyOf"]]
    assert kinds == ["string", "object", "array"]


def test_the_schema_has_no_key_the_config_does_not_know():
    """What the editor offers must load."""
    offered = set(json_schema()["properties"])
    assert offered == set(Config.model_fields) | set(ALIASES)
