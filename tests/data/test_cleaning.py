"""What may become a document, and which conversations are the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples_limit import examples
from tunewell.config.schema import Clean
from tunewell.data.rows.cleaning import clean, digest_questions, digest_whole
from tunewell.data.rows.conversation import Conversation, Rejected


def talk(*turns: tuple[str, str], **more) -> Conversation:
    return Conversation([{"role": role, "content": content} for role, content in turns], **more)


def asked(question: str, answer: str = "a") -> Conversation:
    return talk(("user", question), ("assistant", answer))


def verdict(conversation: Conversation, **options) -> str:
    try:
        clean(conversation, Clean(**options))
    except Rejected as rejected:
        return rejected.reason
    return "ok"


def detail(conversation: Conversation, **options) -> str:
    with pytest.raises(Rejected) as caught:
        clean(conversation, Clean(**options))
    return caught.value.detail


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        (asked("q"), "ok"),
        (asked(""), "empty_question"),
        (asked(" \n\u3000"), "empty_question"),
        (asked("q", ""), "empty_reply"),
        (asked("q", "\t "), "empty_reply"),
        (talk(("user", "q"), ("assistant", "a"), ("user", ""), ("assistant", "b")), "empty_question"),
        (talk(("user", "q"), ("assistant", ""), ("user", "q"), ("assistant", "b")), "empty_reply"),
        (talk(("user", "q")), "not_a_conversation"),
        (talk(("system", "s")), "not_a_conversation"),
        (talk(("assistant", "a")), "not_a_conversation"),
        (talk(("system", "s"), ("assistant", "a")), "not_a_conversation"),
        (talk(("assistant", "a"), ("user", "q"), ("assistant", "b")), "not_a_conversation"),
        (talk(("system", ""), ("user", "q"), ("assistant", "a")), "ok"),
        (talk(("user", "q"), ("assistant", "a"), ("user", "q2")), "ok"),
        (Conversation(text="t"), "ok"),
        (Conversation(text=" \n"), "empty_reply"),
    ],
)
def test_only_conversations_with_questions_and_replies_pass(conversation, reason):
    """An empty reply teaches the model to end at once."""
    assert verdict(conversation) == reason


def test_a_call_of_a_tool_is_a_reply_without_words():
    """It is what the model has to learn to say."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    assert verdict(Conversation([{"role": "user", "content": "q"}, call])) == "ok"
    assert verdict(Conversation([{"role": "user", "content": "q"}, {**call, "tool_calls": []}])) == "empty_reply"


@pytest.mark.parametrize("bad", ["\0", "\ud800", "\udfff", "\udce9", "a\ud83d", "\udc00b"])
@pytest.mark.parametrize("place", ["question", "reply", "text", "name", "tools"])
def test_broken_text_is_found_wherever_it_stands(bad, place):
    """The tokenizer dies of it without naming the row."""

    def broken() -> Conversation:
        if place == "text":
            return Conversation(text=f"x{bad}y")
        conversation = asked(f"x{bad}y" if place == "question" else "q", f"x{bad}y" if place == "reply" else "a")
        if place == "name":
            conversation.messages[0]["name"] = bad
        if place == "tools":
            conversation.tools = [{"function": {f"key{bad}": [1, {"deep": bad}]}}]
        return conversation

    assert verdict(broken()) == "bad_text"
    assert verdict(broken(), bad_text="error") == "bad_text"
    mended = broken()
    assert verdict(mended, bad_text="replace") == "ok"
    digest_whole(mended)
    if place == "text":
        assert mended.text == "x" + "".join(c if c in "ab" else "\ufffd" for c in bad) + "y"


def test_broken_text_says_what_and_where():
    """A byte that is no UTF-8 is mended by naming the encoding, half a character by its writer."""
    assert detail(asked("caf\udce9")) == "a byte that is not UTF-8 at position 3"
    assert detail(asked("\ud800")) == "a lone surrogate at position 0"
    assert detail(asked("a\0")) == "a NUL character at position 1"


@given(text=st.text(alphabet=st.characters() | st.sampled_from("\ud83d\ude42\0\udce9"), max_size=12))
@settings(max_examples=examples(150))
def test_replacing_changes_only_what_is_broken(text):
    """Two halves that belong together are put together; every other half and every NUL becomes U+FFFD."""
    conversation = Conversation(text=f"x{text}")
    clean(conversation, Clean(bad_text="replace"))
    expected = f"x{text}".encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")
    assert conversation.text == expected
    conversation.text.encode()


def test_short_replies_and_addresses_pass_unless_asked():
    """Both checks are off by default: short answers and links are what some people train on."""
    assert verdict(asked("q", "a")) == "ok"
    assert verdict(asked("q", "  four "), min_reply_chars=4) == "ok"
    assert verdict(asked("q", "  four "), min_reply_chars=5) == "too_short"
    two = talk(("user", "q"), ("assistant", "ab"), ("user", "q"), ("assistant", "cd"))
    assert verdict(two, min_reply_chars=4) == "ok"
    assert verdict(Conversation(text=" four "), min_reply_chars=5) == "too_short"
    for link in ("see https://x.org", "HTTP://x", "www.x.org"):
        assert verdict(asked("q", link)) == "ok"
        assert verdict(asked("q", link), drop_urls=True) == "has_url"
        assert verdict(asked(link), drop_urls=True) == "has_url"
        assert verdict(Conversation(text=link), drop_urls=True) == "has_url"
    assert verdict(asked("q", "awww. http is a protocol"), drop_urls=True) == "ok"


# --- who is the same


def tools(value) -> bytes:
    return digest_whole(talk(("user", "q"), ("assistant", "a"), tools=value))


def test_equal_conversations_and_only_those_have_equal_digests():
    """A digest that takes two rows for one drops one of them for nothing."""
    different = [
        asked("q", "a"),
        asked("q", "a "),
        asked("qa", ""),
        talk(("user", "q"), ("assistant", "a"), ("user", "q2")),
        talk(("system", "q"), ("assistant", "a")),
        Conversation(text="q"),
        Conversation([{"role": "user", "content": "q", "name": "n"}, {"role": "assistant", "content": "a"}]),
        Conversation([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "n"}]),
    ]
    assert len({digest_whole(conversation) for conversation in different}) == len(different)
    assert digest_whole(asked("q")) == digest_whole(asked("q"))


def test_tools_that_differ_in_structure_alone_differ():
    """The same words in other brackets, a number and its text, are not the same tools."""
    shapes = [
        [{"a": {"b": 1}, "c": 2}],
        [{"a": {"b": 1, "c": 2}}],
        [{"a": {"b": "1"}, "c": 2}],
        [{"a": {"b": True}, "c": 2}],
        [{"a": ["b", 1], "c": 2}],
        [{"a": [["b"], 1], "c": 2}],
        [{"a": {"b": None}, "c": 2}],
        [{"a": {"b": "None"}, "c": 2}],
        [{"a": {}, "b": 1, "c": 2}],
    ]
    assert len({tools(shape) for shape in shapes}) == len(shapes)


def digest_question(conversation: Conversation) -> bytes:
    return digest_questions(conversation)[0]


def test_questions_are_the_same_in_other_case_and_spacing():
    """Held-out questions must not come back in capitals."""
    base = digest_question(asked("What is  it?", "a"))
    assert base == digest_question(asked("what IS it?\n", "something else"))
    assert base != digest_question(asked("What isit?"))
    assert base != digest_question(talk(("system", "s"), ("user", "What is it?"), ("assistant", "a")))
    assert digest_question(Conversation(text="Some  Text")) == digest_question(Conversation(text="some text "))


def test_the_question_is_everything_before_the_last_reply():
    """A conversation that goes on from a held-out one is another question."""
    two = talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    other = talk(("user", "a"), ("assistant", "B"), ("user", "c"), ("assistant", "x"))
    assert digest_question(two) == digest_question(other)
    assert digest_question(two) != digest_question(asked("a", "b"))
    trailing = talk(("user", "a"), ("assistant", "b"), ("user", "and now?"))
    assert digest_question(trailing) == digest_question(asked("a", "b"))


@pytest.mark.parametrize("system", [[], [("system", "s")]])
def test_each_turn_is_a_question_as_if_it_had_been_asked_first(system):
    """A held-out question was trained on as the first or a later turn of another row."""
    turns = [("user", "A "), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")]
    alone = [digest_question(talk(*system, ("user", text), ("assistant", "x"))) for text in "ace"]
    begun = digest_question(talk(*system, *turns[:4]))
    assert digest_questions(talk(*system, *turns))[1] == [alone[0], alone[1], begun, alone[2]]
    assert digest_questions(talk(*system, *turns[:2]))[1] == []


def test_a_question_that_a_row_repeats_is_one_turn():
    """Otherwise, a single row with `next` 25 times would make `next` a phrase that is in many rows."""
    again = [("user", "next"), ("assistant", "b")]
    turns = digest_questions(talk(*again * 25))[1]
    assert len(turns) == len(set(turns)) and turns[0] == digest_question(asked("next", "x"))


def test_very_deep_tools_need_no_recursion():
    """Nesting is limited when rows are read; a function of the user's may still make more."""
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert tools([{"a": deep}]) != tools([{"a": []}])
